"""What `weft.share` returns, whichever engine made it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class SharedArray(np.ndarray[Any, np.dtype[Any]]):
    """An ndarray in shared memory. Made by `weft.share`; what is computed from it is ordinary."""

    def __array_wrap__(
        self, array: NDArray[Any], context: Any = None, return_scalar: bool = False
    ) -> Any:
        """Results of arithmetic are ordinary arrays, unless they were written into a shared one."""
        if array is self:
            return array
        if return_scalar or array.shape == ():
            return array[()]
        return array.view(np.ndarray)
