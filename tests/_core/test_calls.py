"""Reductions as calls: what they refuse, what they say, and what they come to for many ranks."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._core.exchange import (
    DTYPES,
    LAYOUTS,
    OPS,
    check,
    empty_like,
    laid_out,
    numbers,
    reduced,
    run,
    shapes,
)
from weft._core.arithmetic import address
from weft._core.calls import Reduce
from weft.errors import InvalidType, InvalidValue

many = settings(deadline=None, max_examples=600)
seeds = st.integers(0, 2**32)


def reduction(value: Any, *, name: str = "all_reduce", size: int = 3, **options: Any) -> Reduce:
    how: dict[str, Any] = {"op": "sum", "weight": None, "out": None, **options}
    return Reduce(name, 0, size, value, **how)


# what reductions come to


@many
@given(
    size=st.integers(1, 4),
    op=st.sampled_from(OPS),
    dtype=st.sampled_from(DTYPES),
    shape=shapes,
    seed=seeds,
    data=st.data(),
)
def test_reductions_are_numpys(
    *, size: int, op: str, dtype: str, shape: tuple[int, ...], seed: int, data: Any
) -> None:
    """Every op, dtype, shape, layout, root and out= gives NumPy's numbers, on the right ranks."""
    random = np.random.default_rng(seed)
    per_rank = st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(["", "itself", *LAYOUTS]))
    choices = [data.draw(per_rank) for _ in range(size)]
    root = data.draw(st.none() | st.integers(0, size - 1))
    values = [laid_out(numbers(random, dtype, shape), layout) for layout, _ in choices]
    outs: list[Any] = []
    for value, (_, out) in zip(values, choices, strict=True):
        writable = isinstance(value, torch.Tensor) or (
            value.flags.writeable and value.dtype.isnative
        )
        if out == "itself" and writable:
            outs.append(value)
        else:
            outs.append(empty_like(value, out) if out not in ("", "itself") else None)
    name = "all_reduce" if root is None else "reduce"
    options = {} if root is None else {"root": root}
    with np.errstate(all="ignore"):
        expected = reduced(values, op)
        found = run(name, values, op=op, weight=None, out=outs, **options)
    for rank, result in enumerate(found):
        if root in (None, rank):
            check(result, expected, values[rank])
            assert outs[rank] is None or result is outs[rank]
        else:
            assert result is None


@many
@given(
    dtype=st.sampled_from(DTYPES),
    shape=shapes,
    weights=st.lists(st.sampled_from([0, 1, 2, 5, 0.5]), min_size=1, max_size=4).filter(any),
    seed=seeds,
)
def test_weighted_means_are_numpys(
    dtype: str, shape: tuple[int, ...], weights: list[float], seed: int
) -> None:
    """The weighted mean is the weighted sum over the sum of weights; no weight, no say."""
    random = np.random.default_rng(seed)
    values = [numbers(random, dtype, shape) for _ in weights]
    with np.errstate(all="ignore"):
        expected = reduced(values, "mean", weights)
        found = run("all_reduce", values, op="mean", weight=weights, out=None)
    for value, result in zip(values, found, strict=True):
        check(result, expected, value)


