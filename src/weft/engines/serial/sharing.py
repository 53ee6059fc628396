"""What `weft.share` returns without other processes: shared arrays in ordinary memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft._core import shared
from weft.engines.refusals import validate_memory


class _Memory(bytearray):
    """The memory of a shared array, by whose class an array is told from a copy."""


class SharedArray(shared.SharedArray):
    """An ndarray in this process's own memory. A pickle of it is a copy."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self.view(np.ndarray).__reduce__()

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def share(source: NDArray[Any], *, readonly: bool) -> SharedArray:
    """Return a copy in the same memory order, or a view of an array that is shared already."""
    if _is_shared(source):
        array = source.view(SharedArray)
    else:
        validate_memory("a shared array", source.nbytes, "share less")
        fortran = source.flags.f_contiguous and not source.flags.c_contiguous
        array = _over(_Memory(source.nbytes), source, order="F" if fortran else "C")
        array[...] = source
    return _read_only(array) if readonly else array


def _read_only(array: SharedArray) -> SharedArray:
    """Return the array over a buffer that NumPy cannot make writable again."""
    memory = _memory_of(array)
    whole = np.frombuffer(memory, np.uint8)
    offset = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return _over(
        np.frombuffer(memoryview(memory).toreadonly(), np.uint8),
        array,
        offset=offset,
        strides=array.strides,
    )


def _over(buffer: Any, like: NDArray[Any], **layout: Any) -> SharedArray:
    return np.ndarray.__new__(SharedArray, like.shape, like.dtype, buffer=buffer, **layout)


def _is_shared(array: NDArray[Any]) -> bool:
    return isinstance(array, SharedArray) and isinstance(_memory_of(array), _Memory)


def _memory_of(array: Any) -> Any:
    """Return the object that an array's memory belongs to, behind all its bases."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array.obj if isinstance(array, memoryview) else array
