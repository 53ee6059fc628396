"""What a function mentions besides its arguments, as it is now: to be compared with what it was.

A function that workers keep is a copy. When something that it mentions has changed since, it has to
be sent again, or workers would compute with the old value and the driver with the new one.

    def grad(x): return x.T @ (x @ w - y)      w and y: by what is in them
    w -= 0.1 * f(x)                            the next call sends grad again

Looked at are numbers, strings, arrays, tensors, models, lists, tuples, dicts and sets of these,
attributes of objects of the main program, and functions of it; of anything else, whether it is the
same object. Of what is large a part is compared: to read all of it at every call would take longer
than many a call does.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from weft import adapters
from weft.adapters import models

#: values that are looked at within one that the function mentions, and how deep
_MOST, _DEEPEST = 1000, 20

_CONSTANT = (ModuleType, BuiltinFunctionType, CodeType, type)


@dataclass(frozen=True)
class Fingerprint:
    """What a function mentions. Where two are equal, nothing has changed in between."""

    values: Hashable
    #: whether any of it could change
    may_change: bool = field(compare=False)
    #: what is compared by its identity, held so that no other object has it
    held: list[Any] = field(compare=False, repr=False)


def fingerprint(fun: Callable[..., Any], is_kept: Callable[[Any], bool]) -> Fingerprint:
    """What a function mentions. `is_kept` tells what workers have by themselves, whatever is in it.

    Never raises: what cannot be looked at is compared by its identity.
    """
    look = _Look(is_kept)
    return Fingerprint(look.at(fun), look.may_change, look.held)


class _Look:
    """One look at everything that a function mentions."""

    def __init__(self, is_kept: Callable[[Any], bool]) -> None:
        self._is_kept = is_kept
        #: by identity: the object, so that none made meanwhile has it, and which one it was
        self._seen: dict[int, tuple[Any, int]] = {}
        self._left = _MOST
        self.may_change = False
        self.held: list[Any] = []

    def at(self, value: Any, depth: int = 0) -> Hashable:
        plain = _PLAIN.get(type(value))
        if plain is not None:
            self._left, self.may_change = self._left - 1, True  # another may come in its place
            return type(value).__name__, plain(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)][1]
        self._seen[id(value)] = value, len(self._seen)
        self._left = _MOST if depth <= 1 else self._left - 1
        try:
            inside = self._inside(value, depth)
        except Exception:  # an object may raise whatever it is asked
            inside = None
        if not inside or type(value) is not np.ndarray:  # which is compared by its numbers alone
            self.held.append(value)
        return (type(value).__name__, inside) if inside else id(value)

    def _inside(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, _CONSTANT):
            return None
        if depth:
            self.may_change = True
        if depth > _DEEPEST or self._left <= 0 or (depth and self._is_kept(value)):
            return None
        # no adapter has these, and to ask them all takes longer than the rest
        adapter = adapters.of(value) if type(value) not in _PARTS else None
        if adapter is not None:
            state: Hashable = adapter.state(value)
            return state
        parts = itertools.islice(_parts_of(value), max(0, self._left))
        return tuple(self.at(part, depth + 1) for part in parts)


def _parts_of(value: Any) -> Iterable[Any]:
    """What a value consists of; nothing for what is only looked at as a whole."""
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return parts(value)
    if adapters.of_model(value) is not None:
        found = models.parts(value)
        return list(models.read(value)) if any(part is value for part in found) else found
    attributes = getattr(value, "__dict__", {}) if type(value).__module__ == "__main__" else {}
    return list(attributes.values())


def _mentioned_by(function: FunctionType) -> Iterator[Any]:
    """Yield a function's code, what it has closed over, and the global variables that it uses; only
    its code if workers load it from its module."""
    yield function.__code__
    if function.__module__ != "__main__" and _is_importable(function):
        return
    yield from filter(None, (function.__defaults__, function.__kwdefaults__, function.__dict__))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty so far
            yield None
    variables = function.__globals__
    yield from (variables[name] for name in _globals_of(function.__code__) if name in variables)


def _is_importable(function: FunctionType) -> bool:
    """Return whether its name leads to it: not after its module was loaded again."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)  # a module may have its own __getattr__
    return found is function


@lru_cache(maxsize=256)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """The global variables that a function looks up, and those within it."""
    looked_up = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            looked_up.update(_globals_of(constant))
    return tuple(sorted(looked_up))


#: values that cannot change, and what to compare of them; NaN is to be equal to itself
_PLAIN: dict[type, Callable[[Any], Hashable]] = {
    **dict.fromkeys((int, str, bytes, bool, type(None)), lambda value: value),
    float: float.hex,
    complex: lambda value: (value.real.hex(), value.imag.hex()),
    **dict.fromkeys((np.float32, np.float64, np.int32, np.int64, np.bool_), lambda n: n.tobytes()),
}

_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    FunctionType: _mentioned_by,
    MethodType: lambda method: (method.__func__, method.__self__),
    functools.partial: lambda made: (made.func, made.args, made.keywords),
    dict: lambda given: itertools.chain([len(given)], *given.items()),
    list: lambda given: (len(given), *given),
    tuple: lambda given: given,
    set: lambda given: (len(given), frozenset(given)),
    frozenset: lambda given: sorted(map(hash, given)),
}
