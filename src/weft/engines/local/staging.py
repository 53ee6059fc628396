"""The deltas that wait for their clock under bsp, and how a clock is applied.

every rank   stages its delta, in a place of its own, and counts it
one rank     when all have: applies them in the order of ranks, part by part
               says which rows; progress += 1; updates them
             applied += 1
"""

from __future__ import annotations

import numpy as np

from weft import faults
from weft._core import rows
from weft._core.elements import Array
from weft._core.tables import Ids
from weft.engines.local.changes import Changes
from weft.engines.local.clocks import Clocks
from weft.engines.local.segment import Block
from weft.engines.local.table_memory import APPLIED, PROGRESS, WHOLE, TableMemory

#: rows of a clock that are applied between two notes of how far it has come
_PART = 1 << 16


class Staging:
    """The staged deltas of all ranks, as one of them sees them."""

    def __init__(
        self, block: Block, memory: TableMemory, *, clocks: Clocks, changes: Changes, rank: int
    ) -> None:
        self._spec, self._memory, self._words = memory.spec, memory, block.words
        self._clocks, self._changes = clocks, changes
        self._rank, self._size = rank, memory.size
        self._arrays, self._steps = (memory.rows, memory.state), memory.steps
        self._adds = memory.spec.updater.name == "add"

    @property
    def applied(self) -> int:
        """Return how many clocks have been applied."""
        count: int = self._words[APPLIED]
        return count

    def stage(self, delta: Array, ids: Ids | None) -> None:
        """Keep this rank's delta until its clock is applied."""
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

    def apply(self, clock: int) -> None:
        """Apply everybody's add of the next clock. For the holder of the table's lock.

        `progress` counts the parts of all clocks that were begun: should this rank die, the next
        one goes on after the last of them. So it is never set back, and a clock is applied by one
        store, of its number.
        """
        words = self._words
        parts = -(-self._spec.n_rows // _PART)
        before = (clock - 1) * self._size * parts
        for number in range(max(0, words[PROGRESS] - before), self._size * parts):
            rank, part = divmod(number, parts)
            if self._clocks.count(rank) >= clock:
                # as if nobody was missing
                step = int(self._steps[-1]) + (clock - 1) * self._size + rank + 1
                self._apply_part(rank, part, step, before + number + 1)
        words[APPLIED] = clock

    def _apply_part(self, rank: int, part: int, step: int, progress: int) -> None:
        count, ids, deltas = self._memory.staged(rank)
        whole = count[0] == WHOLE
        low = part * _PART
        high = min(low + _PART, self._spec.n_rows if whole else int(count[0]))
        if low >= high:
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
                rows.update(self._arrays, where, delta, self._spec.updater, step)
            if faults.armed:
                faults.reach("table.added")
        finally:
            changes.write_done[own] = changes.write_begun[own]

    def _add(self, delta: Array, ids: Ids | None, low: int, progress: int) -> None:
        """Add to some rows, and note it: no signal handler can come between, and cost somebody his
        add, because there is no call between the one and the other."""
        words, (table, _) = self._words, self._arrays
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
