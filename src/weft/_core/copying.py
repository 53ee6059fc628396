"""Copying one array to another, past the cache if it is large."""

from __future__ import annotations

import numpy as np

from weft import kernels
from weft._core.elements import Array
from weft._core.values import address, can_change_in_c

#: bytes from which on a copy would push everything else out of the cache, and soon itself
_LARGE = 16 << 20


def copy_to(array: Array, source: Array) -> None:
    """array[...] = source"""
    loop = kernels.copy_loop() if source.nbytes >= _LARGE and not source.dtype.hasobject else None
    if loop is not None and can_change_in_c(array, source):
        loop(address(array), address(source), source.nbytes)
    else:
        np.copyto(array, source)
