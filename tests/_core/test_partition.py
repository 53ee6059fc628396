"""Which rows a batch means, which rows or columns are whose, and results joined again."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from weft._core.arithmetic import Array
from weft._core.partition import (
    RowSlice,
    choose,
    common_length,
    count,
    cut,
    part_of,
    part_of_rows,
    paste,
    validate_columns,
)
from weft.errors import InvalidType, InvalidValue

lengths = st.integers(0, 30)


@given(length=st.integers(0, 10**12), size=st.integers(1, 200))
def test_shares_follow_each_other_and_are_even(length: int, size: int) -> None:
    """Shares are contiguous, in rank order, cover all rows, and differ by one row at most."""
    shares = [part_of(length, size, rank) for rank in range(size)]
    assert shares[0][0] == 0
    assert shares[-1][1] == length
    assert all(before[1] == after[0] for before, after in zip(shares, shares[1:], strict=False))
    counts = [stop - start for start, stop in shares]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@given(lengths, st.data())
def test_a_batch_means_what_it_means_to_an_array(length: int, data: Any) -> None:
    """choose() agrees with NumPy's own indexing, for numbers, slices and indexes."""
    array = np.arange(length)
    edge = st.none() | st.integers(-40, 40)
    steps = st.none() | st.integers(-5, 5).filter(bool)
    batches = st.builds(slice, edge, edge, steps) | st.integers(0, length).map(np.int64)
    if length:
        batches |= st.lists(st.integers(-length, length - 1))
    batch = data.draw(batches)
    expected = array[: int(batch)] if isinstance(batch, np.integer) else array[batch]
    rows = choose(batch, length)
    assert count(rows) == len(expected)
    assert (array[rows] == expected).all()


@given(lengths, st.integers(1, 6), st.booleans())
def test_parts_are_all_rows_in_order(length: int, parts: int, indexed: bool) -> None:
    """They differ by one row at most, the first has the most, and none is left out."""
    rows = choose(slice(None, None, -1) if indexed else None, length)
    found = [part_of_rows(rows, parts, index) for index in range(parts)]
    counts = [count(one) for one in found]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)
    array = np.arange(length)
    assert np.concatenate([array[one] for one in found]).tolist() == array[rows].tolist()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
def test_narrow_indexes(dtype: str) -> None:
    """Indexes of any integer dtype choose rows of arrays longer than that dtype can count."""
    indexes = np.array([0, 5, 100], dtype)
    assert choose(indexes, 1000).tolist() == [0, 5, 100]
    if dtype.startswith("i"):
        assert choose(-indexes[1:], 1000).tolist() == [995, 900]


@pytest.mark.parametrize("batch", [-1, 6, [5], [0, -6], np.array([2**63], np.uint64)])
def test_rows_out_of_range(batch: Any) -> None:
    """The error names the row and the range."""
    with pytest.raises(InvalidValue, match=r"batch.*5"):
        choose(batch, 5)


@pytest.mark.parametrize("batch", [True, 1.5, "ab", [0.5], [[1]], [True, False]])
def test_batches_of_wrong_kinds(batch: Any) -> None:
    """The error says what a batch may be."""
    with pytest.raises(InvalidType, match="a number of rows, a slice, or a list of row indexes"):
        choose(batch, 5)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_rows_of_lists(kind: Any) -> None:
    """Lists and tuples give rows by index too, and stay what they are."""
    taken = RowSlice(kind([4, 5, 6]), np.array([2, 0])).take()
    assert type(taken) is type(kind([]))
    assert list(taken) == [6, 4]


@pytest.mark.parametrize("rows", [slice(2, 4), np.array([3, 0])])
def test_what_is_pickled_of_an_array(rows: Any) -> None:
    """Only the rows that are meant, or the array with their numbers, where a worker has it."""
    given = RowSlice(np.arange(1000.0), rows)
    sent: RowSlice = pickle.loads(pickle.dumps(given))
    assert len(sent.array) == 2
    assert sent.take().tolist() == given.take().tolist()
    make, arguments = given.reduce_whole()
    assert make(*arguments).array is given.array
    assert make(*arguments).take().tolist() == given.take().tolist()


def test_lengths_that_differ() -> None:
    """All inputs are named with their lengths; what has none is told apart."""
    assert common_length({"x": [1, 2], "y": np.ones((2, 3))}) == 2
    with pytest.raises(InvalidValue, match="x has 2, y has 3; expected as many in each"):
        common_length({"x": [1, 2], "y": np.ones(3)})
    with pytest.raises(InvalidType, match=r"y is a float without rows.*first axis, or so"):
        common_length({"x": [1, 2], "y": 3.0}, otherwise=", or so")


arrays = st.builds(
    lambda array, dtype: array.astype(dtype),
    hnp.arrays(np.int8, hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=9)),
    st.sampled_from([np.float64, np.float32, np.int32, np.complex64, np.bool_]),
)


