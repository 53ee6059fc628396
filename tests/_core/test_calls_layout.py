"""The arrays of a call as one flat buffer, and the blocks of it that each rank works on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft._core.calls import LINE, Layout, layout_of

sizes = st.lists(st.integers(0, 1000), max_size=6)


@given(sizes)
def test_arrays_lie_on_lines_of_their_own(sizes: list[int]) -> None:
    """Each array begins on a line, behind the one before, and the buffer ends with the last."""
    layout = Layout(sizes)
    end = 0
    for start, size in zip(layout.starts, sizes, strict=True):
        assert start % LINE == 0
        assert end <= start < end + LINE
        end = start + size
    assert layout.size == end
    assert [(piece.start, piece.stop) for piece in layout.pieces] == [(0, s) for s in sizes if s]


@given(sizes, st.integers(0, 4000), st.integers(0, 4000))
def test_a_window_shows_what_lies_in_it(sizes: list[int], first: int, last: int) -> None:
    """A window's pieces are the bytes of the arrays between its ends, each in its place."""
    layout = Layout(sizes)
    buffer = {}
    for index, (start, size) in enumerate(zip(layout.starts, sizes, strict=True)):
        buffer.update({start + byte: (index, byte) for byte in range(size)})
    seen = {}
    for index, start, stop, at in layout.window(first, last):
        assert start < stop
        seen.update({first + at + byte - start: (index, byte) for byte in range(start, stop)})
    assert seen == {place: byte for place, byte in buffer.items() if first <= place < last}


@given(sizes, st.integers(1, 5), st.integers(1, 8).map(lambda lines: lines * LINE))
def test_every_byte_is_in_one_block_of_one_rank(sizes: list[int], ranks: int, block: int) -> None:
    """The ranks' blocks together are every byte once, and no block is longer than asked."""
    layout = Layout(sizes)
    seen = []
    for rank in range(ranks):
        for index, start, stop, _ in layout.blocks_of(rank, ranks, block):
            assert 0 < stop - start <= block
            seen += [(index, byte) for byte in range(start, stop)]
    assert len(seen) == len(set(seen))
    assert set(seen) == {(i, byte) for i, size in enumerate(sizes) for byte in range(size)}


@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(0, 300)), max_size=5),
    st.integers(1, 5),
)
def test_no_element_is_in_two_blocks(arrays: list[tuple[int, int]], ranks: int) -> None:
    """Blocks are cut between elements, whatever their width."""
    layout = Layout([width * count for width, count in arrays])
    for rank in range(ranks):
        for index, start, stop, _ in layout.blocks_of(rank, ranks, 2 * LINE):
            assert start % arrays[index][0] == 0
            assert stop % arrays[index][0] == 0


def test_equal_sizes_share_a_layout() -> None:
    """A layout is worked out once."""
    assert layout_of((100, 8)) is layout_of((100, 8))
    assert layout_of((100, 8)).starts == (0, 128)
