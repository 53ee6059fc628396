"""Arrays to which nothing can be written."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft._core.elements import Array


def read_only(array: Array) -> Array:
    """A view of an array, of its own class, to which nothing can be written; nor to its mask."""
    if isinstance(array, np.ma.MaskedArray):
        # both parts first: NumPy takes a mask over as it is
        mask = read_only(np.ma.getmaskarray(array))
        return masked(read_only(array.data), mask, array.fill_value, array.hardmask)
    view: Array = array.view()
    view.flags.writeable = False
    return view


def masked(data: Array, mask: Array, fill_value: Any, hard: bool) -> Array:
    """A masked array over these."""
    found: Array = np.ma.array(data, mask=mask, copy=False, fill_value=fill_value, hard_mask=hard)
    return found
