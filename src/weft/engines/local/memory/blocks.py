"""The blocks that this process got from others. The asking side of `keeper.py`.

A block is leased: its owner was asked for it, and is told when it is no longer in use here. One
that comes with a call can be borrowed where its segment is mapped already: whoever sent it keeps it
until the answer, so nobody is asked or told. What is still in use by then is leased first.

Blocks of shared memory as the rest of weft sees them: make, refer to, attach.

    block = allocate(size)         memory in use while block.buffer lives
    reference = refer(buffer)      what to send to another process in its place, pinned
    reference = mention(buffer)    the same, of use while the buffer lives here
    block = attach(reference)      the same memory there, not a copy

    with borrowing(): ...          what is attached meanwhile stays until its sender has an answer:
    lease_borrowed()               most costs no message; before the answer, what is still in use
                                   becomes this process's too

`keeper.py` looks after the blocks that this process made, `attachments.py`
after those it got from others. This module holds the one of each that a
process has, and starts anew in a forked child.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weft import faults
from weft._core import arguments
from weft._core.launch import Process
from weft.engines.local.memory.segment import NO_PIN, Block, Reference, Segment, Source, Views
from weft.engines.local.memory.server import WARM_SECONDS, Keeper
from weft.engines.local.processes.channel import (
    Attach,
    Attached,
    Channel,
    Closed,
    Gone,
    Message,
    Pin,
    Pinned,
    Release,
    Unpin,
)
from weft.engines.local.processes.linux import open_pidfd, this_process
from weft.errors import InvalidValue, SegmentGone, Stalled

#: seconds between two tries of something that is impossible just now
_PAUSE = 0.02

#: in one message
_MOST_RELEASES = 1000

#: messages that a socket certainly takes while nobody reads them (some 280 were seen to fit)
_FIT_INTO_A_SOCKET = 100

#: after so many messages that are not answered comes one that is: then they have been read
_MOST_UNREAD = 50


@dataclass(eq=False)
class _Owner:
    """A keeper in another process, and what this one has from it."""

    source: Source
    channel: Channel
    pidfd: int
    segments: weakref.WeakValueDictionary[int, Segment] = field(
        default_factory=weakref.WeakValueDictionary
    )
    #: requests whose leases have ended but were not given back yet; a dict, because an item is set
    #: without a call, between which and the next no signal handler can come
    ended: dict[int, bool] = field(default_factory=dict)
    #: messages since the last answer, which the owner may not have read yet
    unread: int = 0

    def release(self, request: int) -> None:
        """End a lease, now or with the next one. Safe in a finalizer; twice does no harm."""
        self.ended[request] = True
        self.send_releases()

    def send_releases(self) -> bool:
        """Whether the socket took them."""
        requests = list(self.ended.copy())[:_MOST_RELEASES]
        if self.channel.send_now(Release(requests)):
            self.unread += 1
            for request in requests:
                self.ended.pop(request, None)
            return True
        return False

    def close(self) -> None:
        self.channel.close()
        os.close(self.pidfd)


class Attachments:
    """This process as a user of other processes' blocks."""

    def __init__(self, views: Views) -> None:
        self._views = views
        #: what tells the keeper thread that there may be something for it to do
        self.ring: Callable[[], None] = lambda: None
        self._lock = threading.Lock()  # held while another process answers
        self._owners: dict[Source, _Owner] = {}
        #: where each block came from
        self._origins: dict[int, Source] = {}
        #: one entry for each lease that this process has
        self._leases: dict[int, Source] = {}
        #: blocks without a lease, and whose they are
        self._borrowed: dict[int, _Owner] = {}
        #: mappings, and when they were last wanted: making one anew costs as much as to read the
        #: memory, and owners use theirs again
        self._warm: dict[Segment, float] = {}
        self._numbers = itertools.count(1)

    def attach(
        self, name: int, pin: int, source: Source, timeout: float | None = None
    ) -> Block | None:
        """Map a block of another process; None if it no longer has it, or has ended."""
        with self._lock:
            known = self._known(name, pin, source)
            if known is not None:
                return known
            owner, request = None, next(self._numbers)
            try:
                owner = self._owner(source)
                answer, descriptors = self._ask(owner, Attach(request, name, pin), timeout)
                if isinstance(answer, Gone):
                    return None
                self._leases[request] = source
                return self._map(owner, answer, descriptors, request)
            except Closed:
                return self._views.get(name)  # its memory may still be mapped here
            except BaseException:
                if owner is not None:  # it may have answered, and an interrupt lost the answer
                    owner.ended[request] = True  # first, should another interrupt come now
                    self._end_lease(request, owner)
                raise

    def borrow(self, reference: Reference) -> Block | None:
        """A block whose segment is mapped here already, without a word to its owner; None if it is
        not. It is of use for as long as the reference is; by then `lease_borrowed` is called."""
        extent, source = reference.extent, reference.sources[0]
        if extent is None:
            return None
        with self._lock:
            owner = self._owners.get(source)
            segment = owner.segments.get(extent.segment) if owner is not None else None
            if owner is None or segment is None:
                return None
            known = self._views.get(reference.block)
            if known is not None:
                return known
            self._warm[segment] = time.monotonic()
            self._borrowed[reference.block] = owner
            self._origins[reference.block] = source
            return self._views.open(
                reference.block, segment, extent.offset, extent.length, lambda: None
            )

    def lease_borrowed(self, timeout: float | None = None) -> None:
        """Lease what was borrowed and is still in use here. Raises SegmentGone, Stalled."""
        self._views.catch_up()  # there may be no other finalizer for long
        while self._borrowed:
            with self._lock:
                if not self._borrowed:
                    return  # another thread has done it
                name, owner = self._borrowed.popitem()
                block = self._views.get(name)  # held, so that it is not dropped meanwhile
                if block is None:
                    self._origins.pop(name, None)
                    continue
                try:
                    self._lease(name, owner, timeout)
                except Stalled:
                    self._borrowed[name] = owner
                    raise

    def _lease(self, name: int, owner: _Owner, timeout: float | None) -> None:
        """Have a lease of a block that is in use here."""
        request = next(self._numbers)
        try:
            answer, descriptors = self._ask(owner, Attach(request, name, NO_PIN), timeout)
        except Closed:
            return  # it has ended: its memory is nobody's to use again
        if isinstance(answer, Gone):
            raise SegmentGone(
                f"block {name} of process {owner.source.pid}, an array of this call, was given up "
                "before the call was over; run the call again"
            )
        os.close(descriptors[0])
        self._leases[request] = owner.source
        self._views.when_dropped(name, partial(self._drop, name, request, owner))

    def _known(self, name: int, pin: int, source: Source) -> Block | None:
        """A block that this process has from that source already; the owner, which may be busy, is
        told and not asked."""
        block, owner = self._views.get(name), self._owners.get(source)
        if block is None or owner is None or self._origins.get(name) != source:
            return None
        if pin == NO_PIN:
            return block
        if owner.unread >= _MOST_UNREAD or not owner.channel.send_now(Unpin(name, pin)):
            return None
        owner.unread += 1
        return block

    def refer(self, name: int, keeper: Keeper) -> Reference:
        """Pin a block at its owner; if that has ended, hand on the memory from here."""
        block = self._views.get(name)
        if block is None:
            raise SegmentGone(f"block {name} is no longer attached here")
        with self._lock:
            source = self._origins.get(name)
            if source is None:  # a view of before was dropped while this one was made
                return keeper.refer_on_behalf(name, block)
            try:
                answer, _ = self._ask(self._owner(source), Pin(next(self._numbers), name))
            except Closed:
                return keeper.refer_on_behalf(name, block)
        if isinstance(answer, Gone):  # handed on by somebody who is not its owner
            return keeper.refer_on_behalf(name, block)
        return Reference(name, answer.pin, (source, keeper.hand_on(name)))

    def mention(self, name: int, keeper: Keeper) -> Reference:
        """A block that is seen here for as long as the reference is of use; its owner need not
        know, as it has lent it to this process."""
        source = self._origins.get(name)
        known = () if source is None else (source,)
        return Reference(name, NO_PIN, (*known, keeper.hand_on(name)))

    @property
    def need_thread(self) -> bool:
        """Whether there is something that the keeper thread has to do in time."""
        return bool(self._warm) or self._crowded

    @property
    def _crowded(self) -> bool:
        """Whether there are so many leases that their ends might not fit into a socket at once,
        beside what is there already."""
        unread = max((owner.unread for owner in self._owners.copy().values()), default=0)
        return len(self._leases) > 0 and len(self._leases) + unread > _FIT_INTO_A_SOCKET

    def clear(self) -> None:
        """Unmap what is only kept warm."""
        self._warm.clear()

    def give_back(self) -> tuple[bool, float | None]:
        """Send what could not be sent before, unmap what nobody wants. For the keeper thread:
        whether it is needed any longer, and in how many seconds again."""
        cold = time.monotonic() - WARM_SECONDS
        for segment, wanted in self._warm.copy().items():
            if wanted <= cold:
                self._warm.pop(segment, None)
        for owner in list(self._owners.copy().values()):
            while owner.ended and owner.send_releases():
                continue
        waiting = any(owner.ended for owner in self._owners.copy().values())
        next_time = min((wanted - cold for wanted in self._warm.copy().values()), default=None)
        return waiting or self.need_thread, _PAUSE if waiting else next_time

    def _map(self, owner: _Owner, answer: Attached, descriptors: list[int], request: int) -> Block:
        segment = owner.segments.get(answer.segment)
        if segment is None or answer.segment == 0:  # 0: handed on, numbered by somebody else
            segment = owner.segments[answer.segment] = Segment(descriptors[0], answer.size)
        else:
            os.close(descriptors[0])
        self._warm[segment] = time.monotonic()
        self._origins[answer.block] = owner.source
        known = self._views.get(answer.block)
        if known is not None:
            self._end_lease(request, owner)  # one is enough
            return known
        dropped = partial(self._drop, answer.block, request, owner)
        return self._views.open(answer.block, segment, answer.offset, answer.length, dropped)

    def _drop(self, name: int, request: int, owner: _Owner) -> None:
        """Called in a finalizer."""
        self._origins.pop(name, None)
        self._end_lease(request, owner)

    def _end_lease(self, request: int, owner: _Owner) -> None:
        """Called in finalizers too."""
        owner.release(request)
        self._leases.pop(request, None)
        self.ring()

    def _owner(self, source: Source) -> _Owner:
        """The connection to a keeper. Raises Closed if it has ended."""
        owner = self._owners.get(source)
        if owner is not None:
            return owner
        self._close_unused()
        pidfd = open_pidfd(Process(source.pid, source.start))
        if pidfd < 0:
            raise Closed(f"process {source.pid} has ended")
        try:
            channel = Channel.connect(source.address)
        except ConnectionRefusedError:
            os.close(pidfd)
            raise Closed(f"process {source.pid} keeps nothing") from None
        except BaseException:
            os.close(pidfd)
            raise
        owner = self._owners[source] = _Owner(source, channel, pidfd)
        return owner

    def _close_unused(self) -> None:
        """Hang up on keepers from whom this process has nothing any more."""
        used = set(self._leases.copy().values())
        used.update(owner.source for owner in self._borrowed.copy().values())
        unused = [source for source in self._owners if source not in used]
        for source in unused:
            self._owners.pop(source).close()
        for name, source in self._origins.copy().items():
            if source in unused and self._views.get(name) is None:
                del self._origins[name]

    def _ask(
        self, owner: _Owner, message: Attach | Pin, timeout: float | None = None
    ) -> tuple[Any, list[int]]:
        """Send a message and take its answer. Raises Closed, Stalled.

        Closing the connection would end the leases of blocks still in use here, so a question
        that is given up leaves it open; its answer is known by its number when it comes late.
        """
        if timeout is None:
            timeout = arguments.from_environment(os.environ)
        deadline = time.monotonic() + (arguments.DEFAULT if timeout is None else timeout)
        try:
            owner.channel.send(message)
            while owner.channel.wait(deadline, owner.pidfd):
                answer, descriptors = owner.channel.receive(Attached, Pinned, Gone)
                owner.unread = 0  # it reads in order
                if answer.request == message.request:
                    return answer, descriptors
                _throw_away(owner, answer, descriptors)
        except Closed:
            self._owners.pop(owner.source, None)
            owner.close()
            raise
        raise Stalled(
            f"process {owner.source.pid}, which owns the shared array, is alive but does not "
            "answer: it computes without a pause, is stopped, or has no descriptor left (ulimit -n)"
        )


