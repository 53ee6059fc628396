"""Python's and NumPy's single numbers, which reductions take as arrays of one element."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import InvalidValue

NAME = "number"


def is_mine(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex, np.number, np.bool_))


def view(value: Any) -> tuple[NDArray[Any], str]:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InvalidValue(f"{value} does not fit 64 bits; reduce it as a float")
    array = np.array(value)
    return array, _PYTHON.get(type(value), array.dtype.name)


def deliver(array: NDArray[Any], element: str) -> Any:
    return array.item() if element in _PYTHON.values() else array[()]


#: what errors call Python's own, which come back as Python's own
_PYTHON = {kind: f"Python {kind.__name__}" for kind in (bool, int, float, complex)}
