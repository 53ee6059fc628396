"""Where the local engine keeps a table's rows: in memory that every rank reads and writes itself.

    get    some rows   copy; nobody has written meanwhile? else once more, under the table's lock
           all         stripe by stripe: table shared, stripe shared, copy
    add    some rows   table exclusive: say which, update, say that it is done
           all         stripe by stripe: table shared, stripe exclusive, update

So passes over the whole table exclude each other only where they meet, readers do not exclude
readers, and a change to a few rows excludes everything for the few microseconds that it takes.

A writer says `begun` before it changes anything and `ended` after. A reader that finds all begun
writes ended, copies, and finds nothing begun since, has rows that are whole: it needs no lock
(stores are seen in their order: `waiting.py`). A writer that dies in between blocks nobody: the
kernel hands its locks on, and what it had begun is what `interrupted` tells.

Under bsp an add only puts the delta down; the first rank that needs the next clock applies
everybody's, in the order of ranks. Nobody can need another clock before that rank adds again, so
what it then reads does not change under it.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np

from weft import faults
from weft._core import rows
from weft._core.split import part_of
from weft._core.tables import Array, Ids, Interrupted, TableSpec
from weft._core.timeouts import checked
from weft.engines.base import Store
from weft.engines.local.clocks import Clocks
from weft.engines.local.common import make_block
from weft.engines.local.locks import Lock
from weft.engines.local.meeting import TABLE, Meeting
from weft.engines.local.meeting_memory import MAILBOX_BYTES
from weft.engines.local.recorder import Recorder
from weft.engines.local.segment import Block
from weft.engines.local.table_memory import (
    APPLIED,
    COUNT,
    HIGHEST,
    INTERRUPTED,
    LOWEST,
    NAMED,
    PROGRESS,
    WHOLE,
    TableMemory,
)
from weft.engines.memory import check_memory
from weft.errors import OutOfMemory, UsageError

#: bytes that are read at a time: the C library writes past the cache only in large copies, which
#: is twice as fast
_CHUNK = 32 << 20
#: how often rows are copied again before a reader takes the lock
_TRIES = 3
#: rows of a clock that are applied between two notes of how far it has come
_PART = 1 << 16


def make_store(
    meeting: Meeting, log: Recorder, spec: TableSpec, values: Array | None, *, timeout: float
) -> LocalStore:
    """A table of the ranks that meet: rank 0 makes its memory, which all of them map.

    Raises Disagreement, which shows what each rank asked for, and OutOfMemory, on every rank.
    """
    nbytes = TableMemory(spec, len(meeting.members)).nbytes
    trouble = ""
    if meeting.rank == 0:
        try:
            check_memory(f"{spec.kind} {spec.name!r}", nbytes, "make it smaller")
        except OutOfMemory as error:
            trouble = str(error)
    # a message may be too short for all of it: the digest tells whether ranks mean the same
    digest = hashlib.sha256(str(spec).encode()).hexdigest()[:32]
    message = "\n".join((digest, trouble[: MAILBOX_BYTES // 2], str(spec)))
    said = meeting.exchange(TABLE, message.encode()[:MAILBOX_BYTES], timeout)
    digests, troubles, specs = zip(
        *(text.decode(errors="ignore").split("\n", 2) for text in said), strict=True
    )
    if len(set(digests)) > 1:
        raise meeting.disagreement(dict(enumerate(specs)))
    if troubles[0]:
        raise OutOfMemory(troubles[0])
    block = make_block(
        meeting,
        TABLE,
        leader=meeting.members[0],
        size=nbytes,
        seconds=timeout,
        prepare=lambda made: TableMemory(spec, len(meeting.members), made).format(values),
        point="table.made",
    )
    return LocalStore(spec, block, meeting=meeting, log=log, timeout=timeout)


class LocalStore(Store):
    """One table, as one rank sees it."""

    def __init__(
        self,
        spec: TableSpec,
        block: Block,
        *,
        meeting: Meeting,
        log: Recorder,
        timeout: float,
    ) -> None:
        self.spec = spec
        roster, members = meeting.roster, meeting.members
        self._members, self._roster, self._log = tuple(members), roster, log
        self._rank, self._size = meeting.rank, len(members)
        self._generation, self._timeout = meeting.generation, timeout
        self._memory = TableMemory(spec, self._size, block)
        self._words = block.words
        self._rows, self._state = self._memory.rows, self._memory.state
        self._arrays = self._rows, self._state
        self._steps = self._memory.steps
        self._table, *self._stripes = (
            Lock(one, roster=roster, log=log, members=members, timeout=timeout)
            for one in self._memory.lock_blocks()
        )
        self._clocks = Clocks(block, self._memory, meeting=meeting, log=log)
        begun, ended = self._memory.begun_at, self._memory.ended_at
        self._begun = self._words[begun : begun + self._size]
        self._ended = self._words[ended : ended + self._size]
        self._bsp = spec.consistency.name == "bsp"
        self._adds = spec.updater.name == "add"
        self._own_ids = self._memory.ids(self._rank)
        #: threads of this rank add, and under bsp get, one after the other
        self._turn = threading.RLock()
        #: whether the thread whose turn it is is in the middle of it
        self._in_turn = False
        roster.watch(members)

    # reading

    def get(self, ids: Ids | None, out: Array, *, timeout: float | None = None) -> None:
        if not self._roster.is_here:
            raise self._unusable()
        if timeout is not None:
            checked(timeout)
        if self._bsp:
            with self._turn:  # an add of another thread would let the others change what is read
                self._check_turn()
                try:
                    self._in_turn = True
                    self._catch_up(self._clocks.own, self._deadline(timeout))
                    self._copy(ids, out)
                finally:
                    self._in_turn = False
        elif not self.spec.exact:
            self._copy(ids, out)
        elif ids is None and len(self._stripes) > 1:
            self._copy_stripes(out, self._deadline(timeout))
        else:
            self._copy_whole_rows(ids, out, timeout)
        self.staleness = self._clocks.staleness()

    def _copy(self, ids: Ids | None, out: Array) -> None:
        if ids is None:
            np.copyto(out, self._rows)
        else:
            rows.read(self._rows, ids, out)

    def _copy_whole_rows(self, ids: Ids | None, out: Array, timeout: float | None) -> None:
        """Copy rows that nobody changes meanwhile."""
        begun, ended = self._begun, self._ended
        for _ in range(_TRIES):
            before = ended.tolist()
            if begun.tolist() == before:
                self._copy(ids, out)
                if faults.armed:
                    faults.reach("table.copied")
                if begun.tolist() == before:
                    return
        with self._table.exclusive(timeout=timeout):
            self._settle_deaths()
            self._copy(ids, out)

    def _copy_stripes(self, out: Array, deadline: float) -> None:
        """Copy the whole table, several stripes at a time."""
        memory = self._memory
        chunks = min(max(1, self.spec.nbytes // _CHUNK), memory.stripes)
        for chunk in range(chunks):
            stripes = range(*part_of(memory.stripes, chunks, chunk))
            low, high = memory.range_of(stripes[0])[0], memory.range_of(stripes[-1])[1]
            with (
                self._table.shared(timeout=_left(deadline)),
                self._all_shared([self._stripes[stripe] for stripe in stripes], deadline),
            ):
                np.copyto(out[low:high], self._rows[low:high])

    @contextmanager
    def _all_shared(self, locks: list[Lock], deadline: float) -> Iterator[None]:
        # not by an ExitStack: interrupted, it may be part of a cycle, and what it holds with it
        if not locks:
            yield
            return
        with locks[0].shared(timeout=_left(deadline)), self._all_shared(locks[1:], deadline):
            yield

    # writing

    def add(self, delta: Array, ids: Ids | None, *, timeout: float | None = None) -> None:
        if not self._roster.is_here:
            raise self._unusable()
        repeats = None
        if ids is not None:
            if self._adds and not self._bsp:
                repeats = rows.repeats(ids)
            else:
                ids, delta = rows.merge(ids, delta)
        with self._turn:
            self._check_turn()
            try:
                self._in_turn = True
                self._add(delta, ids, repeats, self._deadline(timeout))
                self._clocks.tick()
            finally:
                self._in_turn = False

    def _add(
        self, delta: Array, ids: Ids | None, repeats: rows.Repeats | None, deadline: float
    ) -> None:
        own = self._clocks.own
        if self._bsp:
            self._catch_up(own, deadline)
            self._stage(delta, ids)
            return
        self._clocks.await_others(self.spec.consistency.before_add(own), deadline)
        if ids is None:
            self._add_all(delta, deadline)
        else:
            self._add_rows(delta, ids, repeats, deadline)

    def _check_turn(self) -> None:
        """Refuse a call that comes in the middle of another one of the same thread."""
        if self._in_turn:
            raise UsageError(
                f"table {self.spec.name!r} is used by an updater or a signal handler in the middle "
                "of a call of the same thread; an updater only changes the rows it is given"
            )

    def _add_all(self, delta: Array, deadline: float) -> None:
        """Update every stripe. Ranks begin at different ones, so as not to meet at once."""
        count, rank = len(self._stripes), self._rank
        first = count * rank // self._size
        try:
            for turn in range(count):
                stripe = (first + turn) % count
                with self._stripe_held(stripe, deadline):
                    if turn == 0:
                        self._begin(0, self.spec.n_rows, None)
                    self._add_stripe(stripe, delta)
                    if turn == count - 1:
                        self._ended[rank] = self._begun[rank]
        finally:
            self._ended[rank] = self._begun[rank]

    @contextmanager
    def _stripe_held(self, stripe: int, deadline: float) -> Iterator[None]:
        if not self.spec.exact:
            yield
        elif len(self._stripes) == 1:
            with self._table.exclusive(timeout=_left(deadline)):
                yield
        else:
            with (
                self._table.shared(timeout=_left(deadline)),
                self._stripes[stripe].exclusive(timeout=_left(deadline)),
            ):
                yield

    def _add_stripe(self, stripe: int, delta: Array) -> None:
        if faults.armed:
            faults.reach("table.adding")
        low, high = self._memory.range_of(stripe)
        self._steps[stripe] += 1
        self._update(low, high, delta[low:high], int(self._steps[stripe] + self._steps[-1]))
        if faults.armed:
            faults.reach("table.added")

    def _add_rows(
        self, delta: Array, ids: Ids, repeats: rows.Repeats | None, deadline: float
    ) -> None:
        if not ids.size:
            return
        rank = self._rank
        alone = self._table.exclusive(timeout=_left(deadline))
        with alone if self.spec.exact else nullcontext():
            try:
                self._begin(0, 0, ids)
                if faults.armed:
                    faults.reach("table.adding")
                if self._adds:
                    rows.add(self._rows, ids, delta, repeats)
                else:
                    self._steps[-1] += 1
                    rows.update(self._arrays, ids, delta, self.spec.updater, self.steps)
                if faults.armed:
                    faults.reach("table.added")
            finally:
                self._ended[rank] = self._begun[rank]

    def _update(self, low: int, high: int, delta: Array, step: int) -> None:
        state = {name: array[low:high] for name, array in self._state.items()}
        self.spec.updater.update(self._rows[low:high], state, delta, step)

    def _begin(self, low: int, high: int, ids: Ids | None) -> None:
        """Say which rows are about to change. Who calls it says afterwards that they have:

            self._ended[rank] = self._begun[rank]

        in a `finally`, and without a call, so that no signal handler keeps it from being said.
        """
        rank, words, word = self._rank, self._words, self._memory.word
        if ids is None:
            words[word(rank, LOWEST)], words[word(rank, HIGHEST)] = low, high
            words[word(rank, COUNT)] = WHOLE
        else:
            named = ids[:NAMED]
            self._own_ids[: named.size] = named
            words[word(rank, COUNT)] = ids.size
        self._begun[rank] += 1

    # clocks

    def _stage(self, delta: Array, ids: Ids | None) -> None:
        """Put a delta down until its clock is applied."""
        count, staged_ids, deltas = self._memory.staged(self._rank)
        if ids is None:
            np.copyto(deltas, delta)
            count[0] = WHOLE
        else:
            staged_ids[: ids.size] = ids
            deltas[: ids.size] = delta
            count[0] = ids.size
        if faults.armed:
            faults.reach("table.staged")

    def _catch_up(self, clock: int, deadline: float) -> None:
        """Wait until everybody has made so many adds, and see that exactly these are applied."""
        if self._words[APPLIED] >= clock:
            return
        self._clocks.await_others(clock, deadline)
        with self._table.exclusive(timeout=_left(deadline)):
            self._settle_deaths()
            while self._words[APPLIED] < clock:
                self._apply_clock(self._words[APPLIED] + 1)

    def _apply_clock(self, clock: int) -> None:
        """Apply everybody's add of a clock, in the order of ranks.

        `progress` counts the parts of all clocks that were begun: should this rank die, the next
        one goes on after the last of them. So it is never set back, and a clock is applied by one
        store, of its number.
        """
        words = self._words
        parts = -(-self.spec.n_rows // _PART)
        before = (clock - 1) * self._size * parts
        for number in range(max(0, words[PROGRESS] - before), self._size * parts):
            rank, part = divmod(number, parts)
            if self._clocks.count(rank) >= clock:
                self._apply_part(rank, part, before + number + 1)
        words[APPLIED] = clock

    def _apply_part(self, rank: int, part: int, progress: int) -> None:
        count, ids, deltas = self._memory.staged(rank)
        whole = count[0] == WHOLE
        low = part * _PART
        high = min(low + _PART, self.spec.n_rows if whole else int(count[0]))
        if low >= high:
            return
        own, step = self._rank, self.steps + rank + 1  # as if nobody was missing
        try:
            self._begin(low, high, None if whole else ids[low:high])
            if faults.armed:
                faults.reach("table.adding")
                faults.reach("table.applying")
            if self._adds:
                self._add_part(deltas[low:high], None if whole else ids[low:high], low, progress)
            else:
                self._words[PROGRESS] = progress
                if whole:
                    self._update(low, high, deltas[low:high], step)
                else:
                    some = ids[low:high], deltas[low:high]
                    rows.update(self._arrays, *some, self.spec.updater, step)
            if faults.armed:
                faults.reach("table.added")
        finally:
            self._ended[own] = self._begun[own]

    def _add_part(self, delta: Array, ids: Ids | None, low: int, progress: int) -> None:
        """Add to some rows, and note it: no signal handler can come between, and cost somebody his
        add, because there is no call between the one and the other."""
        words, table = self._words, self._rows
        if ids is None:
            some = table[low : low + len(delta)]
            with np.errstate(all="ignore"):
                words[PROGRESS] = progress
                np.add(some, delta, some)
        else:
            changed = table.take(ids, 0)
            with np.errstate(all="ignore"):
                changed += delta
            words[PROGRESS] = progress
            table[ids] = changed

    # deaths

    def interrupted(self) -> tuple[Interrupted, ...]:
        words, word = self._words, self._memory.word
        found = []
        for rank in range(self._size):
            if not words[word(rank, INTERRUPTED)] and not self._died_adding(rank):
                continue
            count = words[word(rank, COUNT)]
            if count == WHOLE:
                ids: Sequence[int] = range(words[word(rank, LOWEST)], words[word(rank, HIGHEST)])
            else:
                ids = tuple(self._memory.ids(rank)[: min(count, NAMED)].tolist())
            found.append(Interrupted(rank, ids, self._generation))
        return tuple(found)

    def _died_adding(self, rank: int) -> bool:
        if rank == self._rank or self._begun[rank] == self._ended[rank]:
            return False
        # it may have ended its add, and then left: who is gone first, the words after
        gone = self._roster.gone([self._members[rank]])
        return bool(gone) and self._begun[rank] != self._ended[rank]

    def _settle_deaths(self) -> None:
        """Note which ranks died while they added, so that readers stop waiting for them to end it.
        For the holder of the table's lock."""
        for rank in range(self._size):
            if self._died_adding(rank):
                self._words[self._memory.word(rank, INTERRUPTED)] = 1
                self._ended[rank] = self._begun[rank]

    # the rest

    def arrays(self) -> dict[str, Array]:
        if not self._roster.is_here:
            raise self._unusable()
        if self._bsp:
            self._catch_up(
                min([self._clocks.own, *self._clocks.present().values()]), self._deadline(None)
            )
        return {"rows": self._rows, **self._state}

    @property
    def steps(self) -> int:
        return int(self._steps[-1] + self._steps[:-1].max()) + self._applied_adds()

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps[...] = 0
        self._steps[-1] = value - self._applied_adds()

    def _applied_adds(self) -> int:
        """Those of the clocks that were applied."""
        return self._words[APPLIED] * self._size if self._bsp else 0

    def _unusable(self) -> Exception:
        return self._roster.unusable(f"table {self.spec.name!r}")

    def _deadline(self, timeout: float | None) -> float:
        seconds = self._timeout if timeout is None else checked(timeout)
        return math.inf if math.isinf(seconds) else time.monotonic() + seconds


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
