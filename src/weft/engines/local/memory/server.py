"""The blocks that this process made: allocation, reference counts, and the thread that serves them.

    here (the owner)                            another process
      export: add an in-flight reference
                          -- BlockHandle -->
                          <--- Attach -----       asks the segment server
      in-flight becomes
      remote reference    ---- Attached --->      maps the descriptor, uses the block
                          < ReleaseInFlight       or has the block mapped already
                          <--- Release ----       has dropped its last view of the block
      no view, in-flight or remote reference: reuse

`SegmentServer`: only the owner reuses a block's memory. A remote reference also ends with its
connection, so a process that dies holds nothing. When the owner ends, its memory lives on in the
processes that map it and is never reused.

The server's thread runs only while it is needed: for a block that others may ask for, for large
memory that goes back to the system when nobody uses it any longer, and for some seconds after a
call that was sent an array, so that the next call finds the server at the same address. Finalizers
may run anywhere, even while the lock is held, so they take none: they append to a queue and wake
the thread.

`Arenas`: blocks of segments, recycled. Touching fresh pages costs as much as copying into them, so
memory that is no longer used stays warm for the next block of its kind: small blocks are cut from
arenas that many share (one descriptor each, not one per array), large ones have a segment of their
own. What nobody has used for `WARM_SECONDS` goes back to the system.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from weft.engines import interruption
from weft.engines.local.memory.segment import (
    NO_REFERENCE,
    Block,
    BlockHandle,
    BlockRange,
    MappedBlocks,
    Segment,
    ServerAddress,
    new_name,
    whole_pages,
)
from weft.engines.local.processes.channel import (
    Attach,
    Attached,
    Channel,
    Closed,
    Gone,
    Listener,
    Release,
    ReleaseInFlight,
    Retain,
    Retained,
)
from weft.engines.local.processes.linux import readable, this_process, translate_os_error
from weft.errors import OutOfMemory, WeftError

#: what a program does between two calls often takes more than a second, and seldom more than this
WARM_SECONDS = 5.0
#: seconds between two tries of something that is impossible just now
PAUSE = 0.02
#: blocks are cut in cache lines
LINE = 64
#: from this size on a block has a segment of its own
LARGE = 32 << 20
#: arenas grow from the first to the second size as more is shared
_SMALLEST_ARENA, _LARGEST_ARENA = 1 << 20, 64 << 20
#: unused memory of at most this much is kept for good
_KEPT = 16 << 20


class SegmentServer:
    """This process as the owner of blocks. The thread calls `idle_hook` for this process's segment
    client; it returns whether it will have anything to do, and in how many seconds."""

    def __init__(
        self, mapped: MappedBlocks, idle_hook: Callable[[], tuple[bool, float | None]]
    ) -> None:
        self._mapped = mapped
        self._idle_hook = idle_hook
        self._lock = threading.Lock()
        self._arenas = Arenas()
        self._entries: dict[int, BlockEntry] = {}
        #: whether the arenas' free lists agree with the entries: not after an interrupted change
        self._free_list_valid = True
        #: the block of each remote reference
        self._remote_references: dict[tuple[Channel, int], int] = {}
        self._dropped: deque[int] = deque()
        #: blocks of owners that have ended, by the in-flight references that hold them here
        self._orphans: dict[int, Block] = {}
        #: blocks of other owners that this process has named itself as a server of
        self._forwarded: set[int] = set()
        self._sockets: ServerSockets | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._wake_up_descriptor = -1
        #: until when the next call, which needs the same address, may follow the last
        self._expected_until = 0.0
        #: seconds until the thread has something to do by itself
        self._due: float | None = None
        self._watched: list[int] = []
        #: this process's ends of sockets to forked children, and the buffers that these inherited
        self._children: dict[socket.socket, list[object]] = {}

    def allocate(self, size: int) -> Block:
        """Return a new block of at least `size` bytes. Raises OutOfMemory, OutOfDescriptors."""
        name = new_name()
        with self._lock:
            self._free_dropped()
            try:
                self._free_list_valid = False  # until the block has an entry
                self._entries[name] = BlockEntry(self._arenas.take(size))
                self._free_list_valid = True
                if self._arenas.needs_trimming:
                    self._serve()
                return self._open(name)
            except BaseException:
                self._dropped.append(name)
                raise

    def owns(self, name: int) -> bool:
        """Return whether this process made the block and has not freed it."""
        return name in self._entries

    def export(self, name: int, *, owned: bool) -> BlockHandle:
        """Return a handle to a block of this process. If `owned`, the handle has an in-flight
        reference. Otherwise it is valid for as long as the block is in use here."""
        with self._lock:
            address = self._serve()
            entry = self._entries[name]
            if owned:
                return BlockHandle(name, self._add_in_flight(entry), (address,))
            now = time.monotonic()
            if self._expected_until <= now:
                self.wake()  # the thread has to work out anew how long it sleeps
            self._expected_until = now + WARM_SECONDS
            entry.exported, part = True, entry.allocation
            where = BlockRange(part.arena, part.offset, part.length)
            return BlockHandle(name, NO_REFERENCE, (address,), where)

    def release(self, name: int, in_flight: int) -> None:
        """End an in-flight reference: nobody will attach its handle."""
        with self._lock:
            self._orphans.pop(in_flight, None)
            entry = self._entries.get(name)
            if entry is not None:
                entry.in_flight.discard(in_flight)
                self._free_if_unused(name)
        self.wake()  # the thread may no longer be needed

    def forward(self, name: int) -> ServerAddress:
        """Return this server's address for a block of another owner. The server answers for the
        block while it is in use here."""
        with self._lock:
            self._forwarded.add(name)
            return self._serve()

    def forward_orphan(self, name: int, block: Block) -> BlockHandle:
        """Return a handle, with an in-flight reference, to a block whose owner has ended."""
        with self._lock:
            address = self._serve()
            in_flight = new_name()
            self._orphans[in_flight] = block
            return BlockHandle(name, in_flight, (address,))

    def start(self) -> None:
        """Start the thread, which the idle hook needs, unless it runs."""
        with self._lock:
            self._serve()

    def open(self, name: int, in_flight: int) -> Block | None:
        """Return the block of a handle that this process exported; None if it is gone."""
        with self._lock:
            self._orphans.pop(in_flight, None)
            entry = self._entries.get(name)
            if entry is None:
                return self._mapped.get(name)
            block = self._open(name)
            entry.in_flight.discard(in_flight)
            return block

    def keep_for_child(self, child: socket.socket, buffers: list[object]) -> None:
        """Hold what a forked child has inherited until the child's end of `child` is closed."""
        with self._lock:
            self._children[child] = buffers
            self.wake()

    def clear(self) -> None:
        """Return the memory that is only kept warm to the system."""
        with self._lock:
            self._expected_until = 0.0
            self._free_dropped()
            self._arenas.clear()
        self.wake()  # the thread may no longer be needed

    def wake(self) -> None:
        """Make the thread, if it runs, look for work. Safe in a finalizer."""
        if self._sockets is not None:
            os.eventfd_write(self._wake_up_descriptor, 1)

    def stop(self) -> None:
        """End the thread at exit, before the interpreter cuts it off."""
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join(1.0)

    def abandon(self) -> None:
        """Close the parent's sockets in a forked child."""
        if self._sockets is not None:
            self._sockets.close()

    # with the lock held

    def _open(self, name: int) -> Block:
        part, dropped = self._entries[name].allocation, partial(self._drop, name)
        return self._mapped.open(name, part.segment, part.offset, part.length, dropped)

    def _drop(self, name: int) -> None:
        """Note that the last view here is gone. Called in a finalizer, without the lock."""
        self._dropped.append(name)
        if time.monotonic() >= self._expected_until:  # else the next call frees it
            self.wake()

    def _free_dropped(self) -> None:
        """Free the blocks that were dropped here and that nobody else holds."""
        self._rebuild_free_list()
        for child in [child for child in self._children if readable(child.fileno())]:
            del self._children[child]
            child.close()
        while self._dropped:
            self._free_if_unused(self._dropped[0])
            self._dropped.popleft()

    def _free_if_unused(self, name: int) -> None:
        entry = self._entries.get(name)
        if entry and not (entry.in_flight or entry.remote or self._mapped.get(name)):
            self._rebuild_free_list()
            self._free_list_valid = False  # until its range is free
            del self._entries[name]
            self._arenas.give(entry.allocation)
            self._free_list_valid = True

    def _rebuild_free_list(self) -> None:
        """Rebuild the free lists if a change of them was interrupted."""
        if not self._free_list_valid:
            self._arenas.rebuild_free_list(entry.allocation for entry in self._entries.values())
            self._free_list_valid = True

    def _add_in_flight(self, entry: BlockEntry) -> int:
        in_flight = new_name()
        entry.in_flight.add(in_flight)
        entry.exported = True
        return in_flight

    def _serve(self) -> ServerAddress:
        """Start the thread unless it runs. Return the server's address."""
        if self._sockets is None:
            if self._wake_up_descriptor < 0:
                # never closed: a finalizer may be about to write to it
                self._wake_up_descriptor = _open_eventfd()
            sockets = ServerSockets(self._wake_up_descriptor)
            thread = threading.Thread(
                target=self._run, args=(sockets,), name="weft segment server", daemon=True
            )
            try:
                interruption.start(thread)
            except BaseException:
                sockets.close()
                raise
            self._sockets, self._thread = sockets, thread
        return self._sockets.address

    # the server's thread

    def _run(self, sockets: ServerSockets) -> None:
        with self._lock:
            if self._sockets is not sockets:
                return  # a signal handler raised in the thread that started this one
        try:
            while self._tidy_up(sockets):
                for channel in sockets.wait(self._due, self._watched):
                    self._answer(channel, sockets)
        finally:
            with self._lock:
                if self._sockets is sockets:
                    self._sockets = None
                sockets.close()

    def _tidy_up(self, sockets: ServerSockets) -> bool:
        """Free, trim, call the idle hook. Return whether the thread is still needed."""
        hook_needed, hook_due = self._idle_hook()
        with self._lock:
            self._free_dropped()
            trim_due = self._arenas.trim()
            expected = max(0.0, self._expected_until - time.monotonic()) or None
            times = (due for due in (hook_due, trim_due, expected) if due is not None)
            self._due = min(times, default=None)
            self._watched = [child.fileno() for child in self._children]
            needed = not self._stopping and (hook_needed or bool(expected) or self._needed())
            if not needed:
                self._sockets = None  # from now on `_serve` starts a new thread
                sockets.close()
            return needed

    def _needed(self) -> bool:
        self._forwarded = {name for name in self._forwarded if self._mapped.get(name)}
        exported = any(entry.exported for entry in self._entries.values())
        return bool(exported or self._orphans or self._forwarded or self._arenas.needs_trimming)

    def _answer(self, channel: Channel, sockets: ServerSockets) -> None:
        """Handle one message of a process that has attached blocks or is about to."""
        try:
            message, _ = channel.receive(Attach, Retain, Release, ReleaseInFlight)
            if isinstance(message, ReleaseInFlight):
                return self.release(message.block, message.in_flight)
            with self._lock:
                if isinstance(message, Attach):
                    self._attach_for(channel, message)
                elif isinstance(message, Retain):
                    self._retain_for(channel, message)
                else:
                    self._end_remote([(channel, request) for request in message.requests])
        except Closed:
            sockets.forget(channel)
            with self._lock:
                self._end_remote([held for held in self._remote_references if held[0] is channel])
        except (WeftError, OSError):
            # an invalid message, or an answer that could not be sent: the connection stays, as
            # closing it would end its remote references
            time.sleep(PAUSE)

    def _retain_for(self, channel: Channel, message: Retain) -> None:
        entry = self._entries.get(message.block)
        if entry is None:
            channel.send(Gone(message.request))
        else:
            channel.send(Retained(message.request, self._add_in_flight(entry)))

    def _attach_for(self, channel: Channel, message: Attach) -> None:
        request, name, in_flight = message
        entry, arena = self._entries.get(name), 0
        part: Allocation | Block | None = self._mapped.get(name)
        if entry is None:
            self._orphans.pop(in_flight, None)
        else:
            part, arena = entry.allocation, entry.allocation.arena
            entry.remote.add((channel, request))
            self._remote_references[channel, request] = name
            entry.in_flight.discard(in_flight)
        if part is None:
            channel.send(Gone(request))
        else:
            attached = Attached(request, name, arena, part.segment.size, part.offset, part.length)
            channel.send(attached, [part.segment.descriptor])

    def _end_remote(self, references: list[tuple[Channel, int]]) -> None:
        for reference in references:
            name = self._remote_references.pop(reference, None)
            if name is not None:
                self._entries[name].remote.discard(reference)
                self._free_if_unused(name)


