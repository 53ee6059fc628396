"""NumPy arrays, and models made of them."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.adapters import containers
from weft.errors import InvalidType, InvalidValue

NAME = "numpy"
#: the kinds of dtype that parameters may have
_NUMBERS = "biufc"
#: bytes up to which `state` covers a whole array, and the number of elements it samples otherwise
_WHOLE, _SAMPLE = 1 << 20, 4096


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


def state(value: Any) -> Hashable:
    value = np.asarray(value)  # a mask is apart
    kind = value.shape, value.dtype.str
    if value.nbytes <= _WHOLE:
        whole: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return kind, zlib.crc32(whole)
    some = value.flat[np.linspace(0, value.size - 1, _SAMPLE, dtype=np.intp)]
    return kind, zlib.crc32(some.view(np.uint8))


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
