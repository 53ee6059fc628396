"""Who is in the job, and whether they live. One per job, at the start of its memory.

    words 0-7    magic | layout | size | unused
    then for each rank, 8 words and its recorder's strip
        pid | start | state | ended | blames | unused

A rank's words are written by rank 0 while the group starts (pid, start), then
by the rank itself (state, blames) and by the launcher (ended). Death needs no
writing: the kernel tells it through a pidfd, which works for any process of
this user, child or not. How a process died is known only to its parent: the
launcher publishes it, and without a launcher the cause stays unknown.
"""

from __future__ import annotations

import os
import select
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from weft._core.messages import Process
from weft.engines.local import recorder
from weft.engines.local.polling import readable
from weft.engines.local.processes import (
    end_as_text,
    open_pidfd,
    process_start,
    state_letter,
)
from weft.engines.local.segment import Block
from weft.engines.refusals import forked, left
from weft.errors import NotInitialized, OutOfDescriptors, RankState, Refused, UsedAfterFork
from weft.resources import Plan, count_sharing, host_name, plan

_MAGIC = int.from_bytes(b"weftjob\0", "little")
_LAYOUT = 1
_HEADER = 8
_PID, _START, _STATE, _ENDED, _BLAMES = range(5)
_ROW = 8 + recorder.STRIP_WORDS

LEFT, FAILED = 1, 2
#: flags in the word `ended`, beside the low byte with the code or signal
_PUBLISHED, _BY_SIGNAL, _OUT_OF_MEMORY = 0x100, 0x200, 0x400
#: how long a survivor waits for peers that have left to end, which takes an interpreter some tens
#: of milliseconds, and for the launcher to publish how one ended
_ENDING_SECONDS, _CAUSE_SECONDS = 0.15, 0.03


#: what `cause` says of a rank of which nothing bad is known
_ENDED_WELL = ("exit code 0", "left, then ended", "ended, cause unknown")


def words_for(size: int) -> int:
    """The words that the roster of a job of `size` ranks takes."""
    return _HEADER + size * _ROW


