"""How a function is called with an item, and results in the order of their items."""

from __future__ import annotations

import pickle
from collections.abc import Sized
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft._core.items import (
    NOTHING,
    Collected,
    ColumnSlice,
    Delivery,
    Finished,
    Unwrapping,
    Window,
    at_hand,
    bind,
    not_begun,
    not_drawn,
    takes_an_item,
    validate_callable,
    zipped,
)
from weft.errors import Cancelled, InvalidType, Stalled

DATA = {"table": 1}


def plain(x: Any) -> Any:
    return x


def with_place(x: Any, data: Any) -> Any:
    return x, data


def with_name(x: Any, *, shared_data: Any) -> Any:
    return x, shared_data


def with_gpu(x: Any, use_gpu: bool) -> Any:
    return x, use_gpu


def with_all(x: Any, shared_data: Any, use_gpu: bool = True) -> Any:
    return x, shared_data, use_gpu


def anything(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def alone() -> Any:
    return "alone"


class Method:
    def call(self, x: Any, data: Any) -> Any:
        return x, data

    def __call__(self, x: Any) -> Any:
        return x


def test_shared_data_comes_by_name_or_second() -> None:
    """A parameter called shared_data gets it by name; any other function in the second place."""
    assert bind(with_place, shared_data=DATA)(3) == (3, DATA)
    assert bind(with_name, shared_data=DATA)(3) == (3, DATA)
    assert bind(Method().call, shared_data=DATA)(3) == (3, DATA)
    assert bind(anything, shared_data=DATA)(3) == ((3, DATA), {})
    assert bind(plain)(3) == 3
    assert bind(with_place, shared_data={})(3) == (3, {})


def test_an_item_may_be_several_arguments() -> None:
    """What every call gets comes after them."""
    assert bind(anything, spread=True)((1, 2)) == ((1, 2), {})
    assert bind(anything, shared_data=DATA, spread=True)((1, 2)) == ((1, 2, DATA), {})
    assert bind(with_all, shared_data=DATA, use_gpu=False, spread=True)((3,)) == (3, DATA, False)


def test_iterables_in_step() -> None:
    """Up to the shortest; with a length, and at hand, only if all of them are."""
    both = zipped([[1, 2, 3], range(2)])
    assert (list(both), len(both), at_hand(both)) == ([(1, 0), (2, 1)], 2, True)  # type: ignore[arg-type]
    assert list(both) == [(1, 0), (2, 1)]
    some = zipped([[1, 2], {"a": 1}])
    assert (list(some), len(some), at_hand(some)) == ([(1, "a")], 1, False)  # type: ignore[arg-type]
    unknown = zipped([[1, 2], iter("abc")])
    assert not isinstance(unknown, Sized)
    assert not at_hand(unknown)
    assert list(unknown) == [(1, "a"), (2, "b")]


def test_use_gpu_goes_to_those_who_ask() -> None:
    """Only a function with a parameter of that name is told."""
    assert bind(with_gpu, use_gpu=False)(3) == (3, False)
    assert bind(with_all, shared_data=DATA, use_gpu=False)(3) == (3, DATA, False)
    assert bind(plain, use_gpu=True)(3) == 3
    assert bind(anything, use_gpu=True)(3) == ((3,), {})


def test_nothing_is_not_passed() -> None:
    """A function without parameters is called without; the mark stays itself through a pickle."""
    assert Unwrapping(bind(alone))(NOTHING) == "alone"
    assert Unwrapping(bind(alone))(pickle.loads(pickle.dumps(NOTHING))) == "alone"
    assert Unwrapping(bind(plain))(None) is None


def test_a_part_is_passed_as_its_columns() -> None:
    """The function sees an array, not how it came."""
    array = np.arange(12).reshape(3, 4)
    assert Unwrapping(bind(plain))(ColumnSlice(array, 1, 3)).tolist() == [[1, 2], [5, 6], [9, 10]]


def test_built_in_functions_without_signature_can_be_bound() -> None:
    """Some built-in ones do not tell their parameters; they take an item."""
    assert bind(max)([1, 3, 2]) == 3
    assert bind(partial(pow, 2))(5) == 32
    assert bind(Method())(4) == 4
    assert takes_an_item(max, 0)


@pytest.mark.parametrize(
    ("function", "besides", "takes"),
    [
        (alone, 0, False),
        (plain, 0, True),
        (plain, 1, False),
        (with_place, 1, True),
        (anything, 1, True),
        (lambda use_gpu: 1, 0, False),
        (lambda *, key=1: 1, 0, False),
        (lambda x, use_gpu: 1, 0, True),
        (Method().call, 1, True),
    ],
)
def test_who_has_a_place_for_an_item(function: Any, besides: int, takes: bool) -> None:
    """Places taken by shared data or use_gpu do not count."""
    assert takes_an_item(function, besides) is takes


@pytest.mark.parametrize("value", [None, 3, "f", [len]])
def test_what_cannot_be_called_is_refused(value: object) -> None:
    """The message shows the value, its type and what was expected."""
    with pytest.raises(InvalidType) as caught:
        validate_callable(value, "map(fun, items)")
    text = str(caught.value)
    kind = type(value).__name__
    assert text.startswith(f"the first argument of map(fun, items) is {value!r} of type {kind}; ")
    assert "expected a function" in text
    validate_callable(len, "map")


def part(first: int, values: list[Any], failures: dict[int, Exception] | None = None) -> Finished:
    return Finished(first, values, failures or {}, 0, 1, 0.0, 0, 0)


@given(st.lists(st.integers(1, 5), max_size=20), st.booleans(), st.randoms())
def test_order_is_that_of_the_items(sizes: list[int], known: bool, random: Any) -> None:
    """Whatever the order in which batches come, known in number or not."""
    parts, first = [], 0
    for size in sizes:
        parts.append(part(first, list(range(first, first + size))))
        first += size
    random.shuffle(parts)
    collected = Collected(first if known else None, keep_failures=False)
    for one in parts:
        collected.add(one)
    assert collected.results == list(range(first))
    assert (collected.finished, collected.failed) == (first, 0)


def test_the_first_failure_of_a_batch_is_raised() -> None:
    """Without keeping failures, the one of the lowest index; nothing of the batch is taken in."""
    early, late = KeyError("early"), ValueError("late")
    collected = Collected(4, keep_failures=False)
    with pytest.raises(KeyError, match="early"):
        collected.add(part(1, [1, None, None], {3: late, 2: early}))
    assert collected.finished == 0


def test_failures_are_kept_in_their_places() -> None:
    """With keeping, an exception stands where its result would."""
    error = ValueError("no")
    collected = Collected(None, keep_failures=True)
    collected.add(part(2, [None, 3], {2: error}))
    collected.add(part(0, [0, 1]))
    assert collected.results == [0, 1, error, 3]
    assert (collected.finished, collected.failed) == (4, 1)


@given(st.lists(st.integers(1, 5), max_size=20), st.booleans(), st.randoms())
def test_a_delivery_gives_each_result_once(sizes: list[int], ordered: bool, random: Any) -> None:
    """In the order of the items, or chunk by chunk as they came; nothing before it has come."""
    parts, first = [], 0
    for size in sizes:
        parts.append(part(first, list(range(first, first + size))))
        first += size
    random.shuffle(parts)
    delivery = Delivery(ordered=ordered)
    assert delivery.take() is None
    taken = []
    for one in parts:
        delivery.add(one)
        for _ in range(random.randrange(8)):
            outcome = delivery.take()
            taken += [] if outcome is None else [outcome]
    while (outcome := delivery.take()) is not None:
        taken.append(outcome)
    came = [index for one in parts for index in range(one.first, one.first + len(one.values))]
    assert [index for index, _, _ in taken] == (sorted(came) if ordered else came)
    assert all(index == value and error is None for index, value, error in taken)


def test_a_delivery_has_failures_in_their_places() -> None:
    error = ValueError("no")
    delivery = Delivery(ordered=True)
    delivery.add(part(1, [None, 2], {1: error}))
    assert delivery.take() is None
    delivery.add(part(0, [0]))
    assert [delivery.take() for _ in range(4)] == [
        (0, 0, None),
        (1, None, error),
        (2, 2, None),
        None,
    ]


def test_a_window_wakes_who_waits_for_room() -> None:
    """Only then, and only once there is enough."""
    window = Window(3)
    woken: list[int] = []
    window.wake = lambda: woken.append(1)
    window.consume()
    assert window.has_room(1)
    window.consume()
    assert not woken
    assert not window.has_room(4)
    window.consume()
    assert not woken
    window.consume()
    assert woken
    assert window.has_room(4)


def test_parts_of_a_chunk_without_some_items() -> None:
    """Those that are run again; what was sent and how long it took is counted once."""
    error = KeyError("k")
    chunk = Finished(10, list("abcde"), {11: error, 14: error}, 2, 3, 0.5, 6, 7, "host")
    assert list(chunk.without([])) == [chunk]
    assert list(chunk.without([11, 13])) == [
        Finished(10, ["a"], {}, 2, 3, 0.5, 6, 7, "host"),
        Finished(12, ["c"], {}, 2, 3, 0.0, 0, 0, "host"),
        Finished(14, ["e"], {14: error}, 2, 3, 0.0, 0, 0, "host"),
    ]
    assert list(chunk.without(range(10, 15))) == []


def test_items_that_a_deadline_left_are_all_there() -> None:
    """However many: each has a Cancelled; and one Stalled stands for those that never came."""
    found = list(not_begun([range(3, 5), range(10, 10), range(7, 10_000)], 0.5))
    indexes = [index for chunk in found for index in chunk.failures]
    assert indexes == [3, 4, *range(7, 10_000)]
    assert all(isinstance(error, Cancelled) for one in found for error in one.failures.values())
    assert "items 3 to 4 had not begun when 0.5 s had passed" in str(found[0].failures[3])
    last = not_drawn(7, 0.5)
    assert (last.first, last.values) == (7, [None])
    assert isinstance(last.failures[7], Stalled)
