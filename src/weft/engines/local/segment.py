"""Memory that several processes see.

A segment is an anonymous file (memfd) and its mapping here. It has no name, so
it cannot outlive its processes; its descriptor travels over Unix sockets. Its
pages are reserved when it is made, after a look at what the machine can give:
a full machine is an OutOfMemory here and not a SIGBUS or an OOM kill later.

Segments have huge pages wherever a whole one fits, and begin at an address where
one can begin. The kernel makes them where it is asked to (MADV_COLLAPSE), out of
a single small page each, which takes a tenth of the time that small pages take;
those that it does not make stay small.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cached_property

from weft.engines.local.libc import make_huge, map_over
from weft.engines.local.translation import translated
from weft.engines.memory import check_memory

#: bytes that are reserved at a time
PIECE = 64 << 20
#: bytes of a huge page
HUGE = 2 << 20


class Segment:
    """A descriptor, its size, and the mapping in this process.

    The mapping lives as long as anything refers to it. The descriptor, which is needed to hand
    the segment on, is closed with this object or before.
    """

    descriptor = -1

    def __init__(self, descriptor: int, size: int) -> None:
        """Map a descriptor, which from now on is this object's."""
        self.descriptor = descriptor
        self.size = size
        try:
            self._map()
        except OSError as error:
            raise translated(error, size) from error

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new segment of at least `size` zero bytes, reserved and ready to touch."""
        size = whole_pages(size)
        check_memory("shared memory", size, "share less, or drop shared arrays that are not used")
        made = cls.__new__(cls)
        made.size = size
        try:
            made.descriptor = os.memfd_create("weft")
            os.ftruncate(made.descriptor, _addresses(size))
            made._map()
            made._reserve()
        except OSError as error:
            raise translated(error, size) from error
        return made

    def _map(self) -> None:
        """Map the descriptor, from a huge page's beginning on if it has room for one."""
        self._offset = 0
        if self.size < HUGE:
            self._memory = mmap.mmap(self.descriptor, self.size)
            return
        # more than there is memory for: from where a huge page can begin it is mapped once more
        self._memory = mmap.mmap(self.descriptor, _addresses(self.size))
        self._offset = -self._address() % HUGE
        map_over(self._address(), self.descriptor, self.size)

    def _reserve(self) -> None:
        """Have all pages made, huge ones if possible, and mapped here."""
        huge = True
        # in pieces: a signal that comes meanwhile would start a single call all over again
        for start in range(0, self.size, PIECE):
            length = min(PIECE, self.size - start)
            whole = length // HUGE * HUGE
            if huge and whole:  # not again where it has refused one
                for first in range(start, start + whole, HUGE):
                    os.posix_fallocate(self.descriptor, first, mmap.PAGESIZE)
                huge = make_huge(self._address() + start, whole)
            os.posix_fallocate(self.descriptor, start, length)
        # once more: populating is a flag of mmap's, and huge pages are made of what is mapped
        map_over(self._address(), self.descriptor, self.size, populate=True)

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory, self._offset))

    def view(self, offset: int, length: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Some of its memory, which stays mapped for as long as this lives."""
        return (ctypes.c_ubyte * length).from_buffer(self._memory, self._offset + offset)

    def close_descriptor(self) -> None:
        """Give up the ability to hand the segment on; the mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close_descriptor()


class Block:
    """A part of a segment in use.

    `buffer` exports the memory: NumPy arrays, torch tensors and slices of them all hold it, so
    the block is in use for exactly as long as `buffer` lives (a finalizer on an array would fire
    while views of that array are alive).
    """

    def __init__(
        self,
        segment: Segment,
        offset: int,
        length: int,
        buffer: ctypes.Array[ctypes.c_ubyte] | None = None,
    ) -> None:
        self.segment = segment
        self.offset = offset
        self.length = length
        self.buffer = buffer or segment.view(offset, length)

    @cached_property
    def address(self) -> int:
        """Where the block begins, for the kernel and libc."""
        return ctypes.addressof(self.buffer)

    @cached_property
    def words(self) -> memoryview:
        """The block as unsigned 8-byte integers."""
        return memoryview(self.buffer).cast("B").cast("Q")

    def clear(self, first: int = 0, last: int | None = None) -> None:
        """Set words to zero: these, or all."""
        words = self.words[first:last]
        words[:] = memoryview(bytes(words.nbytes)).cast("Q")


def _addresses(size: int) -> int:
    """How long a segment's file, of which nothing beyond `size` is used, and its mapping are."""
    return size if size < HUGE else size + HUGE


def whole_pages(size: int) -> int:
    """The bytes of the pages that `size` bytes, at least one, take."""
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
