"""The blocks that this process made: who uses them, and when their memory is free again.

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
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from weft._core.messages import Attach, Attached, Gone, Pin, Pinned, Release, Unpin
from weft.engines import threads
from weft.engines.local.arena import WARM_SECONDS, Arenas, Range
from weft.engines.local.channel import Channel, Closed
from weft.engines.local.keeper_sockets import PAUSE, Sockets, open_bell
from weft.engines.local.polling import readable
from weft.engines.local.references import NO_PIN, Reference, Source, new_name
from weft.engines.local.segment import Block
from weft.engines.local.views import Views
from weft.errors import WeftError


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
                threads.start(thread)
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
