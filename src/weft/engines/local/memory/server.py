"""Blocks of segments, recycled.

Touching fresh pages costs as much as copying into them, so memory that is no
longer used stays warm for the next block of its kind: small blocks are cut
from arenas that many share (one descriptor each, not one per array), large
ones have a segment of their own. What nobody has wanted for `WARM_SECONDS`
goes back to the system (`Arenas.trim`, called by the keeper).

The blocks that this process made: who uses them, and when their memory is free again.

    here (the owner)                     another process
      refer: pin the block
                         -- Reference -->
                         <--- Attach ---   asks the keeper thread
      pin becomes lease  --- Attached -->  maps the descriptor, views it
                         <--- Unpin ----   or sees it already
                         <-- Release ---   has dropped its last view
      no view, pin, lease: reuse

Only the owner reuses a block's memory. A lease also ends with its connection, so a process that
dies holds nothing. When the owner ends, its memory lives on in the processes that map it and is
never reused.

The keeper thread runs only while there is something to keep: a block that others may ask for, or
large memory that goes back to the system when it is no longer used; and for some seconds after a
call that was sent an array: the next one finds it at the same address. Finalizers may run anywhere,
even while the lock is held, so they take none: they append to a queue and ring a bell.

The keeper thread's sockets, and the bell that wakes it.
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
    NO_PIN,
    Block,
    Extent,
    Reference,
    Segment,
    Source,
    Views,
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
    Pin,
    Pinned,
    Release,
    Unpin,
)
from weft.engines.local.processes.linux import readable, this_process, translated
from weft.errors import OutOfMemory, WeftError

#: blocks are cut in cache lines
LINE = 64

#: from here on a block has a segment of its own
LARGE = 32 << 20

#: arenas grow from the first to the second size as more is shared
_SMALLEST_ARENA, _LARGEST_ARENA = 1 << 20, 64 << 20

#: unused memory of at most this much is kept for good
_KEPT = 16 << 20

#: what a program does between two calls often takes more than a second, and seldom more than this
WARM_SECONDS = 5.0


class FreeList:
    """Which ranges of [0, size) are free. Pure: knows numbers only."""

    def __init__(self, size: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        """`taken` are the starts and lengths of the ranges that are in use."""
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
        """The start of a range now in use, from the tightest free one that fits; None if none."""
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
        """Return a range; neighbours grow together."""
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
        """Whether nothing is taken."""
        return self._starts == [0] and self._ends == [self.size]


@dataclass(eq=False)
class _Arena:
    number: int
    segment: Segment
    free: FreeList
    #: whether it was made for one block
    large: bool
    #: since when nothing of it is in use
    idle_since: float = field(default=0.0)


@dataclass(frozen=True)
class Range:
    """A part of a segment that has been given out."""

    arena: int
    segment: Segment
    offset: int
    length: int

    @property
    def extent(self) -> Extent:
        """The same in numbers, for other processes."""
        return Extent(self.arena, self.offset, self.length)


class Arenas:
    """All memory that this process has made for sharing. Not thread-safe: the keeper locks."""

    def __init__(self) -> None:
        self._arenas: dict[int, _Arena] = {}
        self._last = 0
        #: whether what is unused is kept for later
        self._warm = True

    def take(self, size: int) -> Range:
        """At least `size` bytes, warm if possible. Raises OutOfMemory, OutOfDescriptors."""
        self._warm = True
        length = whole_pages(size) if size >= LARGE else -(-max(size, 1) // LINE) * LINE
        for arena in self._candidates(length):
            offset = arena.free.take(length)
            if offset is not None:
                return Range(arena.number, arena.segment, offset, length)
        try:
            arena = self._grow(length)
        except OutOfMemory:
            if not self.clear():
                raise
            arena = self._grow(length)
        offset = arena.free.take(length)
        return Range(arena.number, arena.segment, offset or 0, length)

    def give(self, taken: Range) -> None:
        """Take a range back; it stays warm for a while."""
        arena = self._arenas[taken.arena]
        arena.free.give(taken.offset, taken.length)
        if arena.free.unused:
            arena.idle_since = time.monotonic()

    def recount(self, taken: Iterable[Range]) -> None:
        """Find out anew what is free, from what is in use, when counting was interrupted."""
        used: dict[int, list[tuple[int, int]]] = {number: [] for number in self._arenas}
        for one in taken:
            used[one.arena].append((one.offset, one.length))
        for number, arena in self._arenas.items():
            arena.free = FreeList(arena.segment.size, used[number])

    def clear(self) -> bool:
        """Return to the system all that is unused, now and until more is taken; whether there was
        any."""
        self._warm = False
        idle = [arena for arena in self._arenas.values() if arena.free.unused]
        for arena in idle:
            del self._arenas[arena.number]
        return bool(idle)

    def trim(self) -> float | None:
        """Return to the system what has been unused for long; seconds until the next time, if any.

        Arenas of up to `_KEPT` bytes in all are kept.
        """
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
        """Whether there is memory that should go back once it is unused."""
        return self.size > _KEPT

    @property
    def size(self) -> int:
        """Bytes reserved, in use or warm."""
        return sum(arena.segment.size for arena in self._arenas.values())

    def _candidates(self, length: int) -> list[_Arena]:
        """Arenas of the right kind, tightest first.

        A small block never goes into a large segment, which it would keep from being reused.
        """
        if length < LARGE:
            return [arena for arena in self._arenas.values() if not arena.large]
        fitting = (a for a in self._arenas.values() if a.large and a.segment.size <= 2 * length)
        return sorted(fitting, key=lambda arena: arena.segment.size)

    def _grow(self, length: int) -> _Arena:
        large = length >= LARGE
        segment = Segment.create(length if large else max(length, self._next_size()))
        self._last += 1
        arena = _Arena(self._last, segment, FreeList(segment.size), large)
        self._arenas[arena.number] = arena
        return arena

    def _next_size(self) -> int:
        shared = sum(a.segment.size for a in self._arenas.values() if not a.large)
        return max(_SMALLEST_ARENA, min(_LARGEST_ARENA, shared))


@dataclass(eq=False)
class _Kept:
    taken: Range
    pins: set[int] = field(default_factory=set)
    #: who else has it: connections, and the numbers of the requests that attached it
    leases: set[tuple[Channel, int]] = field(default_factory=set)
    #: whether others may ask for it
    referred: bool = False


class Keeper:
    """This process as the owner of blocks.

    `errand` is what the keeper thread does for the attachments: it returns whether there will be
    anything to do, and in how many seconds.
    """

    def __init__(self, views: Views, errand: Callable[[], tuple[bool, float | None]]) -> None:
        self._views = views
        self._errand = errand
        self._lock = threading.Lock()
        self._arenas = Arenas()
        self._kept: dict[int, _Kept] = {}
        #: whether what is free in the arenas is what is not kept: not where a handler has raised
        self._counted = True
        self._leases: dict[tuple[Channel, int], int] = {}
        self._dropped: deque[int] = deque()
        #: blocks of owners that have ended, by the pins that hold them here
        self._on_behalf: dict[int, Block] = {}
        #: blocks of others that this process has told somebody to ask it for
        self._handed_on: set[int] = set()
        self._server: Sockets | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._bell = -1
        #: until when another call may follow the last, by the same address
        self._expected_until = 0.0
        #: seconds until the keeper thread has something to do by itself
        self._due: float | None = None
        self._watched: list[int] = []
        #: the ends of forked children, and what they have inherited
        self._children: dict[socket.socket, list[object]] = {}

    def allocate(self, size: int) -> Block:
        """A new block of at least `size` bytes."""
        name = new_name()
        with self._lock:
            self._free_dropped()
            try:
                self._counted = False  # until the block is kept
                self._kept[name] = _Kept(self._arenas.take(size))
                self._counted = True
                if self._arenas.needs_trimming:
                    self._serve()
                return self._open(name)
            except BaseException:
                self._dropped.append(name)
                raise

    def owns(self, name: int) -> bool:
        return name in self._kept

    def refer(self, name: int) -> Reference:
        """Pin a block of this process."""
        with self._lock:
            source = self._serve()
            return Reference(name, self._pin(self._kept[name]), (source,))

    def mention(self, name: int) -> Reference:
        """A block of this process that is seen here for as long as the reference is of use."""
        with self._lock:
            source = self._serve()
            now = time.monotonic()
            if self._expected_until <= now:
                self.ring()  # it has to know when to wake
            self._expected_until = now + WARM_SECONDS
            self._kept[name].referred = True
            return Reference(name, NO_PIN, (source,), self._kept[name].taken.extent)

    def unpin(self, name: int, pin: int) -> None:
        """Give up a pin: nobody will attach what it stands for."""
        with self._lock:
            self._on_behalf.pop(pin, None)
            kept = self._kept.get(name)
            if kept is not None:
                kept.pins.discard(pin)
                self._free_if_unused(name)
        self.ring()  # the keeper thread may be needed no longer

    def refer_on_behalf(self, name: int, block: Block) -> Reference:
        """Pin a block here whose owner has ended."""
        with self._lock:
            source = self._serve()
            pin = new_name()
            self._on_behalf[pin] = block
            return Reference(name, pin, (source,))

    def hand_on(self, name: int) -> Source:
        """Where this process can be asked for a block of another owner, while it sees it itself."""
        with self._lock:
            self._handed_on.add(name)
            return self._serve()

    def start(self) -> None:
        """Have the keeper thread running, for the sake of its errand."""
        with self._lock:
            self._serve()

    def open(self, name: int, pin: int) -> Block | None:
        """A block of this process, from its own reference."""
        with self._lock:
            self._on_behalf.pop(pin, None)
            kept = self._kept.get(name)
            if kept is None:
                return self._views.get(name)
            block = self._open(name)
            kept.pins.discard(pin)
            return block

    def keep_for_child(self, child: socket.socket, buffers: list[object]) -> None:
        """Hold what a forked child has inherited until the child's end of `child` is closed."""
        with self._lock:
            self._children[child] = buffers
            self.ring()

    def clear(self) -> None:
        """Give back what is only kept warm."""
        with self._lock:
            self._expected_until = 0.0
            self._free_dropped()
            self._arenas.clear()
        self.ring()  # the keeper thread may be needed no longer

    def ring(self) -> None:
        """Have the keeper thread, if it runs, look for work. Safe in a finalizer."""
        if self._server is not None:
            os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """At exit: end the keeper thread, rather than have the interpreter cut it off."""
        self._stopping = True
        self.ring()
        if self._thread is not None:
            self._thread.join(1.0)

    def abandon(self) -> None:
        """In a forked child: stop listening in the parent's name."""
        if self._server is not None:
            self._server.close()

    # with the lock held

    def _open(self, name: int) -> Block:
        taken = self._kept[name].taken
        dropped = partial(self._drop, name)
        return self._views.open(name, taken.segment, taken.offset, taken.length, dropped)

    def _drop(self, name: int) -> None:
        """Called in a finalizer."""
        self._dropped.append(name)
        if time.monotonic() >= self._expected_until:  # else the next call frees it
            self.ring()

    def _free_dropped(self) -> None:
        """Reuse what has been dropped and nobody else has."""
        self._recount()
        for child in [child for child in self._children if readable(child.fileno())]:
            del self._children[child]
            child.close()
        while self._dropped:
            self._free_if_unused(self._dropped[0])
            self._dropped.popleft()

    def _free_if_unused(self, name: int) -> None:
        kept = self._kept.get(name)
        if kept and not (kept.pins or kept.leases or self._views.get(name)):
            self._recount()
            self._counted = False  # until its range is free
            del self._kept[name]
            self._arenas.give(kept.taken)
            self._counted = True

    def _recount(self) -> None:
        if not self._counted:
            self._arenas.recount(kept.taken for kept in self._kept.values())
            self._counted = True

    def _pin(self, kept: _Kept) -> int:
        pin = new_name()
        kept.pins.add(pin)
        kept.referred = True
        return pin

    def _serve(self) -> Source:
        """Have the keeper thread running."""
        if self._server is None:
            if self._bell < 0:
                # never closed: a finalizer may be about to ring it
                self._bell = open_bell()
            server = Sockets(self._bell)
            thread = threading.Thread(
                target=self._run, args=(server,), name="weft keeper", daemon=True
            )
            try:
                interruption.start(thread)
            except BaseException:
                server.close()
                raise
            self._server, self._thread = server, thread
        return self._server.source

    # the keeper thread

    def _run(self, server: Sockets) -> None:
        with self._lock:
            if self._server is not server:
                return  # a signal handler raised in who started this thread
        try:
            while self._tidy_up(server):
                for channel in server.wait(self._due, self._watched):
                    self._answer(channel, server)
        finally:
            with self._lock:
                if self._server is server:
                    self._server = None
                server.close()

    def _tidy_up(self, server: Sockets) -> bool:
        """Reuse, trim, run the errand; whether the thread is needed any longer."""
        wanted, soon = self._errand()
        with self._lock:
            self._free_dropped()
            due = self._arenas.trim()
            expected = max(0.0, self._expected_until - time.monotonic()) or None
            times = (one for one in (soon, due, expected) if one is not None)
            self._due = min(times, default=None)
            self._watched = [child.fileno() for child in self._children]
            needed = not self._stopping and (wanted or bool(expected) or self._needed())
            if not needed:
                self._server = None  # from now on a new one is started
                server.close()
            return needed

    def _needed(self) -> bool:
        self._handed_on = {name for name in self._handed_on if self._views.get(name)}
        referred = any(kept.referred for kept in self._kept.values())
        return bool(referred or self._on_behalf or self._handed_on or self._arenas.needs_trimming)

    def _answer(self, channel: Channel, server: Sockets) -> None:
        """One message of a process that has attached blocks or is about to."""
        try:
            message, _ = channel.receive(Attach, Pin, Release, Unpin)
            if isinstance(message, Unpin):
                return self.unpin(message.block, message.pin)
            with self._lock:
                if isinstance(message, Attach):
                    self._lend(channel, message)
                elif isinstance(message, Pin):
                    self._pin_for(channel, message)
                else:
                    self._end_leases([(channel, request) for request in message.requests])
        except Closed:
            server.forget(channel)
            with self._lock:
                self._end_leases([lease for lease in self._leases if lease[0] is channel])
        except (WeftError, OSError):
            # nonsense, or an answer that could not be sent: leases end with their connection only
            time.sleep(PAUSE)

    def _pin_for(self, channel: Channel, message: Pin) -> None:
        kept = self._kept.get(message.block)
        if kept is None:
            channel.send(Gone(message.request))
        else:
            channel.send(Pinned(message.request, self._pin(kept)))

    def _lend(self, channel: Channel, message: Attach) -> None:
        kept = self._kept.get(message.block)
        if kept is not None:
            taken = kept.taken
            kept.leases.add((channel, message.request))
            self._leases[channel, message.request] = message.block
            kept.pins.discard(message.pin)
            attached = Attached(
                message.request,
                message.block,
                taken.arena,
                taken.segment.size,
                taken.offset,
                taken.length,
            )
            channel.send(attached, [taken.segment.descriptor])
            return
        block = self._views.get(message.block)
        self._on_behalf.pop(message.pin, None)
        if block is None:
            channel.send(Gone(message.request))
        else:
            attached = Attached(
                message.request, message.block, 0, block.segment.size, block.offset, block.length
            )
            channel.send(attached, [block.segment.descriptor])

    def _end_leases(self, leases: list[tuple[Channel, int]]) -> None:
        for lease in leases:
            name = self._leases.pop(lease, None)
            if name is not None:
                self._kept[name].leases.discard(lease)
                self._free_if_unused(name)