@settings(deadline=None, max_examples=200)
@given(
    size=st.integers(1, 4),
    op=st.sampled_from(OPS),
    leaves=st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=5),
    seed=seeds,
    in_place=st.booleans(),
)
def test_trees_are_reduced_leaf_by_leaf(
    size: int, op: str, leaves: list[tuple[str, tuple[int, ...]]], seed: int, in_place: bool
) -> None:
    """A dict of a list and a tuple, of several dtypes and shapes, is reduced in one call."""
    random = np.random.default_rng(seed)
    flats = [[numbers(random, dtype, shape) for dtype, shape in leaves] for _ in range(size)]
    values = [{"b": flat[::2], "a": tuple(flat[1::2])} for flat in flats]
    in_place = in_place and not any(dtype.startswith(">") for dtype, _ in leaves)
    outs = [value if in_place else None for value in values]
    with np.errstate(all="ignore"):
        expected = [reduced(list(column), op) for column in zip(*flats, strict=True)]
        found = run("all_reduce", values, op=op, weight=None, out=outs)
    for result, flat in zip(found, flats, strict=True):
        assert list(result) == ["b", "a"]
        assert (type(result["b"]), type(result["a"])) == (list, tuple)
        for index, like in enumerate(flat):
            check(result["ba"[index % 2]][index // 2], expected[index], like)


@pytest.mark.parametrize(
    ("value", "op", "expected"),
    [
        (2, "sum", 6),
        (2, "mean", 2.0),
        (True, "sum", True),
        (True, "mean", 1.0),
        (0.5, "prod", 0.125),
        (1 + 2j, "sum", 3 + 6j),
        (np.float32(1.5), "sum", np.float32(4.5)),
        (np.int8(100), "sum", np.int8(44)),
        (np.int8(100), "mean", np.int8(100)),
        (np.bool_(True), "min", np.bool_(True)),
    ],
)
def test_single_numbers_stay_what_they_are(value: Any, op: str, expected: Any) -> None:
    """Python's and NumPy's own numbers come back as such; the mean of Python ints is a float."""
    for result in run("all_reduce", [value] * 3, op=op, weight=None, out=None):
        assert type(result) is type(expected)
        assert result == expected
    mixed = run("all_reduce", [[value, np.ones(2)]] * 3, op=op, weight=None, out=None)[0]
    assert type(mixed[0]) is type(expected)


def test_the_mean_of_ints_is_not_cut() -> None:
    """The mean of Python's 1 and 2 is 1.5; of arrays of ints it is cast as NumPy casts."""
    assert run("all_reduce", [1, 2], op="mean", weight=None, out=None) == [1.5, 1.5]
    found = run("all_reduce", [np.array([1]), np.array([2])], op="mean", weight=None, out=None)
    assert found[0].tolist() == [1]


def test_each_rank_gets_its_own_librarys_array() -> None:
    """Tensors on one rank and arrays on another are reduced together, each to its own kind."""
    array, tensor = np.arange(3.0, dtype=np.float32), torch.ones(3)
    for one, two in ((array, tensor), (tensor, array)):
        results = run("all_reduce", [one, two], op="sum", weight=None, out=None)
        assert [type(result) for result in results] == [type(one), type(two)]
        assert [result.tolist() for result in results] == [[1, 2, 3]] * 2


# memory


def test_contiguous_arrays_are_used_where_they_are() -> None:
    """What is contiguous is neither copied to be sent nor to be received."""
    value, out = np.arange(6.0).reshape(2, 3), np.empty((2, 3))
    call = reduction(value, out=out)
    assert address(call.source[0]) == address(value)
    assert address(call.early_target[0]) == address(out)
    itself = reduction(value, out=value)
    assert address(itself.source[0]) == address(itself.early_target[0]) == address(value)


@pytest.mark.parametrize("shift", [1, -1, 2])
def test_an_overlapping_out_does_not_spoil_what_is_sent(shift: int) -> None:
    """An out= that overlaps the value in another way than being it leads to a copy."""
    for size in (1, 3):
        memory = [np.arange(20.0) for _ in range(size)]
        values = [array[5:15] for array in memory]
        outs: list[Any] = [array[5 + shift : 15 + shift] for array in memory]
        call = reduction(values[0], out=outs[0])
        assert not np.may_share_memory(call.source[0], outs[0])
        found = run("all_reduce", values, op="sum", weight=None, out=outs)
        for result, out in zip(found, outs, strict=True):
            assert result is out
            np.testing.assert_array_equal(result, size * np.arange(5.0, 15.0))


def test_an_out_may_be_another_leafs_value() -> None:
    """Leaves that change places are exchanged as they were."""
    values = [[np.full(4, 1.0), np.full(4, 10.0)] for _ in range(2)]
    outs: list[Any] = [value[::-1] for value in values]
    found = run("all_reduce", values, op="sum", weight=None, out=outs)
    assert [[leaf.tolist() for leaf in result] for result in found] == [[[2.0] * 4, [20.0] * 4]] * 2


# what they say


def test_the_words_tell_what_must_agree() -> None:
    """Shape, dtype, op, root, whether it is weighted, and the tree are in the words."""
    calls = [
        reduction(np.ones(3)),
        reduction(np.ones((3, 1))),
        reduction(np.ones(3, np.float32)),
        reduction(np.ones(3), op="max"),
        reduction(np.ones(3), op="mean"),
        reduction(np.ones(3), op="mean", weight=1),
        reduction(np.ones(3), name="reduce", root=0),
        reduction(np.ones(3), name="reduce", root=1),
        reduction([np.ones(3)]),
        reduction({"a": np.ones(3)}),
        reduction({"b": np.ones(3)}),
        reduction(1.0),
        reduction(1),
    ]
    assert len({call.common for call in calls}) == len(calls)
    assert reduction(np.ones((2, 3))).common == b"all_reduce(float64[2, 3], op='sum')"
    weighted = reduction(np.ones(1), name="reduce", root=2, op="mean", weight=5)
    assert weighted.common == b"reduce(float64[1], op='mean', root=2, weight=...)"


def test_a_call_like_one_before_says_the_same() -> None:
    """What is remembered of a call is what was worked out."""
    for value in (np.ones((2, 3), np.float16), torch.ones(4).bfloat16(), np.int16(3), 4):
        for op in OPS:
            for weight in (None, 2) if op == "mean" else (None,):
                first = reduction(value, op=op, weight=weight)
                again = reduction(value, op=op, weight=weight)
                assert again.common == first.common
                assert again.layout.sizes == first.layout.sizes
                assert again.settle([again.own] * 3)[:4] == first.settle([first.own] * 3)[:4]


# what they refuse


@pytest.mark.parametrize("op", ["Sum", "average", "", None, 3, ["sum"], np.add])
def test_an_unknown_op_is_refused(op: Any) -> None:
    """The message names the op and lists the valid ones."""
    with pytest.raises(InvalidValue, match="expected one of sum, mean, prod, min, max") as caught:
        reduction(np.ones(3), op=op)
    assert f"op={op!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("root", "error"),
    [
        (3, InvalidValue),
        (-1, InvalidValue),
        (np.int64(3), InvalidValue),
        (True, InvalidValue),
        (None, InvalidType),
        ("0", InvalidType),
        (0.0, InvalidType),
    ],
)
def test_an_unknown_root_is_refused(root: Any, error: type[Exception]) -> None:
    """The message names the root and the valid ones."""
    with pytest.raises(error, match="expected a rank of the group, 0 to 2") as caught:
        reduction(np.ones(3), name="reduce", root=root)
    assert f"reduce(root={root!r})" in str(caught.value)


def test_a_root_may_be_numpys_number() -> None:
    """A rank that was computed is as good as one that was written."""
    assert b"root=2" in reduction(np.ones(3), name="reduce", root=np.uint8(2)).common


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("text", "str"),
        (None, "the value is None"),
        ([1, "a"], "[1] is a str"),
        ({"a": np.ones(2), "b": [1.0, None]}, "['b'][1] is None"),
        (np.array([object()]), "an array of Python objects"),
        (np.array(["a", "bc"]), "str"),
        (np.array([b"a"]), "bytes"),
        (np.array(["2020-01-01"], "M8[D]"), "datetime64"),
        (np.zeros(2, "i4,f4"), "i4"),
        ({"a": np.ones(2), "b": np.array(["x"])}, "str"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, named: str) -> None:
    """Objects, strings, dates and records have no sum, in whatever they are."""
    for op in OPS:
        with pytest.raises(InvalidType, match="expected numbers") as caught:
            reduction(value, op=op)
        assert named in str(caught.value)


def test_masked_arrays_are_refused() -> None:
    """A mask would be lost without a word."""
    with pytest.raises(InvalidType, match="mask would be lost"):
        reduction(np.ma.masked_array([1, 2], [True, False]))


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**100])
def test_python_ints_that_do_not_fit_are_refused(number: int) -> None:
    """Python's ints have no end, the machine's do."""
    with pytest.raises(InvalidValue, match="does not fit 64 bits") as caught:
        reduction(number)
    assert str(number) in str(caught.value)


