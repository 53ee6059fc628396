"""The arrays of a value: found, described, coalesced, copied where they must be, and read-only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import weft
from weft._core import arrays as core_arrays
from weft._core.arithmetic import address, same_buffer
from weft._core.arrays import (
    Arrays,
    Coalescing,
    Leaf,
    Target,
    copy_if_aliased,
    flat,
    in_words,
    read_only,
)
from weft.adapters import lookup

FLOAT = np.dtype(np.float64)


def leaves_of(value: Any) -> tuple[Leaf, ...]:
    found = Arrays.of(value)
    assert found is not None
    return found.leaves


def test_arrays_are_described() -> None:
    """A leaf says whose array it is, of which numbers and of which shape."""
    assert leaves_of(np.ones((2, 0))) == (Leaf("numpy", "float64", FLOAT, (2, 0)),)
    (leaf,) = leaves_of(torch.ones(3, dtype=torch.bfloat16))
    assert leaf == Leaf("torch", "bfloat16", np.dtype(np.uint16), (3,))
    assert leaf.device == "cpu"
    assert leaf.matches(leaf._replace(adapter="jax", device="cuda:0"))
    assert str(leaf) == "bfloat16[3]"
    assert [str(leaf) for leaf in leaves_of({"b": np.int8([1]), "a": [torch.ones(())]})] == [
        "float32[]",
        "int8[1]",
    ]


@pytest.mark.parametrize("value", [None, 3, "text", [1], {"a": np.array([None])}, [np.ones(1), 2]])
def test_anything_else_has_no_arrays(value: Any) -> None:
    """Numbers, texts, objects and what mixes them with arrays have none to be moved as such."""
    assert Arrays.of(value) is None


def test_numbers_are_arrays_where_they_are_asked_for() -> None:
    """With `of_array_or_number` a mixture of numbers and arrays is all arrays."""
    found = Arrays.of([1, np.ones(2), 2.5], lookup.of_array_or_number)
    assert found is not None
    assert [str(leaf) for leaf in found.leaves] == ["int64[]", "float64[2]", "float64[]"]


def test_arrays_are_described_as_they_arrive() -> None:
    """With their own shape, and in native byte order, in which they are moved."""
    for length in range(3):
        assert leaves_of(np.empty(length, np.int8))[0].shape == (length,)
        assert leaves_of(np.empty(length, ">i2"))[0].dtype == np.dtype("=i2")


def test_leaves_match_whosever_they_are() -> None:
    """A tensor can take an array's values, if shape and kind of number are the same."""
    array, tensor = leaves_of(np.ones(3, "f4"))[0], leaves_of(torch.ones(3))[0]
    assert array.matches(tensor)
    assert not array.matches(leaves_of(np.ones(4, "f4"))[0])
    assert not array.matches(leaves_of(np.ones(3, "f8"))[0])
    bits = leaves_of(torch.ones(3, dtype=torch.bfloat16))[0]
    assert not bits.matches(leaves_of(np.ones(3, np.uint16))[0])


@given(st.dictionaries(st.text(), st.integers(0, 9), max_size=60))
def test_words_are_short(lengths: dict[str, int]) -> None:
    """What ranks show each other fits a message in any script, and still tells trees apart."""
    found = Arrays.of({key: np.empty(length) for key, length in lengths.items()})
    assert found is not None
    words = in_words(found.structure, found.leaves)
    assert len(words.encode()) <= 400
    if lengths:
        first = next(iter(lengths))
        changed = {**lengths, first: lengths[first] + 1}
        other = Arrays.of({key: np.empty(length) for key, length in changed.items()})
        assert other is not None
        assert in_words(other.structure, other.leaves) != words


def test_a_target_is_fresh_or_what_was_given() -> None:
    """Results go to new arrays of each library, or to the memory of out=."""
    leaves = [
        Leaf("numpy", "float64", FLOAT, (2, 2)),
        Leaf("torch", "bfloat16", np.dtype(np.uint16), (2,)),
    ]
    fresh = Target(leaves, ("list", None, (None, None)), None)
    assert [array.shape for array in fresh.arrays] == [(4,), (2,)]
    fresh.arrays[0][...], fresh.arrays[1][...] = range(4), 0x3F80
    numbers, tensor = fresh.deliver(None)
    assert numbers.tolist() == [[0, 1], [2, 3]]
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [1, 1]

    out = np.zeros((2, 4))[:, ::2]
    given_place = Target(leaves[:1], None, Arrays.of(out))
    given_place.arrays[0][...] = range(4)
    assert given_place.deliver(out) is out
    assert out.tolist() == [[0, 1], [2, 3]]


def test_flat_copies_only_what_it_must() -> None:
    """A contiguous array stays where it is; another is copied in its own order."""
    array = np.arange(6.0).reshape(2, 3)
    assert address(flat(array)) == address(array)
    assert flat(array.T).tolist() == [0, 3, 1, 4, 2, 5]
    assert flat(array[:, ::-1]).tolist() == [2, 1, 0, 5, 4, 3]
    assert flat(np.array(7.0)).tolist() == [7]
    assert flat(np.empty((3, 0))).shape == (0,)


