"""The state of one table, in one block that all ranks map.

TableMemory. The layout:

    words 0-7      applied | progress | unused
    for each rank  adds | interrupted | lowest | highest | ids | state | unused
    write_begun    of all ranks side by side, and then write_done; over hosts also serial, reached,
                   begun and counted (layout.py of the engine mpi)
    flags          sleepers' flags, one byte for each place
    locks          one for the table, one for each stripe
    steps          how many adds each stripe has had, and how many adds to some rows there were
    ids            for each rank, those of the rows it is changing, as far as there is room
    rows | one array for each state of the updater
    staged         under bsp, for each rank: how many rows | their ids | their deltas

The rows, the state and the deltas of a table on a device lie in memory of that device instead, in
the same order, and this has all the rest: words, locks, ids.

A place is a process that maps the memory: on one host, a rank. Each rank's words are written by one
process only, on one host the rank itself; `applied`, `progress`, `steps` and the arrays are written
under the locks. A stripe is a run of rows with a lock of its own, so that passes over the whole
table follow each other instead of waiting for each other.

Changes. Which rows each rank is changing: readers see it, and so do the others if the rank dies.

    writer                               reader without a lock
      notes which rows                     all writes that were begun are done? else again
      write_begun += 1                     copies
      changes them                         write_begun has not changed? else again
      write_done = write_begun

Staging. Deltas that wait for their clock under bsp, and how a clock is applied.

    every rank   stages its delta, in memory of its own, and counts the add
    one rank     when all have: applies the deltas in the order of ranks, part by part
                   notes which rows; progress += 1; updates them
                 applied += 1
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from weft import faults
from weft._core import rows, tables
from weft._core.arithmetic import Array
from weft._core.partition import part_of
from weft._core.tables import Ids, Interrupted, TableSpec
from weft.engines.local.meeting import locks
from weft.engines.local.meeting.meeting import Meeting
from weft.engines.local.meeting.roster import Recorder
from weft.engines.local.meeting.waiting import Waiter
from weft.engines.local.memory.segment import Block
from weft.errors import RankState, Stalled

#: words at the beginning
APPLIED, PROGRESS = 0, 1
#: words of a rank; an engine over hosts writes the state of ranks of other hosts
ADDS, INTERRUPTED, LOWEST, HIGHEST, COUNT, STATE = range(6)
#: instead of a number of rows: all of them
WHOLE = 2**63 - 1
#: rows that an interrupted add can name one by one
NAMED = 504
_LINE = 8
_PAGE = 4096
#: Large enough that taking two locks for each costs a hundredth of the pass (docs/performance.md).
_STRIPE = 4 << 20
_MOST_STRIPES = 64
#: the most rows of a clock that are applied between two updates of `progress`
_PART = 1 << 16


class TableMemory:
    """The layout of a table's memory, and arrays over it. Without a `block` it gives `nbytes` and
    `device_nbytes`."""

    def __init__(
        self,
        spec: TableSpec,
        size: int,
        block: Block | None = None,
        *,
        places: int | None = None,
        stripes: int | None = None,
    ) -> None:
        """`size` ranks have words, and `places` processes, by default as many, map the memory."""
        self.spec, self.size = spec, size
        self.places = size if places is None else places
        if spec.on_device:
            stripes = 1  # a device does one thing at a time
        if stripes is None:
            stripes = min(max(1, spec.nbytes // _STRIPE), _MOST_STRIPES, spec.n_rows)
        self.stripes = stripes
        self._block: Any = block
        #: that of a table on a device: a tensor of bytes
        self.device_memory: Any = None
        self._end = 8 * _LINE
        self._lines = self._take(8 * _LINE * size)
        self.write_begun_at = self._take(8 * size) // 8
        self.write_done_at = self._take(8 * size) // 8
        self.serial_at = self._take(8 * size) // 8
        self.reached_at = self._take(8 * size) // 8
        self.begun_at = self._take(8 * size) // 8
        self.counted_at = self._take(8 * size) // 8
        self.flags_at = self._take(self.places)
        lock_bytes = 8 * locks.words_for(self.places)
        self._locks = [self._take(lock_bytes) for _ in range(self.stripes + 1)]
        self._steps = self._take(8 * (self.stripes + 1))
        self._ids = [self._take(8 * NAMED) for _ in range(size)]
        row_bytes = prod(spec.row_shape) * spec.dtype.itemsize
        #: rows of a clock that are applied between two updates of `progress`
        self.part_rows = spec.n_rows
        if not spec.on_device:
            self.part_rows = max(1, min(_PART, _STRIPE // row_bytes))
        self._device_end = 0
        self._rows = self._take_array()
        self._words_end = self._end if spec.on_device else self._rows
        self._state = {name: self._take_array() for name in spec.updater.state}
        staged = range(size if spec.consistency.name == "bsp" else 0)
        self._staged = [
            (self._take(8 * (1 + spec.n_rows), _PAGE), self._take_array()) for _ in staged
        ]
        self.nbytes, self.device_nbytes = self._end, self._device_end

    def _take(self, length: int, align: int = 8 * _LINE) -> int:
        start = -(-self._end // align) * align
        self._end = start + length
        return start

    def _take_array(self) -> int:
        """Return where an array of the rows' shape and dtype begins."""
        if not self.spec.on_device:
            return self._take(self.spec.nbytes, _PAGE)
        start = self._device_end
        self._device_end += -(-self.spec.nbytes // _PAGE) * _PAGE
        return start

    def word(self, rank: int, which: int) -> int:
        """Return the index of one of a rank's words."""
        return self._lines // 8 + _LINE * rank + which

    def range_of(self, stripe: int) -> tuple[int, int]:
        """Return the first row of a stripe, and the row behind its last."""
        return part_of(self.spec.n_rows, self.stripes, stripe)

    def lock_blocks(self) -> Iterator[Block]:
        """Yield the memory of the table's lock, then of the stripes'."""
        block, length = self._block, 8 * locks.words_for(self.places)
        for start in self._locks:
            yield Block(block.segment, block.offset + start, length)

    def format(self, values: Array | None) -> None:
        """Initialize memory, fresh or used, as a table with these rows and no adds: of one on a
        device all but the rows and their state."""
        self._block.clear(0, self._words_end // 8)
        for lock in self.lock_blocks():
            locks.Lock.format(lock)
        if not self.spec.on_device:
            self.format_arrays(values)

    def format_arrays(self, values: Array | None) -> None:
        """Initialize the rows and their state."""
        if self.spec.on_device:
            library = rows.rows_on(self.spec.device)
            for array in (self.rows, *self.state.values()):
                library.clear(array)
            if values is not None:
                library.copy(self.rows, values)
            return
        self.rows[...] = 0 if values is None else values
        for array in self.state.values():
            array[...] = 0

    # the arrays

    @property
    def rows(self) -> Array:
        return self._large_array(self._rows)

    @property
    def state(self) -> dict[str, Array]:
        return {name: self._large_array(start) for name, start in self._state.items()}

    @property
    def steps(self) -> Array:
        return self._array(self._steps, (self.stripes + 1,), np.dtype(np.int64))

    def ids(self, rank: int) -> Array:
        return self._array(self._ids[rank], (NAMED,), np.dtype(np.int64))

    def staged(self, rank: int) -> tuple[Array, Array, Array]:
        """Return how many rows a rank has staged, their ids and their deltas."""
        start, deltas = self._staged[rank]
        whole = self._array(start, (1 + self.spec.n_rows,), np.dtype(np.int64))
        return whole[:1], whole[1:], self._large_array(deltas)

    def _large_array(self, start: int) -> Array:
        spec = self.spec
        if not spec.on_device:
            return self._array(start, spec.shape, spec.dtype)
        tensor: Any = rows.rows_on(spec.device).cut(
            self.device_memory, start, spec.shape, spec.dtype.name
        )
        return tensor  # type: ignore[no-any-return]

    def _array(self, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array: Array = np.ndarray(shape, dtype, memoryview(self._block.buffer), start)
        return array


class Ranks:
    """The ranks of a table, as one of its processes sees them: which of them are still here."""

    def __init__(self, meeting: Meeting) -> None:
        self.roster, self.generation = meeting.roster, meeting.generation
        #: the places in the launch of the processes that map the table, and this one among them
        self.members, self.place = tuple(meeting.members), meeting.rank
        #: the rank whose words this process writes
        self.rank = meeting.rank
        self.free_cores = meeting.free_cores

    def gone(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks that have died or left."""
        gone = set(self.roster.gone([self.members[rank] for rank in ranks]))
        return [rank for rank in ranks if self.members[rank] in gone]

    def states(self) -> Sequence[RankState]:
        """Return the states of all ranks, for errors."""
        return self.roster.states(self.members)

    def waiter(self, block: Block, memory: TableMemory) -> Waiter:
        """Return what publishes this process's words of a table's memory, and waits for others'."""
        return Waiter(
            block,
            flags_at=memory.flags_at,
            size=memory.places,
            place=self.place,
            free_cores=False,
        )


class Clocks:
    """The add counts of all ranks of a table, as one of them sees them."""

    def __init__(
        self, block: Block, memory: TableMemory, *, ranks: Ranks, recorder: Recorder
    ) -> None:
        self._spec: TableSpec = memory.spec
        self._recorder, self._ranks, self._rank = recorder, ranks, ranks.rank
        self._words = block.words
        self._indexes = [memory.word(rank, ADDS) for rank in range(memory.size)]
        self._own = self._indexes[self._rank]
        self._others = [index for index in self._indexes if index != self._own]
        self._waiter = ranks.waiter(block, memory)

    @property
    def own(self) -> int:
        """Return how many adds this rank has made."""
        return int(self._words[self._own])

    def count(self, rank: int) -> int:
        return int(self._words[self._indexes[rank]])

    def tick(self) -> None:
        """Count one more add of this rank."""
        self._waiter.publish(self._own, self.own + 1)

    def note(self, rank: int, adds: int) -> None:
        """Write the count of a rank whose words this process writes."""
        self._waiter.publish(self._indexes[rank], max(adds, self.count(rank)))

    def wake(self, rank: int) -> None:
        """Wake everyone who waits for a rank, so that they check again."""
        self._waiter.wake(self._indexes[rank])

    def staleness(self) -> int:
        """Return how many adds the slowest rank that is still here is behind this one."""
        own, words = self.own, self._words
        for index in self._others:
            if words[index] < own:
                return tables.staleness(own, self.present())
        return 0

    def present(self) -> dict[int, int]:
        """Return how many adds each other rank that is still here has made."""
        others = [rank for rank in range(len(self._indexes)) if rank != self._rank]
        gone = self._ranks.gone(others)
        return {rank: self.count(rank) for rank in others if rank not in gone}

    def await_others(self, needed: int, deadline: float) -> None:
        """Wait until every rank that is still here has made `needed` adds. Raises Stalled."""
        for rank, index in enumerate(self._indexes):
            if index != self._own and self._words[index] < needed:
                self._await(rank, needed, deadline)

    def await_rank(self, rank: int, needed: int, deadline: float) -> None:
        """Wait until a rank has made `needed` adds, or is gone. Raises Stalled."""
        if self.count(rank) < needed:
            self._await(rank, needed, deadline)

    def _await(self, rank: int, needed: int, deadline: float) -> None:
        roster = self._ranks.roster

        def check() -> bool:
            if not roster.is_here:
                raise roster.unusable_error(f"table {self._spec.name!r}")
            if self._ranks.gone([rank]):
                return True
            if time.monotonic() >= deadline:
                counts = self.present()
                if late := tables.behind(counts, needed):  # else the add has come just now
                    raise self._stalled_error(needed, {rank: counts[rank] for rank in late})
            return False

        entry = self._recorder.enter(f"waiting at table {self._spec.name!r}")
        try:
            self._waiter.wait(self._indexes[rank], needed, deadline, check)
        finally:
            self._recorder.leave(entry)

    def _stalled_error(self, needed: int, late: dict[int, int]) -> Stalled:
        counts = ", ".join(f"rank {rank} has made {count}" for rank, count in late.items())
        return Stalled(
            f"table {self._spec.name!r} ({self._spec.consistency}): rank {self._rank} has made "
            f"{self.own} adds and waits until every rank has made {needed}, but {counts}. Ranks "
            "must add equally often; one that has finished calls weft.shutdown(), which releases "
            "the others",
            [*late],
            self._ranks.states(),
        )


class Changes:
    """The changes of all ranks of a table, as one of them sees them, or one that writes for it."""

    def __init__(
        self, block: Block, memory: TableMemory, *, ranks: Ranks, rank: int | None = None
    ) -> None:
        self._memory, self._ranks = memory, ranks
        #: whose words `begin` writes
        self.rank = self._rank = ranks.rank if rank is None else rank
        self._words, self._own_ids = block.words, memory.ids(self.rank)
        #: by rank; `reached` over hosts: the number of the add that its last change belongs to
        self.write_begun = self._words[memory.write_begun_at : memory.write_begun_at + memory.size]
        self.write_done = self._words[memory.write_done_at : memory.write_done_at + memory.size]
        self.reached = self._words[memory.reached_at : memory.reached_at + memory.size]

    def begin(self, low: int, high: int, ids: Ids | None) -> None:
        """Note which rows are about to change. Afterwards the caller notes that the write is done:

            changes.write_done[rank] = changes.write_begun[rank]

        in a `finally`, and without a call, so that no signal handler can prevent it.
        """
        rank, words, word = self._rank, self._words, self._memory.word
        if ids is None:
            words[word(rank, LOWEST)], words[word(rank, HIGHEST)] = low, high
            words[word(rank, COUNT)] = WHOLE
        else:
            named = ids[:NAMED]
            self._own_ids[: named.size] = named
            words[word(rank, COUNT)] = ids.size
        self.write_begun[rank] += 1

    def begin_add(self, add: int) -> None:
        """Note, over hosts, that changes of an add of this rank follow, unless some were made."""
        if self.reached[self._rank] < add:
            self._words[self._memory.word(self._rank, COUNT)] = 0
            self.reached[self._rank] = add

    def interrupted(self) -> tuple[Interrupted, ...]:
        """Return the writes that ranks had begun and not done when they died; over hosts also those
        that are done, of adds that were not done on all hosts."""
        words, word = self._words, self._memory.word
        writes = []
        for rank in range(self._memory.size):
            marked = words[word(rank, INTERRUPTED)] or self._died_within(rank)
            if not marked and not self._died_between(rank):
                continue
            count = words[word(rank, COUNT)]
            if count == WHOLE:
                ids: Sequence[int] = range(words[word(rank, LOWEST)], words[word(rank, HIGHEST)])
            else:
                ids = tuple(self._memory.ids(rank)[: min(count, NAMED)].tolist())
            writes.append(Interrupted(rank, ids, self._ranks.generation))
        return tuple(writes)

    def mark_dead_writers(self) -> None:
        """Mark the writes of ranks that died within one as done, so that readers stop retrying.
        Only for the holder of the table's lock."""
        for rank in range(self._memory.size):
            if self._died_within(rank):
                self._words[self._memory.word(rank, INTERRUPTED)] = 1
                self.write_done[rank] = self.write_begun[rank]

    def _died_between(self, rank: int) -> bool:
        """Return whether a rank has died before it counted an add that it has begun here."""
        words, word = self._words, self._memory.word
        if self.reached[rank] <= words[word(rank, ADDS)] or not words[word(rank, COUNT)]:
            return False
        gone = self._ranks.gone([rank])  # it may have counted it before
        return bool(gone) and self.reached[rank] > words[word(rank, ADDS)]

    def _died_within(self, rank: int) -> bool:
        if rank == self._rank or self.write_begun[rank] == self.write_done[rank]:
            return False
        # it may have done its write and then left: check for its end first, read the words after
        gone = self._ranks.gone([rank])
        return bool(gone) and self.write_begun[rank] != self.write_done[rank]


class Staging:
    """The staged deltas of all ranks, as one of them sees them."""

    def __init__(
        self, block: Block, memory: TableMemory, *, clocks: Clocks, changes: Changes
    ) -> None:
        self._spec, self._memory, self._words = memory.spec, memory, block.words
        self._clocks, self._changes = clocks, changes
        self._rank, self._size = changes.rank, memory.size
        self._arrays, self._steps = (memory.rows, memory.state), memory.steps
        self._device = memory.spec.device
        self._library = rows.rows_on(self._device)
        self._adds = memory.spec.updater.name == "add"

    @property
    def applied(self) -> int:
        """Return how many clocks have been applied."""
        return int(self._words[APPLIED])

    def stage(self, delta: Array, ids: Ids | None) -> None:
        """Keep this rank's delta until its clock is applied."""
        if ids is None:
            self.stage_whole(0, delta)
        else:
            self.stage_some(0, delta, ids)
        if faults.armed:
            faults.reach("table.staged")

    def stage_whole(self, low: int, delta: Array) -> None:
        """Keep a part of a delta for all rows, which begins with row `low`."""
        count, _, deltas = self._memory.staged(self._rank)
        self._library.copy(deltas[low : low + len(delta)], delta)
        count[0] = WHOLE

    def stage_some(self, before: int, delta: Array, ids: Ids) -> None:
        """Keep a part of a delta for some rows, of which `before` are kept already."""
        count, staged_ids, deltas = self._memory.staged(self._rank)
        staged_ids[before : before + ids.size] = ids
        self._library.copy(deltas[before : before + ids.size], delta)
        count[0] = before + ids.size

    def apply(self, clock: int) -> None:
        """Apply all ranks' adds of the next clock. Only for the holder of the table's lock."""
        for _ in self.apply_by_parts(clock):
            pass

    def apply_by_parts(self, clock: int) -> Iterator[None]:
        """Do what `apply` does, and yield after each part. While it waits, another may go on.

        `progress` counts the parts of all clocks that were begun: if this rank dies, the next one
        continues after the last of them. So it is never reset, and a clock becomes applied by one
        store, that of its number.
        """
        words = self._words
        parts = max(1, -(-self._spec.n_rows // self._memory.part_rows))
        before = (clock - 1) * self._size * parts
        while self.applied < clock:
            number = max(0, words[PROGRESS] - before)
            if number == self._size * parts:
                words[APPLIED] = clock
                break
            rank, part = divmod(number, parts)
            if self._clocks.count(rank) < clock:
                words[PROGRESS] = before + (rank + 1) * parts
                continue
            # counted as if no rank was missing
            step = int(self._steps[-1]) + (clock - 1) * self._size + rank + 1
            self._apply_part(rank, part, step, before + number + 1)
            yield

    def _apply_part(self, rank: int, part: int, step: int, progress: int) -> None:
        count, ids, deltas = self._memory.staged(rank)
        whole = count[0] == WHOLE
        low = part * self._memory.part_rows
        high = min(low + self._memory.part_rows, self._spec.n_rows if whole else int(count[0]))
        if low >= high:
            self._words[PROGRESS] = progress
            return
        named, delta = None if whole else ids[low:high], deltas[low:high]
        own, changes = self._rank, self._changes
        try:
            changes.begin(low, high, named)
            if faults.armed:
                faults.reach("table.adding")
                faults.reach("table.applying")
            if self._adds:
                self._add(delta, named, low, progress)
            else:
                self._words[PROGRESS] = progress
                where = slice(low, high) if named is None else named
                self._library.update(self._arrays, where, delta, self._spec.updater, step)
            if faults.armed:
                faults.reach("table.added")
        finally:
            changes.write_done[own] = changes.write_begun[own]

    def _add(self, delta: Array, ids: Ids | None, low: int, progress: int) -> None:
        """Add to some rows and store `progress`. There is no call between the two, so no signal
        handler can come between and lose somebody's add."""
        words, (table, _) = self._words, self._arrays
        where = slice(low, low + len(delta)) if ids is None else ids
        addition = self._library.prepare_addition(table, where, delta)
        try:
            with np.errstate(all="ignore"):
                words[PROGRESS] = progress
                addition()
        finally:
            self._library.await_done(self._device)
