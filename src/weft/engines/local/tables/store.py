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

Rows on a GPU are in memory of that GPU which every rank maps. The algorithm is the same, with one
stripe: a GPU does one thing at a time. A rank waits for what it has queued on its stream before it
takes the lock, and for what the call itself has queued before it releases it: so no work of two
ranks on the same rows is on the GPU at once, and the lock is held for nobody but this rank's GPU.

Under bsp an add only stages the delta; the first rank that needs the next clock applies the deltas
of all, in the order of ranks. Nobody can need another clock before that rank adds again, so the
rows that it then reads do not change meanwhile.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np

from weft import faults
from weft._core.arguments import deadline_after, seconds_until, validate_seconds
from weft._core.arithmetic import Array
from weft._core.partition import part_of
from weft._core.rows import rows_on
from weft._core.tables import Ids, Interrupted, TableSpec
from weft.engines.base import Store
from weft.engines.local.meeting.devices import TROUBLES, device_memory, raise_any
from weft.engines.local.meeting.locks import Lock
from weft.engines.local.meeting.meeting import (
    MAILBOX_BYTES,
    TABLE,
    Meeting,
    in_words,
    make_block,
)
from weft.engines.local.meeting.roster import Recorder
from weft.engines.local.memory.segment import Block
from weft.engines.local.tables.state import Changes, Clocks, Ranks, Staging, TableMemory
from weft.engines.refusals import reentrant_error, validate_memory
from weft.errors import OutOfMemory, Stalled

#: bytes that are read at a time, while nobody adds to them
_CHUNK = 32 << 20
#: how often a reader copies rows before it takes the lock
_TRIES = 3
#: seconds that the end of a process may take which died with a lock, and between looks at it
_ENDING, _SLICE = 10.0, 0.001


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
    memory = TableMemory(spec, len(meeting.members), block)
    if spec.on_device:
        map_arrays(meeting, memory, values, time.monotonic() + timeout)
    rows = SharedRows(
        memory,
        block,
        ranks=Ranks(meeting),
        recorder=recorder,
        timeout=timeout,
    )
    return LocalStore(rows)


def map_arrays(
    meeting: Meeting, memory: TableMemory, values: Array | None, deadline: float
) -> None:
    """Make the rows of a table lie on the devices' memory that rank 0 allocates, and fill them.
    Raises, on every rank, OutOfMemory, InvalidValue if one cannot reach rank 0's GPU, SetupError.
    """
    spec, trouble = memory.spec, b""
    memory.device_memory = device_memory(
        meeting,
        memory.device_nbytes,
        spec.device,
        deadline,
        what=f"table {spec.name!r}",
    )
    if meeting.rank == 0:
        try:
            memory.format_arrays(values)
        except TROUBLES as error:
            trouble = in_words(error)
    raise_any(meeting, trouble, deadline)


