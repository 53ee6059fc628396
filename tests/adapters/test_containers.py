"""Lists, tuples and dicts taken apart and put together."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.containers import describe, flatten, rebuild

Pair = namedtuple("Pair", "left right")

keys = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.booleans(), st.none())
values = st.recursive(
    st.integers(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda two: Pair(*two)),
    ),
    max_leaves=10,
)


def is_leaf(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def alike(one: Any, other: Any) -> bool:
    """Equal, of equal types, dicts in the same order, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@given(values)
def test_what_is_taken_apart_can_be_put_together(value: Any) -> None:
    """The same value, types and order of keys; also with other leaves in their places."""
    found = flatten(value, is_leaf)
    assert found is not None
    leaves, structure = found
    assert all(map(is_leaf, leaves))
    assert alike(rebuild(structure, iter(leaves)), value)
    moved = rebuild(structure, (leaf + 1 for leaf in leaves))
    assert flatten(moved, is_leaf) == ([leaf + 1 for leaf in leaves], structure)


@given(st.dictionaries(keys, st.integers(), max_size=6), st.randoms())
def test_dicts_filled_in_another_order_have_the_same_leaves(value: Any, random: Any) -> None:
    """Leaves and words do not depend on the order of keys, but each rank keeps its own."""
    items = list(value.items())
    random.shuffle(items)
    other = dict(items)
    one, two = flatten(value, is_leaf), flatten(other, is_leaf)
    assert one is not None
    assert two is not None
    assert one[0] == two[0]
    assert describe(one[1], iter(one[0])) == describe(two[1], iter(two[0]))
    assert list(rebuild(two[1], iter(one[0]))) == list(other)


@pytest.mark.parametrize(
    "value", ["text", [1, "text"], {"a": [1, None]}, {1, 2}, [1, {2}], defaultdict(int, a=1)]
)
def test_something_else_is_no_tree(value: Any) -> None:
    """A single thing that is no leaf makes the whole no tree."""
    assert flatten(value, is_leaf) is None


def test_a_list_in_itself_is_no_tree() -> None:
    """A list that holds itself has no leaves to take apart."""
    endless: list[Any] = [1]
    endless.append(endless)
    assert flatten(endless, is_leaf) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1, "1"),
        ([], "[]"),
        ((), "()"),
        ({}, "{}"),
        ([1, (2, 3)], "[1, (2, 3)]"),
        ({"b": 1, "a": [2]}, "{'a': [2], 'b': 1}"),
        (OrderedDict(b=1, a=2), "{'a': 2, 'b': 1}"),
        (Pair(1, [2]), "Pair(1, [2])"),
    ],
)
def test_trees_in_words(value: Any, words: str) -> None:
    """The text reads like Python, with keys in order."""
    found = flatten(value, is_leaf)
    assert found is not None
    assert describe(found[1], iter(found[0])) == words
