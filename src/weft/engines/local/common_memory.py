"""Memory that one rank makes and all, or all who name it, see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft import faults
from weft.engines.local import blocks
from weft.engines.local.meeting import Meeting
from weft.engines.local.meeting_memory import MAILBOX_BYTES
from weft.engines.local.references import Reference
from weft.engines.local.segment import Block
from weft.errors import SetupError, WeftError

#: what may keep a rank from making or mapping memory; RuntimeError: no thread can be started
TROUBLES = (WeftError, MemoryError, RuntimeError)


def make_block(
    meeting: Meeting,
    call: int,
    *,
    leader: int,
    size: int,
    seconds: float,
    prepare: Callable[[Block], None] = lambda block: None,
    point: str,
) -> Block:
    """A block that `leader`, a rank of the job, makes and everyone who names it sees.

    All ranks take part, in this call's steps; `point` is the fault point where it has been made.
    Raises SetupError on every rank if one could not make or map it.
    """
    block, reference, trouble = None, b"", b""
    if leader == meeting.roster.rank:
        try:
            block = blocks.allocate(size)
            prepare(block)
            reference = blocks.refer(block.buffer).encode()
            if faults.armed:
                faults.reach(point)
        except TROUBLES as error:
            trouble = in_words(error)
    try:
        answers = meeting.exchange(call, reference, seconds)
    except BaseException:  # an interrupt too
        if reference:  # nobody will attach it: so that the block is not held for ever
            blocks.attach(Reference.decode(reference))
        raise
    offer = answers[meeting.members.index(leader)]
    if offer:
        try:
            # in half the time: the others, who wait for this rank, are to hear what went wrong
            block = blocks.attach(Reference.decode(offer), seconds / 2)
        except TROUBLES as error:
            trouble = in_words(error)
    _raise_any(meeting, call, meeting.exchange(call, trouble, seconds), seconds)
    if block is None:
        raise SetupError(f"rank {leader} of the job offered no memory; look for its own error")
    return block


def make_no_block(meeting: Meeting, call: int, seconds: float) -> None:
    """Take part in the steps of `make_block` without naming anyone."""
    meeting.exchange(call, b"", seconds)
    _raise_any(meeting, call, meeting.exchange(call, b"", seconds), seconds)


def in_words(error: Exception) -> bytes:
    """What a rank tells the others of its trouble."""
    return (str(error) or repr(error)).encode()[:MAILBOX_BYTES]


def _raise_any(meeting: Meeting, call: int, troubles: Sequence[bytes], seconds: float) -> None:
    if any(troubles):
        # who made the memory may have been interrupted since, and have given it back: that is then
        # what went wrong, and this step tells
        meeting.exchange(call, b"", seconds)
        raise setup_error(meeting, troubles)


def setup_error(meeting: Meeting, troubles: Sequence[bytes]) -> SetupError:
    """The same error on every rank, of what each of them has told."""
    told = [(rank, text.decode(errors="replace")) for rank, text in enumerate(troubles) if text]
    lines = [f"rank {rank}: {text}" for rank, text in told]
    return SetupError(
        f"group {meeting.name!r} could not get memory: {'; '.join(lines)}. The group can be "
        "used when there is more"
    )
