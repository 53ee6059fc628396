"""Sums of large arrays that all ranks make together, in memory that all of them see.

A loop in C does the work and waits a little for the others (`_core/joint_sum.py`). What it cannot
do is here: when it has waited in vain, see whether who is waited for is still there, and sleep.
"""

from __future__ import annotations

import time

from weft import faults
from weft._core import joint_sum
from weft._core.elements import Array
from weft._core.joint_sum import JointSum
from weft.engines.local.common_memory import make_block
from weft.engines.local.meeting import UNDER_WAY, Meeting
from weft.engines.local.segment import Block
from weft.engines.local.waiting import SLICE

#: chunks that are given, added up or taken over before Python is back and hears a signal
_STEPS = 64
#: looks for something to do while awake, where every rank has a core: some 100 us
_AWAKE = 2000
#: looks after each of which another process may have the core: each takes 0.3 us or more
_YIELDS = 200
#: seconds of the first sleep; each one after it, while nothing can be done, is twice as long
_NAP = 5e-5


class JointSums:
    """The joint sums of one group, on one rank."""

    def __init__(self, meeting: Meeting, seconds: float) -> None:
        """Make the memory, with all ranks. Raises SetupError, on every rank, if there is none."""
        self._meeting, self._ranks = meeting, len(meeting.members)
        self._others = [rank for rank in range(self._ranks) if rank != meeting.rank]
        self._awake = _AWAKE if meeting.free_cores else 0
        #: how many chunks have been summed there
        self._chunks = 0
        self._block = make_block(
            meeting,
            UNDER_WAY,
            leader=meeting.members[0],
            size=joint_sum.bytes_for(self._ranks),
            seconds=seconds,
            prepare=Block.clear,
            point="collective.made",
        )

    def add_up(self, source: Array, target: Array | None, *, mean: bool, deadline: float) -> None:
        """Sum the ranks' arrays, or take their mean; nobody uses a rank's own memory for it."""
        one = JointSum(
            self._block.address,
            self._chunks,
            rank=self._meeting.rank,
            ranks=self._ranks,
            source=source if source.flags.aligned else source.copy(),
            target=target,
            mean=mean,
        )
        self._chunks = one.after
        self._carry_out(one, deadline)

    def _carry_out(self, one: JointSum, deadline: float) -> None:
        progress, nap = 0, 0.0
        while True:
            steps = _STEPS
            if faults.armed:
                faults.reach("collective.block")
                steps = 1  # to pass it between any two
            looks = 1 if nap else self._awake + _YIELDS
            if one.go_on(steps, looks, self._awake):
                return
            if one.progress != progress:
                progress, nap = one.progress, 0.0
                continue
            self._check_others(one, deadline)
            nap = min(2 * nap or _NAP, SLICE)
            time.sleep(nap)

    def _check_others(self, one: JointSum, deadline: float) -> None:
        """Raise if one who is waited for is gone, or the time is up."""
        self._meeting.check_that_this_rank_is_here()
        waited_for = [rank for rank in self._others if not one.is_done_by(rank)]
        for rank in waited_for:
            lost = self._meeting.lost(rank)
            # one that was done and then ended has been there: look again
            if lost is not None and not one.is_done_by(rank):
                raise lost
        if waited_for and time.monotonic() >= deadline:
            raise self._meeting.stalled(waited_for)
