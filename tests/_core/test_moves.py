"""Calls that move: who gets what from whom, and what arrives."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._core.exchange import (
    DTYPES,
    KINDS,
    LAYOUTS,
    as_numpy,
    check,
    empty_like,
    laid_out,
    numbers,
    run,
    shapes,
)
from weft._core.arithmetic import address
from weft._core.calls import Copy, Movement, UnlikeArrays
from weft._core.moves import Broadcast, Gather, Scatter
from weft._core.partition import part_of
from weft.errors import InvalidType, InvalidValue

many = settings(deadline=None, max_examples=400)
seeds = st.integers(0, 2**32)
layouts = st.sampled_from(LAYOUTS)
#: what moves but cannot be reduced moves too
MOVED = (*DTYPES, "S3", "U2", "M8[s]", "i4,f8")

Pair = namedtuple("Pair", "left right")


def anything(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """An array of a dtype of `MOVED`."""
    if dtype in DTYPES:
        return numbers(random, dtype, shape)
    if dtype == "i4,f8":
        made = np.zeros(shape, dtype)
        made["f0"] = random.integers(0, 100, shape)
        return made
    return (
        random.integers(0, 1000, shape).astype("M8[s]" if dtype == "M8[s]" else "U").astype(dtype)
    )


def same(found: Any, expected: Any, like: Any) -> None:
    if isinstance(like, torch.Tensor) or like.dtype.kind in "biufc":
        check(found, expected, like)
    else:
        assert found.dtype == like.dtype
        np.testing.assert_array_equal(found, expected)


def maybe_out(data: Any, value: Any, shape: tuple[int, ...]) -> Any:
    layout = data.draw(st.sampled_from(["", *LAYOUTS]))
    return empty_like(value, layout, shape) if layout and not is_record(value) else None


def is_record(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and value.dtype.kind not in "biufc"


# what arrives


@many
@given(
    size=st.integers(1, 4),
    dtype=st.sampled_from(MOVED),
    shape=shapes,
    seed=seeds,
    layout=layouts,
    data=st.data(),
)
def test_broadcasts_arrive(
    *, size: int, dtype: str, shape: tuple[int, ...], seed: int, layout: str, data: Any
) -> None:
    """Every rank gets the root's array, in every dtype, shape, layout and kind of out=."""
    value = laid_out(anything(np.random.default_rng(seed), dtype, shape), layout)
    root = data.draw(st.integers(0, size - 1))
    outs = [maybe_out(data, value, shape) for _ in range(size)]
    others = data.draw(st.sampled_from(["None", "like", "object"]))
    other = {"None": None, "like": value, "object": "text"}[others]
    values = [value if rank == root else other for rank in range(size)]
    before = as_numpy(value).copy()
    for rank, result in enumerate(run("broadcast", values, root=root, out=outs)):
        assert outs[rank] is None or result is outs[rank]
        if rank == root and outs[rank] is None:
            assert result is value
        else:
            same(result, before, value)


@many
@given(
    size=st.integers(1, 4),
    dtype=st.sampled_from(MOVED),
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    seed=seeds,
    layout=layouts,
    data=st.data(),
)
def test_scattered_rows_arrive(
    *, size: int, dtype: str, shape: tuple[int, ...], seed: int, layout: str, data: Any
) -> None:
    """Each rank gets its share of the root's rows; together they are all of them, in order."""
    value = laid_out(anything(np.random.default_rng(seed), dtype, shape), layout)
    root = data.draw(st.integers(0, size - 1))
    shares = [part_of(shape[0], size, rank) for rank in range(size)]
    outs = [maybe_out(data, value, (stop - start, *shape[1:])) for start, stop in shares]
    values = [value if rank == root else None for rank in range(size)]
    found = run("scatter", values, root=root, out=outs)
    for rank, (result, (start, stop)) in enumerate(zip(found, shares, strict=True)):
        same(result, value[start:stop], value)
        assert result is outs[rank] or not np.shares_memory(as_numpy(result), as_numpy(value))


@many
@given(
    dtype=st.sampled_from(MOVED),
    rows=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    row=st.lists(st.integers(0, 4), max_size=2).map(tuple),
    seed=seeds,
    data=st.data(),
)
def test_gathered_rows_arrive(
    dtype: str, rows: list[int], row: tuple[int, ...], seed: int, data: Any
) -> None:
    """All ranks' rows follow each other, however many each has, at the root or everywhere."""
    random = np.random.default_rng(seed)
    values = [
        laid_out(anything(random, dtype, (count, *row)), data.draw(layouts)) for count in rows
    ]
    root = data.draw(st.none() | st.integers(0, len(rows) - 1))
    outs = [maybe_out(data, value, (sum(rows), *row)) for value in values]
    expected = np.concatenate([as_numpy(value) for value in values])
    name, options = ("all_gather", {}) if root is None else ("gather", {"root": root})
    for rank, result in enumerate(run(name, values, out=outs, **options)):
        if root in (None, rank):
            same(result, expected, values[rank])
            assert outs[rank] is None or result is outs[rank]
        else:
            assert result is None


