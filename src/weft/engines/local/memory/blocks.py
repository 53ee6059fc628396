"""Blocks of shared memory as the rest of weft sees them: allocate, export, attach.

    block = allocate(size)                 memory in use while block.buffer lives
    handle = export(buffer)                what to send to another process in its place
    handle = export(buffer, owned=False)   the same, valid only while the buffer lives here
    block = attach(handle)                 the same memory there, not a copy

    with borrowing(): ...          what is attached here stays valid until its sender has an answer:
    retain_borrowed()              most of it costs no message; called before the answer, for what
                                   is still in use by then

A block is held in these ways. Its owner, the process that made it, reuses the memory when it has no
view itself and no in-flight or remote reference is left.

    holder                  what counts it            what ends it               which message
    ----------------------  ------------------------  -------------------------  -------------------
    view: an array over     MappedBlocks: a weak      the last view is garbage   none
    the block's buffer      reference on the buffer
    in-flight reference:    owner: its BlockEntry's   the handle is attached,    Attach, or where it
    an owned handle         in_flight                 or released unattached     is mapped already
                                                                                 ReleaseInFlight
    remote reference:       owner: its BlockEntry's   the last view there is     Release, or the end
    another process         remote                    garbage, or it ends        of the connection
    borrowed reference:     user: client._borrowed;   the last view is garbage,  none; Attach to
    a worker in a call      the sender holds it       or retain_borrowed         retain it
    unowned handle          nothing: valid while the  the exporter's last view   none
                            exporter has views        is garbage
    forwarded block: asked  user: server._forwarded,  the user's last view is    none
    of a user of it         and its own views         garbage
    in-flight, of an owner  exporter: the block in    as any in-flight           Attach
    that has ended          server._orphans           reference
    forked child            parent: all buffers in    the child ends, or runs    none: the end of a
                            server._children          another program            socket pair closes
"""

from __future__ import annotations

import atexit
import contextlib
import gc
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
from weft.engines.local.memory.segment import (
    NO_REFERENCE,
    Block,
    BlockHandle,
    MappedBlocks,
    Segment,
    ServerAddress,
)
from weft.engines.local.memory.server import PAUSE, WARM_SECONDS, SegmentServer
from weft.engines.local.processes.channel import (
    Attach,
    Attached,
    Channel,
    Closed,
    Gone,
    Release,
    ReleaseInFlight,
    Retain,
    Retained,
)
from weft.engines.local.processes.linux import open_pidfd, readable, this_process
from weft.errors import InvalidValue, SegmentGone, Stalled

#: seconds that an owner may take to end an in-flight reference, or to lend a block before a fork
_SHORT_TIMEOUT = 1.0
#: in one message
_MOST_RELEASES = 1000
#: messages that a socket certainly takes while nobody reads them (some 280 were seen to fit)
_FIT_INTO_A_SOCKET = 100
#: after so many messages without an answer the next one is a question: its answer tells that all
#: were read
_MOST_UNREAD = 50


class _AttachOptions(threading.local):
    """Tell how this thread attaches blocks."""

    #: how long it waits for their owners
    timeout: float | None = None
    #: whether it borrows them where it can
    borrow = False


_options = _AttachOptions()


def allocate(size: int) -> Block:
    """Return a new block of at least `size` bytes. Raises OutOfMemory, OutOfDescriptors."""
    block = _here.server.allocate(size)
    if faults.armed:
        faults.reach("share.created")
    return block


def name_of(buffer: object) -> int:
    """Return the number by which every process knows a buffer's block; 0 if it has none."""
    return _here.mapped.name_of(buffer) or 0


def export(buffer: object, *, owned: bool = True) -> BlockHandle:
    """Return a handle to the block of `buffer`.

    If `owned`, an in-flight reference holds the block until the handle is attached or released.
    Otherwise the handle is valid only while `buffer` lives, and there is nothing to release
    wherever a signal handler raises. Raises InvalidValue for memory that is not a block's.
    """
    name = _here.mapped.name_of(buffer)
    if name is None:
        raise InvalidValue("this memory is not a shared block of this process; use weft.share")
    if _here.server.owns(name):
        return _here.server.export(name, owned=owned)
    return _here.client.export(name, _here.server, owned=owned)


