"""A table's rows in the local engine: shared memory that every rank reads and writes itself.

    get    some rows   copy; nobody has written meanwhile? else again, then under the lock
           all         stripe by stripe: table shared, stripe shared, copy
    add    some rows   table exclusive: note which rows, update, note that it is done
           all         stripe by stripe: table shared, stripe exclusive, update

So passes over the whole table exclude each other only where they meet, readers do not exclude
readers, and a change to a few rows excludes everything for the few microseconds that it takes.

A writer counts `write_begun` before it changes anything and `write_done` after. A reader that finds
all writes done, copies, and finds that none was begun since, has consistent rows without a lock
(stores are seen in program order: `waiting.py`). A writer that dies in between blocks nobody: the
kernel passes its locks on, and `interrupted` lists what it had begun.

Under bsp an add only stages the delta; the first rank that needs the next clock applies the deltas
of all, in the order of ranks. Nobody can need another clock before that rank adds again, so the
rows that it then reads do not change meanwhile.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np

from weft import faults
from weft._core import rows
from weft._core.arguments import deadline_after, seconds_until, validate_seconds
from weft._core.arithmetic import Array
from weft._core.partition import part_of
from weft._core.tables import Ids, Interrupted, TableSpec
from weft.engines.base import Store
from weft.engines.local.meeting.locks import Lock
from weft.engines.local.meeting.meeting import MAILBOX_BYTES, TABLE, Meeting, make_block
from weft.engines.local.meeting.roster import Recorder
from weft.engines.local.memory.segment import Block
from weft.engines.local.tables.state import Changes, Clocks, Staging, TableMemory
from weft.engines.refusals import reentrant_error, validate_memory
from weft.errors import OutOfMemory, Stalled

#: bytes that are read at a time, while nobody adds to them
_CHUNK = 32 << 20
#: how often a reader copies rows before it takes the lock
_TRIES = 3


def make_store(
    meeting: Meeting, recorder: Recorder, spec: TableSpec, values: Array | None, *, timeout: float
) -> LocalStore:
    """Make a table of the meeting's ranks: rank 0 allocates its memory, and all of them map it.
    Raises, on every rank, Disagreement, which shows what each asked for, and OutOfMemory."""
    nbytes = TableMemory(spec, len(meeting.members)).nbytes
    trouble = ""
    if meeting.rank == 0:
        try:
            validate_memory(f"{spec.kind} {spec.name!r}", nbytes, "make it smaller")
        except OutOfMemory as error:
            trouble = str(error)
    # the spec may not fit a mailbox: the digest tells whether all ranks' specs are equal
    digest = hashlib.sha256(str(spec).encode()).hexdigest()[:32]
    message = "\n".join((digest, trouble[: MAILBOX_BYTES // 2], str(spec)))
    answers = meeting.exchange(TABLE, message.encode()[:MAILBOX_BYTES], timeout)
    digests, troubles, specs = zip(
        *(text.decode(errors="ignore").split("\n", 2) for text in answers), strict=True
    )
    if len(set(digests)) > 1:
        raise meeting.disagreement_error(dict(enumerate(specs)))
    if troubles[0]:
        raise OutOfMemory(troubles[0])
    block = make_block(
        meeting,
        TABLE,
        leader=meeting.members[0],
        size=nbytes,
        seconds=timeout,
        prepare=lambda block: TableMemory(spec, len(meeting.members), block).format(values),
        point="table.made",
    )
    return LocalStore(spec, block, meeting=meeting, recorder=recorder, timeout=timeout)


class LocalStore(Store):
    """One table, as one rank sees it."""

    def __init__(
        self, spec: TableSpec, block: Block, *, meeting: Meeting, recorder: Recorder, timeout: float
    ) -> None:
        self.spec = spec
        roster, members = meeting.roster, meeting.members
        self._roster, self._timeout = roster, timeout
        self._rank, self._size = meeting.rank, len(members)
        self._memory = memory = TableMemory(spec, self._size, block)
        self._rows, self._state = self._arrays = memory.rows, memory.state
        self._steps = memory.steps
        lock = partial(Lock, roster=roster, recorder=recorder, members=members, timeout=timeout)
        locks = (lock(words, free_cores=meeting.free_cores) for words in memory.lock_blocks())
        self._table, *self._stripes = locks
        self._clocks = Clocks(block, memory, meeting=meeting, recorder=recorder)
        self._changes = Changes(block, memory, meeting=meeting)
        self._staging = Staging(
            block, memory, clocks=self._clocks, changes=self._changes, rank=self._rank
        )
        self._bsp = spec.consistency.name == "bsp"
        #: whether deltas are added to rows directly, by an adder
        self._adds_rows = spec.updater.name == "add" and not self._bsp
        self._adder = rows.make_adder(spec.n_rows, spec.dtype)
        #: held by the thread of this rank that adds or, under bsp, gets
        self._turn = threading.RLock()
        #: the thread that holds `_turn`; 0 if none
        self._in_turn = 0
        roster.watch(members)

    # reading

    def get(self, ids: Ids | None, out: Array | None, *, timeout: float | None = None) -> Array:
        if not self._roster.is_here:
            raise self._unusable_error()
        if timeout is not None:
            validate_seconds(timeout)
        try:
            copied = self._get(ids, out, timeout)
        except BaseException:
            # another signal may come meanwhile: the first exception is the one that is raised
            while self._in_turn != threading.get_ident():
                try:
                    self._release_locks()
                    break
                except BaseException:
                    continue
            raise
        self.staleness = self._clocks.staleness()
        return copied

    def _get(self, ids: Ids | None, out: Array | None, timeout: float | None) -> Array:
        if self._bsp:
            with self._turn:  # after another thread's add the other ranks may change these rows
                self._validate_turn()
                try:
                    self._in_turn = threading.get_ident()
                    needed = self.spec.consistency.before_get(self._clocks.own)
                    self._apply_through(needed, deadline_after(timeout, self._timeout))
                    return rows.read(self._rows, ids, out)
                finally:
                    self._in_turn = 0
        if not self.spec.exact:
            return rows.read(self._rows, ids, out)
        if ids is None and len(self._stripes) > 1:
            return self._read_stripes(out, deadline_after(timeout, self._timeout))
        return self._read_whole_rows(ids, out, timeout)

    def _read_whole_rows(self, ids: Ids | None, out: Array | None, timeout: float | None) -> Array:
        """Copy rows while nobody changes them."""
        write_begun, write_done = self._changes.write_begun, self._changes.write_done
        for _ in range(_TRIES):
            before = write_done.tolist()
            if write_begun.tolist() == before:
                copied = rows.read(self._rows, ids, out)
                if faults.armed:
                    faults.reach("table.copied")
                if write_begun.tolist() == before:
                    return copied
        with self._table.exclusive(timeout=timeout):
            self._changes.mark_dead_writers()
            return rows.read(self._rows, ids, out)

    def _read_stripes(self, out: Array | None, deadline: float) -> Array:
        """Copy the whole table, several stripes at a time."""
        memory, copied = self._memory, out
        if copied is None:
            copied = np.empty(self.spec.shape, self.spec.dtype)
        chunks = min(max(1, self.spec.nbytes // _CHUNK), memory.stripes)
        for chunk in range(chunks):
            stripes = range(*part_of(memory.stripes, chunks, chunk))
            low, high = memory.range_of(stripes[0])[0], memory.range_of(stripes[-1])[1]
            with (
                self._table.shared(timeout=seconds_until(deadline)),
                self._all_shared([self._stripes[stripe] for stripe in stripes], deadline),
            ):
                np.copyto(copied[low:high], self._rows[low:high])
        return copied

    @contextmanager
    def _all_shared(self, locks: list[Lock], deadline: float) -> Iterator[None]:
        # no ExitStack: if interrupted, it may become part of a reference cycle and keep its locks
        if not locks:
            yield
            return
        with (
            locks[0].shared(timeout=seconds_until(deadline)),
            self._all_shared(locks[1:], deadline),
        ):
            yield

    # writing

    def add(self, delta: Array, ids: Ids | None, *, timeout: float | None = None) -> None:
        if not self._roster.is_here:
            raise self._unusable_error()
        if ids is not None and not self._adds_rows:
            ids, delta = rows.merge(ids, delta)
        with self._turn:
            self._validate_turn()
            try:
                self._in_turn = threading.get_ident()
                self._add(delta, ids, deadline_after(timeout, self._timeout))
                self._clocks.tick()
            except BaseException:
                while True:  # as in `get`
                    try:
                        self._release_locks()
                        break
                    except BaseException:
                        continue
                raise
            finally:
                self._in_turn = 0

    def _add(self, delta: Array, ids: Ids | None, deadline: float) -> None:
        needed = self.spec.consistency.before_add(self._clocks.own)
        if self._bsp:
            self._apply_through(needed, deadline)
            self._staging.stage(delta, ids)
            return
        self._clocks.await_others(needed, deadline)
        if ids is None:
            self._add_all(delta, deadline)
        else:
            self._add_rows(delta, ids, deadline)

    def _validate_turn(self) -> None:
        """Raise if this thread is in the middle of another call, as in a signal handler."""
        if self._in_turn:
            raise reentrant_error(self.spec.name)

    def _add_all(self, delta: Array, deadline: float) -> None:
        """Update every stripe. Ranks begin at different ones, to keep out of each other's way. Once
        begun, it continues to the end, even past the call's own deadline."""
        count, rank, changes = len(self._stripes), self._rank, self._changes
        first, turn = count * rank // self._size, 0
        try:
            for turn in range(count):
                stripe = (first + turn) % count
                with self._stripe_held(stripe, deadline):
                    if turn == 0:
                        changes.begin(0, self.spec.n_rows, None)
                        deadline = deadline_after(None, self._timeout)
                    self._add_stripe(stripe, delta)
                    if turn == count - 1:
                        changes.write_done[rank] = changes.write_begun[rank]
        except Stalled as stalled:
            if not turn:
                raise
            raise Stalled(
                f"{stalled.message}; table {self.spec.name!r} has got {turn} of {count} parts of "
                "the delta",
                stalled.ranks,
                stalled.states,
            ) from None
        finally:
            changes.write_done[rank] = changes.write_begun[rank]

    @contextmanager
    def _stripe_held(self, stripe: int, deadline: float) -> Iterator[None]:
        if not self.spec.exact:
            yield
        elif len(self._stripes) == 1:
            with self._table.exclusive(timeout=seconds_until(deadline)):
                yield
        else:
            with (
                self._table.shared(timeout=seconds_until(deadline)),
                self._stripes[stripe].exclusive(timeout=seconds_until(deadline)),
            ):
                yield

    def _add_stripe(self, stripe: int, delta: Array) -> None:
        if faults.armed:
            faults.reach("table.adding")
        some = slice(*self._memory.range_of(stripe))
        self._steps[stripe] += 1
        step = int(self._steps[stripe] + self._steps[-1])
        rows.update(self._arrays, some, delta[some], self.spec.updater, step)
        if faults.armed:
            faults.reach("table.added")

    def _add_rows(self, delta: Array, ids: Ids, deadline: float) -> None:
        if not ids.size:
            return
        prepared = None
        if self._adds_rows:
            prepared = self._adder.prepare(self._rows, ids, delta, touch=self.spec.exact)
        rank, changes = self._rank, self._changes
        alone = self._table.exclusive(timeout=seconds_until(deadline))
        with alone if self.spec.exact else nullcontext():
            try:
                changes.begin(0, 0, ids)
                if faults.armed:
                    faults.reach("table.adding")
                if self._adds_rows:
                    self._adder.add(self._rows, ids, delta, prepared)
                else:
                    self._steps[-1] += 1
                    rows.update(self._arrays, ids, delta, self.spec.updater, self.steps)
                if faults.armed:
                    faults.reach("table.added")
            finally:
                changes.write_done[rank] = changes.write_begun[rank]

    def _apply_through(self, clock: int, deadline: float) -> None:
        """Wait until all ranks have made `clock` adds, and apply exactly these."""
        staging = self._staging
        if staging.applied >= clock:
            return
        self._clocks.await_others(clock, deadline)
        with self._table.exclusive(timeout=seconds_until(deadline)):
            self._changes.mark_dead_writers()
            while staging.applied < clock:
                staging.apply(staging.applied + 1)

    # the rest

    def interrupted(self) -> tuple[Interrupted, ...]:
        return self._changes.interrupted()

    def settle(self, *, timeout: float | None = None) -> None:
        if not self._roster.is_here:
            raise self._unusable_error()
        if self._bsp:
            slowest = min([self._clocks.own, *self._clocks.present().values()])
            self._apply_through(slowest, deadline_after(timeout, self._timeout))

    def read_piece(self, name: str, start: int, stop: int) -> Array:
        return np.array(self._piece(name, start, stop))

    def write_piece(self, name: str, start: int, values: Array) -> None:
        self._piece(name, start, start + len(values))[...] = values

    def _piece(self, name: str, start: int, stop: int) -> Array:
        if not self._roster.is_here:
            raise self._unusable_error()
        piece: Array = (self._rows if name == "rows" else self._state[name])[start:stop]
        return piece

    @property
    def steps(self) -> int:
        return int(self._steps[-1] + self._steps[:-1].max()) + self._applied_adds()

    def set_steps(self, steps: int) -> None:
        self._steps[...] = 0
        self._steps[-1] = steps - self._applied_adds()

    def exclusive_rows(self) -> Array | None:
        if self._size > 1:
            return None
        self.settle()
        return self._rows

    def _applied_adds(self) -> int:
        """Return how many adds the applied clocks have."""
        return self._staging.applied * self._size if self._bsp else 0

    def _release_locks(self) -> None:
        """Release the locks that this thread still holds after an interrupt hit a `with`."""
        for lock in (self._table, *self._stripes):
            lock.release_held()

    def _unusable_error(self) -> Exception:
        return self._roster.unusable_error(f"table {self.spec.name!r}")