def test_single_numbers_count_as_a_row() -> None:
    """Arrays without a dimension are gathered to one of one dimension, even beside rows."""
    found = run("all_gather", [np.array(1.0), np.array([2.0, 3.0]), np.array(4.0)], out=None)
    assert [result.tolist() for result in found] == [[1, 2, 3, 4]] * 3
    tensors = run("gather", [torch.tensor(1), torch.tensor(2)], out=None, root=1)
    assert tensors[0] is None
    assert tensors[1].tolist() == [1, 2]


@many
@given(
    size=st.integers(1, 4),
    leaves=st.lists(
        st.tuples(st.sampled_from(MOVED), st.lists(st.integers(0, 4), min_size=1, max_size=2)),
        min_size=1,
        max_size=4,
    ),
    name=st.sampled_from(["broadcast", "scatter", "gather", "all_gather"]),
    seed=seeds,
)
def test_trees_travel_leaf_by_leaf(
    size: int, leaves: list[tuple[str, list[int]]], name: str, seed: int
) -> None:
    """A dict of lists, of several dtypes and shapes, moves in one call and keeps its form."""
    random = np.random.default_rng(seed)
    trees = [
        {"b": [anything(random, dtype, tuple(shape)) for dtype, shape in leaves], "a": ()}
        for _ in range(size)
    ]
    options = {} if name == "all_gather" else {"root": 0}
    found = run(name, trees, out=None, **options)
    for rank, result in enumerate(found):
        if name == "gather" and rank:
            assert result is None
            continue
        if name == "broadcast" and not rank:
            assert result is trees[0]
            continue
        assert list(result) == ["b", "a"]
        for index, got in enumerate(result["b"]):
            mine = trees[rank]["b"][index]
            first = as_numpy(trees[0]["b"][index])
            if name == "broadcast":
                expected = first
            elif name == "scatter":
                expected = first[slice(*part_of(len(first), size, rank))]
            else:
                expected = np.concatenate([as_numpy(tree["b"][index]) for tree in trees])
            same(got, expected, mine)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        2**100,
        "text",
        b"",
        [],
        {},
        [1, np.ones(2)],
        {"a": object},
        np.array([None, "x"]),
        np.float32(2),
        Pair("left", "right"),
    ],
)
def test_objects_travel(value: Any) -> None:
    """What is no array arrives as an equal object: broadcast, and gathered to a list."""
    for result in run("broadcast", [None, value, None], root=1, out=None):
        assert type(result) is type(value)
        assert repr(result) == repr(value)
    for result in run("all_gather", [value, value], out=None):
        assert repr(result) == repr([value, value])
    found = run("gather", [1, "two", None], root=2, out=None)
    assert found == [None, None, [1, "two", None]]


def test_what_has_no_name_travels() -> None:
    """A function made on the spot is sent by value."""
    for result in run("all_gather", [lambda x, k=k: x + k for k in range(2)], out=None):
        assert [function(10) for function in result] == [10, 11]


@pytest.mark.parametrize("kind", [list, tuple])
def test_items_are_shared_out(kind: Any) -> None:
    """A list or tuple of objects is scattered by its items; with too few, some get none."""
    found = run("scatter", [kind("abcde"), None, None], root=0, out=None)
    assert found == [kind("ab"), kind("cd"), kind("e")]
    assert run("scatter", [kind("a"), None, None], root=0, out=None) == [kind("a"), kind(), kind()]
    assert run("scatter", [kind(), None], root=0, out=None) == [kind(), kind()]


def test_named_tuples_of_arrays_keep_their_names() -> None:
    """A named tuple arrives as what it was."""
    value = Pair(np.arange(4), [np.ones(2)])
    for result in run("broadcast", [value, None], root=0, out=None):
        assert type(result) is Pair
        assert result.left.tolist() == [0, 1, 2, 3]
    assert run("scatter", [value, None], root=0, out=None)[1].left.tolist() == [2, 3]


def test_each_rank_gathers_to_its_own_librarys_arrays() -> None:
    """Where one rank gives a tensor and another an array, each gets its own kind."""
    values = [np.ones(2, np.float32), torch.zeros(1)]
    found = run("all_gather", values, out=None)
    assert [type(result) for result in found] == [np.ndarray, torch.Tensor]
    assert [result.tolist() for result in found] == [[1, 1, 0]] * 2


# plans


