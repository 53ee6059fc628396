"""Arrays in payloads: in and out through blocks of shared memory.

They arrive as what they were: plain arrays, writable if they were. An item's array is a copy of its
own, so that a function may work in place. Its block is freed when the last view of it is gone.

First what packing calls (`reduce...`, `as_...`, `place`), then what pickles name, and unpickling
calls.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np

from weft._core.arithmetic import Array
from weft._core.arrays import masked
from weft._core.arrays import read_only as without_writing
from weft.adapters import lookup
from weft.engines.local.memory import blocks
from weft.engines.local.memory.arrays import (
    SharedArray,
    attach,
    buffer_of,
    copy_in,
    describe,
    read_only,
)
from weft.engines.local.memory.segment import Block, BlockHandle
from weft.errors import InvalidType

#: bytes from which on an array goes through shared memory
LARGE = 1 << 16

#: bytes from which on a copy-on-write mapping costs less than a copy
_MAPPED = 1 << 20

#: the characters of dtypes that have no parameters, such as a length or a unit
_ONE_LETTER = frozenset(np.typecodes["All"]) - frozenset("SUVOMm")


class PlacedArray(SharedArray):
    """An array that `place` put into shared memory: workers get a plain array over that memory."""


class RepeatedArray(PlacedArray):
    """An array in shared memory that several items use: workers get a plain array of their own,
    copy-on-write."""


#: exactly these classes; their subclasses have pickles of their own
KINDS: tuple[type, ...] = (np.ndarray, np.memmap, SharedArray, PlacedArray, RepeatedArray)
#: those of which an item has one of its own
COPIED = (np.ndarray, RepeatedArray)


def is_large(array: Array) -> bool:
    """Return whether an array goes through shared memory: if it is large, or there already."""
    if array.dtype.hasobject:
        return False
    is_shared = isinstance(array, SharedArray) and buffer_of(array) is not None
    return is_shared or array.nbytes >= LARGE


def reduce_small(array: Array) -> Any:
    """Reduce an array that is not large: for most, in half the time of NumPy's own reduction."""
    dtype, flags = array.dtype, array.flags
    simple = dtype.isnative and dtype.char in _ONE_LETTER and dtype.metadata is None
    if simple and type(array) is np.ndarray and flags.c_contiguous and flags.writeable:
        return _small, (array.tobytes(), dtype.char, array.shape)
    return array.__reduce_ex__(5)


def reduce(array: Any, shared: SharedArray, *, owned: bool) -> tuple[Any, tuple[Any, ...]]:
    """Reduce an array that is `shared` in shared memory; the first argument is the block's handle,
    `owned` whether that holds a reference."""
    arguments = describe(shared, blocks.export(buffer_of(shared), owned=owned))
    if type(array) is SharedArray:
        return attach, arguments
    if type(array) is RepeatedArray:
        return copy_on_write_view, arguments
    return as_view, (*arguments[:-1], array.flags.writeable)


