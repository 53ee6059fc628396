"""A segment of shared memory, a block in it, its handle, and which blocks are mapped here.

`Segment`: an anonymous file (memfd) and its mapping in this process. It has no name, so it cannot
outlive the processes that use it; its descriptor travels over Unix sockets. Its pages are reserved
when it is made, after a look at how much memory the machine has left: a full machine raises
OutOfMemory here instead of a SIGBUS or an OOM kill later. Segments start at a huge page boundary
and use huge pages wherever a whole one fits. The kernel makes these on request (MADV_COLLAPSE) out
of one small page each, which takes a tenth of the time that small pages take; where it refuses,
the pages stay small.

`MappedBlocks`: the blocks that this process uses, and a callback when it stops using one. A weak
reference on a block's buffer tells when that is. A signal handler may raise inside any callback
written in Python, and the rest of that callback would be lost. So the first callback is the
`append` of a queue, which no handler can interrupt, and the second works off the queue. If the
second is interrupted, the next one does its work, or `release_pending`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from weft.engines.local.processes.linux import make_huge, map_over, translate_os_error
from weft.engines.refusals import validate_memory

#: bytes that are reserved at a time
PIECE = 64 << 20
#: bytes of a huge page
HUGE = 2 << 20
Buffer = ctypes.Array[ctypes.c_ubyte]


class Segment:
    """A descriptor, its size, and the mapping in this process. The mapping lives as long as
    anything refers to it. The descriptor, which other processes need to map the segment, is closed
    with this object or before."""

    descriptor = -1

    def __init__(self, descriptor: int, size: int) -> None:
        """Map a descriptor and take ownership of it. Raises OutOfMemory, OutOfDescriptors."""
        self.descriptor = descriptor
        self.size = size
        try:
            self._map()
        except OSError as error:
            raise translate_os_error(error, size) from error

    @classmethod
    def create(cls, size: int) -> Segment:
        """Return a new segment of at least `size` zero bytes, its pages reserved. Raises
        OutOfMemory, OutOfDescriptors."""
        size = whole_pages(size)
        validate_memory(
            "shared memory", size, "share less, or drop shared arrays that are not used"
        )
        segment = cls.__new__(cls)
        segment.size = size
        try:
            segment.descriptor = os.memfd_create("weft")
            os.ftruncate(segment.descriptor, _addresses(size))
            segment._map()
            segment._reserve()
        except OSError as error:
            raise translate_os_error(error, size) from error
        return segment

    def _map(self) -> None:
        """Map the descriptor, at a huge page boundary if a huge page fits into it."""
        self._offset = 0
        if self.size < HUGE:
            self._memory = mmap.mmap(self.descriptor, self.size)
            return
        # reserve more addresses than bytes, then map again at the first boundary within them
        self._memory = mmap.mmap(self.descriptor, _addresses(self.size))
        self._offset = -self._address() % HUGE
        map_over(self._address(), self.descriptor, self.size)

    def _reserve(self) -> None:
        """Allocate all pages, huge ones where possible, and map them here."""
        huge = True
        # in pieces: a signal would make a single call start all over again
        for start in range(0, self.size, PIECE):
            length = min(PIECE, self.size - start)
            whole = length // HUGE * HUGE
            if huge and whole:  # not again once the kernel has refused
                for first in range(start, start + whole, HUGE):
                    os.posix_fallocate(self.descriptor, first, mmap.PAGESIZE)
                huge = make_huge(self._address() + start, whole)
            os.posix_fallocate(self.descriptor, start, length)
        # again: only mmap populates page tables, and huge pages can only be made of mapped pages
        map_over(self._address(), self.descriptor, self.size, populate=True)

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory, self._offset))

    def view(self, offset: int, length: int) -> Buffer:
        """Return a buffer over some of its memory, which stays mapped while the buffer lives."""
        return (ctypes.c_ubyte * length).from_buffer(self._memory, self._offset + offset)

    def close_descriptor(self) -> None:
        """Close the descriptor: no other process can map the segment then; the mapping stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close_descriptor()


class Block:
    """A part of a segment in use. NumPy arrays, torch tensors and slices of them all hold `buffer`,
    so the block is in use for exactly as long as `buffer` lives (a finalizer on an array would run
    while views of that array are alive)."""

    def __init__(
        self, segment: Segment, offset: int, length: int, buffer: Buffer | None = None
    ) -> None:
        self.segment, self.offset, self.length = segment, offset, length
        self.buffer = buffer or segment.view(offset, length)

    @cached_property
    def address(self) -> int:
        """Return the block's address in this process, for the kernel and libc."""
        return ctypes.addressof(self.buffer)

    @cached_property
    def words(self) -> memoryview:
        """Return the block as unsigned 8-byte integers."""
        return memoryview(self.buffer).cast("B").cast("Q")

    def clear(self, first: int = 0, last: int | None = None) -> None:
        """Set the words from `first` to `last` to zero, by default all."""
        words = self.words[first:last]
        words[:] = memoryview(bytes(words.nbytes)).cast("Q")


