"""What each rank of a launch is doing (Recorder), and which ranks are alive (Roster).

The flight recorder. Every rank owns a strip of shared memory that only it writes, and that its
peers may read at any time:

    ring        16 entries of 5 words, overwritten in turn
                    number | texts | began | ended | group and step
    texts       64 texts of 184 bytes (operation names, source lines), each with its length

Entry n lies at n % 16, and is open while `ended` is 0. Times are CLOCK_MONOTONIC in
nanoseconds, the same in every process. Writing an entry takes about half a microsecond, so
the recorder is always on: a source line is written as text once and then named by its number,
until a newer text replaces it; texts that an entry of the ring names are not replaced.

The roster. One per launch, at the start of its memory:

    words 0-7    magic | layout | size | unused
    then for each rank, 8 words and its recorder's strip
        pid | start | state | ended | cause | three for its engine

A rank's words are written by rank 0 while the group starts (pid, start), then by the rank
itself (state, cause) and by the launcher (ended). Nobody has to write that a rank died: a
pidfd tells, for any process of this user, child or not. How a process died is known only to
its parent: the launcher publishes it, and without a launcher the cause stays unknown.
"""

from __future__ import annotations

import itertools
import os
import select
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from types import CodeType

from weft._core.failures import OUTSIDE, is_outside
from weft._core.launch import Process
from weft.engines.local.memory.segment import Block
from weft.engines.local.processes.linux import (
    end_as_text,
    open_pidfd,
    process_start,
    readable,
    state_letter,
)
from weft.engines.refusals import forked_error, left_error
from weft.errors import NotInitialized, OutOfDescriptors, RankState, Refused, UsedAfterFork
from weft.resources import Plan, count_sharing, host_name, plan