def as_copy(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a reduced array such that each receiver gets a copy; arrays of `weft.share` stay
    shared."""
    return (copied, *reduced[1:]) if reduced[0] is as_view else reduced


def as_copy_on_write(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a reduced array such that each receiver copies only what it changes."""
    writable = reduced[0] is as_view and reduced[1][-1]
    return (copy_on_write_view, *reduced[1:]) if writable else reduced


def place(array: Array, *, readonly: bool) -> Any:
    """Return an array in shared memory with the same values: the array itself if it was shared.

    Arrays of objects or of another class cannot be there. They are returned as they are, and with
    `readonly` in a wrapper that arrives as an array that nobody can write to.
    """
    if array.dtype.hasobject or type(array) not in KINDS:
        return _ReadOnly(array) if readonly else array
    shared = in_shared_memory(array)
    return (read_only(shared) if readonly else shared).view(PlacedArray)


class _ReadOnly:
    """An array that is pickled by value, and of which a worker gets a read-only copy. The data and
    the mask of a masked array go into shared memory if they can."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __reduce__(self) -> tuple[Any, ...]:
        array: Any = self._array
        if type(array) is np.ma.MaskedArray and type(array.data) in KINDS:
            parts = (array.data, np.ma.getmaskarray(array))
            placed = (place(part, readonly=True) for part in parts)
            return masked, (*placed, array.fill_value, array.hardmask)
        return without_writing, (array,)


def in_shared_memory(array: Array) -> SharedArray:
    """Return an array in shared memory with the same values: itself, or a copy."""
    return array.view(SharedArray) if is_in_shared_memory(array) else copy_in(array)


def is_in_shared_memory(array: Array) -> bool:
    """Return whether an array is there for others to see. Results are not: their memory is their
    owner's alone."""
    is_result = type(array) is np.ndarray and array.flags.writeable
    return not is_result and buffer_of(array) is not None


def reduce_tensor(tensor: Any) -> Any:
    """Reduce a tensor to an array, where that is possible: torch would pickle the whole storage of
    a view, and the number that its device has here."""
    torch = sys.modules["torch"]
    if tensor.device.type not in ("cpu", "meta"):
        return _reduce_on_device(tensor)
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.requires_grad or tensor.is_conj():
        return tensor.__reduce_ex__(5)
    try:
        return as_tensor, (tensor.numpy(),)
    except (TypeError, RuntimeError):  # bfloat16 and other types that NumPy lacks
        return tensor.__reduce_ex__(5)


def _reduce_on_device(tensor: Any) -> Any:
    """Reduce a tensor on a device, which arrives on the receiver's own."""
    try:
        array, element = lookup.named("torch").view(tensor)
    except InvalidType:  # a sparse one
        return tensor.__reduce_ex__(5)
    device = str(tensor.device)
    return _tensor_on_device, (array, element, device, tensor.requires_grad)


def _tensor_on_device(array: Any, element: str, device: str, requires_grad: bool) -> Any:
    from weft.adapters import torch_arrays

    writable = array if array.flags.writeable else array.copy()
    tensor = torch_arrays.deliver(writable, element, torch_arrays.here(device))
    return tensor.requires_grad_() if requires_grad else tensor


def _small(data: bytes, letter: str, shape: tuple[int, ...]) -> Any:
    return np.ndarray(shape, letter, data).copy()


def as_view(handle: BlockHandle, *arguments: Any) -> Any:
    """Return a plain array over a block."""
    return attach(handle, *arguments).view(np.ndarray)


def copied(handle: BlockHandle, *arguments: Any) -> Any:
    """Return a copy of an array in a block."""
    shared = attach(handle, *arguments)
    copy = np.array(shared, order="K", subok=False)
    copy.flags.writeable = shared.flags.writeable
    return copy


def copy_on_write_view(handle: BlockHandle, *arguments: Any) -> Any:
    """Return a writable array over a private mapping of a block, or a copy of a small one."""
    block = blocks.attach(handle)
    shape, dtype, offset, strides, _ = arguments
    if block.length >= _MAPPED:
        try:
            memory = _CopyOnWriteMapping.over(block)
        except (OSError, ValueError):  # no descriptor is left, or the segment's is closed
            return copied(handle, *arguments)
        begin = block.offset % mmap.ALLOCATIONGRANULARITY + offset
        return np.ndarray(shape, dtype, buffer=memory, offset=begin, strides=strides)
    return copied(handle, *arguments)


class _CopyOnWriteMapping(mmap.mmap):
    """A private mapping of a block: a page is copied when it is first written to."""

    #: kept alive by this mapping, whose unwritten pages are still the block's
    block: Block

    @classmethod
    def over(cls, block: Block) -> _CopyOnWriteMapping:
        before = block.offset % mmap.ALLOCATIONGRANULARITY
        memory = cls(
            block.segment.descriptor,
            before + block.length,
            flags=mmap.MAP_PRIVATE,
            offset=block.offset - before,
        )
        memory.block = block
        return memory


def as_tensor(array: Any) -> Any:
    """Return a tensor over the memory of an array."""
    import torch

    return torch.from_numpy(array)