class Roster:
    """The job's ranks, as seen from one of them (or from the launcher, with rank -1)."""

    def __init__(self, block: Block, rank: int, launcher: int = 0) -> None:
        self._block = block
        self._words = block.words
        self.rank = rank
        #: False once this process has left the job, and in children forked from it
        self.is_here = True
        self._forked = False
        self._process = os.getpid()
        _rosters.add(self)
        if self._words[0] != _MAGIC or self._words[1] != _LAYOUT:
            raise Refused(
                f"the job's memory has layout {self._words[1]} where {_LAYOUT} was expected; "
                "start all ranks with one version of weft"
            )
        self.size: int = self._words[2]
        self._pidfds: dict[int, int] = {}
        self._launcher = launcher

    @staticmethod
    def format(block: Block, size: int) -> None:
        """Make fresh memory a roster of `size` ranks that nobody has joined."""
        block.words[1] = _LAYOUT
        block.words[2] = size
        block.words[0] = _MAGIC

    # what the ranks and the launcher write

    def enroll(self, rank: int, process: Process) -> None:
        """Give a rank to a process; nothing of an earlier one stays."""
        at = self._row(rank)
        self._block.clear(at, at + _ROW)
        self._words[at + _PID], self._words[at + _START] = process.pid, process.start

    def set_state(self, state: int) -> None:
        self._words[self._row(self.rank) + _STATE] = state

    def blame(self, rank: int) -> None:
        """Note that this rank fails because `rank` was lost, so that the launcher knows who was
        first."""
        self._words[self._row(self.rank) + _BLAMES] = rank + 1

    def publish_end(self, rank: int, code: int, *, out_of_memory: bool = False) -> None:
        """The launcher says how a rank ended: an exit code, or minus a signal."""
        flags = _PUBLISHED | (_BY_SIGNAL if code < 0 else 0)
        flags |= _OUT_OF_MEMORY if out_of_memory else 0
        self._words[self._row(rank) + _ENDED] = flags | abs(code) & 0xFF

    # what they read

    def open_recorder(self) -> recorder.Recorder:
        """This rank's own recorder."""
        return recorder.Recorder(self._words, self._row(self.rank) + 8)

    def entries(self, rank: int) -> list[recorder.Entry]:
        return recorder.entries(self._words, self._row(rank) + 8)

    def process(self, rank: int) -> Process:
        at = self._row(rank)
        return Process(self._words[at + _PID], self._words[at + _START])

    def end_published(self, rank: int) -> bool:
        """Whether the launcher has said that a rank has ended."""
        return bool(self._words[self._row(rank) + _ENDED])

    def blamed(self, rank: int) -> int | None:
        """Whom `rank` blames for its failure."""
        return int(self._words[self._row(rank) + _BLAMES]) - 1 if self._blames(rank) else None

    def has_left(self, rank: int) -> bool:
        return bool(self._words[self._row(rank) + _STATE])

    def plan(self, ranks: Sequence[int]) -> Plan:
        """Return what this rank may use of the cores beside these, of which it is one."""
        return plan(len(ranks), count_sharing(self.process(rank).pid for rank in ranks))

    def watch(self, ranks: Iterable[int]) -> None:
        """Open what tells the death of these ranks."""
        for rank in ranks:
            if rank != self.rank and rank not in self._pidfds:
                self._pidfds[rank] = open_pidfd(self.process(rank))

    def leave(self) -> None:
        """This process is no longer a rank of the job."""
        self.is_here = False
        # Python sets last_type when it has printed an exception that nobody caught
        self.set_state(FAILED if hasattr(sys, "last_type") else LEFT)

    def unusable(self, what: str) -> NotInitialized | UsedAfterFork:
        """Why something of this job cannot be used here any more."""
        if self._forked:
            return forked(what, self._process)
        return left(what)

    def mark_forked(self) -> None:
        self.is_here, self._forked = False, True

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # not in leave(): another thread may still be waiting with these. `close` is still there
        # when Python ends and has taken the modules apart
        for pidfd in self._pidfds.values():
            if pidfd >= 0:
                close(pidfd)

    def gone(self, ranks: Sequence[int]) -> list[int]:
        """Which of these ranks have died or left."""
        poll = select.poll()
        watched = {self._pidfds[rank]: rank for rank in ranks if self._pidfds.get(rank, -1) >= 0}
        for pidfd in watched:
            poll.register(pidfd, select.POLLIN)
        dead = {watched[pidfd] for pidfd, _ in poll.poll(0)} if watched else set()
        return [
            rank
            for rank in ranks
            if rank in dead or self.has_left(rank) or self._pidfds.get(rank) == -1
        ]

    def failed(self, rank: int) -> bool:
        """Whether a rank has ended, and not well, as far as its launcher says."""
        if rank == self.rank or not self._died(rank):
            return False
        return self.cause(rank, time.monotonic() + _CAUSE_SECONDS) not in _ENDED_WELL

    def states(self, ranks: Sequence[int]) -> tuple[RankState, ...]:
        """The table that errors carry: these ranks of the job, numbered by their place."""
        now = time.monotonic_ns()
        deadline = time.monotonic() + _ENDING_SECONDS
        rows = []
        for place, rank in enumerate(ranks):
            entry = recorder.current(self._words, self._row(rank) + 8)
            since = entry.ended or entry.began or now
            rows.append(
                RankState(
                    rank=place,
                    pid=self.process(rank).pid,
                    status=self._status(rank, deadline),
                    operation=("after " if entry.ended else "") + entry.operation,
                    seconds=max(0, now - since) / 1e9,
                    line=entry.line,
                    host=host_name(),
                )
            )
        return tuple(rows)

    def _status(self, rank: int, deadline: float) -> str:
        """One of "alive", "stopped", "left", or how the rank ended."""
        while rank != self.rank:
            if self._died(rank):
                return self.cause(rank, time.monotonic() + _CAUSE_SECONDS)
            # one that has left may be about to end, and then its exit code says more
            if not self.has_left(rank):
                break
            if time.monotonic() > deadline:
                failed = self._words[self._row(rank) + _STATE] == FAILED
                return "ending after an exception" if failed else "left"
            time.sleep(0.001)
        try:
            stopped = state_letter(self.process(rank).pid) in "Tt"
        except OutOfDescriptors:
            return "alive"
        return "stopped" if stopped else "alive"

    def cause(self, rank: int, deadline: float = 0.0) -> str:
        """How a rank that has ended did; waits until the deadline for the launcher to say."""
        at = self._row(rank) + _ENDED
        while not self._words[at] and self._launcher and time.monotonic() < deadline:
            time.sleep(0.001)
        ended: int = self._words[at]
        if not ended:
            return "ended, cause unknown" if not self.has_left(rank) else "left, then ended"
        code = -(ended & 0xFF) if ended & _BY_SIGNAL else ended & 0xFF
        return end_as_text(code, out_of_memory=bool(ended & _OUT_OF_MEMORY))

    def _died(self, rank: int) -> bool:
        pidfd = self._pidfds.get(rank)
        if pidfd is None:
            return process_start(self.process(rank).pid) != self.process(rank).start
        if pidfd < 0:
            return True
        return readable(pidfd)

    def _blames(self, rank: int) -> bool:
        return bool(self._words[self._row(rank) + _BLAMES])

    def _row(self, rank: int) -> int:
        return _HEADER + rank * _ROW


_rosters: weakref.WeakSet[Roster] = weakref.WeakSet()


def _mark_forked() -> None:
    for roster in list(_rosters):
        roster.mark_forked()


os.register_at_fork(after_in_child=_mark_forked)
