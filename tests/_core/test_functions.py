"""A function over some rows, slice by slice, and what the outputs of several parts come to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from weft._core.checks import is_close
from weft._core.functions import Partial, Task, compute, join, select, validate_modes
from weft._core.partition import Bounds, RowSlice, choose, part_of_rows
from weft.errors import InvalidType, InvalidValue

FUNCTIONS = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max, "prod": np.prod}


class Pair(NamedTuple):
    loss: Any
    rows: Any


def cut(array: Any, places: list[int]) -> list[Any]:
    """The rows between these places, without empty parts."""
    edges = sorted({0, *(place % (len(array) + 1) for place in places), len(array)})
    return [array[start:stop] for start, stop in zip(edges, edges[1:], strict=False)]


@given(
    arrays.arrays(
        np.int64,
        st.tuples(st.integers(1, 12), st.integers(1, 3)),
        elements=st.integers(-3, 3),
    ),
    st.sampled_from(["float64", "float32", "float16", "int16", "int64"]),
    st.lists(st.integers(0, 50), max_size=4),
    st.sampled_from([*FUNCTIONS, "gather"]),
)
def test_parts_come_to_the_whole(whole: Any, dtype: str, places: list[int], mode: str) -> None:
    """A function of all rows and the join of its parts are the same, however the rows are cut."""
    array = whole.astype(dtype)

    def function(rows: Any) -> Any:
        return FUNCTIONS[mode](rows, axis=0) if mode in FUNCTIONS else rows * 2

    parts = [Partial(function(one), len(one)) for one in cut(array, places)]
    tolerance = 1e-2 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(join(parts, mode), function(array), rtol=tolerance, atol=tolerance)


def test_a_mean_is_weighted_by_rows() -> None:
    """Parts count by their rows; a part without rows does not count, not even as NaN."""
    parts = [Partial(1.0, 3), Partial(5.0, 1), Partial(float("nan"), 0)]
    assert join(parts, "mean") == 2.0
    assert np.isnan(join([Partial(np.float32("nan"), 0)], "mean"))


def test_means_of_integers_are_not_cut_off() -> None:
    """They are floats, also those of one part; so are those of booleans."""
    assert join([Partial(1, 1), Partial(2, 1)], "mean") == 1.5
    assert join([Partial(np.int8(100), 1), Partial(np.int8(101), 1)], "mean") == 100.5
    assert join([Partial(np.array([True, False]), 4)], "mean").tolist() == [1.0, 0.0]


def test_pythons_integers_have_no_width() -> None:
    """Sums and products of them are exact beyond 64 bits."""
    parts = [Partial(2**62, 1)] * 3
    assert join(parts, "sum") == 3 * 2**62
    assert join(parts, "prod") == 2**186


def test_parts_of_different_dtypes() -> None:
    """Numbers that are integers for some rows and floats for others are not cut off."""
    assert join([Partial(1, 1), Partial(2.5, 1)], "sum") == 3.5
    assert join([Partial(np.float32(1), 1), Partial(np.float64(0.1), 1)], "max") == 1.0


def test_bfloat16() -> None:
    """The mean of tensors is one of their numbers, not of their bits."""
    torch = pytest.importorskip("torch")
    ones = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    found = join([Partial(ones, 3), Partial(ones * 5, 1)], "mean")
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [2.0, 6.0]
    assert join([Partial(ones, 2), Partial(ones, 2)], "gather").tolist() == [1, 3, 1, 3]
    assert is_close(ones, ones + 0.001)
    assert not is_close(ones, ones * 2)


def test_tensors_that_require_gradients() -> None:
    """They are joined as values."""
    torch = pytest.importorskip("torch")
    leaf = torch.ones(2, requires_grad=True)
    assert join([Partial((leaf * 2).sum(), 1), Partial(leaf.sum(), 1)], "mean") == 3.0


def test_trees_keep_their_form() -> None:
    """Tuples, lists, dicts, NamedTuples and None in them, each leaf by the mode that is said."""
    first = {"a": (1.0, [2.0, None]), "b": Pair(3.0, np.array([1]))}
    second = {"a": (3.0, [4.0, None]), "b": Pair(5.0, np.array([2]))}
    parts = [Partial(first, 1), Partial(second, 1)]
    assert join(parts, "sum") == {"a": (4.0, [6.0, None]), "b": Pair(8.0, np.array([3]))}
    found = join(parts, {"a": "max", "b": ["mean", "gather"]})
    assert found["a"] == (3.0, [4.0, None])
    assert isinstance(found["b"], Pair)
    assert found["b"].rows.tolist() == [1, 2]


def test_rows_of_any_kind_are_gathered() -> None:
    """Lists, strings in arrays, objects, and numbers that stand alone."""
    assert join([Partial(["a", 1], 2), Partial([None], 1)], "gather") == ["a", 1, None]
    texts = [Partial(np.array(["a"]), 1), Partial(np.array(["long"]), 1)]
    assert join(texts, "gather").tolist() == ["a", "long"]
    objects = [Partial(np.array([{}], object), 1), Partial(np.array([None], object), 1)]
    assert join(objects, "gather").tolist() == [{}, None]
    assert join([Partial(1.0, 3), Partial(2.0, 3)], "gather").tolist() == [1.0, 2.0]


def test_none_keeps_the_first() -> None:
    """Whatever it is."""
    thing = object()
    assert join([Partial(thing, 1), Partial("other", 1)], None) is thing


@pytest.mark.parametrize(
    ("first", "second", "mode", "error", "text"),
    [
        ("a", "b", "mean", InvalidType, "is a str, which collect='mean' cannot combine"),
        ("a", "b", "gather", InvalidType, "is a str"),
        (np.array(["a"]), np.array(["b"]), "sum", InvalidType, "dtype <U1"),
        (np.ones(2), np.ones(3), "mean", InvalidValue, r"\(2,\), \(3,\).*collect='gather'"),
        (np.ones((1, 2)), np.ones((1, 3)), "gather", InvalidValue, "rows of one shape"),
        ((1, 2), (1, 2, 3), "sum", InvalidValue, "a tuple of 2 .*a tuple of 3"),
        ({"a": 1}, {"b": 1}, "sum", InvalidValue, r"a dict with \['a'\].*\['b'\]"),
        (1.0, None, "mean", InvalidType, "NoneType"),
        (1.0, 2.0, ["mean"], InvalidValue, "modes for 1 outputs.*returned a float"),
        ((1.0, 2.0), (1.0, 2.0), ["mean"], InvalidValue, "a tuple of 2"),
        ({"a": 1}, {"a": 1}, {"b": "sum"}, InvalidValue, r"\['b'\].*\['a'\]"),
    ],
)
def test_outputs_that_cannot_be_joined(
    first: Any, second: Any, mode: Any, error: type[Exception], text: str
) -> None:
    """The error names the output, what it is, and what the mode needs."""
    with pytest.raises(error, match=text):
        join([Partial(first, 1), Partial(second, 1)], mode)


@pytest.mark.parametrize("modes", ["average", ["mean", "all"], {"a": ("sum", 3)}, 7])
def test_unknown_modes(modes: Any) -> None:
    """The known ones are listed."""
    with pytest.raises(InvalidValue, match="'mean', 'sum', 'prod', 'min', 'max', 'gather', None"):
        validate_modes(modes)


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
    seen.clear()
    parts = compute(
        lambda x: seen.append(x.tolist()) or x.mean(),
        Task([RowSlice(np.arange(7), np.arange(6, -1, -1))], {}, 7, 2, None),
        "mean",
        lambda length, slices: [(0, slices), (slices, length)],
    )
    assert seen == [[6, 5], [4, 3, 2, 1, 0]], "as it was told to divide"
    assert parts.outputs == 3


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


def test_bounds_of_slices() -> None:
    """Each slice of a task gets the numbers of its first row and of the one after its last."""
    task = Task([RowSlice(Bounds(), slice(10, 17))], {}, 7, 3, None)
    found = compute(lambda bounds: [bounds[np.newaxis]], task, ["gather"])
    assert found.outputs[0].tolist() == [[10, 13], [13, 15], [15, 17]]
    assert found.rows == 7


def test_a_mean_of_no_rows() -> None:
    """Is what the function made of none."""
    assert np.isnan(join([Partial(np.float64("nan"), 0)], "mean"))
    assert join([Partial(np.array(2.0), 0), Partial(np.array(4.0), 0)], "mean") == 3


def test_the_option_that_was_wrong() -> None:
    """Is named as the user named it."""
    with pytest.raises(InvalidValue, match="batch_s=4: expected the first 0 to 3 rows"):
        choose(4, 3, "batch_s")
    with pytest.raises(InvalidValue, match="batch_s has the row 3"):
        choose([3], 3, "batch_s")
    with pytest.raises(InvalidType, match="batch_s is a list"):
        choose([0.5], 3, "batch_s")