@pytest.mark.parametrize(
    ("weight", "error"),
    [
        (-1, InvalidValue),
        (-0.001, InvalidValue),
        (float("nan"), InvalidValue),
        (float("inf"), InvalidValue),
        pytest.param(10**400, InvalidValue, id="10**400"),
        ("3", InvalidType),
        (True, InvalidType),
        ([1, 2], InvalidType),
        (1j, InvalidType),
        (np.complex64(1), InvalidType),
    ],
)
def test_a_wrong_weight_is_refused(weight: Any, error: type[Exception]) -> None:
    """A weight is a finite number, 0 or more; the message names what came instead."""
    with pytest.raises(error, match=r"weight=") as caught:
        reduction(np.ones(3), op="mean", weight=weight)
    assert repr(weight)[:100] in str(caught.value)


def test_a_weight_is_for_the_mean() -> None:
    """Other ops have no weights."""
    for op in ("sum", "prod", "min", "max"):
        with pytest.raises(InvalidValue, match="weight= is for op='mean'"):
            reduction(np.ones(3), op=op, weight=1)


def test_without_any_weight_there_is_no_mean() -> None:
    """Weights that are all 0 are refused when the ranks have met."""
    with pytest.raises(InvalidValue, match="the weights of all 3 ranks are 0"):
        run("all_reduce", [np.ones(2)] * 3, op="mean", weight=[0, 0.0, 0], out=None)


