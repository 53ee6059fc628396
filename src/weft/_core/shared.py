"""The type of what `weft.share` returns, whichever engine made it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class SharedArray(np.ndarray[Any, np.dtype[Any]]):
    """An ndarray in shared memory, made by `weft.share`. What is computed from it is ordinary."""

    def __array_wrap__(
        self, array: NDArray[Any], context: Any = None, return_scalar: bool = False
    ) -> Any:
        """Return a result of arithmetic as an ordinary array, unless it was written to this one."""
        if array is self:
            return array
        if return_scalar or array.shape == ():
            return array[()]
        return array.view(np.ndarray)
