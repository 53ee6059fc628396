"""Adding one array to another, by the quickest loop that there is."""

from __future__ import annotations

import numpy as np

from weft import kernels
from weft._core.elements import Array
from weft._core.values import address

#: bytes from which on arrays are taken to be in no cache, so that the loop in C is the quicker one
_LARGE = 2 << 20


def add_to(array: Array, delta: Array) -> None:
    """array += delta"""
    quicker = array.nbytes >= _LARGE and kernels.adding_side_by_side_pays()
    loop = kernels.add_loop(array.dtype.name) if quicker else None
    if loop is not None and _fit(array, delta) and not np.may_share_memory(array, delta):
        loop(address(array), address(delta), array.size)
    else:
        np.add(array, delta, out=array)


def _fit(array: Array, delta: Array) -> bool:
    """Whether one lies in memory as the other does, as C would have it."""
    in_order = array.flags.carray and delta.flags.c_contiguous and delta.flags.aligned
    alike = array.dtype == delta.dtype and array.shape == delta.shape
    return in_order and alike and array.dtype.isnative
