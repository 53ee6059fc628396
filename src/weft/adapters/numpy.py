"""NumPy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import InvalidType

NAME = "numpy"


def is_mine(value: Any) -> bool:
    """Arrays of Python objects are not: they travel as objects."""
    return not value.dtype.hasobject


def view(value: Any) -> tuple[NDArray[Any], str]:
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidType(
            "a masked array's mask would be lost; pass .filled(value), or .data and .mask"
        )
    array = np.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
        array.flags.writeable = False  # a copy: results written to it would be lost
    return array, array.dtype.name if array.dtype.kind != "V" else str(array.dtype)


def deliver(array: NDArray[Any], element: str) -> Any:
    return array
