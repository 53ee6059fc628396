"""Python's own numbers, which reductions treat as arrays of one element."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import InvalidValue

NAME = "number"


def is_mine(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic)


def describe(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str]:
    array, element = view(value)
    return element, array.dtype, (), "cpu"


def view(value: Any) -> tuple[NDArray[Any], str]:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidValue(f"{value} does not fit 64 bits; reduce it as a float")
    array = np.array(value)
    return array, array.dtype.name


def deliver(array: NDArray[Any], element: str) -> Any:
    return array.item()