def read_only() -> Any:
    array = np.ones(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (np.ones(4), InvalidValue, "out= is float64[4], the result is float64[3]"),
        (np.ones((3, 1)), InvalidValue, "out= is float64[3, 1], the result is float64[3]"),
        (np.ones(3, "f4"), InvalidValue, "out= is float32[3], the result is float64[3]"),
        ([np.ones(3)] * 2, InvalidValue, "out= is 2 arrays"),
        (read_only(), InvalidValue, "cannot be written to"),
        (np.ones(3, ">f8"), InvalidValue, "cannot be written to"),
        ("here", InvalidType, "out=str"),
        ([0.0], InvalidType, "out=list"),
        (1.0, InvalidType, "out=float"),
    ],
)
def test_a_wrong_out_is_refused(out: Any, error: type[Exception], words: str) -> None:
    """Wrong shape, dtype, count, kind, or not writable: the message shows both sides."""
    with pytest.raises(error) as caught:
        reduction(np.ones(3), out=out)
    assert words in str(caught.value)


def test_out_counts_where_the_result_goes() -> None:
    """A rank that gets no result need not have a place for it."""
    call = Reduce("reduce", 1, 2, np.ones(3), op="sum", weight=None, out=np.ones(9), root=0)
    assert call.early_target == ()


def test_sums_of_pythons_ints_fit() -> None:
    """A whole number whose sum over the ranks might wrap around is refused."""
    limit = 2**63 // 3
    assert reduction(limit, op="sum", size=3).source[0] == limit
    with pytest.raises(InvalidValue, match="may not fit 64 bits; reduce it as a float"):
        reduction(limit + 1, op="sum", size=3)


@pytest.mark.parametrize("weight", [np.float32(3), np.array(3), torch.tensor(3), np.int8(3)])
def test_weights_of_one_element_are_numbers(weight: Any) -> None:
    """A count may come from NumPy or torch."""
    assert reduction(np.ones(2), op="mean", weight=weight).own == struct.pack("d", 3.0)