def _addresses(size: int) -> int:
    """Return the length of a segment's file and mapping; nothing beyond `size` is used."""
    return size if size < HUGE else size + HUGE


def whole_pages(size: int) -> int:
    """Round a size up to whole pages, at least one."""
    return -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


#: in the place of an in-flight reference: there is none
NO_REFERENCE = 0


class BlockHandle(NamedTuple):
    """Stand for a block in a pickle, and in another process until that has attached it."""

    block: int
    #: the in-flight reference that holds the block until the handle is first attached; with
    #: NO_REFERENCE it is valid only while its exporter holds the block
    in_flight: int
    #: whom to ask: the owner, then the process that sent it
    servers: tuple[ServerAddress, ...]
    #: for processes that have the owner's segment mapped already; not part of `encode`, whose
    #: readers have to ask
    range: BlockRange | None = None

    def encode(self) -> bytes:
        """Return the handle as JSON."""
        return json.dumps([self.block, self.in_flight, self.servers]).encode()

    @classmethod
    def decode(cls, data: bytes) -> BlockHandle:
        """Return the handle that `encode` wrote."""
        block, in_flight, servers = json.loads(data)
        return cls(block, in_flight, tuple(ServerAddress(*server) for server in servers))


class ServerAddress(NamedTuple):
    """The socket of a segment server, and the process behind it."""

    socket: str
    pid: int
    start: int


class BlockRange(NamedTuple):
    """Describe where a block lies in its owner's segments."""

    segment: int
    offset: int
    length: int


def new_name() -> int:
    """Return a random number that no other block or reference on this machine has."""
    return int.from_bytes(os.urandom(7), "little") + 1


class MappedBlocks:
    """Blocks by name, for as long as anything in this process uses their memory."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._names: dict[int, int] = {}
        self._live: dict[int, _MappedBlock] = {}
        self._ended: deque[_MappedBlock] = deque()

    def open(
        self, name: int, segment: Segment, offset: int, length: int, dropped: Callable[[], None]
    ) -> Block:
        """Return the block, and call `dropped()` when its last user is gone. `dropped` runs in a
        finalizer, so it must not take a lock or start anything, and it may be called twice."""
        block = self.get(name)
        if block is None:
            block = Block(segment, offset, length)
            # of two weak references, the later one is called back first
            second = weakref.ref(block.buffer, self._work_off)
            identity = id(block.buffer)
            # no calls from here on: a signal handler that raises must not leave half an entry
            mapped = _MappedBlock(block.buffer, self._ended.append)
            mapped.second, mapped.name, mapped.identity = second, name, identity
            mapped.segment, mapped.offset, mapped.length = segment, offset, length
            mapped.dropped = dropped
            self._names[mapped.identity] = name
            self._live[name] = mapped
        return block

    def when_dropped(self, name: int, dropped: Callable[[], None]) -> None:
        """Replace what is called when the last user of a block, which is in use, is gone."""
        self._live[name].dropped = dropped

    def get(self, name: int) -> Block | None:
        """Return the block, or None if it is not in use here."""
        mapped = self._live.get(name)
        buffer = mapped() if mapped else None
        if mapped is None or buffer is None:
            return None
        return Block(mapped.segment, mapped.offset, mapped.length, buffer)

    def buffers(self) -> list[object]:
        """Return the buffers of all blocks that are in use here."""
        buffers = [mapped() for mapped in self._live.copy().values()]
        return [buffer for buffer in buffers if buffer is not None]

    def name_of(self, buffer: object) -> int | None:
        """Return the name of the block that a buffer belongs to, or None."""
        return self._names.get(id(buffer))

    def release_pending(self) -> None:
        """Finish what an interrupted finalizer has left undone."""
        if self._ended:
            self._work_off(None)

    def _work_off(self, _: object) -> None:
        if os.getpid() != self._process:
            return  # a forked child drops what it inherited; the parent still has it
        while self._ended:
            mapped = self._ended[0]
            if self._live.get(mapped.name) is mapped:
                del self._live[mapped.name]
                self._names.pop(mapped.identity, None)
            mapped.dropped()
            # removed only now that it is done; another thread may have done the same meanwhile
            if self._ended and self._ended[0] is mapped:
                self._ended.popleft()


class _MappedBlock(weakref.ref[Buffer]):
    """A weak reference to the buffer of a block in use, and what describes the block."""

    #: the weak reference whose callback works off the queue
    second: object
    name: int
    identity: int
    segment: Segment
    offset: int
    length: int
    dropped: Callable[[], None]
