"""What errors need: the way between processes, the part that cannot be pickled, the user's line.

worker:  exception  --describe-->  Failure, pickled  --restore-->  the exception  :driver
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from weft.errors import RemoteError, RemoteTraceback


class Failure(NamedTuple):
    """An exception that can be sent."""

    #: the pickled exception; None if it cannot be pickled
    error: bytes | None
    #: its class and message, in case it cannot be restored
    kind: str
    message: str
    #: its traceback, as text
    text: str


#: of a call that a SIGINT ended which did not come from the driver, or that raised this itself
INTERRUPTED = Failure(None, "KeyboardInterrupt", "raised in the worker", "KeyboardInterrupt")


def describe(error: BaseException) -> Failure:
    """Return an exception as a Failure, which holds no reference to the exception or its frames."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    packed = _packed(error) if isinstance(error, Exception) else None
    return Failure(packed, type(error).__qualname__, _message(error), text)


def _packed(error: Exception) -> bytes | None:
    """Return a pickle from which the exception can be restored, or None. It is pickled in parts if
    its own pickle cannot be loaded: a class may take other arguments than it gives Exception."""
    from weft._core import pickling  # every rank loads this module, and few of them fail

    for in_parts in (False, True):
        try:
            form = _Parts(type(error), error.args, error.__dict__) if in_parts else error
            packed = pickling.dumps(form)
            copy = _unpacked(packed)
            if isinstance(copy, type(error)) and (not in_parts or str(copy) == str(error)):
                return packed
        except Exception:  # whatever an exception's own pickling raises
            continue
    return None


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a faulty __str__ must not hide what went wrong
        return "<its __str__ raises>"


def restore(failure: Failure, where: str, item: int | None = None, *, host: str = "") -> Exception:
    """Return the exception, with its remote traceback as its cause. `where` and `host` name the
    worker. The exception has its own class; one that cannot be pickled, or that would end this
    process (SystemExit), becomes a RemoteError."""
    error: object = None
    if failure.error is not None:
        try:
            error = _unpacked(failure.error)
        except Exception:  # such as a class that is not the same here
            error = None
    if not isinstance(error, Exception):
        error = RemoteError(f"{failure.kind}: {failure.message}")
    error.__cause__ = RemoteTraceback(failure.text, where, item, host)
    return error


def _unpacked(packed: bytes) -> object:
    form = pickle.loads(packed)
    return form.join() if isinstance(form, _Parts) else form


class _Parts(NamedTuple):
    """An exception in parts, from which it is made without a call of its constructor."""

    kind: type[Exception]
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def join(self) -> Exception:
        error = self.kind.__new__(self.kind, *self.arguments)
        error.args = self.arguments
        error.__dict__.update(self.attributes)
        return error


#: how deep to search; a longer path helps nobody
_DEEPEST = 12


def path_to_fault(value: Any, name: str, pickles: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the path to the innermost part of `value` that cannot be pickled, and that part.

    `pickles` tells whether a value can be pickled; the path begins with `name`.

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
    """Yield the parts of a value, each with its step of the path."""
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
    in_slots = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**in_slots, **getattr(value, "__dict__", {})}


def _closed_over(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what is pickled with a function: its closure, its defaults and the globals it names."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # an empty cell
            yield f".{name}", cell.cell_contents
    for index, default in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{index}]", default
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f".{name}", function.__globals__[name]


#: the folder that has the package weft
_PACKAGES = os.path.dirname(os.path.dirname(str(sys.modules["weft"].__file__)))

_LIBRARY = tuple(
    os.path.join(_PACKAGES, name) + os.sep
    for name in ("weft", "multiverso", "synkhronos", "playdoh", "distfun")
)

#: source files seen so far: whether they are the user's
OUTSIDE: dict[str, bool] = {contextlib.__file__: False}


def caller_line() -> str:
    """Return where the nearest caller outside weft is: file:line."""
    frame = sys._getframe(1)
    while frame.f_back and not is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn_caller(text: str) -> None:
    """Issue a RuntimeWarning at the line of the nearest caller outside weft."""
    file, _, line = caller_line().rpartition(":")
    warnings.warn_explicit(text, RuntimeWarning, file, int(line))


def is_outside(filename: str) -> bool:
    """Return whether a source file is the user's, and not weft's own."""
    if filename not in OUTSIDE:
        OUTSIDE[filename] = not filename.startswith(_LIBRARY)
    return OUTSIDE[filename]
