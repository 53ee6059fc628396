"""Adding one array to another, by the quickest loop that there is."""

from __future__ import annotations

import numpy as np

from weft import kernels
from weft._core.elements import Array
from weft._core.values import address

#: bytes from which on arrays are taken to be in no cache, so that the loop in C is the quicker one
_LARGE = 2 << 20


def add_to(array: Array, delta: Array) -> None:
    """Add numbers to those of an array. Both are C-contiguous, of one dtype and shape."""
    loop = kernels.adder(array.dtype.name) if array.nbytes >= _LARGE else None
    if loop is None or np.may_share_memory(array, delta):
        np.add(array, delta, out=array)
    else:
        loop(address(array), address(delta), array.size)
