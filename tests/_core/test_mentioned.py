"""Whether what a function mentions has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft._core.mentioned import state_of


def state(fun: Any) -> Any:
    return state_of(fun, lambda value: False)


class Own:
    """An object of a program's own, as one of its main module is."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.parts = [np.zeros(3)]

    def method(self, x: Any) -> Any:
        return x * self.weight


Own.__module__ = "__main__"


def changed_in_place(value: Any) -> None:
    if isinstance(value, np.ndarray):
        value[(-1,) * value.ndim] += 1
    elif isinstance(value, list):
        value.append(1)
    elif isinstance(value, dict):
        value["new"] = 1
    elif isinstance(value, set):
        value.add(1)
    else:
        value.parts[0][0] = 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros(3),
        lambda: np.zeros((4, 6), np.int8)[::2, ::3],
        lambda: np.array(1.0)[None],
        lambda: np.zeros(1_000_000),
        lambda: np.zeros((3000, 300))[:, ::2],
        lambda: [1, [2, {"a": 3}]],
        lambda: {"a": np.ones(2)},
        lambda: {1, 2} - {1},
        Own,
    ],
)
def test_changes_in_place_are_seen(make: Callable[[], Any]) -> None:
    """And nothing else is: a look at what has not changed gives the same."""
    value = make()

    def fun(x: Any) -> Any:
        return x, value

    before = state(fun)
    assert state(fun) == before
    assert hash(before) == hash(state(fun))
    changed_in_place(value)
    assert state(fun) != before


def test_other_values_are_seen() -> None:
    """What a name stands for may be another object: a number, None, NaN, an array alike."""
    seen = []
    for value in (1, 2, 2.0, True, None, float("nan"), "2", b"2", np.float32(2), np.ones(2), (2,)):
        seen.append(state(lambda x, value=value: value))
    assert len(set(seen)) == len(seen)
    assert state(lambda: float("nan")) != state(lambda: 1)


def test_functions_and_what_they_mention() -> None:
    """A helper, a partial function, a bound method, defaults: all that a call would use."""
    weight = [1.0]
    own = Own()

    def helper(x: Any) -> Any:
        return x * weight[0]

    for fun in (
        lambda x: helper(x) + 1,
        functools.partial(helper),
        functools.partial(lambda weight, x: x, weight),
        lambda x, given=weight: x,
    ):
        before = state(fun)
        weight[0] += 1
        assert state(fun) != before
    before = state(own.method)
    assert state(own.method) == before
    own.weight = 2.0
    assert state(own.method) != before


def test_what_refers_to_itself() -> None:
    """Cycles end."""
    value: list[Any] = []
    value.append(value)

    def fun(x: Any) -> Any:
        return fun, value

    before = state(fun)
    value.append(1)
    assert state(fun) != before


def test_what_workers_have_by_themselves_is_not_looked_at() -> None:
    """A replica may change as it likes."""
    replica, other = np.zeros(3), np.zeros(3)

    def fun(x: Any) -> Any:
        return replica, other

    before = state_of(fun, lambda value: value is replica)
    replica += 1
    assert state_of(fun, lambda value: value is replica) == before
    other += 1
    assert state_of(fun, lambda value: value is replica) != before


def test_tensors_and_modules() -> None:
    """Torch counts changes, those of parameters too."""
    torch = pytest.importorskip("torch")
    tensor, module = torch.zeros(3), torch.nn.Linear(2, 2)
    with torch.inference_mode():
        inferred = torch.zeros(2)

    def fun(x: Any) -> Any:
        return tensor, module, inferred

    before = state(fun)
    assert state(fun) == before
    tensor += 1
    between = state(fun)
    assert between != before
    with torch.no_grad():
        module.weight.zero_()
    assert state(fun) != between
