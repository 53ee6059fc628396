"""Arrays in shared memory, and how they travel: a pickle of one is a handle to its block."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft._core import shared
from weft._core.arithmetic import Array, address
from weft.engines import interruption
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import BlockHandle
from weft.resources import count_cores

#: bytes from which on a copy takes much longer than the start of a thread
_LARGE = 16 << 20


def copy_in(source: NDArray[Any]) -> SharedArray:
    """Copy an array into a new block, in the same memory order. Raises OutOfMemory."""
    block = blocks.allocate(source.nbytes)
    fortran = source.flags.f_contiguous and not source.flags.c_contiguous
    array = _over(block.buffer, source.shape, source.dtype, order="F" if fortran else "C")
    _copy(array, source)
    return array


def _copy(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy values, large arrays with two threads: one core cannot use the full memory bandwidth."""
    if source.nbytes < _LARGE or not source.flags.c_contiguous or count_cores()[0] < 2:
        np.copyto(target, source)
        return
    whole, parts = target.reshape(-1), source.reshape(-1)
    half = len(parts) // 2
    other = threading.Thread(target=np.copyto, args=(whole[half:], parts[half:]))
    interruption.start(other)
    try:
        np.copyto(whole[:half], parts[:half])
    finally:
        other.join()


def read_only(array: SharedArray) -> SharedArray:
    """Return the same array over a buffer that NumPy cannot make writable again."""
    buffer = buffer_of(array)
    offset = array.__array_interface__["data"][0] - ctypes.addressof(buffer)
    return _over(
        # frombuffer keeps the read-only view as its base; ndarray would use the buffer under it
        np.frombuffer(memoryview(buffer).cast("B").toreadonly(), np.uint8),
        array.shape,
        array.dtype,
        offset=offset,
        strides=array.strides,
    )


class SharedArray(shared.SharedArray):
    """An ndarray in a block."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        buffer = buffer_of(self)
        if buffer is None:
            return self.view(np.ndarray).__reduce__()
        return attach, describe(self, blocks.export(buffer))

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        # ndarray has its own for protocol 5, which would send the bytes
        return self.__reduce__()


def describe(array: SharedArray, handle: BlockHandle) -> tuple[Any, ...]:
    """Return the arguments with which `attach` makes the array again from its block's handle."""
    offset = array.__array_interface__["data"][0] - ctypes.addressof(buffer_of(array))
    return handle, array.shape, array.dtype, offset, array.strides, array.flags.writeable


def attach(  # noqa: PLR0917  pickle calls it with positions only
    handle: BlockHandle,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    offset: int,
    strides: tuple[int, ...],
    writeable: bool,
) -> SharedArray:
    """Attach a shared array. Unpickling calls it. Raises SegmentGone, Stalled."""
    block = blocks.attach(handle)
    array = _over(block.buffer, shape, dtype, offset=offset, strides=strides)
    return array if writeable else read_only(array)


def _over(buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any], **layout: Any) -> SharedArray:
    return np.ndarray.__new__(SharedArray, shape, dtype, buffer=buffer, **layout)


def block_of(array: Array) -> tuple[int, int]:
    """Return the name of the block an array lies in, 0 if in none, and the array's offset in it."""
    buffer = buffer_of(array)
    if buffer is None:
        return 0, 0
    return blocks.name_of(buffer), address(array) - ctypes.addressof(buffer)


def buffer_of(array: Array) -> Any:
    """Return the buffer of the block an array lies in; None if it lies in ordinary memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if blocks.name_of(base) else None
