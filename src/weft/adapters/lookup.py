"""The adapter of a value, and what an adapter has.

An adapter is loaded at the first sight of its type. One that knows arrays has

    NAME                      the name by which ranks tell each other which adapter to use
    is_mine(value)            whether it can be moved as an array
    describe(value)           the name of its elements, the dtype of its view, its shape and its
                              device ("cpu", "cuda:0"), without making a view
    view(value)               the same memory as a NumPy array, and the name of its elements
    deliver(array, element)   a NumPy array that weft made, as this library's

and one whose arrays may be on a GPU

    on_device(value)          the same memory as a tensor of torch's there; None if it is not on a
                              GPU that torch can use: then `view` is a copy on the host
    deliver_tensor(tensor)    a tensor that weft made there, as this library's

bfloat16, which NumPy does not have, is viewed as uint16 under its own name.

One whose values are not to be compared by their pickles, because that would take long or differ
each time, has

    contents(value)           what is compared to tell whether a value has changed; None: its pickle

One that knows models has

    NAME                      the name in errors
    is_model(value)           whether its parameters can be read and written
    names(model)              the parameters' names; models made alike have the same ones in the
                              same order
    read(model)               their values as NumPy arrays, in that order: views where possible,
                              not to be written to, valid until the model changes
    write(model, arrays)      copy values in. Each parameter stays the same object, with its dtype
                              and device, so optimizers made earlier go on working
    parts(model)              the objects that its parameters are, which others may hold too, such
                              as an optimizer: what is sent to a worker finds the worker's own
    reshape(model, arrays)    as `write`, with arrays of other shapes, where the library allows it
    live_in(model, arrays)    have the parameters live in the memory of these arrays, which hold
                              their values already; return False, with nothing done, if they cannot

    library      a model is                                               lives in other memory
    keras        a model or layer, on any backend                         on the torch backend
    pytensor     a shared variable, a layer of Lasagne                    no: updates replace arrays
    jax          a `weft.Holder` of a pytree                              no: arrays are immutable
    torch        an nn.Module, a tensor                                   on the CPU
    numpy        an array                                                 no: an array is its memory

Lists, tuples and dicts of a library's models, nested as you like, are models of that library too.
"Parameters" are all persistent values of a model: also a module's persistent buffers and the moving
averages of a Keras layer, but not the states of random generators. A parameter that occurs several
times counts once, under its first name.

Floats that NumPy does not have, such as bfloat16, are read as float32 and rounded when they are
written: a model's change is a difference, which uint16 could not hold. Such a model cannot live in
other memory. Arrays that differ from `read` in number, shape or dtype raise `InvalidValue`.
"""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np

from weft.adapters import containers, numbers, numpy, scalars
from weft.adapters.contents import Contents
from weft.adapters.holder import Holder
from weft.errors import MissingPackage

_loaded: dict[str, ModuleType] = {adapter.NAME: adapter for adapter in (numpy, numbers, scalars)}

#: the libraries with arrays, besides NumPy, and the name of the array class
_ARRAYS = {"torch": "Tensor", "jax": "Array"}
#: the libraries with models, in the order of asking: a Keras model may be a torch module too
_MODELS = ("keras", "pytensor", "jax", "torch", "numpy")
#: the libraries whose adapters have `contents`, in the order of asking, and for which class
_COMPARED = {
    "numpy": "ndarray",
    "keras": "Layer",
    "torch": "Tensor",
    "jax": "Array",
    "pytensor": "compile.executor.Function",
}


def of(value: Any) -> ModuleType | None:
    """Return the adapter of an array; None for what is no array."""
    if isinstance(value, np.ndarray):
        return numpy if numpy.is_mine(value) else None
    for library, kind in _ARRAYS.items():
        array_class = getattr(sys.modules.get(library), kind, None)
        if array_class is not None and isinstance(value, array_class):
            return named(library)
    return None


def of_array_or_number(value: Any) -> ModuleType | None:
    """Return the adapter of an array or a single number; None for anything else."""
    return of(value) or next((kind for kind in (scalars, numbers) if kind.is_mine(value)), None)


def of_model(value: Any) -> ModuleType | None:
    """Return the adapter of a model; None for what is no model.

    A library that the program has not imported has made no model, so it is not asked; but a worker
    may get a Holder of NumPy arrays.
    """
    held = containers.all_are(value, Holder)
    asked = (
        named(library)
        for library in _MODELS
        if sys.modules.get(library) is not None or (held and library == "jax")
    )
    return next((adapter for adapter in asked if adapter.is_model(value)), None)


def contents(value: Any) -> Contents | None:
    """Return what is compared to tell whether a value has changed; None: its pickle."""
    kind: Any = type(value)
    adapter = _comparer_of(kind)
    return None if adapter is None else adapter.contents(value)


@lru_cache(maxsize=1024)
def _comparer_of(kind: type) -> Any:
    """Return the adapter that knows what to compare of such values: for a class never another one,
    as a class is made after those that it is derived from."""
    for library, name in _COMPARED.items():
        module = sys.modules.get(library)
        try:
            if module is not None and issubclass(kind, attrgetter(name)(module)):
                return named(library)
        except AttributeError:  # it is being imported
            continue
    return None


def named(name: str) -> ModuleType:
    """Return the adapter of this name, which another rank sent. Raises MissingPackage."""
    if name not in _loaded:
        try:
            _loaded[name] = importlib.import_module(f"weft.adapters.{name}")
        except ImportError as error:
            raise MissingPackage(
                f"another rank sent an array of {name}, which cannot be loaded here ({error}):\n"
                f"    pip install 'weft[{name}]'"
            ) from error
    return _loaded[name]


def table_device(given: Any) -> str:
    """Return the device that `device=` of a table names, with its number. Raises InvalidType,
    InvalidValue if this process has no such device, MissingPackage."""
    try:
        from weft.adapters import torch_rows
    except ImportError as error:
        raise MissingPackage(
            f"device={given!r}: tables on a device are torch's tensors, and torch cannot be loaded "
            f"({error}):\n    pip install 'weft[torch]'"
        ) from error
    return torch_rows.device_of_table(given)
