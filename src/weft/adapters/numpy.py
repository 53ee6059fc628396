"""NumPy arrays, and models made of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pickle import PickleBuffer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.adapters import containers
from weft.adapters.contents import Contents
from weft.errors import InvalidType, InvalidValue

NAME = "numpy"
#: the kinds of dtype that parameters may have
_NUMBERS = "biufc"


def is_mine(value: Any) -> bool:
    """Return whether it can be moved as an array; arrays of Python objects travel as objects."""
    return not value.dtype.hasobject


def describe(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str]:
    dtype = value.dtype if value.dtype.isnative else value.dtype.newbyteorder("=")
    return _element(dtype), dtype, value.shape, "cpu"


def view(value: Any) -> tuple[NDArray[Any], str]:
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidType(
            "a masked array's mask would be lost; pass .filled(value), or .data and .mask"
        )
    array = np.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
        array.flags.writeable = False  # a copy: results written to it would be lost
    return array, _element(array.dtype)


@lru_cache(maxsize=256)  # NumPy takes a microsecond to make a dtype's name
def _element(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.kind != "V" else str(dtype)


def deliver(array: NDArray[Any], element: str) -> Any:
    return array


def contents(value: Any) -> Contents | None:
    """Return an array's memory, without a copy. A read-only array that owns its memory is constant:
    whether somebody has an older view to write by, or makes it writable again, cannot be known."""
    dtype, flags = value.dtype, value.flags
    if type(value) is not np.ndarray or dtype.hasobject:
        return None
    if not flags.writeable and value.base is None:
        return Contents(value)
    if not flags.forc or dtype.kind in "mM":  # no buffer has times
        return None
    kind = (dtype if dtype.kind == "V" else dtype.str), value.shape, flags.fnc, flags.writeable
    memory: Any = value
    return Contents(variable=(kind, PickleBuffer(memory)))


def is_model(value: Any) -> bool:
    leaves = containers.leaves(value)
    return bool(leaves) and all(
        isinstance(leaf, np.ndarray) and leaf.dtype.kind in _NUMBERS for _, leaf in leaves
    )


def names(model: Any) -> list[str]:
    return list(_parameters(model))


def read(model: Any) -> list[NDArray[Any]]:
    return [view(parameter)[0] for parameter in _parameters(model).values()]


def write(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    parameters = _parameters(model)
    forms = {name: (a.dtype.newbyteorder("="), a.shape) for name, a in parameters.items()}
    containers.validate_forms(forms, arrays)
    for name, parameter in parameters.items():
        if not parameter.flags.writeable:
            raise InvalidValue(f"{name} is a read-only array: pass a copy of it as a parameter")
    for parameter, array in zip(parameters.values(), arrays, strict=True):
        np.copyto(parameter, array)


def parts(model: Any) -> list[Any]:
    return list(_parameters(model).values())


def reshape(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    shapes = [list(parameter.shape) for parameter in parts(model)]
    raise InvalidValue(
        f"values of shape {[list(array.shape) for array in arrays]} for arrays of shape {shapes}: "
        "an array of NumPy's cannot change its shape; replicate a weft.Holder with the array in it"
    )


def live_in(model: Any, arrays: Sequence[NDArray[Any]]) -> bool:
    return False


def _parameters(model: Any) -> dict[str, NDArray[Any]]:
    leaves = containers.leaves(model)
    return containers.unique((containers.parameter_name(place), array) for place, array in leaves)
