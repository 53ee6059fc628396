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
    array = shared.like(SharedArray, source, block.buffer)
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
    return shared.read_only(array.view(SharedArray), buffer_of(array))


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
    offset = address(array) - ctypes.addressof(buffer_of(array))
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
    array = shared.over(SharedArray, block.buffer, shape, dtype, offset=offset, strides=strides)
    return array if writeable else read_only(array)


def block_of(array: Array) -> tuple[int, int]:
    """Return the name of the block an array lies in, 0 if in none, and the array's offset in it."""
    buffer = buffer_of(array)
    if buffer is None:
        return 0, 0
    return blocks.name_of(buffer), address(array) - ctypes.addressof(buffer)


def buffer_of(array: Array) -> Any:
    """Return the buffer of the block an array lies in; None if it lies in ordinary memory."""
    memory = shared.memory_of(array)
    return memory if blocks.name_of(memory) else None