class SharedRows:
    """Rows that several processes of this host map, as one of them reads and updates them."""

    def __init__(
        self,
        memory: TableMemory,
        block: Block,
        *,
        ranks: Ranks,
        recorder: Recorder,
        timeout: float,
    ) -> None:
        self.memory, self.ranks, self.timeout = memory, ranks, timeout
        self.spec = spec = memory.spec
        self.rows, self.state = self._arrays = memory.rows, memory.state
        self._steps = memory.steps
        #: by rank, over hosts: adds to some rows, wherever these are
        self._counted = block.words[memory.counted_at : memory.counted_at + memory.size]
        lock = partial(
            Lock, roster=ranks.roster, recorder=recorder, members=ranks.members, timeout=timeout
        )
        locks = (lock(words, free_cores=ranks.free_cores) for words in memory.lock_blocks())
        self.table, *self.stripes = locks
        self.clocks = Clocks(block, memory, ranks=ranks, recorder=recorder)
        self.changes = Changes(block, memory, ranks=ranks)
        self.staging = Staging(block, memory, clocks=self.clocks, changes=self.changes)
        self.is_bsp = spec.consistency.name == "bsp"
        self._needs_no_lock = self.is_bsp or not spec.exact
        #: whether deltas are added to rows directly, by an adder
        self.adds_rows = spec.updater.name == "add" and not self.is_bsp
        self.library = library = rows_on(spec.device)
        self._adder = library.make_adder(spec.n_rows, spec.dtype)

    # reading

    def read(self, ids: Ids | None, out: Array | None, timeout: float | None) -> Array:
        """Copy all rows or some. Under bsp nobody changes them: the caller has applied its clock,
        and has not added since."""
        if self._needs_no_lock:
            return self._copy(self.rows, ids, out)
        if ids is None and len(self.stripes) > 1:
            return self._read_stripes(out, deadline_after(timeout, self.timeout))
        return self._read_whole_rows(ids, out, timeout)

    def _read_whole_rows(self, ids: Ids | None, out: Array | None, timeout: float | None) -> Array:
        """Copy rows while nobody changes them."""
        for _ in range(_TRIES):
            if (copied := self.try_read(self.rows, ids, out)) is not None:
                return copied
        with self.table.exclusive(timeout=timeout) as died:
            self._await_end(died)
            self.changes.mark_dead_writers()
            return self._copy(self.rows, ids, out)

    def try_read(self, some: Array, ids: Ids | None, out: Array | None) -> Array | None:
        """Copy the rows, or some of them; return None if somebody has changed some meanwhile."""
        write_begun, write_done = self.changes.write_begun, self.changes.write_done
        before = write_done.tolist()
        if write_begun.tolist() != before:
            return None
        copied = self._copy(some, ids, out)
        if faults.armed:
            faults.reach("table.copied")
        return copied if write_begun.tolist() == before else None

    def _copy(self, some: Array, ids: Ids | None, out: Array | None) -> Array:
        copied: Array = self.library.read(some, ids, out)
        return copied

    def _read_stripes(self, out: Array | None, deadline: float) -> Array:
        """Copy the whole table, several stripes at a time."""
        memory, copied = self.memory, out
        if copied is None:
            copied = np.empty(self.spec.shape, self.spec.dtype)
        chunks = min(max(1, self.spec.nbytes // _CHUNK), memory.stripes)
        for chunk in range(chunks):
            stripes = range(*part_of(memory.stripes, chunks, chunk))
            low, high = memory.range_of(stripes[0])[0], memory.range_of(stripes[-1])[1]
            with (
                self.table.shared(timeout=seconds_until(deadline)),
                self._all_shared([self.stripes[stripe] for stripe in stripes], deadline),
            ):
                np.copyto(copied[low:high], self.rows[low:high])
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

    def merge(self, delta: Array, ids: Ids | None) -> tuple[Array, Ids | None]:
        """Return a delta with each id once, where it has to be."""
        if ids is None or self.adds_rows:
            return delta, ids
        ids, delta = self.library.merge(ids, delta)
        return delta, ids

    def update(
        self, delta: Array, ids: Ids | None, deadline: float, out: Array | None = None
    ) -> None:
        """Apply the updater to all rows, or to these; under bsp stage the delta. Not under bsp, and
        for all rows, they can be copied to `out` on the way."""
        self.library.await_ready(self.spec.device)
        if self.is_bsp:
            self.staging.stage(delta, ids)
        elif ids is None:
            self._add_all(delta, deadline, out)
        else:
            self._add_rows(delta, ids, deadline)

    def _add_all(self, delta: Array, deadline: float, out: Array | None) -> None:
        """Update every stripe. Ranks begin at different ones, to keep out of each other's way. Once
        begun, it continues to the end, even past the call's own deadline."""
        count, rank, changes = len(self.stripes), self.ranks.rank, self.changes
        first, turn = count * rank // self.memory.size, 0
        try:
            for turn in range(count):
                stripe = (first + turn) % count
                with self._stripe_held(stripe, deadline):
                    if turn == 0:
                        changes.begin(0, self.spec.n_rows, None)
                        deadline = deadline_after(None, self.timeout)
                    some = slice(*self.memory.range_of(stripe))
                    self.add_stripe(stripe, delta[some], None if out is None else out[some])
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
        elif len(self.stripes) == 1:
            with self.table.exclusive(timeout=seconds_until(deadline)) as died:
                self._await_end(died)
                yield
        else:
            with (
                self.table.shared(timeout=seconds_until(deadline)),
                self.stripes[stripe].exclusive(timeout=seconds_until(deadline)),
            ):
                yield

    def add_stripe(self, stripe: int, delta: Array, out: Array | None = None) -> None:
        """Update a stripe, and copy it to `out`. Only for the holder of its lock."""
        if faults.armed:
            faults.reach("table.adding")
        some = slice(*self.memory.range_of(stripe))
        self._steps[stripe] += 1
        step = int(self._steps[stripe]) + self._some_steps
        self.library.update(self._arrays, some, delta, self.spec.updater, step, out=out)
        if faults.armed:
            faults.reach("table.added")

    def _add_rows(self, delta: Array, ids: Ids, deadline: float) -> None:
        if not ids.size:
            return
        prepared = self.prepare(delta, ids)
        alone = self.table.exclusive(timeout=seconds_until(deadline))
        with alone if self.spec.exact else nullcontext() as died:
            self._await_end(died)
            step = 0
            if not self.adds_rows:
                self.count_step()
                step = self.added_steps
            self.add_rows(delta, ids, prepared, self.changes, step=step)

    def prepare(self, delta: Array, ids: Ids) -> object:
        """Do what can be done for `add_rows` before the lock is taken."""
        if not self.adds_rows:
            return None
        return self._adder.prepare(self.rows, ids, delta, touch=self.spec.exact)

    def add_rows(
        self,
        delta: Array,
        ids: Ids,
        prepared: object,
        changes: Changes,
        *,
        step: int,
        named: Ids | None = None,
    ) -> None:
        """Update some rows, as the `step`-th add, and note `named` of the add, by default these.
        Only for the holder of the table's lock."""
        rank = changes.rank
        try:
            changes.begin(0, 0, ids if named is None else named)
            if faults.armed:
                faults.reach("table.adding")
            if self.adds_rows:
                self._adder.add(self.rows, ids, delta, prepared)
            else:
                self.library.update(self._arrays, ids, delta, self.spec.updater, step)
            if faults.armed:
                faults.reach("table.added")
        finally:
            changes.write_done[rank] = changes.write_begun[rank]

    def count_step(self) -> None:
        """Count an add to some rows. Only for the holder of the table's lock."""
        self._steps[-1] += 1

    def apply_through(self, clock: int, deadline: float) -> None:
        """Wait until all ranks have made `clock` adds, and apply exactly these."""
        staging = self.staging
        if staging.applied >= clock:
            return
        self.clocks.await_others(clock, deadline)
        with self.table.exclusive(timeout=seconds_until(deadline)) as died:
            self._await_end(died)
            self.changes.mark_dead_writers()
            while staging.applied < clock:
                staging.apply(staging.applied + 1)

    def _await_end(self, died: int | None) -> None:
        """Return when the process of a holder that died with the lock is gone, and with it what it
        had a GPU do: that goes on for some milliseconds after its lock was passed on."""
        if died is None or not self.spec.on_device:
            return
        until = time.monotonic() + _ENDING
        while not self.ranks.gone([died]) and time.monotonic() < until:
            time.sleep(_SLICE)

    def settle(self, deadline: float) -> None:
        """Apply what all ranks that are here have added."""
        if self.is_bsp:
            slowest = min([self.clocks.own, *self.clocks.present().values()])
            self.apply_through(slowest, deadline)

    # the rest

    def piece(self, name: str, start: int, stop: int) -> Array:
        """Return some rows of "rows", or of a state array."""
        piece: Array = (self.rows if name == "rows" else self.state[name])[start:stop]
        return piece

    @property
    def added_steps(self) -> int:
        """Return how many adds have been applied to the rows, those that were staged aside."""
        return self._some_steps + int(self._steps[:-1].max())

    @property
    def _some_steps(self) -> int:
        """Return how many adds to some rows there were."""
        return int(self._steps[-1]) + sum(self._counted)

    @property
    def steps(self) -> int:
        """Return how many adds have been applied to the rows."""
        return self.added_steps + self._applied_adds()

    def set_steps(self, steps: int) -> None:
        self._steps[...] = 0
        self._steps[-1] = steps - self._applied_adds() - sum(self._counted)

    def _applied_adds(self) -> int:
        """Return how many adds the applied clocks have."""
        return self.staging.applied * self.memory.size if self.is_bsp else 0

    def release_locks(self) -> None:
        """Release the locks that this thread still holds after an interrupt hit a `with`. If
        another signal comes meanwhile, be it before the first line, call it again."""
        for lock in (self.table, *self.stripes):
            lock.release_held()

    def validate_use(self) -> None:
        """Raise if this process has left the launch, or is a forked child."""
        if not self.ranks.roster.is_here:
            raise self.ranks.roster.unusable_error(f"table {self.spec.name!r}")


class LocalStore(Store):
    """One table, as one rank sees it."""

    def __init__(self, rows: SharedRows) -> None:
        self.spec, self._rows = rows.spec, rows
        # looked up once: a get of few rows takes microseconds
        self._roster, self._is_bsp, self._read = rows.ranks.roster, rows.is_bsp, rows.read
        #: held by the thread of this rank that adds or, under bsp, gets
        self._turn = threading.RLock()
        #: the thread that holds `_turn`; 0 if none
        self._in_turn = 0
        rows.ranks.roster.watch(rows.ranks.members)

    def get(
        self,
        ids: Ids | None,
        out: Array | None,
        *,
        timeout: float | None = None,
        slack: int | None = None,
    ) -> Array:
        if not self._roster.is_here:
            self._rows.validate_use()
        if timeout is not None:
            validate_seconds(timeout)
        try:
            copied = self._get(ids, out, timeout) if self._is_bsp else self._read(ids, out, timeout)
        except BaseException:
            while True:  # the first exception is the one that is raised
                try:
                    if self._in_turn != threading.get_ident():
                        self._rows.release_locks()
                    break
                except BaseException:
                    continue
            raise
        self.staleness = self._rows.clocks.staleness()
        return copied

    def _get(self, ids: Ids | None, out: Array | None, timeout: float | None) -> Array:
        """Copy rows under bsp."""
        with self._turn:  # after another thread's add the other ranks may change these rows
            self._validate_turn()
            try:
                self._in_turn = threading.get_ident()
                needed = self.spec.consistency.before_get(self._rows.clocks.own)
                self._rows.apply_through(needed, deadline_after(timeout, self._rows.timeout))
                return self._rows.read(ids, out, timeout)
            finally:
                self._in_turn = 0

    def add(self, delta: Array, ids: Ids | None, *, timeout: float | None = None) -> None:
        self._add_and_read(delta, ids, None, timeout)

    @classmethod
    def exchange(
        cls, parts: Sequence[tuple[Store, Array, Array]], *, timeout: float | None = None
    ) -> None:
        """Do both at once, each stripe while its lock is held; under bsp one after the other."""
        staged = [part for part in parts if part[0].spec.consistency.name == "bsp"]
        for store, delta, out in parts:
            if isinstance(store, LocalStore) and store.spec.consistency.name != "bsp":
                store._add_and_read(delta, None, out, timeout)
                store.staleness = store._rows.clocks.staleness()
        super().exchange(staged, timeout=timeout)

    def _add_and_read(
        self, delta: Array, ids: Ids | None, out: Array | None, timeout: float | None
    ) -> None:
        self._rows.validate_use()
        delta, ids = self._rows.merge(delta, ids)
        with self._turn:
            self._validate_turn()
            try:
                self._in_turn = threading.get_ident()
                self._add(delta, ids, deadline_after(timeout, self._rows.timeout), out)
                self._rows.clocks.tick()
            except BaseException:
                while True:
                    try:
                        self._rows.release_locks()
                        break
                    except BaseException:
                        continue
                raise
            finally:
                self._in_turn = 0

    def _add(self, delta: Array, ids: Ids | None, deadline: float, out: Array | None) -> None:
        needed = self.spec.consistency.before_add(self._rows.clocks.own)
        if self._rows.is_bsp:
            self._rows.apply_through(needed, deadline)
        else:
            self._rows.clocks.await_others(needed, deadline)
        self._rows.update(delta, ids, deadline, out)

    def _validate_turn(self) -> None:
        """Raise if this thread is in the middle of another call, as in a signal handler."""
        if self._in_turn:
            raise reentrant_error(self.spec.name)

    def interrupted(self) -> tuple[Interrupted, ...]:
        return self._rows.changes.interrupted()

    def settle(self, *, timeout: float | None = None) -> None:
        self._rows.validate_use()
        self._rows.settle(deadline_after(timeout, self._rows.timeout))

    def read_piece(self, name: str, start: int, stop: int) -> Array:
        self._rows.validate_use()
        copied: Array = self._rows.library.to_host(self._rows.piece(name, start, stop))
        return copied

    def write_piece(self, name: str, start: int, values: Array) -> None:
        self._rows.validate_use()
        self._rows.library.copy(self._rows.piece(name, start, start + len(values)), values)

    @property
    def steps(self) -> int:
        return self._rows.steps

    def set_steps(self, steps: int) -> None:
        self._rows.set_steps(steps)
