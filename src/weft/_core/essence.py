"""Functions that are nothing but their code: what they do cannot change between two calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any


def essence_of(function: Any) -> tuple[Any, ...] | None:
    """All that such a function consists of, to be compared; None for any other: one that has
    closed over something, uses a global variable, has defaults or attributes."""
    if type(function) is not FunctionType:
        return None
    code = function.__code__
    if (
        function.__closure__ is not None
        or function.__defaults__ is not None
        or function.__kwdefaults__ is not None
        or function.__dict__
        or not function.__globals__.keys().isdisjoint(_names(code))
    ):
        return None
    try:
        annotations = function.__annotations__
    except Exception:  # they are evaluated now, where names may be missing that only types need
        return None
    if not all(map(_is_constant, annotations.values())):
        return None
    names = function.__name__, function.__qualname__, function.__module__
    return code, names, function.__doc__, tuple(annotations.items()), is_found(function)


def _is_constant(annotation: Any) -> bool:
    builtin = type(annotation) is type and annotation.__module__ == "builtins"
    return annotation is None or isinstance(annotation, str) or builtin


def is_found(function: FunctionType) -> bool:
    """Whether its name leads to it, as it no longer does after its module was loaded again."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)  # a module may have its own __getattr__
    return found is function


@lru_cache(maxsize=256)
def _names(code: CodeType) -> frozenset[str]:
    """The names that it may look up anywhere; those of attributes too."""
    return frozenset(name for one in _all_code(code) for name in one.co_names)


def _all_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_code(constant)
