"""Where in a value the part lies that cannot be pickled."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

#: how deep to look; a path that is longer helps nobody
_DEEPEST = 12


def path_to_fault(value: Any, name: str, pickles: Callable[[Any], bool]) -> tuple[str, Any]:
    """The deepest part of `value` that cannot be pickled, and the path that leads to it.

    >>> path_to_fault({"a": [1, print]}, "x", lambda value: "print" not in repr(value))
    ("x['a'][1]", <built-in function print>)
    """
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        seen.add(id(value))
        for step, part in _parts(value):
            if id(part) not in seen and not pickles(part):
                name, value = name + step, part
                break
        else:
            break
    return name, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value consists of, and how one gets there."""
    if isinstance(value, dict):
        for key, part in list(value.items()):
            yield f"[{key!r}]", part
            yield f".keys()[{key!r}]", key
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _closed_over(value)
    elif isinstance(value, functools.partial):
        yield from ((f".{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif not isinstance(value, (type, types.ModuleType)):
        yield from ((f".{name}", part) for name, part in _attributes(value).items())


def _attributes(value: Any) -> dict[str, Any]:
    slots: list[str] = []
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        slots += [names] if isinstance(names, str) else names
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function takes along: its closure, its defaults and the globals it names."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty one
            yield f".{name}", cell.cell_contents
    for index, default in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{index}]", default
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f".{name}", function.__globals__[name]
