"""Whose arrays and whose models: what weft needs to know of one library.

Each adapter is a module, loaded at the first sight of its type. One that knows arrays has

    NAME                      how ranks tell each other which adapter to use
    is_mine(value)            whether it can be moved as an array
    describe(value)           the name of its elements, the dtype of its view, its shape and its
                              device ("cpu", "cuda:0"), without making a view
    view(value)               the same memory as a NumPy array, and the name of its elements
    deliver(array, element)   a NumPy array that weft made, as this library's
    state(value)              what tells whether it has changed since; of a large one of NumPy's,
                              which does not count changes, a sample of it

bfloat16, which NumPy does not have, is viewed as uint16 under its own name.

One that knows models has

    NAME                      what to call it in an error
    is_model(value)           whether its parameters can be read and written
    names(model)              their names; models made alike have the same ones in the same order
    read(model)               their values as NumPy arrays, in that order: views where they can be,
                              never to be written to, good until the model changes
    write(model, arrays)      copies values in. Each parameter stays the object that it is, with its
                              dtype and device, so that optimizers made earlier go on working
    parts(model)              the objects that its parameters are, which others may hold too, such
                              as an optimizer: what is sent to a worker finds the worker's own
    reshape(model, arrays)    as `write`, with arrays of other shapes, where there are such models
    live_in(model, arrays)    has the parameters live in the memory of these arrays from now on,
                              which hold their values already; False, and nothing done, if they
                              cannot

    library      a model is                                               lives in other memory
    keras        a model or layer, on any backend                         on the torch backend
    pytensor     a shared variable, a layer of Lasagne                    no: updates replace arrays
    jax          a `weft.Holder` of a pytree                              no: arrays are immutable
    torch        an nn.Module, a tensor                                   on the CPU
    numpy        an array                                                 no: an array is its memory

Lists, tuples and dicts of a library's models, nested as you like, are models of that library too.
"Parameters" are all of a model's lasting values: a module's persistent buffers and the moving
averages of a Keras layer are among them, states of random generators are not. One that stands in
several places counts once, under its first name.

bfloat16, and what else of floats NumPy does not have, is read as float32 and rounded when it is
written: a model's change is a difference, which uint16 could not hold. Such a model lives nowhere
else. Arrays that are not as `read` has them, in number, shape or dtype, raise `InvalidValue`.

Besides a module for each library there are

numbers.py      Python's own numbers, as arrays
scalars.py      NumPy's single numbers, as arrays
holder.py       `weft.Holder`: a place for a value that cannot be changed itself
containers.py   lists, tuples and dicts of arrays or models, taken apart and put together
models.py       an object's values, whatever library's it is
torch_training.py  a step of training of a torch module
jax_training.py    a step of training of JAX's arrays
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np

from weft.adapters import containers, numbers, numpy, scalars
from weft.adapters.holder import Holder
from weft.errors import MissingPackage

_loaded: dict[str, ModuleType] = {one.NAME: one for one in (numpy, numbers, scalars)}

#: whose arrays, besides NumPy's, by what the library calls them
_ARRAYS = {"torch": "Tensor", "jax": "Array"}
#: whose models, in the order of asking: a Keras model may be a torch module as well
_MODELS = ("keras", "pytensor", "jax", "torch", "numpy")


def of(value: Any) -> ModuleType | None:
    """The adapter of an array; None if the value is nobody's array."""
    if isinstance(value, np.ndarray):
        return numpy if numpy.is_mine(value) else None
    for library, kind in _ARRAYS.items():
        found = getattr(sys.modules.get(library), kind, None)
        if found is not None and isinstance(value, found):
            return named(library)
    return None


def of_array_or_number(value: Any) -> ModuleType | None:
    """The adapter of an array or a single number."""
    return of(value) or next((one for one in (scalars, numbers) if one.is_mine(value)), None)


def of_model(value: Any) -> ModuleType | None:
    """The adapter of a model; None if nobody knows it. A library that the program has not imported
    has made no model, so it is not asked; but a worker may get a Holder of NumPy's arrays."""
    held = containers.all_are(value, Holder)
    asked = (
        named(library)
        for library in _MODELS
        if sys.modules.get(library) is not None or (held and library == "jax")
    )
    return next((adapter for adapter in asked if adapter.is_model(value)), None)


def named(name: str) -> ModuleType:
    """The adapter that another rank spoke of."""
    if name not in _loaded:
        try:
            _loaded[name] = importlib.import_module(f"weft.adapters.{name}")
        except ImportError as error:
            raise MissingPackage(
                f"another rank sent an array of {name}, which cannot be loaded here ({error}):\n"
                f"    pip install 'weft[{name}]'"
            ) from error
    return _loaded[name]