def release(handle: BlockHandle) -> None:
    """End the in-flight reference of a handle, made here, that nobody will attach any more."""
    if handle.servers[0].pid == os.getpid():
        _here.server.release(handle.block, handle.in_flight)
    else:
        with contextlib.suppress(SegmentGone, Stalled):
            attach(handle, _SHORT_TIMEOUT)  # which ends the reference; the block is dropped at once


@contextlib.contextmanager
def attach_timeout(seconds: float) -> Iterator[None]:
    """Limit how long this thread waits for owners when it attaches blocks, as unpickling does."""
    before, _options.timeout = _options.timeout, seconds
    try:
        yield
    finally:
        _options.timeout = before


@contextlib.contextmanager
def borrowing() -> Iterator[None]:
    """Borrow the blocks that this thread attaches, if their segments are mapped here already. Their
    owners are not asked, because the sender of the handles holds the blocks until it has the answer
    for which it waits."""
    before, _options.borrow = _options.borrow, True
    try:
        yield
    finally:
        _options.borrow = before


def retain_borrowed() -> None:
    """Replace borrowed references that are still in use by remote ones, before the answer is sent.
    Raises SegmentGone, Stalled."""
    _here.client.retain_borrowed()


def collect_garbage() -> None:
    """Free blocks that only cycles of references hold: a function of the script, and its globals,
    are one."""
    if _here.mapped.buffers():
        gc.collect()


def attach(handle: BlockHandle, timeout: float | None = None) -> Block:
    """Map the block of a handle. Raises SegmentGone, Stalled. Waits for its owner for `timeout`
    seconds, by default as long as `attach_timeout` or WEFT_TIMEOUT says."""
    if timeout is None:
        timeout = _options.timeout
    if faults.armed:
        faults.reach("share.attach")
    block = _here.client.borrow(handle) if _options.borrow else None
    if block is None:
        block = _ask_servers(handle, timeout)
    if _here.client.need_thread:
        _here.server.start()
    if block is not None:
        if faults.armed:
            faults.reach("share.attached")
        return block
    pids = " and ".join(str(server.pid) for server in handle.servers)
    raise SegmentGone(
        f"the shared array's memory is gone: process {pids} has ended or has given it back; "
        "keep the array alive where it was shared until it has been unpickled. (A pickle of a "
        "shared array is a reference: to save the values, pickle a copy() or use numpy.save)"
    )


def _ask_servers(handle: BlockHandle, timeout: float | None) -> Block | None:
    """Ask the owner, then the sender, for a block. Return None if neither has it any more."""
    for address in handle.servers:
        if address.pid == os.getpid() and address.start == this_process().start:
            block = _here.server.open(handle.block, handle.in_flight)
        else:
            block = _here.client.attach(handle.block, handle.in_flight, address, timeout)
        if block is not None:
            return block
    return None


def clear() -> None:
    """Unmap and free what is only kept warm for later."""
    _here.client.clear()
    _here.server.clear()