def test_the_plan_of_a_scatter() -> None:
    """Rows are cut by shares; what is empty is not copied; the root carries nothing itself."""
    call = Scatter("scatter", 0, 3, np.zeros((2, 5), np.float32), root=0, out=None)
    nothing = Scatter("scatter", 1, 3, None, root=0, out=None).own
    plan = call.settle([call.own, nothing, nothing])
    assert plan.incoming == [Copy(0, 0, 0, 0, 0, 0, 20)]
    assert plan.outgoing == [Copy(0, 0, 20, 1, 0, 0, 20)]
    assert list(plan.sizes) == [(40,), (), ()]


def test_the_plan_of_a_gather() -> None:
    """Every rank sends to the root, each behind the one before."""
    calls = [
        Gather("gather", rank, 3, np.zeros(rank, np.int16), out=None, root=1) for rank in range(3)
    ]
    plans: list[Movement] = [call.settle([other.own for other in calls]) for call in calls]
    assert plans[1].incoming == [Copy(1, 0, 0, 1, 0, 0, 2), Copy(2, 0, 0, 1, 0, 2, 4)]
    assert [list(plan.outgoing) for plan in plans] == [[], [], [Copy(2, 0, 0, 1, 0, 2, 4)]]
    assert [len(plan.target) for plan in plans] == [0, 1, 0]


def test_the_plan_of_a_broadcast() -> None:
    """The root sends to all others, and to itself only where it gave an out=."""
    nothing = Broadcast("broadcast", 1, 3, None, root=0, out=None).own
    for out, extra in ((None, []), (np.empty(2), [Copy(0, 0, 0, 0, 0, 0, 16)])):
        call = Broadcast("broadcast", 0, 3, np.ones(2), root=0, out=out)
        plan = call.settle([call.own, nothing, nothing])
        assert plan.incoming == extra
        assert plan.outgoing == [Copy(0, 0, 0, rank, 0, 0, 16) for rank in (1, 2)]


def test_contiguous_arrays_are_sent_from_where_they_are() -> None:
    """No copy is made of what is contiguous, nor between it and an out= elsewhere."""
    value, out = np.ones((4, 2)), np.empty((4, 2))
    for name in ("broadcast", "scatter", "gather", "all_gather"):
        options = {} if name == "all_gather" else {"root": 0}
        call = KINDS[name](name, 0, 1, value, out=out, **options)
        assert address(call.source[0]) == address(value)
        plan = call.settle([call.own])
        assert address(plan.target[0]) == address(out)


@pytest.mark.parametrize("name", ["broadcast", "scatter", "all_gather"])
def test_an_overlapping_out_does_not_spoil_what_is_sent(name: str) -> None:
    """An out= in the memory of the value gets the right result."""
    memory = np.arange(12.0)
    value = memory[:8]
    out = {"broadcast": memory[4:], "scatter": memory[2:6], "all_gather": np.empty(16)}[name]
    if name == "all_gather":
        out[8:] = value
        value = out[8:]
    values = [value, np.arange(8.0)]
    options: dict[str, Any] = {} if name == "all_gather" else {"root": 0}
    found = run(name, values, out=[out, None], **options)
    expected = {
        "broadcast": [*range(8)],
        "scatter": [*range(4)],
        "all_gather": [*range(8), *range(8)],
    }[name]
    assert found[0] is out
    assert found[0].tolist() == expected


def test_gather_in_place() -> None:
    """A rank may give the part of out= that is its own."""
    outs = [np.zeros(6), np.zeros(6)]
    for rank, out in enumerate(outs):
        out[3 * rank : 3 * rank + 3] = rank + 1
    values = [outs[0][:3], outs[1][3:]]
    for result in run("all_gather", values, out=outs):
        assert result.tolist() == [1, 1, 1, 2, 2, 2]


# what must agree


def test_other_arrays_than_the_roots_are_shown() -> None:
    """Ranks that pass arrays to a broadcast or scatter must pass ones like the root's."""
    for name in ("broadcast", "scatter"):
        for other in (np.ones(4), np.ones(3, "f4"), [np.ones(3), np.ones(3)], np.ones((3, 1))):
            with pytest.raises(UnlikeArrays) as caught:
                run(name, [other, np.ones(3)], root=1, out=None)
            assert caught.value.ranks[1] == "float64[3]"
            assert caught.value.ranks[0] != "float64[3]"
            assert set(caught.value.ranks) == {0, 1}


def test_long_lists_of_arrays_are_cut() -> None:
    """What differs is shown, but not a hundred arrays."""
    with pytest.raises(UnlikeArrays) as caught:
        run("broadcast", [[np.ones(1)] * 100, [np.ones(1)] * 99], root=0, out=None)
    assert all(text.endswith(", ...)") for text in caught.value.ranks.values())
    assert max(map(len, caught.value.ranks.values())) < 140


