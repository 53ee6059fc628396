"""Functions, classes and instances of the user's modules on their way into a worker, by value.

driver                         worker
ByValuePickler          ──>    functions over the worker's own module, whose variables they use;
                               classes with the attributes of the driver's; instances
what has changed in place ──>  the worker's own object, changed in place
"""

from __future__ import annotations

import enum
import functools
import importlib
import sys
import types
from collections.abc import Container, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any

from weft._core.digest import is_plain_instance, own_attributes
from weft._core.own_modules import home_of, is_importable, own_modules
from weft._core.pickling import is_single_dispatch, make_lru_cache, reduce_single_dispatch
from weft.engines.local.pool.payload import Pickler

#: an attribute of a module: the names of both
Attribute = tuple[str, str]


class ByValuePickler(Pickler):
    """Pickles by value the functions and classes that are sent; others as cloudpickle does."""

    #: the attributes of modules that are sent
    sent: Container[Attribute]
    #: of objects that were changed in place, by identity, where the worker has its own
    in_place: Mapping[int, Attribute]

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild an object in the worker."""
        if id(value) in self.in_place and is_plain_instance(value):
            made_of = type(value), self.in_place[id(value)]
            return _make_instance, made_of, vars(value), None, None, _replace_attributes
        if is_single_dispatch(value) and self._is_sent(value):
            return reduce_single_dispatch(value, _Existing(self.in_place.get(id(value))))
        if type(value) is FunctionType and self._is_sent(value):
            home = home_of(value)
            if home is not None:
                return self._function(value, home)
        elif isinstance(value, type) and self._is_sent(value):
            return self._class(value)
        elif type(value) is functools._lru_cache_wrapper and self._is_sent(value):
            return make_lru_cache, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)

    def _is_sent(self, value: Any) -> bool:
        """Return whether the worker does not have this function or class under its name."""
        if isinstance(value, type) and value.__module__ not in own_modules():
            return False
        attribute = value.__module__, value.__qualname__.partition(".")[0]
        return attribute in self.sent or not is_importable(value)

    def _function(self, function: FunctionType, home: ModuleType) -> Any:
        closure = function.__closure__
        contents = None if closure is None else [*map(_contents, closure)]
        state = {
            "__code__": function.__code__,
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            "__annotations__": function.__annotations__,
            "__doc__": function.__doc__,
            "__module__": function.__module__,
            "__name__": function.__name__,
            "__qualname__": function.__qualname__,
        }
        made_of = (function.__code__, home.__name__, self.in_place.get(id(function)))
        return _make_function, made_of, (state, function.__dict__, contents), None, None, _fill

    def _class(self, kind: type) -> Any:
        own = own_attributes(kind)
        slots = vars(kind).get("__slots__", ())
        slots = (slots,) if isinstance(slots, str) else tuple(slots)
        start = {name: vars(kind)[name] for name in ("__slots__",) if name in vars(kind)}
        start |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        if isinstance(kind, enum.EnumMeta):
            members: Mapping[str, Any] = kind.__members__
            start |= {name: member._value_ for name, member in members.items()}
        state = {name: value for name, value in own.items() if name not in (*slots, "__slots__")}
        extra = ("__doc__", "__annotations__", "__dataclass_fields__", "__dataclass_params__")
        state |= {name: vars(kind)[name] for name in extra if name in vars(kind)}
        made_of = (type(kind), kind.__name__, kind.__bases__, start, self.in_place.get(id(kind)))
        return _make_class, made_of, state, None, None, _set_attributes


class _Existing:
    """Stands for the worker's own object of an attribute; for None without one."""

    def __init__(self, attribute: Attribute | None) -> None:
        self._attribute = attribute

    def __reduce__(self) -> Any:
        return _at, (self._attribute,)


class _NoContent(enum.Enum):
    """Stands for the content of an empty cell. An Enum: unpickled, it is the same object."""

    EMPTY = 0


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NoContent.EMPTY


# in the worker


def change_in_place(old: Any, value: Any) -> bool:
    """Give an object the content of another. Return whether that could be done."""
    if type(old) is not type(value):
        return False
    if old is value:  # changed when it was loaded
        return True
    if type(value) in (dict, set):
        old.clear()
        old.update(value)
    elif type(value) in (list, bytearray):
        old[:] = value
    elif _is_array_like(old, value):
        old[...] = value
    else:
        return False
    return True


def _is_array_like(old: Any, value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and type(value) is numpy.ndarray
        and (old.shape, old.dtype, old.flags.fnc) == (value.shape, value.dtype, value.flags.fnc)
        and old.flags.writeable
    )


def _at(attribute: Attribute | None) -> Any:
    """Return what is to be changed in place; None if there is nothing."""
    if attribute is None:
        return None
    name, path = attribute
    return vars(sys.modules[name]).get(path)


def _make_function(code: Any, home: str, existing: Attribute | None) -> FunctionType:
    old = _at(existing)
    if type(old) is FunctionType and len(old.__code__.co_freevars) == len(code.co_freevars):
        return old
    closure = tuple(CellType() for _ in code.co_freevars)
    variables = vars(importlib.import_module(home))
    return FunctionType(code, variables, code.co_name, None, closure)


def _fill(function: FunctionType, state: tuple[dict[str, Any], dict[str, Any], Any]) -> None:
    attributes, own, contents = state
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__.clear()
    function.__dict__.update(own)
    for cell, content in zip(function.__closure__ or (), contents or (), strict=True):
        if content is not _NoContent.EMPTY:
            cell.cell_contents = content


def _make_instance(kind: Any, existing: Attribute) -> Any:
    old = _at(existing)
    return old if type(old) is kind else object.__new__(kind)


def _replace_attributes(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).clear()
    vars(value).update(attributes)


def _make_class(
    kind: Any,
    name: str,
    bases: tuple[type, ...],
    start: dict[str, Any],
    existing: Attribute | None,
) -> type:
    old = _at(existing)
    slots = start.get("__slots__")
    same = isinstance(old, type) and type(old) is kind and vars(old).get("__slots__") == slots
    if same and not issubclass(kind, enum.EnumMeta):
        if old.__bases__ != bases:
            old.__bases__ = bases
        return old  # type: ignore[no-any-return]
    return types.new_class(name, bases, {"metaclass": kind}, lambda space: space.update(start))


def _set_attributes(kind: type, attributes: dict[str, Any]) -> None:
    for name in own_attributes(kind).keys() - attributes.keys() - {"__slots__"}:
        if not isinstance(vars(kind)[name], types.MemberDescriptorType):
            delattr(kind, name)
    for name, value in attributes.items():
        setattr(kind, name, value)