class SegmentClient:
    """This process as a user of other processes' blocks.

    It holds a remote reference to each of them: it has asked the owner, and tells it when the block
    is no longer in use here. A block that comes with a call can be borrowed where its segment is
    mapped already: its sender holds it until the answer, so nobody is asked or told. What is still
    in use by then gets a remote reference first.
    """

    def __init__(self, mapped: MappedBlocks) -> None:
        self._mapped = mapped
        #: wakes the segment server's thread, which calls `release_unused`
        self.wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()  # held while another process answers
        self._owners: dict[ServerAddress, _Owner] = {}
        #: where each block came from
        self._origins: dict[int, ServerAddress] = {}
        #: the owner of each remote reference that this process has, by the request that made it
        self._remote_references: dict[int, ServerAddress] = {}
        #: blocks with a borrowed reference only, and whose they are
        self._borrowed: dict[int, _Owner] = {}
        #: mapped segments, and when they were last used: mapping one anew costs as much as reading
        #: the memory, and owners reuse theirs
        self._warm: dict[Segment, float] = {}
        self._numbers = itertools.count(1)

    def attach(
        self, name: int, in_flight: int, address: ServerAddress, timeout: float | None = None
    ) -> Block | None:
        """Map a block of another process; None if it no longer has it, or has ended."""
        with self._lock:
            known = self._attach_known(name, in_flight, address)
            if known is not None:
                return known
            owner, request = None, next(self._numbers)
            try:
                owner = self._owner(address)
                answer, descriptors = self._ask(owner, Attach(request, name, in_flight), timeout)
                if isinstance(answer, Gone):
                    return None
                self._remote_references[request] = address
                return self._map(owner, answer, descriptors, request)
            except Closed:
                return self._mapped.get(name)  # its memory may still be mapped here
            except BaseException:
                if owner is not None:  # it may have answered, and an interrupt lost the answer
                    owner.ended[request] = True  # first, should another interrupt come now
                    self._end_reference(request, owner)
                raise

    def _attach_known(self, name: int, in_flight: int, address: ServerAddress) -> Block | None:
        """Return a block that this process has from that address already, else None. The owner,
        which may be busy, is told and not asked."""
        block, owner = self._mapped.get(name), self._owners.get(address)
        if block is None or owner is None or self._origins.get(name) != address:
            return None
        if in_flight == NO_REFERENCE:
            return block
        if owner.unread >= _MOST_UNREAD:
            return None
        if not owner.channel.send_now(ReleaseInFlight(name, in_flight)):
            return None
        owner.unread += 1
        return block

    def _map(self, owner: _Owner, answer: Attached, descriptors: list[int], request: int) -> Block:
        segment = owner.segments.get(answer.segment)
        if segment is None or answer.segment == 0:  # 0: forwarded, so its number means nothing here
            segment = owner.segments[answer.segment] = Segment(descriptors[0], answer.size)
        else:
            os.close(descriptors[0])
        self._warm[segment] = time.monotonic()
        self._origins[answer.block] = owner.address
        known = self._mapped.get(answer.block)
        if known is not None:
            self._end_reference(request, owner)  # one is enough
            return known
        dropped = partial(self._drop, answer.block, request, owner)
        return self._mapped.open(answer.block, segment, answer.offset, answer.length, dropped)

    def _drop(self, name: int, request: int, owner: _Owner) -> None:
        """Forget a block whose last view is gone. Called in a finalizer."""
        self._origins.pop(name, None)
        self._end_reference(request, owner)

    def _end_reference(self, request: int, owner: _Owner) -> None:
        """End a remote reference. Called in finalizers too."""
        owner.release(request)
        self._remote_references.pop(request, None)
        self.wake()

    def borrow(self, handle: BlockHandle) -> Block | None:
        """Return a block whose segment is mapped here already, else None. No message is sent. It is
        valid for as long as the handle is; call `retain_borrowed` before that ends."""
        block_range, address = handle.range, handle.servers[0]
        if block_range is None:
            return None
        with self._lock:
            owner = self._owners.get(address)
            segment = owner.segments.get(block_range.segment) if owner is not None else None
            if owner is None or segment is None:
                return None
            known = self._mapped.get(handle.block)
            if known is not None:
                return known
            self._warm[segment] = time.monotonic()
            self._borrowed[handle.block] = owner
            self._origins[handle.block] = address
            return self._mapped.open(
                handle.block, segment, block_range.offset, block_range.length, lambda: None
            )

    def retain_borrowed(self, timeout: float | None = None) -> None:
        """Replace borrowed references that are still in use here by remote ones. Raises
        SegmentGone, Stalled."""
        self._mapped.release_pending()  # the next finalizer may be a long time off
        while self._borrowed:
            with self._lock:
                if not self._borrowed:
                    return  # another thread has done it
                name, owner = self._borrowed.popitem()
                block = self._mapped.get(name)  # held, so that it is not dropped meanwhile
                if block is None:
                    self._origins.pop(name, None)
                    continue
                try:
                    self._retain(name, owner, timeout)
                except Stalled:
                    self._borrowed[name] = owner
                    raise

    def _retain(self, name: int, owner: _Owner, timeout: float | None) -> None:
        """Get a remote reference to a block that is in use here."""
        request = next(self._numbers)
        try:
            answer, descriptors = self._ask(owner, Attach(request, name, NO_REFERENCE), timeout)
        except Closed:
            return  # the owner has ended, so nobody will reuse its memory
        if isinstance(answer, Gone):
            raise SegmentGone(
                f"block {name} of process {owner.address.pid}, an array of this call, was given up "
                "before the call was over; run the call again"
            )
        os.close(descriptors[0])
        self._remote_references[request] = owner.address
        self._mapped.when_dropped(name, partial(self._drop, name, request, owner))

    def export(self, name: int, server: SegmentServer, *, owned: bool) -> BlockHandle:
        """Return a handle to a block of another process; `server` is this process's own. If
        `owned`, the owner adds an in-flight reference; if it has ended, `server` does. Otherwise
        the handle is valid while the block is in use here, and the owner need not know of it."""
        if not owned:
            origin = self._origins.get(name)
            known = () if origin is None else (origin,)
            return BlockHandle(name, NO_REFERENCE, (*known, server.forward(name)))
        block = self._mapped.get(name)
        if block is None:
            raise SegmentGone(f"block {name} is no longer attached here")
        with self._lock:
            address = self._origins.get(name)
            if address is None:  # an earlier view was dropped while this one was made
                return server.forward_orphan(name, block)
            try:
                answer, _ = self._ask(self._owner(address), Retain(next(self._numbers), name))
            except Closed:
                return server.forward_orphan(name, block)
        if isinstance(answer, Gone):  # it came from a process that is not its owner
            return server.forward_orphan(name, block)
        return BlockHandle(name, answer.in_flight, (address, server.forward(name)))

    @property
    def need_thread(self) -> bool:
        """Return whether `release_unused` has to be called in time: segments are kept warm, or the
        releases of all references might not fit into a socket beside what is there already."""
        held = len(self._remote_references)
        unread = max((owner.unread for owner in self._owners.copy().values()), default=0)
        return bool(self._warm) or (held > 0 and held + unread > _FIT_INTO_A_SOCKET)

    def clear(self) -> None:
        """Unmap what is only kept warm."""
        self._warm.clear()

    def release_unused(self) -> tuple[bool, float | None]:
        """Send releases that could not be sent before, and unmap what nobody has used for long. The
        idle hook of the segment server: returns whether its thread is still needed, and in how many
        seconds to call this again."""
        cold = time.monotonic() - WARM_SECONDS
        for segment, last_used in self._warm.copy().items():
            if last_used <= cold:
                self._warm.pop(segment, None)
        for owner in list(self._owners.copy().values()):
            while owner.ended and owner.send_releases():
                continue
        waiting = any(owner.ended for owner in self._owners.copy().values())
        next_time = min((used - cold for used in self._warm.copy().values()), default=None)
        return waiting or self.need_thread, PAUSE if waiting else next_time

    def _owner(self, address: ServerAddress) -> _Owner:
        """Return the connection to a segment server. Raises Closed if that has ended."""
        owner = self._owners.get(address)
        if owner is not None:
            return owner
        self._close_unused()
        pidfd = open_pidfd(Process(address.pid, address.start))
        if pidfd < 0:
            raise Closed(f"process {address.pid} has ended")
        try:
            channel = Channel.connect(address.socket)
        except BaseException as error:
            os.close(pidfd)
            if isinstance(error, ConnectionRefusedError):
                raise Closed(f"process {address.pid} serves no blocks") from None
            raise
        owner = self._owners[address] = _Owner(address, channel, pidfd)
        return owner

    def _close_unused(self) -> None:
        """Close the connections to owners of which this process holds no block, if they have ended,
        or if it maps no segment of theirs, which would be mapped anew beside the warm one."""
        used = set(self._remote_references.copy().values())
        used.update(owner.address for owner in self._borrowed.copy().values())
        unused = [
            address
            for address, owner in self._owners.items()
            if address not in used and (not owner.segments or readable(owner.pidfd))
        ]
        for address in unused:
            self._owners.pop(address).close()
        for name, address in self._origins.copy().items():
            if address in unused and self._mapped.get(name) is None:
                del self._origins[name]

    def _ask(
        self, owner: _Owner, message: Attach | Retain, timeout: float | None = None
    ) -> tuple[Any, list[int]]:
        """Send a message and return its answer, with the descriptors. Raises Closed, Stalled. After
        a timeout the connection stays open, as closing it would end the references to blocks that
        are still in use here. An answer that comes late is known by its request number."""
        if timeout is None:
            timeout = arguments.from_environment(os.environ)
        deadline = time.monotonic() + (arguments.DEFAULT if timeout is None else timeout)
        try:
            owner.channel.send(message)
            while owner.channel.wait(deadline, owner.pidfd):
                answer, descriptors = owner.channel.receive(Attached, Retained, Gone)
                owner.unread = 0  # it reads in order
                if answer.request == message.request:
                    return answer, descriptors
                for descriptor in descriptors:  # of an answer that nobody waits for any more
                    os.close(descriptor)
                if isinstance(answer, Attached):
                    owner.release(answer.request)
        except Closed:
            self._owners.pop(owner.address, None)
            owner.close()
            raise
        raise Stalled(
            f"process {owner.address.pid}, which owns the shared array, is alive but does not "
            "answer: it computes without a pause, is stopped, or has no descriptor left (ulimit -n)"
        )


