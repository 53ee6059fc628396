"""Locks between processes and threads that survive the death of their holder.

    words 0-7    a robust pthread mutex
    word  8      the place of the exclusive holder, plus one
    word  9      the place of a holder that died in exclusive mode, plus one, until the next
                 exclusive holder has learned of it
    words 10-    sleepers' flags, one byte for each place
    then         for each place a line of 8 words: entered | left

Exclusive mode takes the mutex, waits until every reader that has entered has left, and keeps
the mutex. Shared mode takes the mutex, counts itself in, and releases the mutex; leaving is
one store. So readers do not exclude readers, a waiting writer stops new readers, and a reader
pays for one short mutex operation, not two.

If the holder of the mutex dies, the kernel hands it to the next in line with EOWNERDEAD. A
dead reader has changed nothing: the writer sees that it is gone and stops waiting for it. A
robust mutex is owned by a thread, so threads of one process exclude each other too. (OFD
locks were the alternative: they have both modes, but cost 2-4 us a pair, cannot wait with a
deadline, and are shared by accident when a descriptor is inherited.)

A signal handler may raise at any call. Stores that must not be lost are therefore made
without calls: CPython runs handlers and switches threads only at calls and backward jumps, so
`words[i] += 1` is atomic between the threads of a process. A handler that raises just as a
`with` begins or ends can keep its `finally` from running; the lock is then released when the
exception's traceback is freed. A caller that cannot wait for that uses `release_held`.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weft import faults
from weft._core.arguments import deadline_after
from weft.engines.local.meeting.roster import Recorder, Roster
from weft.engines.local.meeting.waiting import SLICE, Waiter
from weft.engines.local.memory.segment import Block
from weft.engines.local.processes import linux
from weft.errors import Stalled, UsageError

_HOLDER, _DIED, _FLAGS = 8, 9, 10
#: tries before sleeping, where every rank has a core: some 400 us, in which a table's change of a
#: thousand rows ends
_TRIES = 1000


def words_for(size: int) -> int:
    """Return how many words a lock between `size` places takes."""
    return _lines_at(size) + 8 * size


def _lines_at(size: int) -> int:
    return -(-(_FLAGS + -(-size // 8)) // 8) * 8


class Lock:
    """One process's handle on a lock between `members`, ranks of the launch. Threads may share it,
    but it is not reentrant: a thread that holds it, in either mode, must not take it again."""

    def __init__(
        self,
        block: Block,
        *,
        roster: Roster,
        recorder: Recorder,
        members: Sequence[int],
        timeout: float,
        free_cores: bool = False,
    ) -> None:
        size = len(members)
        self._block = block
        self._address = block.address
        self._words = block.words
        self._roster = roster
        self._recorder = recorder
        self._members = tuple(members)
        self._place = self._members.index(roster.rank)
        self._timeout = timeout
        self._tries = range(_TRIES if free_cores else 0)
        self._lines = [_lines_at(size) + 8 * place for place in range(size)]
        self._line = self._lines[self._place]
        #: by thread of this process: the mode in which it holds the lock, a fresh list each time.
        #: A dict, because items are set and deleted without a call
        self._holding: dict[int, list[str]] = {}
        self._waiter = Waiter(
            block, flags_at=8 * _FLAGS, size=size, place=self._place, free_cores=False
        )

    @staticmethod
    def format(block: Block) -> None:
        """Initialize memory, fresh or used, as a lock that nobody holds."""
        block.clear()
        linux.mutex_init(block.address)

    @contextmanager
    def exclusive(self, *, timeout: float | None = None) -> Iterator[int | None]:
        """Hold the lock alone.

        Yields the place of an earlier exclusive holder that died with the lock, and so may have
        left its changes incomplete; None if there is none.

        Raises Stalled, UsageError, and what a group raises after shutdown or in a forked child.
        """
        thread = self._validate_use()
        deadline = deadline_after(timeout, self._timeout)
        words, holding, hold = self._words, self._holding, ["exclusive"]
        try:
            died = self._take(deadline)
            holding[thread] = hold
            words[_HOLDER] = self._place + 1
            for place, line in enumerate(self._lines):
                if words[line + 1] < words[line]:
                    self._await_reader(place, line, deadline)
            words[_DIED] = 0
            if faults.armed:
                faults.reach("lock.taken")
            yield died
        finally:
            if thread in holding and holding[thread] is hold and self._roster.is_here:
                words[_HOLDER] = 0
                del holding[thread]
                linux.raw_unlock(self._address)

    @contextmanager
    def shared(self, *, timeout: float | None = None) -> Iterator[int | None]:
        """Hold the lock together with other readers. Yields and raises what `exclusive` does."""
        thread = self._validate_use()
        deadline = deadline_after(timeout, self._timeout)
        words, line = self._words, self._line
        holding, hold = self._holding, ["shared"]
        try:
            died = self._take(deadline)
            words[line] += 1
            holding[thread] = hold
            linux.raw_unlock(self._address)
            if faults.armed:
                faults.reach("lock.shared")
            yield died
        finally:
            if thread in holding and holding[thread] is hold and self._roster.is_here:
                words[line + 1] += 1
                del holding[thread]
                self._waiter.wake_sleepers(line + 1)

    def release_held(self) -> None:
        """Release the lock if this thread holds it because an interrupt hit the end of a `with`."""
        thread = threading.get_ident()
        hold = self._holding.get(thread)
        if hold is None or not self._roster.is_here:
            return
        if hold[0] == "exclusive":
            self._words[_HOLDER] = 0
            del self._holding[thread]
            linux.raw_unlock(self._address)
        else:
            self._words[self._line + 1] += 1
            del self._holding[thread]
            self._waiter.wake_sleepers(self._line + 1)

    # for who must not wait: an agent, which serves others meanwhile. One thread of it takes locks,
    # and no signal handler of it raises

    def try_take(self, *, patience: float = 0.0) -> bool:
        """Take the lock alone, if nobody else does; wait so many seconds at most. The caller may
        change something once there are no more readers, and ends with `release_taken`."""
        if not self._try_mutex(patience):
            return False
        self._words[_HOLDER] = self._place + 1
        self._words[_DIED] = 0
        return True

    def has_readers(self) -> bool:
        """Return whether somebody is still reading, after `try_take`; no new readers come."""
        words = self._words
        for place, line in enumerate(self._lines):
            if words[line + 1] < words[line]:
                if not self._roster.gone([self._members[place]]):
                    return True
                words[line] = words[line + 1]  # it died inside: count it out
        return False

    def release_taken(self) -> None:
        self._words[_HOLDER] = 0
        linux.raw_unlock(self._address)

    def try_enter(self, *, patience: float = 0.0) -> bool:
        """Take the lock together with other readers, if nobody has it alone."""
        if not self._try_mutex(patience):
            return False
        self._words[self._line] += 1
        linux.raw_unlock(self._address)
        return True

    def leave_entered(self) -> None:
        self._words[self._line + 1] += 1
        self._waiter.wake_sleepers(self._line + 1)

    def _try_mutex(self, patience: float) -> bool:
        if linux.mutex_is_mine(self._address):  # taken for another that it serves
            return False
        code = linux.raw_try(self._address)
        if code == errno.EBUSY and patience:
            code = linux.mutex_wait(self._address, time.monotonic() + patience)
        if code in (errno.EBUSY, errno.ETIMEDOUT):
            return False
        if code == errno.EOWNERDEAD:
            self._recover()
        elif code:
            raise OSError(code, f"a lock is broken: {os.strerror(code)}")
        return True

    def _take(self, deadline: float) -> int | None:
        """Take the mutex. Return the place of a dead exclusive holder not yet reported, or None. If
        this raises, the mutex is not held."""
        words = self._words
        try:
            code = linux.raw_try(self._address)
            if code == errno.EBUSY:
                for _ in self._tries:
                    code = linux.raw_try(self._address)
                    if code != errno.EBUSY:
                        break
                else:
                    code = self._wait_for_mutex(deadline)
            if code == errno.EOWNERDEAD:
                self._recover()
            elif code:
                raise OSError(code, f"a lock is broken: {os.strerror(code)}")
            return words[_DIED] - 1 if words[_DIED] else None
        except BaseException:
            # a signal may have come after the mutex was taken and before `code` was assigned, and
            # another may come here: the first exception is the one that is raised
            while True:
                try:
                    if linux.mutex_is_mine(self._address):
                        self._recover()
                        linux.raw_unlock(self._address)
                    break
                except BaseException:
                    continue
            raise

    def _recover(self) -> None:
        """Mark the mutex consistent, and note the last holder if it died. A living holder clears
        its word before it unlocks, so a word that is still set names a dead one."""
        words = self._words
        if words[_HOLDER]:
            words[_DIED] = words[_DIED] or words[_HOLDER]
            words[_HOLDER] = 0
        linux.mutex_consistent(self._address)

    def _wait_for_mutex(self, deadline: float) -> int:
        entry = self._recorder.enter("waiting for a lock")
        try:
            while True:
                now = time.monotonic()
                if now >= deadline:
                    raise self._stalled_error("held", self._words[_HOLDER] - 1)
                code = linux.mutex_wait(self._address, min(now + SLICE, deadline))
                if code != errno.ETIMEDOUT:
                    return code
        finally:
            self._recorder.leave(entry)

    def _await_reader(self, place: int, line: int, deadline: float) -> None:
        def check() -> bool:
            if self._roster.gone([self._members[place]]):
                return True
            if time.monotonic() >= deadline:
                raise self._stalled_error("read", place)
            return False

        entry = self._recorder.enter("waiting for readers of a lock")
        try:
            if not self._waiter.wait(line + 1, self._words[line], deadline, check):
                self._words[line] = self._words[line + 1]  # it died inside: count it out
        finally:
            self._recorder.leave(entry)

    def _validate_use(self) -> int:
        """Return this thread's id; raise if it may not take the lock."""
        if not self._roster.is_here:
            raise self._roster.unusable_error("the lock")
        thread = threading.get_ident()
        if thread in self._holding:
            raise UsageError(
                "this thread holds the lock already; release it before taking it again"
            )
        return thread

    def _stalled_error(self, how: str, place: int) -> Stalled:
        by = f"by rank {place}" if place >= 0 else "by nobody for long, but never free"
        return Stalled(
            f"a lock was not free in time: it is {how} {by}",
            [place] if place >= 0 else [],
            self._roster.states(self._members),
        )
