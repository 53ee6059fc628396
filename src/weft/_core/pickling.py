"""What cloudpickle leaves open where classes and cached functions of the script are sent by value.

A class of `__main__` that arrives a second time is the one that came the first time, and
cloudpickle sets its attributes anew. Here a process takes them only from where it had it first:

    driver                         worker
    class Model: rate = 2   ──>    the class, made when it first comes
    del Model.rate          ──>    deleted there, too
                            <──    an instance, or an exception: the driver's class stays as it is
"""

from __future__ import annotations

import functools
import io
import os
import platform
from collections import ChainMap
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import cloudpickle

from weft._core.own_modules import is_importable

#: the classes that are defined in this process
_defined_here: WeakKeyDictionary[type, None] = WeakKeyDictionary()

#: the classes that came from another process: from which, and the attributes that they came with
_received: WeakKeyDictionary[type, tuple[str, frozenset[str]]] = WeakKeyDictionary()


def _reduce_cached_property(value: Any) -> Any:
    return functools.cached_property, (value.func,), {"attrname": value.attrname}


#: how to pickle more than cloudpickle does: until Python 3.12 a cached property has a lock
REDUCERS = ChainMap(
    {functools.cached_property: _reduce_cached_property}, cloudpickle.Pickler.dispatch_table
)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """cloudpickle's pickler, whose pickles change no class where it was defined."""

    dispatch_table = REDUCERS

    #: whether classes were sent by value: what is loaded next may change them
    has_classes = False

    def reducer_override(self, value: Any) -> Any:
        """Return how a value is pickled."""
        if type(value) is functools._lru_cache_wrapper and not is_importable(value):
            return make_lru_cache, (value.__wrapped__, value.cache_parameters())
        if is_single_dispatch(value) and not is_importable(value):
            return reduce_single_dispatch(value, None)
        reduced = super().reducer_override(value)
        if not isinstance(value, type) or not isinstance(reduced, tuple) or len(reduced) != 6:
            return reduced
        make, arguments, state, _, _, set_state = reduced
        if vars(value).get("__slots__") and len(arguments) == 6:  # else instances have a dict
            arguments[3]["__slots__"] = vars(value)["__slots__"]
        self.has_classes = True
        if value not in _received:
            _defined_here[value] = None
        sent = ClassState(_this_process(), value.__bases__, set_state, state)
        return make, arguments, sent, None, None, set_class_state


def dumps(value: Any) -> bytes:
    """Pickle a value by `Pickler`."""
    file = io.BytesIO()
    Pickler(file, 5).dump(value)
    return file.getvalue()


def make_lru_cache(function: Any, parameters: dict[str, Any]) -> Any:
    """Return a function with a cache of its own."""
    return functools.lru_cache(**parameters)(function)


_dispatching: Any = functools.singledispatch(lambda _: None)
_SINGLE_DISPATCH = _dispatching.__code__


def is_single_dispatch(value: Any) -> bool:
    """Return whether a value is a function that `functools.singledispatch` has made."""
    return type(value) is FunctionType and value.__code__ is _SINGLE_DISPATCH


def reduce_single_dispatch(function: Any, existing: Any) -> Any:
    """Reduce a function of `functools.singledispatch`: one that is there, or a new one, registers
    the same functions. Its closure has a cache of weak references, which cannot be pickled."""
    state = dict(function.registry)
    made_of = function.__wrapped__, existing
    return make_single_dispatch, made_of, state, None, None, register_all


def make_single_dispatch(function: Any, existing: Any) -> Any:
    """Return a function that dispatches to this one: the one that is there already, if any."""
    return existing if is_single_dispatch(existing) else functools.singledispatch(function)


def register_all(function: Any, registry: Mapping[type, Any]) -> None:
    """Make a function dispatch to others for objects of these types."""
    for kind, one in registry.items():
        function.register(kind, one)


class ClassState(NamedTuple):
    """Describe what a class has."""

    #: the process that sends it
    sender: str
    bases: tuple[type, ...]
    #: cloudpickle's function that sets attributes, and what it takes
    set_state: Callable[[type, Any], None]
    attributes: tuple[dict[str, Any], Any]


def set_class_state(kind: type, state: ClassState) -> None:
    """Give a class what a process has sent of it, if it came from there."""
    first_sender, known = _received.get(kind, (state.sender, frozenset[str]()))
    if kind in _defined_here or first_sender != state.sender:
        return
    names = state.attributes[0].keys()
    for name in (known - names) & vars(kind).keys():
        type.__delattr__(kind, name)
    if kind.__bases__ != state.bases:
        kind.__bases__ = state.bases
    _received[kind] = state.sender, frozenset(names)
    state.set_state(kind, state.attributes)


def _this_process() -> str:
    return f"{platform.node()} {os.getpid()}"