_RING = 16
_ENTRY = 5
_TEXTS = 64
_TEXT_WORDS = 24
_TEXTS_AT = _RING * _ENTRY
#: words of one rank's strip
STRIP_WORDS = -(-(_TEXTS_AT + _TEXTS * _TEXT_WORDS) // 8) * 8
_NO_CALL: tuple[str, CodeType | None, int, int] = ("", None, -1, 0)
_pack_entry = struct.Struct(f"{_ENTRY}Q").pack_into
_getframe = sys._getframe


@dataclass(frozen=True)
class Entry:
    """One operation of one rank."""

    number: int
    operation: str
    line: str
    began: int
    #: 0 while the rank is in it
    ended: int
    #: tells groups, generations and steps apart; the same number on every rank
    tag: int


NOTHING = Entry(0, "nothing yet", "", 0, 0, 0)


class Recorder:
    """The writer of this rank's own strip."""

    def __init__(self, words: memoryview, at: int) -> None:
        self._words = words
        self._ring = at
        self._texts = at + _TEXTS_AT
        # next() on itertools.count is atomic, so threads get different entries
        self._numbers = itertools.count(1)
        self._written = itertools.count(0)
        #: the texts by number, their numbers, and the two numbers of each call site
        self._by_number: list[str | None] = [None] * _TEXTS
        self._known: dict[str, int] = {}
        self._sites: dict[tuple[str, str], int] = {}
        self._last = _NO_CALL

    def enter(self, operation: str, tag: int = 0, depth: int = 1) -> int:
        """Note that this rank begins `operation`. Return the entry's position, for `leave`.

        The source line is that of the first caller outside weft. `depth` is how many callers are
        certainly inside weft: they are skipped, as examining a frame costs as much as all the rest.
        """
        frame = _getframe(depth)
        code = frame.f_code
        while not OUTSIDE.get(code.co_filename):
            if is_outside(code.co_filename) or frame.f_back is None:
                break
            frame = frame.f_back
            code = frame.f_code
        # most calls come from the same line as the call before
        last_operation, last_code, last_instruction, texts = self._last
        if (
            code is not last_code
            or frame.f_lasti != last_instruction
            or operation is not last_operation
        ):
            texts = self._texts_of(operation, f"{code.co_filename}:{frame.f_lineno}")
            self._last = operation, code, frame.f_lasti, texts
        return self._note(texts, tag)

    def enter_at(self, operation: str, line: str, tag: int = 0) -> int:
        """Note, as `enter` does, an operation that was requested earlier, at `line`."""
        return self._note(self._texts_of(operation, line), tag)

    def _note(self, texts: int, tag: int) -> int:
        number = next(self._numbers)
        at = self._ring + number % _RING * _ENTRY
        # number 0 while the entry is incomplete, so that readers skip it
        _pack_entry(self._words, 8 * at, 0, texts, monotonic_ns(), 0, tag)
        self._words[at] = number
        return at

    def leave(self, at: int) -> None:
        """Note that the operation of the entry at this position has ended."""
        self._words[at + 3] = monotonic_ns()

    def _texts_of(self, operation: str, line: str) -> int:
        """Return the numbers of the two texts of a call; write the texts if they are new."""
        texts = self._sites.get((operation, line))
        if texts is None:
            number = self._write(operation)
            texts = number << 32 | self._write(line, keep=number)
            self._sites[operation, line] = texts
        return texts

    def _write(self, text: str, keep: int = -1) -> int:
        if text in self._known:
            return self._known[text]
        index = self._place_for_text(keep)
        before = self._by_number[index]
        if before is not None:
            self._known.pop(before, None)
            self._sites.clear()
            self._last = _NO_CALL
        data = text.encode(errors="replace")[-(_TEXT_WORDS - 1) * 8 :]
        at = self._texts + index * _TEXT_WORDS
        self._words[at] = len(data)
        target = self._words[at + 1 : at + _TEXT_WORDS].cast("B")
        target[: len(data)] = data
        self._by_number[index] = text
        self._known[text] = index
        return index

    def _place_for_text(self, keep: int) -> int:
        """Return the next text to replace, skipping those that the ring names or is about to."""
        entries = self._words[self._ring : self._ring + _RING * _ENTRY].tolist()
        named = {number for texts in entries[1::_ENTRY] for number in divmod(texts, 1 << 32)}
        named |= {keep}
        return next(turn % _TEXTS for turn in self._written if turn % _TEXTS not in named)


def entries(words: memoryview, at: int) -> list[Entry]:
    """Return a strip's entries, oldest first. Any process may read; torn entries are left out."""
    whole = []
    for index in range(_RING):
        place = at + index * _ENTRY
        number, texts, began, ended, tag = words[place : place + _ENTRY]
        if number and words[place] == number:
            operation, line = _text(words, at, texts >> 32), _text(words, at, texts & 0xFFFFFFFF)
            whole.append(Entry(number, operation, line, began, ended, tag))
    return sorted(whole, key=lambda entry: entry.number)


def current(words: memoryview, at: int) -> Entry:
    """Return the operation that the strip's rank is in, or else its last one."""
    noted = entries(words, at) or [NOTHING]
    return next((entry for entry in noted if not entry.ended), noted[-1])


def _text(words: memoryview, at: int, index: int) -> str:
    place = at + _TEXTS_AT + index % _TEXTS * _TEXT_WORDS
    data = words[place + 1 : place + _TEXT_WORDS].tobytes()
    return data[: min(words[place], len(data))].decode(errors="replace")


_MAGIC = int.from_bytes(b"weftjob\0", "little")
_LAYOUT = 1
_HEADER = 8
_PID, _START, _STATE, _ENDED, _CAUSE = range(5)
_ROW = 8 + STRIP_WORDS
LEFT, FAILED = 1, 2
#: flags in the word `ended`, beside the low byte with the code or signal
_PUBLISHED, _BY_SIGNAL, _OUT_OF_MEMORY = 0x100, 0x200, 0x400
#: how long a survivor waits for the end of peers that have left, which takes an interpreter some
#: tens of milliseconds, and for the launcher to publish how a rank ended
_ENDING_SECONDS, _CAUSE_SECONDS = 0.15, 0.03
#: what `describe_end` returns for a rank that is not known to have failed
_ENDED_WELL = ("exit code 0", "left, then ended", "ended, cause unknown")


def words_for(size: int) -> int:
    """Return how many words the roster of `size` ranks takes."""
    return _HEADER + size * _ROW


class Roster:
    """The launch's ranks, as seen from one of them (or from the launcher, with rank -1)."""

    def __init__(self, block: Block, rank: int, launcher: int = 0) -> None:
        self._block = block
        self._words = block.words
        self.rank = rank
        #: False once this process has left the launch, and in children forked from it
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
        """Initialize fresh memory as a roster of `size` ranks that nobody has joined."""
        block.words[1] = _LAYOUT
        block.words[2] = size
        block.words[0] = _MAGIC

    # what the ranks and the launcher write

    def enroll(self, rank: int, process: Process) -> None:
        """Assign a rank to a process, and clear what an earlier one left."""
        at = self._row(rank)
        self._block.clear(at, at + _ROW)
        self._words[at + _PID], self._words[at + _START] = process.pid, process.start

    def set_state(self, state: int) -> None:
        self._words[self._row(self.rank) + _STATE] = state

    def record_cause(self, rank: int) -> None:
        """Note that this rank fails because it lost `rank`: the launcher looks for the first."""
        self._words[self._row(self.rank) + _CAUSE] = rank + 1

    def publish_end(self, rank: int, code: int, *, out_of_memory: bool) -> None:
        """Publish how a rank ended: its exit code, or the negative signal number."""
        flags = _PUBLISHED | (_BY_SIGNAL if code < 0 else 0)
        flags |= _OUT_OF_MEMORY if out_of_memory else 0
        self._words[self._row(rank) + _ENDED] = flags | abs(code) & 0xFF

    # what they read

    def open_recorder(self) -> Recorder:
        """Return this rank's own recorder."""
        return Recorder(self._words, self._row(self.rank) + 8)

    def entries(self, rank: int) -> list[Entry]:
        return entries(self._words, self._row(rank) + 8)

    def process(self, rank: int) -> Process:
        at = self._row(rank)
        return Process(self._words[at + _PID], self._words[at + _START])

    def row_of(self, rank: int) -> tuple[Block, int]:
        """Return the block, and the index of a rank's first word in it. Words 5 to 7 of a row are
        the rank's own, for what its engine needs."""
        return self._block, self._row(rank)

    def end_published(self, rank: int) -> bool:
        """Return whether the launcher has published a rank's end."""
        return bool(self._words[self._row(rank) + _ENDED])

    def cause_of(self, rank: int) -> int | None:
        """Return the rank whose loss made `rank` fail, or None."""
        cause = int(self._words[self._row(rank) + _CAUSE])
        return cause - 1 if cause else None

    def has_left(self, rank: int) -> bool:
        return bool(self._words[self._row(rank) + _STATE])

    def plan(self, ranks: Sequence[int]) -> Plan:
        """Return the cores that this rank may use beside these ranks, of which it is one."""
        return plan(len(ranks), count_sharing(self.process(rank).pid for rank in ranks))

    def watch(self, ranks: Iterable[int]) -> None:
        """Open pidfds of these ranks, to learn of their deaths."""
        for rank in ranks:
            if rank != self.rank and rank not in self._pidfds:
                self._pidfds[rank] = open_pidfd(self.process(rank))

    def leave(self) -> None:
        """Note that this process is no longer a rank of the launch."""
        self.is_here = False
        # Python sets sys.last_type when it has printed an uncaught exception
        self.set_state(FAILED if hasattr(sys, "last_type") else LEFT)

    def unusable_error(self, what: str) -> NotInitialized | UsedAfterFork:
        """Return the error of using something of this launch after leaving it, or in a fork."""
        if self._forked:
            return forked_error(what, self._process)
        return left_error(what)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # not in leave(): another thread may still be polling these. `close` is an argument, because
        # module globals may be gone when the interpreter ends
        for pidfd in self._pidfds.values():
            if pidfd >= 0:
                close(pidfd)

    def gone(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks that have died or left."""
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
        """Return whether a rank has ended and its launcher has published a failure."""
        if rank == self.rank or not self._died(rank):
            return False
        return self.describe_end(rank, time.monotonic() + _CAUSE_SECONDS) not in _ENDED_WELL

    def states(self, ranks: Sequence[int]) -> tuple[RankState, ...]:
        """Return the table that errors carry: the states of these ranks, numbered by position."""
        now = time.monotonic_ns()
        # only a launcher of weft's publishes how they end
        deadline = time.monotonic() + (_ENDING_SECONDS if self._launcher else 0.0)
        rows = []
        for place, rank in enumerate(ranks):
            entry = current(self._words, self._row(rank) + 8)
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
        """Return "alive", "stopped", "left", or how the rank ended."""
        while rank != self.rank:
            if self._died(rank):
                return self.describe_end(rank, time.monotonic() + _CAUSE_SECONDS)
            # a rank that has left may be about to end, and its exit code says more
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

    def describe_end(self, rank: int, deadline: float = 0.0) -> str:
        """Describe how a rank ended. Wait until the deadline for the launcher to publish it."""
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

    def _row(self, rank: int) -> int:
        return _HEADER + rank * _ROW


_rosters: weakref.WeakSet[Roster] = weakref.WeakSet()


def _mark_forked() -> None:
    for roster in list(_rosters):
        roster.is_here, roster._forked = False, True


os.register_at_fork(after_in_child=_mark_forked)
