"""Adding one array to another, by the quickest loop that there is."""

from __future__ import annotations

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
