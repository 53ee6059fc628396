"""The memory in which all ranks work together on large arrays: sums and broadcasts.

A loop in C does the work and waits a little for the others (`_core/joint_work.py`). What it cannot
do is here: when it has waited in vain, see whether who is waited for is still there, and sleep.

What several processes do together by a loop in C, which kernels.c draws: sums and broadcasts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from weft import faults, kernels
from weft._core.arithmetic import Array, address
from weft._core.calls import LINE, Call, Reduce
from weft.engines.local.meeting.meeting import UNDER_WAY, Meeting, make_block
from weft.engines.local.meeting.waiting import SLICE
from weft.engines.local.memory.segment import Block

#: chunks that are given, added up or taken over before Python is back and hears a signal
_STEPS = 64

#: looks for something to do before sleeping, where every rank has a core: some 100 us
_SPINS = 2000

#: seconds of the first sleep; each one after it, while nothing can be done, is twice as long
_NAP = 5e-5

#: broadcasts to one rank that are left to the kernel before it is tried again whether cores share a
#: cache, once they were found to share none
_LEFT_OUT = 15


class PipelinedMemory:
    """The joint work of one group, on one rank."""

    def __init__(self, meeting: Meeting, seconds: float) -> None:
        """Make the memory, with all ranks. Raises SetupError, on every rank, if there is none."""
        rank, ranks = meeting.rank, len(meeting.members)
        self._meeting = meeting
        self._others = [other for other in range(ranks) if other != rank]
        self._spins = _SPINS if meeting.free_cores else 1
        #: how many chunks have gone through it
        self._chunks = 0
        #: how many of the next broadcasts to one rank had better be left to the kernel
        self._left_out = 0
        self._block = make_block(
            meeting,
            UNDER_WAY,
            leader=meeting.members[0],
            size=bytes_for(ranks),
            seconds=seconds,
            prepare=Block.clear,
            point="collective.made",
        )
        self._memory = Memory(self._block.address, rank, ranks)

    # Nobody uses a rank's own memory for these.

    def add_up(self, source: Array, target: Array | None, *, mean: bool, deadline: float) -> None:
        """Sum the ranks' arrays, or take their mean."""
        source = source if source.flags.aligned else source.copy()
        work = PipelinedWork.sum(
            self._memory, self._chunks, source=source, target=target, mean=mean
        )
        self._carry_out(work, deadline)

    def broadcast(
        self, root: int, source: Array | None, target: Array | None, *, deadline: float
    ) -> None:
        """Bring the root's source to the others' targets."""
        work = PipelinedWork.broadcast(
            self._memory, self._chunks, root=root, source=source, target=target
        )
        self._carry_out(work, deadline)
        self._left_out = _LEFT_OUT if work.past_cache else 0

    def leave_to_kernel(self) -> bool:
        """Whether this broadcast is left to the kernel's copies, which are quicker with 2 ranks
        that share no cache. Asked once for each broadcast, on all ranks, which say the same."""
        if len(self._others) > 1 or not self._left_out:
            return False
        self._left_out -= 1
        if not self._left_out:
            self._memory.use_cache()
        return True

    def _carry_out(self, work: PipelinedWork, deadline: float) -> None:
        self._chunks = work.after
        progress, nap = 0, 0.0
        while True:
            steps = _STEPS
            if faults.armed:
                faults.reach("collective.block")
                steps = 1  # to pass it between any two
            if work.advance(steps, 1 if nap else self._spins):
                return
            if work.progress != progress:
                progress, nap = work.progress, 0.0
                continue
            self._check_others(work, deadline)
            nap = min(2 * nap or _NAP, SLICE)
            time.sleep(nap)

    def _check_others(self, work: PipelinedWork, deadline: float) -> None:
        """Raise if one who is waited for is gone, or the time is up."""
        self._meeting.validate_present()
        waited_for = [rank for rank in self._others if not work.is_done_by(rank)]
        for rank in waited_for:
            lost = self._meeting.lost_error(rank)
            # one that was done and then ended has been there: look again
            if lost is not None and not work.is_done_by(rank):
                raise lost
        if waited_for and time.monotonic() >= deadline:
            raise self._meeting.stalled_error(waited_for)


#: bytes of a chunk: few enough for some of them to stay in a cache of a few megabytes. Measured
#: (docs/performance.md).
_CHUNK = 512 << 10

#: bytes of one chunk of all ranks together, where there are many
_ALL_CHUNKS = 32 << 20

