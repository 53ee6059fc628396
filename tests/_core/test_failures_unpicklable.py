"""The path to what cannot be pickled."""

from __future__ import annotations

import pickle
import sys
import threading
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft._core.failures import path_to_fault

LOCK = threading.Lock()


def pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except (TypeError, pickle.PicklingError):
        return False
    return True


@dataclass
class Model:
    name: str
    lock: Any


class Slotted:
    __slots__ = ("lock", "other")

    def __init__(self) -> None:
        self.lock = LOCK


class OneSlot:
    __slots__ = "lock"  # noqa: PLC0205  a string is one slot

    def __init__(self) -> None:
        self.lock = LOCK


class Holder:
    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def method(self) -> None: ...


def closing_over(lock: Any) -> Any:
    return lambda: lock


def calls_what_is_not_there_yet(lock: Any) -> Any:
    def function() -> Any:
        return later, lock

    if lock is None:
        later = 1
    return function


def has_a_default(a: int = 1, lock: Any = LOCK) -> Any:
    return lock


PATHS = [
    (LOCK, "x"),
    ([1, "a", LOCK], "x[2]"),
    ((1, [2, (LOCK,)]), "x[1][1][0]"),
    ({"a": 1, "b": {"c": LOCK}}, "x['b']['c']"),
    ({1: [Model("m", LOCK)]}, "x[1][0].lock"),
    ([0, 1, SimpleNamespace(model=Model("m", LOCK))], "x[2].model.lock"),
    (Slotted(), "x.lock"),
    (OneSlot(), "x.lock"),
    (Holder(LOCK).method, "x.__self__.lock"),
    (closing_over(LOCK), "x.lock"),
    (closing_over([1, LOCK]), "x.lock[1]"),
    (has_a_default, "x.__defaults__[1]"),
    (calls_what_is_not_there_yet(LOCK), "x.lock"),
]


@pytest.mark.parametrize(("value", "path"), PATHS, ids=[path for _, path in PATHS])
def test_the_path_leads_to_the_fault(value: Any, path: str) -> None:
    """Through lists, dicts, attributes, slots, methods and what functions close over."""
    this = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this)  # as what is defined in a script
    try:
        assert path_to_fault(value, "x", pickles) == (path, LOCK)
    finally:
        cloudpickle.unregister_pickle_by_value(this)


def test_globals_that_a_function_names_are_looked_at() -> None:
    """A function that travels by value takes its globals along."""
    scope: dict[str, Any] = {"lock": LOCK}
    exec("def function():\n    return lock", scope)
    assert path_to_fault(scope["function"], "f", pickles) == ("f.lock", LOCK)


def test_a_key_can_be_the_fault() -> None:
    """Keys are looked at as well as values."""
    key = Holder(LOCK)
    path, part = path_to_fault({key: 1}, "x", lambda value: value is not part_of_keys(value, key))
    assert path.startswith("x.keys()[")
    assert part is key


def part_of_keys(value: Any, key: Any) -> Any:
    """The value itself if it holds the key."""
    return value if value is key or (isinstance(value, dict) and key in value) else None


def test_what_refuses_by_itself_is_named_itself() -> None:
    """Where every part can be pickled the fault is the whole: its own pickling raises."""

    class Refuses:
        def __init__(self) -> None:
            self.number = 1

        def __reduce__(self) -> Any:
            raise TypeError("never")

    value = Refuses()
    assert path_to_fault([value], "items", pickles) == ("items[0]", value)


def test_partials_are_looked_into() -> None:
    """What a partial was given can be the fault."""
    path, part = path_to_fault(partial(print, LOCK), "f", pickles)
    assert (path, part) == ("f.args[0]", LOCK)


def test_a_value_that_contains_itself_comes_to_an_end() -> None:
    """A cycle is not followed round and round."""
    cycle: list[Any] = [1]
    cycle.append(cycle)
    path, _ = path_to_fault(cycle, "x", lambda value: False)
    assert path == "x[0]"
    pair: list[Any] = []
    pair.append([pair, LOCK])
    assert path_to_fault(pair, "x", lambda value: value == 1)[0] == "x[0][1]"


nested = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(nested, st.data())
def test_a_path_can_be_evaluated(value: Any, data: st.DataObject) -> None:
    """Wherever the fault lies in lists and dicts, its path is the Python that reaches it."""
    fault = object()
    value = [value]
    place: Any = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys)) if keys else None
        if key is None or not isinstance(place[key], (list, dict)) or not place[key]:
            break
        place = place[key]
    place[key] = fault
    path, part = path_to_fault(value, "value", lambda one: not _holds(one, fault))
    assert part is fault
    assert eval(path, {"value": value}) is fault


def _holds(value: Any, fault: object) -> bool:
    if isinstance(value, dict):
        return any(_holds(part, fault) for part in value.values())
    return value is fault or (isinstance(value, list) and any(_holds(one, fault) for one in value))
