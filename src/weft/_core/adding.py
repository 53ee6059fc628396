"""Adding arrays, by the quickest loop that there is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft import kernels
from weft._core.elements import Array
from weft._core.values import address, can_change_in_c

#: bytes from which on arrays are taken to be in no cache: there the loop in C is the quicker one on
#: some processors
_LARGE = 2 << 20


def add_to(array: Array, delta: Array) -> None:
    """array += delta"""
    quicker = array.nbytes >= _LARGE and kernels.adding_side_by_side_pays()
    loop = kernels.add_loop(array.dtype.name) if quicker else None
    if loop is not None and can_change_in_c(array, delta):
        loop(address(array), address(delta), array.size)
    else:
        np.add(array, delta, out=array)


def can_add_up(array: Array, element: str) -> bool:
    """Whether `add_up` takes arrays like this one. `element` is what its numbers are: those of
    bfloat16 have the dtype of uint16."""
    native = array.dtype.isnative and array.dtype.name == element
    return native and kernels.add_up_loop(element) is not None


def add_up(arrays: Sequence[Array]) -> None:
    """Have each of several arrays, which are alike and contiguous, be the sum of all, in their
    order, in one pass over memory."""
    loop = kernels.add_up_loop(arrays[0].dtype.name)
    if loop is None:
        raise TypeError(f"there is no loop that adds arrays of {arrays[0].dtype} up")
    loop([address(array) for array in arrays], arrays[0].size)
