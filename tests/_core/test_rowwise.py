"""A function over some rows, slice by slice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft._core.functions import Task, compute, join, select
from weft._core.partition import RowSlice, choose, part_of_rows
from weft.errors import InvalidType, InvalidValue


@given(
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from(["mean", "sum", "min", "max", "gather"]),
)
def test_ranks_and_slices_come_to_one_call(rows: int, ranks: int, slices: int, mode: str) -> None:
    """However many ranks and slices there are, more than rows too, it is what one call gives."""
    array = np.arange(rows * 2.0).reshape(rows, 2) ** 1.5

    def function(x: Any, power: int) -> Any:
        values = x**power
        return values if mode == "gather" else getattr(values, mode)(axis=0)

    def task(rank: int) -> Task:
        own = part_of_rows(choose(None, rows), ranks, rank)
        return Task([RowSlice(array, own)], {"power": 2}, own.stop - own.start, slices, None)

    parts = [compute(function, task(rank), mode) for rank in range(ranks) if task(rank).rows]
    np.testing.assert_allclose(join(parts, mode), function(array, 2), rtol=1e-12)


def test_slices_are_as_even_as_can_be() -> None:
    """The function sees so many slices, of rows in order, and never none."""
    seen: list[list[int]] = []
    task = Task([RowSlice(np.arange(7), slice(0, 7))], {}, 7, 3, None)
    compute(lambda x: seen.append(x.tolist()) or 0, task, "sum")
    assert seen == [[0, 1, 2], [3, 4], [5, 6]]
    seen.clear()
    compute(
        lambda x: seen.append(x.tolist()) or 0,
        Task([RowSlice(np.arange(2), slice(0, 2))], {}, 2, 5, None),
        "sum",
    )
    assert seen == [[0], [1]]


def test_some_outputs() -> None:
    """By position in tuples and lists, by key in dicts."""
    assert select((1, 2, 3), None) == (1, 2, 3)
    assert select((1, 2, 3), (2, 0)) == [3, 1]
    assert select({"a": 1, "b": 2}, ("b",)) == {"b": 2}
    assert select([1, 2], ()) == []


@pytest.mark.parametrize(
    ("outputs", "wanted", "error", "text"),
    [
        ((1, 2), (2,), InvalidValue, "outputs has 2; the function's outputs are 0 to 1"),
        ((1, 2), ("a",), InvalidValue, "outputs has 'a'"),
        ({"a": 1}, (0,), InvalidValue, r"outputs has 0; the function's outputs are \['a'\]"),
        (np.ones(3), (0,), InvalidType, "the function has one output, a ndarray"),
    ],
)
def test_outputs_that_are_not_there(
    outputs: Any, wanted: Any, error: type[Exception], text: str
) -> None:
    """The error names the output and those there are; an array's rows are no outputs."""
    with pytest.raises(error, match=text):
        select(outputs, wanted)