#: seconds between two tries of something that is impossible just now
PAUSE = 0.02


class Sockets:
    """Where others ask for blocks, and those who have asked."""

    def __init__(self, bell: int) -> None:
        process = this_process()
        self.source = Source(f"{os.geteuid()}/{os.urandom(8).hex()}", process.pid, process.start)
        self._listener = Listener(self.source.address)
        self._bell = bell
        self.channels: dict[int, Channel] = {}

    def wait(self, seconds: float | None, watched: list[int]) -> list[Channel]:
        """Channels with something to read. Returns early for the bell and the watched."""
        poll = select.poll()
        for descriptor in (self._listener.fileno(), self._bell, *watched, *self.channels):
            poll.register(descriptor, select.POLLIN)
        longest = None if seconds is None else max(0.0, seconds) * 1000 + 1
        ready = [fd for fd, _ in poll.poll(longest)]
        if self._bell in ready:
            os.eventfd_read(self._bell)
        if self._listener.fileno() in ready:
            try:
                channel = self._listener.accept()
            except (WeftError, OSError):  # no descriptor is left: the caller waits until one is
                time.sleep(PAUSE)
                channel = None
            if channel is not None:
                self.channels[channel.fileno()] = channel
        return [self.channels[fd] for fd in ready if fd in self.channels]

    def forget(self, channel: Channel) -> None:
        self.channels.pop(channel.fileno(), None)
        channel.close()

    def close(self) -> None:
        self._listener.close()
        for channel in list(self.channels.values()):
            self.forget(channel)


def open_bell() -> int:
    """An eventfd: whoever adds to it wakes the thread."""
    try:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise translated(error) from error