@given(st.integers(1, 500), st.integers(1, 40))
def test_parts_are_even_and_never_a_single_column(columns: int, workers: int) -> None:
    """Parts follow each other, cover all, differ by one column at most, have at least two."""
    parts = cut(np.zeros((3, columns)), workers)
    assert 1 <= len(parts) <= workers
    assert (parts[0].start, parts[-1].stop) == (0, columns)
    assert all(left.stop == right.start for left, right in zip(parts, parts[1:], strict=False))
    widths = [part.stop - part.start for part in parts]
    assert max(widths) - min(widths) <= 1
    assert min(widths) >= min(2, columns)
    assert len(parts) == min(workers, max(1, columns // 2))


@given(arrays, st.integers(1, 12))
def test_an_elementwise_function_gives_the_same_bits(array: Array, workers: int) -> None:
    """What is computed from the parts and pasted together is what is computed from the whole."""
    parts = cut(array, workers)
    pasted = paste(array, parts, [part.view() * part.view() for part in parts])
    assert pasted.dtype == (array * array).dtype
    assert pasted.tobytes() == np.ascontiguousarray(array * array).tobytes()
    assert pasted.shape == array.shape


@given(arrays, st.integers(1, 6), st.integers(0, 3))
def test_results_may_have_any_leading_axes(array: Array, workers: int, leading: int) -> None:
    """Only the last axis has to be as long as the part's."""

    def fun(x: Array) -> Array:
        last = x.reshape(-1, x.shape[-1]).any(axis=0)
        return np.broadcast_to(last, (*range(2, 2 + leading), x.shape[-1]))

    parts = cut(array, workers)
    assert np.array_equal(paste(array, parts, [fun(part.view()) for part in parts]), fun(array))


def test_a_part_is_a_view_with_the_strides_of_the_whole() -> None:
    """Nothing is copied, and NumPy takes the same way through it, in either order."""
    for array in (
        np.zeros((4, 10)),
        np.asfortranarray(np.zeros((4, 10))),
        np.zeros((4, 20))[:, ::2],
    ):
        for part in cut(array, 3):
            assert np.shares_memory(part.view(), array)
            assert part.view().strides == array.strides


def test_results_that_are_lists_are_pasted() -> None:
    """A function may return what NumPy can read."""
    parts = cut(np.arange(4.0), 2)
    assert paste(np.zeros(4), parts, [[1, 2], (3, 4)]).tolist() == [1, 2, 3, 4]


def test_arrays_that_cannot_be_cut_are_refused() -> None:
    """The message shows the array without axes, or the shape without columns."""
    with pytest.raises(
        InvalidType, match=r"without axes, array\(3\); expected a list, or an array"
    ):
        validate_columns(np.array(3))
    with pytest.raises(InvalidValue, match=r"shape \(5, 0\), which has no columns; expected one"):
        validate_columns(np.zeros((5, 0)))
    validate_columns(np.zeros((0, 1)))


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([np.zeros(3), np.zeros(3)], ["columns 3 to 4", "(2, 2)", "shape (3,)", "last axis of 2"]),
        ([7.0, np.zeros(2)], ["columns 0 to 2", "a single value", "last axis of 3"]),
        ([None, np.zeros(2)], ["columns 0 to 2", "a single value", "last axis of 3"]),
        ([np.zeros((3, 2)), np.zeros(2)], ["columns 0 to 2", "(3, 2)", "last axis of 3"]),
        (
            [np.zeros((4, 3)), np.zeros((5, 2))],
            ["(4, 3) for columns 0 to 2", "(5, 2) for columns 3 to 4", "the same shape"],
        ),
        ([np.zeros(3), np.zeros((1, 2))], ["(3,)", "(1, 2)", "the same shape"]),
        ([[[1, 2, 3], [1]], np.zeros(2)], ["columns 0 to 2", "last axis of 3"]),
    ],
    ids=["longer", "number", "None", "transposed", "leading", "axes", "ragged"],
)
def test_results_that_do_not_fit_are_refused(results: list[Any], words: list[str]) -> None:
    """The message names the columns, what the function got and returned, and what was expected."""
    with pytest.raises(InvalidValue) as caught:
        paste(np.zeros((2, 5)), cut(np.zeros((2, 5)), 2), results)
    assert all(word in str(caught.value) for word in words), caught.value


def test_masks_are_kept() -> None:
    """A masked array keeps its mask on the way through cut and paste."""
    masked = np.ma.masked_less(np.arange(10.0), 4)
    parts = cut(masked, 3)
    pasted = paste(masked, parts, [part.view() + 1 for part in parts])
    assert np.ma.getmaskarray(pasted).tolist() == masked.mask.tolist()
    assert pasted.sum() == (masked + 1).sum()
