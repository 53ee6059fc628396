"""Memory that several processes see.

A segment is an anonymous file (memfd) and its mapping here. It has no name, so
it cannot outlive its processes; its descriptor travels over Unix sockets. Its
pages are reserved when it is made, after a look at what the machine can give:
a full machine is an OutOfMemory here and not a SIGBUS or an OOM kill later.

Segments have huge pages wherever a whole one fits, and begin at an address where
one can begin. The kernel makes them where it is asked to (MADV_COLLAPSE), out of
a single small page each, which takes a tenth of the time that small pages take;
those that it does not make stay small.

What stands for a block in another process.

Which blocks this process sees, and when it has stopped seeing one.

The end of a view is told by a weak reference on its buffer. A signal handler
may raise inside any callback that is written in Python, and what such a
callback had still to do would be lost; so the first callback is the `append`
of a queue, which no handler can interrupt, and the second works the queue off.
Should that one be interrupted, the next to come does its work, or `catch_up`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from weft.engines.local.processes.linux import make_huge, map_over, translated
from weft.engines.refusals import validate_memory

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
        validate_memory(
            "shared memory", size, "share less, or drop shared arrays that are not used"
        )
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


NO_PIN = 0


@dataclass(frozen=True)
class Source:
    """A keeper's address, and the process behind it."""

    address: str
    pid: int
    start: int

    def __reduce__(self) -> tuple[Any, ...]:
        """In a third of the time that dataclasses take."""
        return Source, (self.address, self.pid, self.start)


class Extent(NamedTuple):
    """Where a block lies in its owner's segments."""

    segment: int
    offset: int
    length: int


@dataclass(frozen=True)
class Reference:
    """What stands for a block in another process."""

    block: int
    #: keeps the block until the reference is attached for the first time; NO_PIN: whoever made the
    #: reference keeps it
    pin: int
    #: whom to ask: the owner, then who sent it
    sources: tuple[Source, ...]
    #: for who has the owner's segment mapped already; not in `encode`, whose readers have to ask
    extent: Extent | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Reference, (self.block, self.pin, self.sources, self.extent)

    def encode(self) -> bytes:
        sources = [asdict(source) for source in self.sources]
        return json.dumps({"block": self.block, "pin": self.pin, "sources": sources}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Reference:
        values = json.loads(data)
        sources = tuple(Source(**source) for source in values["sources"])
        return cls(values["block"], values["pin"], sources)


def new_name() -> int:
    """A number that no other block or pin on this machine has."""
    return int.from_bytes(os.urandom(7), "little") + 1


Buffer = ctypes.Array[ctypes.c_ubyte]


class Views:
    """Blocks by name, for as long as anything here uses their memory."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._names: dict[int, int] = {}
        self._live: dict[int, _View] = {}
        self._ended: deque[_View] = deque()

    def open(
        self, name: int, segment: Segment, offset: int, length: int, dropped: Callable[[], None]
    ) -> Block:
        """The block, seen from now on; `dropped()` is called when its last user is gone.

        It is called in a finalizer, so it must not take a lock or start anything, and it may be
        called twice.
        """
        block = self.get(name)
        if block is None:
            block = Block(segment, offset, length)
            # the later of two references is called back first
            second = weakref.ref(block.buffer, self._work_off)
            identity = id(block.buffer)
            # from here on there is no call: a handler that raises must not leave it half described
            view = _View(block.buffer, self._ended.append)
            view.second, view.name, view.identity = second, name, identity
            view.segment, view.offset, view.length = segment, offset, length
            view.dropped = dropped
            self._names[view.identity] = name
            self._live[name] = view
        return block

    def when_dropped(self, name: int, dropped: Callable[[], None]) -> None:
        """Have something else called when the last user of a block, which is in use, is gone."""
        self._live[name].dropped = dropped

    def get(self, name: int) -> Block | None:
        """The block, if it is in use here."""
        view = self._live.get(name)
        buffer = view() if view else None
        if view is None or buffer is None:
            return None
        return Block(view.segment, view.offset, view.length, buffer)

    def buffers(self) -> list[object]:
        """Everything that is in use here."""
        found = [view() for view in self._live.copy().values()]
        return [buffer for buffer in found if buffer is not None]

    def name_of(self, buffer: object) -> int | None:
        return self._names.get(id(buffer))

    def catch_up(self) -> None:
        """Do what an interrupted finalizer has left, if one has."""
        if self._ended:
            self._work_off(None)

    def _work_off(self, _: object) -> None:
        if os.getpid() != self._process:
            return  # a forked child drops what it inherited; the parent still has it
        while self._ended:
            view = self._ended[0]
            if self._live.get(view.name) is view:
                del self._live[view.name]
                self._names.pop(view.identity, None)
            view.dropped()
            # only now is it done; another thread may have done the same meanwhile
            if self._ended and self._ended[0] is view:
                self._ended.popleft()


class _View(weakref.ref[Buffer]):
    second: object
    name: int
    identity: int
    segment: Segment
    offset: int
    length: int
    dropped: Callable[[], None]