def _throw_away(owner: _Owner, answer: Message, descriptors: list[int]) -> None:
    """An answer that nobody waits for any more."""
    for descriptor in descriptors:
        os.close(descriptor)
    if isinstance(answer, Attached):
        owner.release(answer.request)


#: seconds that an owner may take to give up a pin that is not needed, or to lend before a fork
_PATIENCE = 1.0


class _Manner(threading.local):
    """How this thread attaches blocks."""

    #: for how long it waits for their owners
    seconds: float | None = None
    #: whether it borrows them where it can
    borrows = False


_manner = _Manner()


class _Memory:
    """The shared memory of one process."""

    def __init__(self) -> None:
        self.views = Views()
        self.attachments = Attachments(self.views)
        self.keeper = Keeper(self.views, self.attachments.give_back)
        self.attachments.ring = self.keeper.ring


_here = _Memory()

#: in a forked child: what keeps the parent's connections, and so its leases, open
_inherited: list[object] = []


def allocate(size: int) -> Block:
    """A new block of at least `size` bytes. Raises OutOfMemory, OutOfDescriptors."""
    block = _here.keeper.allocate(size)
    if faults.armed:
        faults.reach("share.created")
    return block


def is_block(buffer: object) -> bool:
    """Whether a buffer is a block's."""
    return _here.views.name_of(buffer) is not None