@dataclass(eq=False)
class BlockEntry:
    """A block of this process, and the references that others have to it."""

    allocation: Allocation
    #: the in-flight references: of handles that are exported and not attached yet
    in_flight: set[int] = field(default_factory=set)
    #: the remote references: a connection, and the number of the request that attached the block
    remote: set[tuple[Channel, int]] = field(default_factory=set)
    #: whether others may ask for it
    exported: bool = False


class ServerSockets:
    """The listener at which others ask for blocks, and their connections."""

    def __init__(self, wake_up_descriptor: int) -> None:
        process = this_process()
        name = f"{os.geteuid()}/{os.urandom(8).hex()}"
        self.address = ServerAddress(name, process.pid, process.start)
        self._listener = Listener(self.address.socket)
        self._wake_up_descriptor = wake_up_descriptor
        self.channels: dict[int, Channel] = {}

    def wait(self, seconds: float | None, watched: list[int]) -> list[Channel]:
        """Wait for messages. Return the channels that have one. Returns early when woken, and when
        a `watched` descriptor is readable."""
        poll = select.poll()
        always = (self._listener.fileno(), self._wake_up_descriptor)
        for descriptor in (*always, *watched, *self.channels):
            poll.register(descriptor, select.POLLIN)
        longest = None if seconds is None else max(0.0, seconds) * 1000 + 1
        ready = [descriptor for descriptor, _ in poll.poll(longest)]
        if self._wake_up_descriptor in ready:
            os.eventfd_read(self._wake_up_descriptor)
        if self._listener.fileno() in ready:
            try:
                channel = self._listener.accept()
            except (WeftError, OSError):  # no descriptor is left: the caller waits until one is
                time.sleep(PAUSE)
                channel = None
            if channel is not None:
                self.channels[channel.fileno()] = channel
        return [self.channels[descriptor] for descriptor in ready if descriptor in self.channels]

    def forget(self, channel: Channel) -> None:
        """Close a connection."""
        self.channels.pop(channel.fileno(), None)
        channel.close()

    def close(self) -> None:
        """Close the listener and all connections."""
        self._listener.close()
        for channel in list(self.channels.values()):
            self.forget(channel)


