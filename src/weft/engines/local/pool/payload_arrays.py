"""Arrays that are part of items and results: in and out through blocks of shared memory.

They arrive as what they were: plain arrays, writable if they were. An item's array is a copy of
its own, so that a function may work in place. Its block is free again when its last view is gone.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np

from weft._core.arithmetic import Array
from weft._core.arrays import masked
from weft._core.arrays import read_only as without_writing
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

#: from how many bytes on an array goes through shared memory
LARGE = 1 << 16

#: bytes from which on a mapping of its own costs an array less than a copy
_MAPPED = 1 << 20

#: dtypes that one letter says all of
_ONE_LETTER = frozenset(np.typecodes["All"]) - frozenset("SUVOMm")


class Placed(SharedArray):
    """What was put into shared memory for workers: they get it as a plain array, where it lies."""


#: exactly these classes; others are pickled as they want to be
KINDS: tuple[type, ...] = (np.ndarray, np.memmap, SharedArray, Placed)


def is_large(array: Array) -> bool:
    """Whether an array goes through shared memory: also a small one that lies there already."""
    if array.dtype.hasobject:
        return False
    lies_there = isinstance(array, SharedArray) and buffer_of(array) is not None
    return lies_there or array.nbytes >= LARGE


def reduce_small(array: Array) -> Any:
    """What to pickle in the place of an array that is not large: most travel in half the time that
    NumPy's own way takes."""
    dtype, flags = array.dtype, array.flags
    simple = dtype.isnative and dtype.char in _ONE_LETTER and dtype.metadata is None
    if simple and type(array) is np.ndarray and flags.c_contiguous and flags.writeable:
        return _small, (array.tobytes(), dtype.char, array.shape)
    return array.__reduce_ex__(5)


def reduce(array: Any, shared: SharedArray, *, pin: bool) -> tuple[Any, tuple[Any, ...]]:
    """What to pickle in the place of an array that is large and lies there in shared memory; the
    reference is the first of it."""
    arguments = describe(shared, blocks.export(buffer_of(shared), owned=pin))
    if type(array) is SharedArray:
        return attach, arguments
    return _plain, (*arguments[:-1], array.flags.writeable)


def copied_there(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """What to pickle in its place if several get it, and each may change its own; arrays of
    `weft.share` stay everybody's."""
    return (_copy, *reduced[1:]) if reduced[0] is _plain else reduced


def private_there(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same where few change theirs: what nobody changes is one memory for all."""
    changeable = reduced[0] is _plain and reduced[1][-1]
    return (_private, *reduced[1:]) if changeable else reduced


def place(array: Array, *, readonly: bool) -> Any:
    """An array in shared memory with the same values, for workers: the array itself if it was
    shared. One that cannot lie there, of objects or of another class, is left as it is; if nothing
    may be written to it, it is what arrives in a worker as such an array."""
    if array.dtype.hasobject or type(array) not in KINDS:
        return _ReadOnly(array) if readonly else array
    shared = in_shared_memory(array)
    return (read_only(shared) if readonly else shared).view(Placed)


class _ReadOnly:
    """An array that is sent by value: a worker gets a copy to which it cannot write. Of a masked
    array the data and the mask lie in shared memory, where they can."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __reduce__(self) -> tuple[Any, ...]:
        array: Any = self._array
        if type(array) is np.ma.MaskedArray and type(array.data) in KINDS:
            parts = (array.data, np.ma.getmaskarray(array))
            placed = (place(one, readonly=True) for one in parts)
            return masked, (*placed, array.fill_value, array.hardmask)
        return without_writing, (array,)


def in_shared_memory(array: Array) -> SharedArray:
    """The array itself if it is there for all to see; of a result, which is there too, but its
    owner's alone, a copy."""
    if buffer_of(array) is None or (type(array) is np.ndarray and array.flags.writeable):
        return copy_in(array)
    return array.view(SharedArray)


def reduce_tensor(tensor: Any) -> Any:
    """A CPU tensor as an array, where that is possible: by itself, a part of a large tensor would
    bring all of it along."""
    torch = sys.modules["torch"]
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.requires_grad or tensor.is_conj():
        return tensor.__reduce_ex__(5)
    try:
        return _tensor, (tensor.numpy(),)
    except (TypeError, RuntimeError):  # bfloat16 and other types that NumPy has not
        return tensor.__reduce_ex__(5)


def _small(data: bytes, letter: str, shape: tuple[int, ...]) -> Any:
    return np.ndarray(shape, letter, data).copy()


def _plain(reference: BlockHandle, *arguments: Any) -> Any:
    return attach(reference, *arguments).view(np.ndarray)


def _copy(reference: BlockHandle, *arguments: Any) -> Any:
    shared = attach(reference, *arguments)
    copy = np.array(shared, order="K", subok=False)
    copy.flags.writeable = shared.flags.writeable
    return copy


def _private(reference: BlockHandle, *arguments: Any) -> Any:
    block = blocks.attach(reference)
    shape, dtype, offset, strides, _ = arguments
    if block.length >= _MAPPED:
        try:
            memory = _Private.over(block)
        except (OSError, ValueError):  # no descriptor is left, or it has been given up
            return _copy(reference, *arguments)
        begin = block.offset % mmap.ALLOCATIONGRANULARITY + offset
        return np.ndarray(shape, dtype, buffer=memory, offset=begin, strides=strides)
    return _copy(reference, *arguments)


class _Private(mmap.mmap):
    """A block as this process alone sees it: a page is copied when it is first written to."""

    #: in use for as long as this is: what was not written to is still the block's
    block: Block

    @classmethod
    def over(cls, block: Block) -> _Private:
        before = block.offset % mmap.ALLOCATIONGRANULARITY
        memory = cls(
            block.segment.descriptor,
            before + block.length,
            flags=mmap.MAP_PRIVATE,
            offset=block.offset - before,
        )
        memory.block = block
        return memory


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)