def name_of(buffer: object) -> int:
    """The number by which every process knows a block, given its buffer; 0 if it is no block's."""
    return _here.views.name_of(buffer) or 0


def refer(buffer: object) -> Reference:
    """What stands for the block behind `buffer`; it is pinned until somebody has attached it."""
    name = _here.views.name_of(buffer)
    if name is None:
        raise InvalidValue("this memory is not a shared block of this process; use weft.share")
    if _here.keeper.owns(name):
        return _here.keeper.refer(name)
    return _here.attachments.refer(name, _here.keeper)


def mention(buffer: object) -> Reference:
    """What stands for the block behind `buffer` for as long as `buffer` lives: no pin, so nothing
    is left of it wherever a signal handler raises."""
    name = _here.views.name_of(buffer)
    if name is None:
        raise InvalidValue("this memory is not a shared block of this process; use weft.share")
    if _here.keeper.owns(name):
        return _here.keeper.mention(name)
    return _here.attachments.mention(name, _here.keeper)


def unpin(reference: Reference) -> None:
    """Give up a reference made here that nobody will attach any more."""
    if reference.sources[0].pid == os.getpid():
        _here.keeper.unpin(reference.block, reference.pin)
    else:
        with contextlib.suppress(SegmentGone, Stalled):
            attach(reference, _PATIENCE)  # the pin is gone with it, and the view at once


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Have what this thread attaches meanwhile, by unpickling, wait for so long and no longer."""
    before, _manner.seconds = _manner.seconds, seconds
    try:
        yield
    finally:
        _manner.seconds = before


@contextlib.contextmanager
def borrowing() -> Iterator[None]:
    """Have what this thread attaches meanwhile stay as it is until the sender of the references,
    who waits for an answer, has got it: so nobody need be asked, if the segment is mapped here."""
    before, _manner.borrows = _manner.borrows, True
    try:
        yield
    finally:
        _manner.borrows = before


def lease_borrowed() -> None:
    """Have what was borrowed and is still in use stay so. Raises SegmentGone, Stalled."""
    _here.attachments.lease_borrowed()


def attach(reference: Reference, timeout: float | None = None) -> Block:
    """Map the block that a reference stands for. Raises SegmentGone, Stalled.

    Waits for its owner for `timeout` seconds, by default as long as `patience` or WEFT_TIMEOUT
    says.
    """
    if timeout is None:
        timeout = _manner.seconds
    if faults.armed:
        faults.reach("share.attach")
    block = _here.attachments.borrow(reference) if _manner.borrows else None
    if block is None:
        block = _ask_for(reference, timeout)
    if _here.attachments.need_thread:
        _here.keeper.start()
    if block is not None:
        if faults.armed:
            faults.reach("share.attached")
        return block
    pids = " and ".join(str(source.pid) for source in reference.sources)
    raise SegmentGone(
        f"the shared array's memory is gone: process {pids} has ended or has given it back; "
        "keep the array alive where it was shared until it has been unpickled. (A pickle of a "
        "shared array is a reference: to save the values, pickle a copy() or use numpy.save)"
    )


def _ask_for(reference: Reference, timeout: float | None) -> Block | None:
    """From its owner, or who sent it; None if both have ended, or given it back."""
    for source in reference.sources:
        if source.pid == os.getpid() and source.start == this_process().start:
            block = _here.keeper.open(reference.block, reference.pin)
        else:
            block = _here.attachments.attach(reference.block, reference.pin, source, timeout)
        if block is not None:
            return block
    return None


def clear() -> None:
    """Give back what is only kept warm for later."""
    _here.attachments.clear()
    _here.keeper.clear()


# A forked child sees what its parent saw. The parent must not give that memory up before the child
# has ended, so it holds everything that was in use at the fork until the child's end of a socket
# pair is closed, which the kernel does when the child ends or executes another program.

_ends: tuple[socket.socket, socket.socket] | None = None


def _before_fork() -> None:
    global _ends
    try:  # the child may have it for longer than the call takes
        _here.attachments.lease_borrowed(_PATIENCE)
    finally:
        _ends = socket.socketpair() if _here.views.buffers() else None


def _in_parent() -> None:
    global _ends
    if _ends is not None:
        parents, childs = _ends
        childs.close()
        _here.keeper.keep_for_child(parents, _here.views.buffers())
        _ends = None


def _in_child() -> None:
    """Leave the parent's blocks alone: what the parent made is the parent's to reuse."""
    global _here
    _here.keeper.abandon()
    if _ends is not None:
        _ends[0].close()
    _inherited.append((_here, _ends))
    _here = _Memory()


@atexit.register
def _stop() -> None:
    _here.keeper.stop()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
