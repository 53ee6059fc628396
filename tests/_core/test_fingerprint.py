"""Whether what a function mentions has changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft._core.fingerprint import fingerprint


def state(fun: Any) -> Any:
    return fingerprint(fun)


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
        value[(-1,) * value.ndim] += 1  # also with a dtype of times
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
        lambda: np.array(["2000-01-01", "2001-01-01"], "M8[D]"),
        lambda: np.array([{}, 1], dtype=object),
        lambda: np.ma.masked_array(np.zeros(1_000_000), mask=False),
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

    def known(value: Any) -> Any:
        return "replica" if value is replica else None

    before = fingerprint(fun, known)
    replica += 1
    assert fingerprint(fun, known) == before
    other += 1
    assert fingerprint(fun, known) != before


def test_tensors_and_modules() -> None:
    """By their contents, also where torch does not count a change."""
    torch = pytest.importorskip("torch")
    tensor, module = torch.zeros(3), torch.nn.Linear(2, 2)
    with torch.inference_mode():
        inferred = torch.zeros(2)
    sparse, short = torch.eye(2).to_sparse(), torch.zeros(3, dtype=torch.bfloat16)
    cut = torch.arange(12.0).reshape(3, 4)[:, 1]

    def fun(x: Any) -> Any:
        return tensor, module, inferred, sparse, short, cut

    seen = [state(fun)]
    assert state(fun) == seen[0]
    for value in (tensor, module.weight.data, inferred, sparse.values(), short, cut):
        with torch.inference_mode():
            value[-1] += 1
        seen.append(state(fun))
        assert state(fun) == seen[-1] != seen[-2]
    module.weight.requires_grad = False
    assert state(fun) != seen[-1]
    module.eval()
    assert state(fun) not in seen


def test_another_object_at_the_same_place() -> None:
    """What is compared by its identity is held: none that comes later has it."""

    def constant(number: float) -> Any:
        array = np.full(100, number)
        array.setflags(write=False)
        return array

    value: Any = constant(0.0)

    def fun(x: Any) -> Any:
        return value

    for number in range(20):
        before = state(fun)
        value = None
        value = constant(number)
        assert state(fun) != before


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        np.zeros(3, [("a", "f4"), ("b", "U3")]),
        np.zeros((0, 3)),
        np.array(["a", "bc"], dtype=np.dtypes.StringDType()),
        iter([1]),
        len,
        np,
        [[1.0] * 100_000] * 3,
        {"a" * 10: 1, 2: b"x" * 1000},
        np.random.default_rng(0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_two_looks_see_the_same(value: Any) -> None:
    """Of anything that can be sent."""
    fun = lambda x: value  # noqa: E731
    assert state(fun) == state(fun)


def test_any_element_of_anything_large_is_seen() -> None:
    """Nothing is sampled."""
    large, text = [float(n) for n in range(100_000)], bytearray(1_000_000)
    array = np.zeros((300, 700))[:, ::2]

    def fun(x: Any) -> Any:
        return large, text, array

    seen = [state(fun)]
    for at in np.random.default_rng(0).integers(0, 100_000, 20).tolist():
        large[at] -= 0.5
        seen.append(state(fun))
        text[at] ^= 1
        seen.append(state(fun))
        array[at % 300, at % 350] += 1
        seen.append(state(fun))
    assert len({one.digest for one in seen}) == len(seen)


@pytest.mark.parametrize("kernels", [True, False])
def test_arrays_apart(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any shape, with kernels and without."""
    if not kernels:
        monkeypatch.setattr("weft._core.fingerprint._hash_buffers", None)
    arrays = [np.zeros(()), np.zeros((3, 4), np.float32), np.zeros(0), np.zeros(5, np.int64)]
    seen = [fingerprint([1], arrays=arrays)]
    assert fingerprint([1], arrays=arrays) == seen[0] != fingerprint([2], arrays=arrays)
    for array in (arrays[0], arrays[1], arrays[3]):
        array.reshape(-1)[-1] += 1
        seen.append(fingerprint([1], arrays=arrays))
    assert len({one.digest for one in seen}) == 4


def test_what_costs_nothing() -> None:
    """A read-only array that owns its memory is not read, nor what only consists of constants."""
    array = np.zeros(1_000_000)
    array.setflags(write=False)
    assert state(lambda x: array).size < 1000
    assert state(lambda x: array[1:]).size < 1000
    view = array[1:]
    assert state(lambda x: view).size > 7_000_000
    assert state(lambda x: np.mean(x) + 1 + len(x)).size == 0
    other = array.copy()
    other.setflags(write=False)
    before = state(lambda x: array)
    array = other
    assert state(lambda x: array) != before


def test_methods_of_objects_are_no_constants() -> None:
    """A bound method of a list is written in C, and the list may change."""
    values = [1]
    add = values.count

    def fun(x: Any) -> Any:
        return add(x)

    before = state(fun)
    values.append(2)
    assert state(fun) != before


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


@pytest.mark.parametrize("value", [1, [1]])
def test_new_code_is_seen(value: Any) -> None:
    """A function may be given other code in place, as editors of running programs do."""

    def function(x: Any) -> Any:
        return x, value

    before = state(function)
    assert state(function) == before

    def other(x: Any) -> Any:
        return -x, value

    function.__code__ = other.__code__
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
