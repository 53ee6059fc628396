"""Which rows a batch means, and which of them a rank gets."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft._core.partition import RowSlice, choose, common_length, count, part_of_rows
from weft.errors import InvalidType, InvalidValue

lengths = st.integers(0, 30)


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
