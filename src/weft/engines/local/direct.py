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
from collections.abc import Sequence
from pathlib import Path

from weft.engines.local.libc import allow_reading_by, read_memory, write_memory
from weft.engines.local.roster import Roster

#: for one call into the kernel, so that a signal is heard soon
_MOST = 32 << 20
#: seconds after which a peer is looked for again
_FRESH = 0.05


class Peers:
    """The memory of a group's ranks. `members` are their ranks in the job."""

    def __init__(self, roster: Roster, members: Sequence[int]) -> None:
        self._roster, self._members = roster, members
        #: when each was last seen alive
        self._seen = [0.0] * len(members)
        self._pids = [roster.process(member).pid for member in members]

    def pull(self, rank: int, remote: int, local: int, length: int) -> None:
        """Copy from a rank's memory to this process's."""
        for done in range(0, length, _MOST):
            part = min(_MOST, length - done)
            _complete(read_memory(self._pids[rank], remote + done, local + done, part), part)

    def push(self, rank: int, remote: int, local: int, length: int) -> None:
        """Copy from this process's memory to a rank's."""
        for done in range(0, length, _MOST):
            self._check_that_it_lives(rank)
            part = min(_MOST, length - done)
            _complete(write_memory(self._pids[rank], remote + done, local + done, part), part)

    def _check_that_it_lives(self, rank: int) -> None:
        """Not to write into another process: the pid of one that has ended is given to a new one
        when all numbers have been used, which takes seconds at the least."""
        now = time.monotonic()
        if now - self._seen[rank] > _FRESH:
            if self._roster.gone([self._members[rank]]):
                raise ProcessLookupError(f"rank {rank} has ended")
            self._seen[rank] = now

    def can_reach(self, rank: int, word: int, value: int) -> bool:
        """Whether a rank's memory can be read: the 8 bytes at `word` are tried, and compared."""
        seen = ctypes.c_uint64()
        try:
            self.pull(rank, word, ctypes.addressof(seen), 8)
        except OSError:
            return False
        return seen.value == value


def _complete(copied: int, length: int) -> None:
    if copied != length:
        raise OSError(f"{copied} of {length} bytes were copied")


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
