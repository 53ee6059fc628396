"""Memory that several processes see.

A segment is an anonymous file (memfd) and its mapping here. It has no name, so
it cannot outlive its processes; its descriptor travels over Unix sockets. Its
pages are reserved when it is made, after a look at what the machine can give:
a full machine is an OutOfMemory here and not a SIGBUS or an OOM kill later.

WEFT_PORTABLE=1 takes multiprocessing.shared_memory instead of memfd, for
systems without it. That memory has a name for the instant between its creation
and its unlinking; afterwards both kinds are a descriptor and behave alike.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cached_property

from weft.engines.local.translation import translated
from weft.engines.memory import check_memory

_PIECE = 64 << 20


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
        self._map()

    @classmethod
    def create(cls, size: int) -> Segment:
        """A new segment of at least `size` zero bytes, reserved and ready to touch."""
        size = whole_pages(size)
        check_memory("shared memory", size, "share less, or drop shared arrays that are not used")
        made = cls.__new__(cls)
        made.size = size
        try:
            made.descriptor = _portable_descriptor(size) if portable() else os.memfd_create("weft")
            # in pieces: a signal that comes meanwhile would start a single call all over again
            for start in range(0, size, _PIECE):
                os.posix_fallocate(made.descriptor, start, min(_PIECE, size - start))
        except OSError as error:
            raise translated(error, size) from error
        made._map(populate=True)
        return made

    def _map(self, populate: bool = False) -> None:
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        try:
            self.map = mmap.mmap(self.descriptor, self.size, flags=flags)
        except OSError as error:
            raise translated(error, self.size) from error

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
        self.buffer = buffer or (ctypes.c_ubyte * length).from_buffer(segment.map, offset)

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


def whole_pages(size: int) -> int:
    """The bytes of the pages that `size` bytes, at least one, take."""
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def portable() -> bool:
    """Whether segments come from multiprocessing.shared_memory."""
    return bool(os.environ.get("WEFT_PORTABLE")) or not hasattr(os, "memfd_create")


def _portable_descriptor(size: int) -> int:
    from multiprocessing.shared_memory import SharedMemory

    if sys.version_info >= (3, 13):
        memory = SharedMemory(create=True, size=size, track=False)
    else:
        memory = SharedMemory(create=True, size=size)
    try:
        # the descriptor is a private field in every version of Python; there is no public way
        return os.dup(memory._fd)  # type: ignore[attr-defined]
    finally:
        memory.unlink()
        memory.close()
