"""NumPy's single numbers, which reductions treat as arrays of one element."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NAME = "scalar"


def is_mine(value: Any) -> bool:
    return isinstance(value, (np.number, np.bool_))


def describe(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str]:
    array, element = view(value)
    return element, array.dtype, (), "cpu"


def view(value: Any) -> tuple[NDArray[Any], str]:
    array = np.array(value)
    return array, array.dtype.name


def deliver(array: NDArray[Any], element: str) -> Any:
    return array[()]
