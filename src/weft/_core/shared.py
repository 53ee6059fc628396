"""The type of what `weft.share` returns, whichever engine made it, and how engines make it."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from weft._core.arithmetic import address


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


Kind = TypeVar("Kind", bound=SharedArray)


def like(kind: type[Kind], source: NDArray[Any], buffer: Any) -> Kind:
    """Return an array over a buffer, of the shape, dtype and memory order of another."""
    fortran = source.flags.f_contiguous and not source.flags.c_contiguous
    return over(kind, buffer, source.shape, source.dtype, order="F" if fortran else "C")


def read_only(array: Kind, memory: Any) -> Kind:
    """Return the same array, which lies in `memory`, over a buffer that NumPy cannot make writable
    again."""
    # frombuffer keeps the read-only view as its base; ndarray would use the buffer under it
    whole = np.frombuffer(memoryview(memory).cast("B").toreadonly(), np.uint8)
    layout = {"offset": address(array) - address(whole), "strides": array.strides}
    return over(type(array), whole, array.shape, array.dtype, **layout)


def over(
    kind: type[Kind], buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any], **layout: Any
) -> Kind:
    """Return an array over a buffer."""
    return np.ndarray.__new__(kind, shape, dtype, buffer=buffer, **layout)


def memory_of(array: Any) -> Any:
    """Return the object that an array's memory belongs to, behind all its bases."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array.obj if isinstance(array, memoryview) else array
