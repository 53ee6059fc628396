"""How a function is called with an item, and results in the order of their items."""

from __future__ import annotations

import pickle
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
    Finished,
    Unwrapping,
    bind,
    takes_an_item,
    validate_callable,
)
from weft.errors import InvalidType

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
