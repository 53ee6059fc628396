"""The arrays of a value: found, described, copied where they must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft import adapters
from weft._core import arrays
from weft._core.arithmetic import address, same_buffer
from weft._core.arrays import Arrays, Leaf, Target, copy_if_aliased, flat, in_words

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
    found = Arrays.of([1, np.ones(2), 2.5], adapters.of_array_or_number)
    assert found is not None
    assert [str(leaf) for leaf in found.leaves] == ["int64[]", "float64[2]", "float64[]"]


def test_what_is_remembered_of_arrays_is_bounded_and_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of shapes are described rightly, and not all of them are kept."""
    monkeypatch.setattr(arrays, "_plain", {})
    for turn in range(3000):
        length = turn % 1500
        assert leaves_of(np.empty(length, np.int8))[0].shape == (length,)
        assert leaves_of(np.empty(length, ">i2"))[0].dtype == np.dtype("=i2")
    assert len(arrays._plain) <= 1024


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