@dataclass(eq=False)
class _Owner:
    """A segment server in another process, and what this process has from it."""

    address: ServerAddress
    channel: Channel
    pidfd: int
    segments: weakref.WeakValueDictionary[int, Segment] = field(
        default_factory=weakref.WeakValueDictionary
    )
    #: the requests of references that have ended but were not released yet; a dict, because setting
    #: an item is no call, so no signal handler can come between it and the next statement
    ended: dict[int, bool] = field(default_factory=dict)
    #: messages since the last answer, which the owner may not have read yet
    unread: int = 0

    def release(self, request: int) -> None:
        """Release a reference, now or with the next one. Safe in a finalizer, harmless twice."""
        self.ended[request] = True
        self.send_releases()

    def send_releases(self) -> bool:
        """Send the next releases. Return whether the socket took them."""
        requests = list(self.ended.copy())[:_MOST_RELEASES]
        if self.channel.send_now(Release(requests)):
            self.unread += 1
            for request in requests:
                self.ended.pop(request, None)
            return True
        return False

    def close(self) -> None:
        """Close the connection, which ends all references to the owner's blocks."""
        self.channel.close()
        os.close(self.pidfd)


class _Memory:
    """The shared memory of one process."""

    def __init__(self) -> None:
        self.mapped = MappedBlocks()
        self.client = SegmentClient(self.mapped)
        self.server = SegmentServer(self.mapped, self.client.release_unused)
        self.client.wake = self.server.wake


_here = _Memory()
#: in a forked child: what keeps the parent's connections open, and with them its references
_inherited: list[object] = []

# A forked child sees what its parent saw. The parent must not free that memory before the child has
# ended, so it holds everything that was in use at the fork until the child's end of a socket pair
# is closed, which the kernel does when the child ends or executes another program.

_ends: tuple[socket.socket, socket.socket] | None = None


def _before_fork() -> None:
    global _ends
    try:  # the child may use it for longer than the call lasts
        _here.client.retain_borrowed(_SHORT_TIMEOUT)
    finally:
        _ends = socket.socketpair() if _here.mapped.buffers() else None


def _in_parent() -> None:
    global _ends
    if _ends is not None:
        parents, childs = _ends
        childs.close()
        _here.server.keep_for_child(parents, _here.mapped.buffers())
        _ends = None


def _in_child() -> None:
    """Leave the parent's blocks alone: only the parent may reuse what it made."""
    global _here
    _here.server.abandon()
    if _ends is not None:
        _ends[0].close()
    _inherited.append((_here, _ends))
    _here = _Memory()


@atexit.register
def _stop() -> None:
    _here.server.stop()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