def test_sources_are_kept_apart_from_targets() -> None:
    """A source is copied if a target overlaps it, unless it is its own."""
    memory = np.arange(30.0)
    one, two = memory[:10], memory[10:20]
    assert [
        a is b for a, b in zip(copy_if_aliased([one, two], [one, two]), [one, two], strict=True)
    ] == [
        True,
        True,
    ]
    assert same_buffer(one, memory[:10])
    assert not same_buffer(one, two)
    for targets in ([two, one], [memory[1:11], memory[20:]], [memory, memory]):
        first, second = copy_if_aliased([one, two], targets)
        assert not np.may_share_memory(first, memory)
        assert first.tolist() == one.tolist()
        assert second.tolist() == two.tolist()


DTYPES = ("float32", "float64", "int8")
#: lengths around the border, in bytes of int8
lengths = st.sampled_from([0, 1, 3, 1000, core_arrays._LARGE - 1, core_arrays._LARGE])


def arrays_of(kinds: list[tuple[str, int]]) -> tuple[Coalescing, list[Any]]:
    values = [np.arange(length).astype(dtype) for dtype, length in kinds]
    found = Arrays.of(values)
    assert found is not None
    return Coalescing(found.leaves), [flat(view) for view in found.views]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), lengths), max_size=8))
def test_what_is_joined_is_spread_again(kinds: list[tuple[str, int]]) -> None:
    """Whatever was done to the joined arrays has been done to each."""
    groups, arrays = arrays_of(kinds)
    expected = [array * 2 for array in arrays]
    joined = groups.coalesce(arrays)
    targets = groups.targets(joined, arrays)
    for target in targets:
        target[...] = target * 2
    groups.scatter_back(targets, arrays)
    for array, wanted in zip(arrays, expected, strict=True):
        assert np.array_equal(array, wanted)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), lengths), max_size=8))
def test_small_ones_of_a_kind_are_one(kinds: list[tuple[str, int]]) -> None:
    """One array for the small ones of each dtype, and each large one where it is."""
    groups, arrays = arrays_of(kinds)
    joined = groups.coalesce(arrays)
    large = [array for array in arrays if array.nbytes >= core_arrays._LARGE]
    small = {array.dtype for array in arrays if array.nbytes < core_arrays._LARGE}
    assert len(joined) == len(groups.elements) == len(large) + len(small)
    assert {address(one) for one in large} <= {address(one) for one in joined}


def test_bfloat16_is_not_uint16() -> None:
    """Numbers that lie alike in memory, but are others, stay apart."""
    import torch

    found = Arrays.of([torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.uint16)])
    assert found is not None
    assert Coalescing(found.leaves).elements == ("bfloat16", "uint16")


Array = np.ndarray[Any, Any]


class Own(Array):
    """A user's own class."""


def subjects() -> dict[str, Array]:
    some = np.ma.masked_less(np.arange(50_000.0), 10)
    some.fill_value = -1
    hard = np.ma.array(np.arange(3), mask=[0, 1, 0], hard_mask=True)
    return {
        "plain": np.arange(50_000.0),
        "small": np.arange(3),
        "objects": np.array([[1], "a", None] * 10, dtype=object),
        "structured": np.zeros(3, dtype=[("a", "i4"), ("b", object)]),
        "masked": some,
        "hard mask": hard,
        "no mask": np.ma.array(np.arange(3.0)),
        "masked objects": np.ma.array(np.array([1, "a", None], dtype=object), mask=[1, 0, 0]),
        "another class": np.arange(3).view(Own),
    }


def refuses_all(array: Any, expected: Any) -> list[str]:
    """What is wrong with an array that was to be read-only: empty if nothing."""
    wrong = [] if type(array) is type(expected) else [f"it is a {type(array)}"]
    if array.tolist() != expected.tolist():
        wrong.append("it has other values")

    def change(part: Any) -> None:
        part[0] = part[-1]

    attempts: list[Callable[[], Any]] = [lambda: change(array)]
    if isinstance(array, np.ma.MaskedArray):
        if array.fill_value != expected.fill_value or array.hardmask != expected.hardmask:
            wrong.append("it fills or hardens otherwise")
        attempts += [
            lambda: change(array.mask),
            lambda: array.__setitem__(0, np.ma.masked),
            lambda: change(array.data),
        ]
    for number, attempt in enumerate(attempts):
        try:
            attempt()
            wrong.append(f"attempt {number} to change it succeeded")
        except ValueError:
            pass
    return wrong


@pytest.mark.parametrize("name", subjects())
def test_nothing_can_be_written(name: str) -> None:
    """The array itself is as writable as it was."""
    array = subjects()[name]
    assert not refuses_all(read_only(array), array)
    array[0] = array[-1]


@pytest.mark.parametrize("engine", ["local", "serial"])
def test_no_shared_data_can_be_written(engine: str) -> None:
    """Of every kind of array, in every engine."""
    data = subjects()

    def function(name: str, shared_data: dict[str, Any]) -> list[str]:
        return refuses_all(shared_data[name], subjects()[name])

    found = weft.map(function, list(data), n=2, engine=engine, shared_data=data)
    assert dict(zip(data, found, strict=True)) == {name: [] for name in data}


def test_a_masked_arrays_data_is_not_copied() -> None:
    """They lie in shared memory like those of any other."""
    array = np.ma.array(np.arange(2_000_000.0), mask=np.arange(2_000_000) % 2)

    def function(_: int, shared_data: dict[str, Any]) -> tuple[float, bool]:
        values = shared_data["array"]
        return float(values.sum()), values.data.base is None

    assert weft.map(function, [0], n=1, shared_data={"array": array}) == [(array.sum(), False)]
