"""An exception on its way from the process in which it was raised to the one that asked; and the
line of the user's program that errors name.

Where in a value the part lies that cannot be pickled.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from weft.errors import RemoteError, RemoteTraceback

#: the folder in which weft lies, wherever this file is in it
_PACKAGES = os.path.dirname(os.path.dirname(str(sys.modules["weft"].__file__)))

_LIBRARY = tuple(
    os.path.join(_PACKAGES, name) + os.sep
    for name in ("weft", "multiverso", "synkhronos", "playdoh", "distfun")
)

#: source files seen so far: whether they are the user's
OUTSIDE: dict[str, bool] = {contextlib.__file__: False}


def caller_line() -> str:
    """Return where the first caller outside weft is: file:line."""
    frame = sys._getframe(1)
    while frame.f_back and not is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_outside(filename: str) -> bool:
    """Whether a source file is the user's, and not weft's own."""
    if filename not in OUTSIDE:
        OUTSIDE[filename] = not filename.startswith(_LIBRARY)
    return OUTSIDE[filename]


class Failure(NamedTuple):
    """An exception, ready to travel."""

    #: the exception itself; None where it cannot be pickled
    error: bytes | None
    #: its class and its message, should it not arrive
    kind: str
    message: str
    #: its traceback, as text
    text: str


#: of what was ended by a SIGINT that did not come from the driver, or that raised this itself
INTERRUPTED = Failure(None, "KeyboardInterrupt", "raised in the worker", "KeyboardInterrupt")


def describe(error: BaseException) -> Failure:
    """An exception as what can be sent. Takes nothing from it: its frames can go."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    packed = _packed(error) if isinstance(error, Exception) else None
    return Failure(packed, type(error).__qualname__, _message(error), text)


def _packed(error: Exception) -> bytes | None:
    """It as bytes; in parts where its own way would not bring it back, as where a class takes other
    arguments than it gives to Exception. None if neither does."""
    import cloudpickle  # every rank loads this module, and few of them fail

    for in_parts in (False, True):
        try:
            form = _Parts(type(error), error.args, error.__dict__) if in_parts else error
            packed: bytes = cloudpickle.dumps(form)
            found = _unpacked(packed)
            if isinstance(found, type(error)) and (not in_parts or str(found) == str(error)):
                return packed
        except Exception:  # whatever an exception's own pickling raises
            continue
    return None


def _unpacked(packed: bytes) -> object:
    found = pickle.loads(packed)
    return found.made() if isinstance(found, _Parts) else found


class _Parts(NamedTuple):
    """An exception in parts."""

    kind: type[Exception]
    arguments: tuple[Any, ...]
    attributes: dict[str, Any]

    def made(self) -> Exception:
        error = self.kind.__new__(self.kind, *self.arguments)
        error.args = self.arguments
        error.__dict__.update(self.attributes)
        return error


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its own __str__ is wrong; that must not hide what went wrong
        return "<its __str__ raises>"


def restore(failure: Failure, where: str, item: int | None = None, *, host: str = "") -> Exception:
    """Return the exception, with its remote traceback as its cause.

    `where` and `host` tell the worker. The exception has its own class; one that cannot be
    pickled, or that would end this process (SystemExit), becomes a RemoteError.
    """
    error: object = None
    if failure.error is not None:
        try:
            error = _unpacked(failure.error)
        except Exception:  # a class that is not the same here, ...
            error = None
    if not isinstance(error, Exception):
        error = RemoteError(f"{failure.kind}: {failure.message}")
    error.__cause__ = RemoteTraceback(failure.text, where, item, host)
    return error


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