def test_the_words_of_gathers_leave_out_rows() -> None:
    """Gathers agree whatever the number of rows, but not on other axes, dtypes or kinds."""

    def words(value: Any, **options: Any) -> bytes:
        return Gather("all_gather", 0, 2, value, out=None, **options).common

    assert words(np.ones((2, 3))) == words(np.ones((5, 3))) == b"all_gather(float64[rows, 3])"
    different = [np.ones((2, 3)), np.ones((2, 4)), np.ones(2), np.ones((2, 3), "f4"), "text"]
    assert len({words(value) for value in different}) == len(different)
    roots = {Gather("gather", 0, 2, np.ones(1), out=None, root=r).common for r in (0, 1)}
    assert roots == {b"gather(float64[rows], root=0)", b"gather(float64[rows], root=1)"}


# what they refuse


@pytest.mark.parametrize("name", ["broadcast", "scatter", "gather"])
def test_an_unknown_root_is_refused(name: str) -> None:
    """The message names the call, the root and the valid ones."""
    for root, error in ((2, InvalidValue), (-1, InvalidValue), ("a", InvalidType)):
        with pytest.raises(error, match="expected a rank of the group, 0 to 1") as caught:
            KINDS[name](name, 0, 2, np.ones(2), root=root, out=None)
        assert f"{name}(root={root!r})" in str(caught.value)


@pytest.mark.parametrize("value", [np.array(1.0), torch.tensor(1), [np.ones(2), np.array(3)]])
def test_a_single_number_cannot_be_scattered(value: Any) -> None:
    """It has no rows; the message points to broadcast."""
    with pytest.raises(InvalidValue, match=r"no rows to share out.*use broadcast"):
        Scatter("scatter", 0, 2, value, root=0, out=None)


@pytest.mark.parametrize("value", [None, 3, "text", {"a": 1}, {1, 2}])
def test_one_object_cannot_be_scattered(value: Any) -> None:
    """It has no items to share out; the message names its kind and points to broadcast."""
    with pytest.raises(InvalidType, match=rf"scatter\({type(value).__name__}\).*use broadcast"):
        Scatter("scatter", 0, 2, value, root=0, out=None)


def test_objects_have_no_out() -> None:
    """An object comes back as a new one; out= is refused by who gives both."""
    for name in ("broadcast", "scatter", "gather", "all_gather"):
        options = {} if name == "all_gather" else {"root": 0}
        with pytest.raises(InvalidType, match=r"out= takes arrays"):
            KINDS[name](name, 0, 2, ["text"], out=np.ones(3), **options)


@pytest.mark.parametrize("name", ["broadcast", "scatter"])
def test_an_out_for_an_object_of_the_roots_is_refused(name: str) -> None:
    """A rank with an out= learns, with all others, that the root sent an object."""
    for out, words in ((np.ones(3), r"float64\[3\]"), ([], "0 arrays")):
        with pytest.raises(InvalidValue, match=rf"rank 1's out= is {words}.*is an object"):
            run(name, [["text"], None], root=0, out=[None, out])


@pytest.mark.parametrize(
    ("name", "out", "words"),
    [
        ("broadcast", np.ones(5), "rank 1's out= is float64[5], the result is float64[4]"),
        ("broadcast", np.ones(4, "i8"), "rank 1's out= is int64[4], the result is float64[4]"),
        ("scatter", np.ones(4), "rank 1's out= is float64[4], the result is float64[2]"),
        ("all_gather", np.ones(4), "rank 1's out= is float64[4], the result is float64[8]"),
        ("all_gather", [np.ones(8)] * 2, "rank 1's out= is 2 arrays"),
    ],
)
def test_a_wrong_out_is_refused_by_all(name: str, out: Any, words: str) -> None:
    """What the result is like is known when the ranks have met; then all learn whose is wrong."""
    options: dict[str, Any] = {} if name == "all_gather" else {"root": 0}
    calls = [
        KINDS[name](name, rank, 2, np.ones(4), out=out if rank else None, **options)
        for rank in range(2)
    ]
    for call in calls:
        with pytest.raises(InvalidValue) as caught:
            call.settle([other.own for other in calls])
        assert words in str(caught.value)


def test_a_read_only_out_is_refused() -> None:
    """Nothing can be written to it; where nothing is, it does not matter."""
    out = np.ones(3)
    out.flags.writeable = False
    for name in ("broadcast", "scatter", "gather", "all_gather"):
        options = {} if name == "all_gather" else {"root": 0}
        with pytest.raises(InvalidValue, match="cannot be written to"):
            KINDS[name](name, 0, 2, np.ones(3), out=out, **options)
    assert Gather("gather", 1, 2, np.ones(3), out=out, root=0).result is not None
