"""`share`: an array in memory that several processes see."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from weft._core.shared import SharedArray
from weft.engines import registry
from weft.errors import InvalidType

__all__ = ["SharedArray", "share"]


def share(array: ArrayLike, *, readonly: bool = False) -> SharedArray:
    """Return a copy of `array` in shared memory, as an ndarray.

    Pickling it, or a slice of it, sends a reference: whoever unpickles that, in any process of this
    user on this machine, sees the same memory. Nothing is copied, and what one process writes the
    others see. The memory is freed when the last view in the last process is gone; a pickle that is
    never loaded keeps it for as long as this process lives. The pickle does not contain the
    values: to save them, pickle `shared.copy()` or use `numpy.save`.

    >>> import numpy, weft
    >>> shared = weft.share(numpy.arange(6.0).reshape(2, 3))
    >>> shared[1].sum()
    np.float64(12.0)

    An array that is shared already is returned as it is. With `readonly` the result cannot be
    written to, here or where it is unpickled.

    Where the local engine cannot run (other than Linux on x86-64), the result is a copy in ordinary
    memory, and so is a pickle of it.

    Raises InvalidType for arrays of Python objects, OutOfMemory.
    """
    source = np.asanyarray(array)
    if source.dtype.hasobject or isinstance(source, np.ma.MaskedArray):
        what = "a mask" if isinstance(source, np.ma.MaskedArray) else "Python objects"
        raise InvalidType(
            f"share() got {type(array).__name__} as an array of dtype {source.dtype} with {what}, "
            "which cannot be shared; expected numbers, strings of fixed length or records of these"
        )
    shared: SharedArray = registry.choose(None, "share").load().share(source, readonly=readonly)
    return shared
