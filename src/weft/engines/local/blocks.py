"""Blocks of shared memory as the rest of weft sees them: make, refer to, attach.

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
import os
import socket
import threading
from collections.abc import Iterator

from weft import faults
from weft.engines.local.attachments import Attachments
from weft.engines.local.keeper import Keeper
from weft.engines.local.processes import this_process
from weft.engines.local.references import Reference
from weft.engines.local.segment import Block
from weft.engines.local.views import Views
from weft.errors import InvalidValue, SegmentGone, Stalled

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
