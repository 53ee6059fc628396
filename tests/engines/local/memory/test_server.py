"""Which memory is given out, kept warm, and returned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engines.local.memory import server
from weft.engines.local.memory.segment import Segment
from weft.engines.local.memory.server import LARGE, LINE, Arenas, FreeList
from weft.errors import OutOfMemory


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=200))
def test_free_list_never_overlaps_and_forgets_nothing(steps: list[tuple[bool, int]]) -> None:
    """Ranges in use are disjoint and inside; giving everything back leaves one free range."""
    free = FreeList(256)
    taken: list[tuple[int, int]] = []
    for take, number in steps:
        if take:
            start = free.take(number)
            if start is None:
                gaps = sorted([(0, 0), *taken, (256, 0)])
                room = [b[0] - (a[0] + a[1]) for a, b in zip(gaps, gaps[1:], strict=False)]
                assert max(room) < number
            else:
                assert 0 <= start <= 256 - number
                assert all(start + number <= s or s + n <= start for s, n in taken)
                taken.append((start, number))
        elif taken:
            free.give(*taken.pop(number % len(taken)))
        assert free.unused == (not taken)
        assert vars(FreeList(256, taken)) == vars(free)  # as it is found from what is in use
    for item in taken:
        free.give(*item)
    assert free.unused


def test_the_tightest_gap_is_taken() -> None:
    """A small block does not break up a large gap while a small one fits."""
    free = FreeList(100)
    parts = [free.take(10) for _ in range(10)]
    free.give(parts[0] or 0, 10)
    free.give(parts[5] or 0, 10)
    free.give(parts[6] or 0, 10)
    assert free.take(8) == parts[0]
    assert free.take(20) == parts[5]


def test_small_blocks_share_a_segment() -> None:
    """A thousand small blocks take few descriptors."""
    arenas = Arenas()
    taken = [arenas.take(1000) for _ in range(1000)]
    assert len({r.segment.descriptor for r in taken}) <= 2
    assert all(r.offset % LINE == 0 and r.length >= 1000 for r in taken)


def test_what_is_free_can_be_found_from_what_is_in_use() -> None:
    """After an interrupt the arenas count again: what is kept is in use, and nothing else."""
    arenas = Arenas()
    kept, lost = arenas.take(1000), arenas.take(5000)
    arenas.rebuild_free_list([kept])
    again = arenas.take(5000)
    assert (again.arena, again.offset) == (lost.arena, lost.offset)
    arenas.rebuild_free_list([kept, again])
    arenas.give(again)
    arenas.give(kept)
    assert arenas.take(1000).offset == 0


def test_memory_is_recycled() -> None:
    """What was given back is given out again: the same segment, warm."""
    arenas = Arenas()
    for size in (100, LARGE + 5):
        first = arenas.take(size)
        arenas.give(first)
        again = arenas.take(size)
        assert (again.segment, again.offset) == (first.segment, first.offset)


def test_a_small_block_never_occupies_a_large_segment() -> None:
    """Otherwise one byte would keep a large segment from being reused or returned."""
    arenas = Arenas()
    large = arenas.take(LARGE)
    arenas.give(large)
    assert arenas.take(64).segment is not large.segment


def test_unused_memory_goes_back_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """trim() returns what has been idle, says when to come again, and keeps a little."""
    now = [1000.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])
    arenas = Arenas()
    large, small = arenas.take(2 * LARGE), arenas.take(100)
    assert arenas.trim() is None
    arenas.give(large)
    arenas.give(small)
    due = arenas.trim()
    assert due is not None
    assert 0 < due <= server.WARM_SECONDS
    now[0] += due
    assert arenas.trim() is None
    assert arenas.size == small.segment.size


def test_warm_memory_goes_back_before_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is only kept for later stands in nobody's way; where there is none, the error comes."""
    arenas = Arenas()
    warm = arenas.take(2 * LARGE)
    arenas.give(warm)
    asked: list[int] = []
    create = Segment.create

    def create_if_little_is_there(size: int) -> Segment:
        asked.append(arenas.size)
        if arenas.size:
            raise OutOfMemory("no")
        return create(size)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "create", create_if_little_is_there)
        taken = arenas.take(8 * LARGE)
        assert asked == [warm.length, 0]
        with pytest.raises(OutOfMemory):
            arenas.take(LARGE)  # what is in use stays
        assert arenas.size == taken.length


def test_after_the_end_nothing_is_kept() -> None:
    """What is given back after `clear` goes at once, until more is taken."""
    arenas = Arenas()
    held, early = arenas.take(2 * LARGE), arenas.take(LARGE)
    arenas.give(early)
    assert arenas.clear()
    assert arenas.size == held.length
    arenas.give(held)
    assert arenas.trim() is None
    assert arenas.size == 0
    arenas.give(arenas.take(LARGE))
    assert arenas.trim() is not None


def test_zero_bytes_are_a_block_too() -> None:
    """Every block has an address of its own, however small."""
    arenas = Arenas()
    assert arenas.take(0).offset != arenas.take(0).offset