def _open_eventfd() -> int:
    try:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise translate_os_error(error) from error


class Arenas:
    """All memory that this process has made for sharing. Not thread-safe: the server locks."""

    def __init__(self) -> None:
        self._arenas: dict[int, _Arena] = {}
        self._last = 0
        #: whether unused memory is kept for later
        self._warm = True

    def take(self, size: int) -> Allocation:
        """Allocate `size` bytes or more, warm if possible. Raises OutOfMemory, OutOfDescriptors."""
        self._warm = True
        length = whole_pages(size) if size >= LARGE else -(-max(size, 1) // LINE) * LINE
        for arena in self._candidates(length):
            offset = arena.free.take(length)
            if offset is not None:
                return Allocation(arena.number, arena.segment, offset, length)
        try:
            arena = self._grow(length)
        except OutOfMemory:
            if not self.clear():
                raise
            arena = self._grow(length)
        offset = arena.free.take(length)
        return Allocation(arena.number, arena.segment, offset or 0, length)

    def give(self, allocation: Allocation) -> None:
        """Free an allocation; its memory stays warm for a while."""
        arena = self._arenas[allocation.arena]
        arena.free.give(allocation.offset, allocation.length)
        if arena.free.unused:
            arena.idle_since = time.monotonic()

    def rebuild_free_list(self, allocations: Iterable[Allocation]) -> None:
        """Compute what is free from what is in use, after an interrupted change."""
        used: dict[int, list[tuple[int, int]]] = {number: [] for number in self._arenas}
        for allocation in allocations:
            used[allocation.arena].append((allocation.offset, allocation.length))
        for number, arena in self._arenas.items():
            arena.free = FreeList(arena.segment.size, used[number])

    def clear(self) -> bool:
        """Return unused memory to the system, until more is taken. Return whether there was any."""
        self._warm = False
        idle = [arena for arena in self._arenas.values() if arena.free.unused]
        for arena in idle:
            del self._arenas[arena.number]
        return bool(idle)

    def trim(self) -> float | None:
        """Return to the system what has been unused for `WARM_SECONDS`. Returns the seconds until
        there is more to return, or None. Arenas of up to `_KEPT` bytes in all are kept."""
        now = time.monotonic()
        idle = sorted(
            (a for a in self._arenas.values() if a.free.unused), key=lambda a: a.segment.size
        )
        kept, next_time = 0, None
        for arena in idle:
            kept += arena.segment.size
            due = arena.idle_since + WARM_SECONDS - now if self._warm else 0.0
            if kept > _KEPT and due <= 0:
                del self._arenas[arena.number]
            elif kept > _KEPT:
                next_time = due if next_time is None else min(next_time, due)
        return next_time

    @property
    def needs_trimming(self) -> bool:
        """Return whether there is memory that should go back to the system once it is unused."""
        return self.size > _KEPT

    @property
    def size(self) -> int:
        """Return the bytes reserved, in use or warm."""
        return sum(arena.segment.size for arena in self._arenas.values())

    def _candidates(self, length: int) -> list[_Arena]:
        """List the arenas of the right kind, tightest first. A small block never goes into a large
        segment, which it would keep from being reused."""
        if length < LARGE:
            return [arena for arena in self._arenas.values() if not arena.large]
        fitting = (a for a in self._arenas.values() if a.large and a.segment.size <= 2 * length)
        return sorted(fitting, key=lambda arena: arena.segment.size)

    def _grow(self, length: int) -> _Arena:
        large = length >= LARGE
        if not large:
            shared = sum(a.segment.size for a in self._arenas.values() if not a.large)
            length = max(length, _SMALLEST_ARENA, min(_LARGEST_ARENA, shared))
        segment = Segment.create(length)
        self._last += 1
        arena = _Arena(self._last, segment, FreeList(segment.size), large)
        self._arenas[arena.number] = arena
        return arena


@dataclass(frozen=True)
class Allocation:
    """A part of an arena's segment that is in use."""

    arena: int
    segment: Segment
    offset: int
    length: int


@dataclass(eq=False)
class _Arena:
    """A segment of which blocks are cut."""

    number: int
    segment: Segment
    free: FreeList
    #: whether it was made for one block
    large: bool
    #: since when nothing of it is in use
    idle_since: float = field(default=0.0)


class FreeList:
    """Tell which ranges of [0, size) are free. Pure: knows numbers only."""

    def __init__(self, size: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        """Begin with the ranges in `taken`, by start and length, in use."""
        self.size = size
        self._starts: list[int] = []
        self._ends: list[int] = []
        end = 0
        for start, length in (*sorted(taken), (size, 0)):
            if end < start:
                self._starts.append(end)
                self._ends.append(start)
            end = start + length

    def take(self, length: int) -> int | None:
        """Take a range out of the tightest free one that fits; return its start, or None."""
        fitting = [
            (end - start, index)
            for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True))
            if end - start >= length
        ]
        if not fitting:
            return None
        _, index = min(fitting)
        start = self._starts[index]
        self._starts[index] += length
        if self._starts[index] == self._ends[index]:
            del self._starts[index], self._ends[index]
        return start

    def give(self, start: int, length: int) -> None:
        """Free a range and join it with its free neighbours."""
        end = start + length
        index = bisect_left(self._starts, start)
        joins_next = index < len(self._starts) and self._starts[index] == end
        joins_last = index > 0 and self._ends[index - 1] == start
        if joins_last and joins_next:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_last:
            self._ends[index - 1] = end
        elif joins_next:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    @property
    def unused(self) -> bool:
        """Return whether nothing is taken."""
        return self._starts == [0] and self._ends == [self.size]
