"""What a function mentions besides its arguments, as it is now: to be compared with what it was.

A function that workers keep is a copy. When something that it mentions has changed since, it has to
be sent again, or workers would compute with the old value and the driver with the new one.

    def grad(x): return x.T @ (x @ w - y)      w and y: by what is in them
    w -= 0.1 * f(x)                            the next call sends grad again

Looked at are numbers, strings, arrays, tensors, torch's modules, lists, tuples, dicts and sets of
these, attributes of the program's own objects, and functions that are mentioned; of anything else,
whether it is the same object. Of a large array some elements are compared: to read all of it at
every call would take longer than many a call does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from weft import adapters
from weft._core import models
from weft._core.essence import names_in

#: values that are looked at, and how deep in each other
_MOST, _DEEPEST = 10_000, 6
_PLAIN = (int, float, complex, str, bytes, bool, type(None), np.generic)
_CONSTANT = (ModuleType, BuiltinFunctionType, type)


def state_of(fun: Callable[..., Any], is_kept: Callable[[Any], bool]) -> Hashable:
    """What a function mentions, to be compared. `is_kept` tells what workers have copies of by
    themselves, whatever is in it."""
    return _Look(is_kept).at(fun)


class _Look:
    """One look at everything that a function mentions."""

    def __init__(self, is_kept: Callable[[Any], bool]) -> None:
        self._is_kept = is_kept
        self._seen: dict[int, int] = {}

    def at(self, value: Any, depth: int = 0) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value).__name__, repr(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        too_far = depth > _DEEPEST or len(self._seen) > _MOST
        if too_far or isinstance(value, _CONSTANT) or (depth and self._is_kept(value)):
            return id(value)
        adapter = adapters.of(value)
        if adapter is not None:
            state: Hashable = adapter.state(value)
            return state
        found = tuple(self.at(part, depth + 1) for part in _parts_of(value))
        return found or id(value)


def _parts_of(value: Any) -> Iterable[Any]:
    """What a value consists of; nothing for what is only looked at as a whole."""
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return [kind.__name__, *parts(value)]
    if type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
        return type(value), vars(value)
    return models.parts(value) if type(value).__module__ != "builtins" else ()


def _mentioned_by(function: FunctionType) -> Iterator[Any]:
    """The code of a function, what it has closed over, and the global variables that it uses; only
    itself if the workers load it from its module."""
    module = sys.modules.get(function.__module__ or "")
    if function.__module__ != "__main__" and getattr(module, function.__name__, None) is function:
        yield id(function)
        return
    code: CodeType = function.__code__
    yield id(code)
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty so far
            yield None
    for name in sorted(names_in(code) & function.__globals__.keys()):
        yield function.__globals__[name]


_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    FunctionType: _mentioned_by,
    MethodType: lambda method: (method.__func__, method.__self__),
    functools.partial: lambda made: (made.func, made.args, made.keywords),
    dict: lambda given: (*given.keys(), *given.values()),
    list: iter,
    tuple: iter,
    set: lambda given: sorted(map(repr, given)),
    frozenset: lambda given: sorted(map(repr, given)),
}
