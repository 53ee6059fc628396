"""The memory in which all ranks work together on large arrays: sums and broadcasts.

A loop in C does the work and waits a little for the others (`_core/joint_work.py`). What it cannot
do is here: when it has waited in vain, see whether who is waited for is still there, and sleep.
"""

from __future__ import annotations

import time

from weft import faults
from weft._core.elements import Array
from weft._core.joint_work import JointWork, Memory, bytes_for
from weft.engines.local.common_memory import make_block
from weft.engines.local.meeting import UNDER_WAY, Meeting
from weft.engines.local.segment import Block
from weft.engines.local.waiting import SLICE

#: chunks that are given, added up or taken over before Python is back and hears a signal
_STEPS = 64
#: looks for something to do before sleeping, where every rank has a core: some 100 us
_SPINS = 2000
#: seconds of the first sleep; each one after it, while nothing can be done, is twice as long
_NAP = 5e-5
#: broadcasts to one rank that are left to the kernel before it is tried again whether cores share a
#: cache, once they were found to share none
_LEFT_OUT = 15


class JointMemory:
    """The joint work of one group, on one rank."""

    def __init__(self, meeting: Meeting, seconds: float) -> None:
        """Make the memory, with all ranks. Raises SetupError, on every rank, if there is none."""
        rank, ranks = meeting.rank, len(meeting.members)
        self._meeting = meeting
        self._others = [other for other in range(ranks) if other != rank]
        self._looks = _SPINS if meeting.free_cores else 1
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
        work = JointWork.sum(self._memory, self._chunks, source=source, target=target, mean=mean)
        self._carry_out(work, deadline)

    def broadcast(
        self, root: int, source: Array | None, target: Array | None, *, deadline: float
    ) -> None:
        """Bring the root's source to the others' targets."""
        work = JointWork.broadcast(
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

    def _carry_out(self, work: JointWork, deadline: float) -> None:
        self._chunks = work.after
        progress, nap = 0, 0.0
        while True:
            steps = _STEPS
            if faults.armed:
                faults.reach("collective.block")
                steps = 1  # to pass it between any two
            if work.go_on(steps, 1 if nap else self._looks):
                return
            if work.progress != progress:
                progress, nap = work.progress, 0.0
                continue
            self._check_others(work, deadline)
            nap = min(2 * nap or _NAP, SLICE)
            time.sleep(nap)

    def _check_others(self, work: JointWork, deadline: float) -> None:
        """Raise if one who is waited for is gone, or the time is up."""
        self._meeting.check_that_this_rank_is_here()
        waited_for = [rank for rank in self._others if not work.is_done_by(rank)]
        for rank in waited_for:
            lost = self._meeting.lost(rank)
            # one that was done and then ended has been there: look again
            if lost is not None and not work.is_done_by(rank):
                raise lost
        if waited_for and time.monotonic() >= deadline:
            raise self._meeting.stalled(waited_for)
