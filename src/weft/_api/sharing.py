"""`share`: an array in memory that several processes see."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weft.engines.local import blocks
from weft.engines.local.keeper import Reference
from weft.engines.local.mapped import buffer_of
from weft.errors import InvalidType


def share(array: ArrayLike, *, readonly: bool = False) -> SharedArray:
    """A copy of `array` in shared memory, as an ndarray.

    Pickling it, or a slice of it, sends a reference: whoever unpickles it, in
    any process of this user on this machine, sees the same memory. Nothing is
    copied, and what one process writes the others see. The memory returns when
    the last view in the last process is gone; a pickle that is never loaded
    keeps it for as long as this process lives. A pickle is not the array: to
    save one, pickle `shared.copy()` or use `numpy.save`.

    >>> import numpy, weft
    >>> shared = weft.share(numpy.arange(6.0).reshape(2, 3))
    >>> shared[1].sum()
    np.float64(12.0)

    An array that is shared already is returned as it is. With `readonly` the
    result cannot be written to, here or where it is unpickled.

    Raises InvalidType for arrays of Python objects, OutOfMemory.
    """
    source = np.asanyarray(array)
    if source.dtype.hasobject or isinstance(source, np.ma.MaskedArray):
        what = "a mask" if isinstance(source, np.ma.MaskedArray) else "Python objects"
        raise InvalidType(
            f"share() got {type(array).__name__} as an array of dtype {source.dtype} with {what}, "
            "which cannot be shared; expected numbers, strings of fixed length or records of these"
        )
    if isinstance(source, SharedArray) and buffer_of(source) is not None:
        shared = cast(SharedArray, source.view())
        block_buffer = buffer_of(source)
    else:
        block = blocks.allocate(source.nbytes)
        fortran = source.flags.f_contiguous and not source.flags.c_contiguous
        shared = _over(block.buffer, source.shape, source.dtype, order="F" if fortran else "C")
        np.copyto(shared, source)
        block_buffer = block.buffer
    return _read_only(shared, block_buffer) if readonly else shared


class SharedArray(np.ndarray[Any, np.dtype[Any]]):
    """An ndarray in shared memory. Made by `weft.share`; what is computed from it is ordinary."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        buffer = buffer_of(self)
        if buffer is None:
            return self.view(np.ndarray).__reduce__()
        offset = self.__array_interface__["data"][0] - ctypes.addressof(buffer)
        return _attach, (
            blocks.refer(buffer),
            self.shape,
            self.dtype,
            offset,
            self.strides,
            self.flags.writeable,
        )

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        # ndarray has its own for protocol 5, which would send the bytes
        return self.__reduce__()

    def __array_wrap__(
        self, array: NDArray[Any], context: Any = None, return_scalar: bool = False
    ) -> Any:
        """Results of arithmetic are ordinary arrays, unless they were written into a shared one."""
        if array is self:
            return array
        if return_scalar or array.shape == ():
            return array[()]
        return array.view(np.ndarray)


def _attach(  # noqa: PLR0917  pickle calls it with positions only
    reference: Reference,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    offset: int,
    strides: tuple[int, ...],
    writeable: bool,
) -> SharedArray:
    """What unpickling a shared array calls."""
    block = blocks.attach(reference)
    array = _over(block.buffer, shape, dtype, offset=offset, strides=strides)
    return array if writeable else _read_only(array, block.buffer)


def _over(buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any], **layout: Any) -> SharedArray:
    return cast(SharedArray, np.ndarray.__new__(SharedArray, shape, dtype, buffer=buffer, **layout))


def _read_only(array: SharedArray, buffer: Any) -> SharedArray:
    """The same array over a buffer that NumPy cannot make writable again."""
    offset = array.__array_interface__["data"][0] - ctypes.addressof(buffer)
    return _over(
        # frombuffer keeps the read-only view as its base; ndarray would look behind it
        np.frombuffer(memoryview(buffer).cast("B").toreadonly(), np.uint8),
        array.shape,
        array.dtype,
        offset=offset,
        strides=array.strides,
    )
