"""Whether what a function mentions has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft._core.fingerprint import fingerprint


def state(fun: Any) -> Any:
    return fingerprint(fun, lambda value: False)


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
    changed_in_place(value)
    assert state(fun) != before


def test_other_values_are_seen() -> None:
    """What a name stands for may be another object: a number, None, NaN, an array alike."""
    values = (1, 2, 2.0, -2.0, True, None, float("nan"), "2", b"2", np.float32(2), np.ones(2), (2,))
    seen = [state(lambda x, value=value: value) for value in values]
    for index, one in enumerate(seen):
        assert one not in seen[:index]
    value = float("nan")
    fun = lambda: value  # noqa: E731
    assert state(fun) == state(fun)


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

    before = fingerprint(fun, lambda value: value is replica)
    replica += 1
    assert fingerprint(fun, lambda value: value is replica) == before
    other += 1
    assert fingerprint(fun, lambda value: value is replica) != before


def test_tensors_and_modules() -> None:
    """Torch counts changes, those of parameters too."""
    torch = pytest.importorskip("torch")
    tensor, module = torch.zeros(3), torch.nn.Linear(2, 2)
    with torch.inference_mode():
        inferred = torch.zeros(2)
    sparse, lazy = torch.eye(2).to_sparse(), torch.nn.LazyLinear(3)

    def fun(x: Any) -> Any:
        return tensor, module, inferred, sparse, lazy

    before = state(fun)
    assert state(fun) == before
    tensor += 1
    between = state(fun)
    assert between != before
    with torch.no_grad():
        module.weight.zero_()
    assert state(fun) != between


def test_another_object_at_the_same_place() -> None:
    """What is compared by its identity is held: none that comes later has it."""

    class Opaque:
        __slots__ = ("room",)

    value: Any = Opaque()

    def fun(x: Any) -> Any:
        return value

    for _ in range(20):
        before = state(fun)
        value = None
        value = Opaque()
        assert state(fun) != before


class Hostile:
    """Raises whatever it is asked."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __hash__(self) -> int:
        raise RuntimeError

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


Hostile.__module__ = "__main__"


@pytest.mark.parametrize(
    "value",
    [
        Hostile(),
        [Hostile()],
        10**5000,
        np.ma.masked_array(np.zeros(1_000_000), mask=False),
        np.array([{}, None]),
        np.zeros(3, [("a", "f4"), ("b", "U3")]),
        np.zeros((0, 3)),
        iter([1]),
        len,
        np,
        [[1.0] * 100_000] * 3,
        {"a" * 10: 1, 2: b"x" * 1000},
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_look_raises_nothing(value: Any) -> None:
    """And two of them see the same."""
    fun = lambda x: value  # noqa: E731
    assert state(fun) == state(fun)


def test_a_look_has_an_end() -> None:
    """Of what is large a part is looked at; each thing that is mentioned has its own part."""
    large, small = [float(n) for n in range(1_000_000)], np.zeros(3)

    def fun(x: Any) -> Any:
        return large, small

    before = state(fun)
    large[0] = -1.0
    between = state(fun)
    assert between != before
    small[0] = 1
    assert state(fun) != between
    assert len(str(between.values)) < 1_000_000


def test_what_cannot_change_is_known() -> None:
    """Modules, classes and what modules have under their names need no second look."""
    assert not state(lambda x: np.mean(x) + 1).may_change
    assert not state(np.mean).may_change
    assert not state(functools.reduce).may_change
    small = [1]
    assert state(lambda x: small).may_change


def test_models_of_other_libraries() -> None:
    """A Holder and a shared variable are looked into; so is another Holder in its place."""
    import weft

    held = weft.Holder({"w": np.zeros(2)})

    def fun(x: Any) -> Any:
        return held

    before = state(fun)
    assert state(fun) == before
    held.value = {"w": np.ones(2)}
    assert state(fun) != before
    pytensor = pytest.importorskip("pytensor")
    shared = pytensor.shared(np.zeros(2))

    def other(x: Any) -> Any:
        return shared

    before = state(other)
    shared.set_value(np.ones(2))
    assert state(other) != before


GLOBAL = 3


def importable(x: int) -> int:
    return max(x, 0) + GLOBAL


@pytest.mark.parametrize("make", [lambda: lambda x: x, lambda: importable])
def test_new_code_is_seen(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A function may be given other code in place, as editors of running programs do."""
    function = make()
    before = state(function)
    assert state(function) == before
    assert not before.may_change
    monkeypatch.setattr(function, "__code__", (lambda x: -x).__code__)
    assert state(function) != before


def test_another_function_that_uses_the_same_is_seen() -> None:
    """A helper that was defined again differs by its code, also if it mentions the same things."""
    value = 2.0
    helper = lambda x: x + value  # noqa: E731

    def fun(x: float) -> float:
        return helper(x)

    before = state(fun)
    assert state(fun) == before
    helper = lambda x: x - value  # noqa: E731
    assert state(fun) != before


def test_a_builtin_that_is_hidden_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global variable that comes later and has the name of a built-in function is seen."""
    function = lambda x: max(x, 0)  # noqa: E731
    before = state(function)
    monkeypatch.setitem(globals(), "max", lambda *_: 7)
    assert state(function) != before
