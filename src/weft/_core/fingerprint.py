"""The fingerprint of a function: it tells whether a value that the function uses has changed.

Workers have a copy of a registered function. Once something that it uses besides its arguments has
changed, it must be sent again, or workers would compute with the old value and the driver with the
new one.

    def grad(x): return x.T @ (x @ w - y)      w and y are compared by their contents
    w -= 0.1 * f(x)                            so the next call sends grad again

By contents are compared numbers, strings, arrays, tensors, models, lists, tuples, dicts and sets of
these, attributes of objects of the main program, and its functions; anything else by its identity.
Of large values a part is compared: to read all of them at every call would take longer than many
calls do.
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

#: how many values are visited within one that the function uses, and how deep
_MOST, _DEEPEST = 1000, 20

#: the modules that a user's script may be: the second in a process of multiprocessing
_SCRIPT = ("__main__", "__mp_main__")

_CONSTANT = (ModuleType, BuiltinFunctionType, CodeType, type)


@dataclass(frozen=True)
class Fingerprint:
    """What a function uses, at one time. If two are equal, nothing has changed in between."""

    values: Hashable
    #: whether any of it could change
    may_change: bool = field(compare=False)
    #: objects compared by identity, kept alive so that no other object gets the same one
    held: list[Any] = field(compare=False, repr=False)


def fingerprint(function: Callable[..., Any], workers_have: Callable[[Any], bool]) -> Fingerprint:
    """Return the fingerprint of a function.

    Values for which `workers_have` is true, such as replicas, are compared by identity: each worker
    has its own. Never raises: what cannot be read is compared by identity too.
    """
    visit = _Visit(workers_have)
    return Fingerprint(visit.value(function), visit.may_change, visit.held)


class _Visit:
    """One walk through everything that a function uses."""

    def __init__(self, workers_have: Callable[[Any], bool]) -> None:
        self._workers_have = workers_have
        #: by identity: the object, kept alive so that no new one gets it, and its place in the walk
        self._seen: dict[int, tuple[Any, int]] = {}
        self._left = _MOST
        self.may_change = False
        self.held: list[Any] = []

    def value(self, value: Any, depth: int = 0) -> Hashable:
        """Return what is to be compared of a value."""
        plain = _PLAIN.get(type(value))
        if plain is not None:
            self._left, self.may_change = self._left - 1, True  # the name may get another value
            return type(value).__name__, plain(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)][1]
        self._seen[id(value)] = value, len(self._seen)
        self._left = _MOST if depth <= 1 else self._left - 1
        try:
            inside = self._inside(value, depth)
        except Exception:  # an object may raise whatever it is asked
            inside = None
        if not inside or type(value) is not np.ndarray:  # arrays are compared by contents alone
            self.held.append(value)
        return (type(value).__name__, inside) if inside else id(value)

    def _inside(self, value: Any, depth: int) -> Hashable:
        if isinstance(value, _CONSTANT):
            return None
        if depth:
            self.may_change = True
        if depth > _DEEPEST or self._left <= 0 or (depth and self._workers_have(value)):
            return None
        # no adapter takes these, and to ask all adapters takes longer than the rest
        adapter = adapters.of(value) if type(value) not in _PARTS else None
        if adapter is not None:
            state: Hashable = adapter.state(value)
            return state
        parts = itertools.islice(_parts_of(value), max(0, self._left))
        return tuple(self.value(part, depth + 1) for part in parts)


def _parts_of(value: Any) -> Iterable[Any]:
    """Return what a value consists of; nothing if only its identity counts."""
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return parts(value)
    if adapters.of_model(value) is not None:
        parts_of_model = models.parts(value)
        whole = any(part is value for part in parts_of_model)
        return list(models.read(value)) if whole else parts_of_model
    attributes = getattr(value, "__dict__", {}) if type(value).__module__ in _SCRIPT else {}
    return list(attributes.values())


def _used_by(function: FunctionType) -> Iterator[Any]:
    """Yield a function's code, its closure, and the global variables that it uses; only its code if
    workers import it from its module."""
    yield function.__code__
    if function.__module__ not in _SCRIPT and _is_importable(function):
        return
    yield from filter(None, (function.__defaults__, function.__kwdefaults__, function.__dict__))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            yield None
    variables = function.__globals__
    yield from (variables[name] for name in _globals_of(function.__code__) if name in variables)


def _is_importable(function: FunctionType) -> bool:
    """Return whether a function can be imported by its name: not after its module was reloaded."""
    value: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        value = getattr(value, "__dict__", {}).get(name)  # a module may have its own __getattr__
    return value is function


@lru_cache(maxsize=256)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that a function and those within it look up."""
    looked_up = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            looked_up.update(_globals_of(constant))
    return tuple(sorted(looked_up))


#: immutable values, and what is compared of them; NaN must equal itself
_PLAIN: dict[type, Callable[[Any], Hashable]] = {
    **dict.fromkeys((int, str, bytes, bool, type(None)), lambda value: value),
    float: float.hex,
    complex: lambda value: (value.real.hex(), value.imag.hex()),
    **dict.fromkeys((np.float32, np.float64, np.int32, np.int64, np.bool_), lambda n: n.tobytes()),
}

#: containers and callables, and the values in them
_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    FunctionType: _used_by,
    MethodType: lambda method: (method.__func__, method.__self__),
    functools.partial: lambda partial: (partial.func, partial.args, partial.keywords),
    dict: lambda values: itertools.chain([len(values)], *values.items()),
    list: lambda values: (len(values), *values),
    tuple: lambda values: values,
    set: lambda values: (len(values), frozenset(values)),
    frozenset: lambda values: sorted(map(hash, values)),
}
