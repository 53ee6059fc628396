"""Copies straight out of, and into, a peer's own memory, where the kernel allows it.

A byte that passes through shared memory is copied twice; this way once. It needs
the permission to trace the peer: the same user, and under Yama's scope 1 that the
peer has named an ancestor of this process. Each rank names its launcher, so the
ranks of a job may read each other and nobody else is let in.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

from weft.engines.local.libc import allow_reading_by, read_memory, write_memory
from weft.engines.local.meeting import Meeting
from weft.errors import PeerLost

#: whether ranks try to reach each other; where they may not, large arrays go through the slots in
#: rounds, which tests have by this
ALLOWED = True
#: for one call into the kernel, so that a signal is heard soon
_MOST = 32 << 20
#: seconds after which a peer is looked for again
_FRESH = 0.05
#: seconds that the kernel may take to end a process whose memory it has taken away
_ENDING = 30.0


class Peers:
    """The memory of the ranks that meet."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        #: when each was last seen alive
        self._seen = [0.0] * len(meeting.members)
        self._pids = [meeting.roster.process(member).pid for member in meeting.members]

    def pull(self, rank: int, remote: int, local: int, length: int) -> None:
        """Copy from a rank's memory to this process's. Raises PeerLost."""
        self._copy(read_memory, rank, remote, local, length)

    def push(self, rank: int, remote: int, local: int, length: int) -> None:
        """Copy from this process's memory to a rank's. Raises PeerLost."""
        self._copy(write_memory, rank, remote, local, length)

    def _copy(
        self,
        copy: Callable[[int, int, int, int], int],
        rank: int,
        remote: int,
        local: int,
        length: int,
    ) -> None:
        for done in range(0, length, _MOST):
            self._look_for(rank)
            part = min(_MOST, length - done)
            try:
                copied = copy(self._pids[rank], remote + done, local + done, part)
            except OSError as error:
                raise self._lost(rank) or error from None
            if copied != part:
                raise self._lost(rank) or OSError(f"{copied} of {part} bytes were copied")

    def _look_for(self, rank: int) -> None:
        """Raise PeerLost if a rank is gone. The pid of one that has ended is given to a new process
        when all numbers have been used, which takes seconds at the least."""
        self._meeting.check_that_this_rank_is_here()
        now = time.monotonic()
        if now - self._seen[rank] > _FRESH:
            lost = self._meeting.lost(rank)
            if lost is not None:
                raise lost
            self._seen[rank] = now

    def _lost(self, rank: int) -> PeerLost | None:
        """The loss of a rank whose memory is out of reach: that of one that ends is so before its
        end is known. None if it turns out to live."""
        deadline = time.monotonic() + _ENDING
        while (lost := self._meeting.lost(rank)) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return lost

    def can_reach(self, rank: int, word: int, value: int) -> bool:
        """Whether a rank's memory can be read: the 8 bytes at `word` are tried, and compared."""
        if not ALLOWED:
            return False
        seen = ctypes.c_uint64()
        try:
            read_memory(self._pids[rank], word, ctypes.addressof(seen), 8)
        except OSError:
            return False
        return seen.value == value


def let_peers_reach() -> None:
    """Allow the launcher's other children to read this process, where Yama would forbid it.

    A process without a launcher, which is a child of the first process, allows nobody.
    """
    parent = os.getppid()
    if parent > 1 and _yama_scope() == "1":
        allow_reading_by(parent)


def _yama_scope() -> str:
    """Whom processes of one user may trace: anybody (0), their descendants (1), or nobody."""
    try:
        return Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:  # a kernel without Yama
        return "0"