#: how many times longer than to take over it may take to give as much, where cores share a cache:
#: about as long, and where they share none some 5 to 10 times
_SLOW = 4

_MEANS = ("float32", "float64")


def has_kernels() -> bool:
    """Whether this process can take part in joint work: all of a group's must."""
    return not kernels.missing()


def can_pipeline(call: Call) -> bool:
    """Return whether all ranks can carry a call out together, if all have the kernels for it."""
    return (
        isinstance(call, Reduce)
        and not call.own
        and kernels_apply(call.op, call.source, call.elements)
    )


def kernels_apply(op: str, arrays: Sequence[Array], elements: Sequence[str]) -> bool:
    """Whether arrays like these can be summed jointly; `elements` are what their numbers are."""
    if op not in ("sum", "mean"):
        return False
    return all(
        array.dtype.isnative
        and array.dtype.name == element
        and (op == "sum" or element in _MEANS)
        and kernels.joint_sum_kernel(element) is not None
        for array, element in zip(arrays, elements, strict=True)
    )


def bytes_for(ranks: int) -> int:
    """The bytes of the memory that ranks work in."""
    return kernels.joint_bytes(ranks, _chunk_for(ranks))


def _chunk_for(ranks: int) -> int:
    """The bytes of a chunk: as many lines for each rank."""
    lines = min(_CHUNK, _ALL_CHUNKS // ranks) // LINE
    return max(1, lines // ranks) * ranks * LINE


class Memory(NamedTuple):
    """What ranks work in, as one of them sees it."""

    #: of what all ranks see, and was zero at the beginning
    address: int
    rank: int
    ranks: int

    def use_cache(self) -> None:
        """Have the next work find out anew whether cores share a cache."""
        kernels.joint_use_cache(self.address, self.rank)


class PipelinedWork:
    """One rank's part in one sum or broadcast.

    `before` is the `after` of the one before in that memory. Arrays are flat.
    """

    def __init__(
        self,
        memory: Memory,
        before: int,
        loop: kernels.GoOn | None,
        *,
        source: Array | None,
        target: Array | None,
        **how: float,
    ) -> None:
        if loop is None:
            raise TypeError(f"there is no loop for {'any' if source is None else source.dtype}")
        size = source.nbytes if source is not None else 0 if target is None else target.nbytes
        chunk = _chunk_for(memory.ranks)
        chunks = -(-size // chunk)
        self.after = before + chunks
        self._loop = loop
        self._arrays = source, target  # which must live as long
        self._work = kernels.Joint(
            rank=memory.rank,
            ranks=memory.ranks,
            source=None if source is None else address(source),
            target=None if target is None else address(target),
            size=size,
            memory=memory.address,
            chunk=chunk,
            chunks=chunks,
            before=before,
            slow=_SLOW,
            **how,
        )

    @classmethod
    def sum(
        cls,
        memory: Memory,
        before: int,
        *,
        source: Array,
        target: Array | None,
        mean: bool = False,
    ) -> PipelinedWork:
        """The sum of all ranks' sources, or their mean. Arrays are aligned, and a source is its
        target or lies apart from it; a rank without a target gets no result."""
        loop = kernels.joint_sum_kernel(source.dtype.name)
        divisor = memory.ranks if mean else 1
        return cls(memory, before, loop, source=source, target=target, divisor=divisor)

    @classmethod
    def broadcast(
        cls, memory: Memory, before: int, *, root: int, source: Array | None, target: Array | None
    ) -> PipelinedWork:
        """The root's source to the others' targets."""
        loop = kernels.joint_broadcast_kernel()
        return cls(memory, before, loop, source=source, target=target, root=root)

    def advance(self, steps: int, spins: int) -> bool:
        """Do what can be done: give, add up or take over `steps` chunks, or until at `looks` looks
        in a row there was nothing. Whether all is done."""
        return bool(self._loop(self._work, steps, spins))

    @property
    def progress(self) -> int:
        """What grows with whatever is done."""
        done: int = self._work.given + self._work.added + self._work.taken
        return done

    @property
    def past_cache(self) -> bool:
        """When it is done: whether cores were found to share no cache. All ranks say the same, if
        they are asked before they meet again."""
        return kernels.joint_past_cache(self._work)

    def is_done_by(self, rank: int) -> bool:
        """Whether a rank needs nobody any more."""
        return kernels.joint_is_done(self._work, rank)
