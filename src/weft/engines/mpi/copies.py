"""A host's own copy of rows that other hosts keep, for gets that accept older ones.

    words      of a lock between the ranks of the host and their agent
    versions   of each row: up to which clock it has the adds of all; -1: it is not here
    rows       of all other hosts, in the table's order

A rank that needs rows which are too old fetches them, and only them, while it holds the lock; the
others of its host wait, and find them. So each row is fetched once for a host and clock.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from weft._core import rows
from weft._core.arguments import seconds_until
from weft._core.sharding import needed_version, version
from weft.engines.local.meeting import locks
from weft.engines.local.meeting.locks import Lock
from weft.engines.local.memory.segment import Block

if TYPE_CHECKING:
    from collections.abc import Callable

    from weft._core.arithmetic import Array
    from weft._core.tables import Ids
    from weft.engines.local.meeting.roster import Recorder
    from weft.engines.mpi.layout import HostRanks, Layout

_LINE = 64


class CopyMemory:
    """The layout of a copy's memory, and arrays over it. Without a `block` it gives `nbytes`."""

    def __init__(self, layout: Layout, at: int, places: int, block: Block | None = None) -> None:
        """`at` is the host that has the copy, of which `places` processes map it."""
        self.layout, self.block = layout, block
        #: the rows that are not copied, as they are the host's own
        self.low, self.high = layout.sharding.part(at)
        self.count = layout.spec.n_rows - (self.high - self.low)
        self._lock_bytes = 8 * locks.words_for(places)
        self._versions_at = -(-self._lock_bytes // _LINE) * _LINE
        self._rows_at = -(-(self._versions_at + 8 * self.count) // _LINE) * _LINE
        self.nbytes = self._rows_at + self.count * layout.sharding.row_nbytes

    def format(self) -> None:
        Lock.format(self.lock_block)
        self.versions[...] = -1

    @property
    def lock_block(self) -> Block:
        block = self._mapped
        return Block(block.segment, block.offset, self._lock_bytes)

    @property
    def versions(self) -> Array:
        buffer = memoryview(self._mapped.buffer)
        array: Array = np.ndarray((self.count,), np.int64, buffer, self._versions_at)
        return array

    @property
    def rows(self) -> Array:
        spec = self.layout.spec
        shape = (self.count, *spec.row_shape)
        buffer = memoryview(self._mapped.buffer)
        array: Array = np.ndarray(shape, spec.dtype, buffer, self._rows_at)
        return array

    @property
    def _mapped(self) -> Block:
        if self.block is None:
            raise ValueError("a layout without memory has no arrays")
        return self.block


class RowCopy:
    """The copy, as one rank sees it."""

    def __init__(
        self, memory: CopyMemory, *, ranks: HostRanks, recorder: Recorder, timeout: float
    ) -> None:
        self._memory, self._rows, self._versions = memory, memory.rows, memory.versions
        self.lock = partial(Lock, recorder=recorder, members=ranks.members, timeout=timeout)(
            memory.lock_block, roster=ranks.roster
        )

    def read(
        self,
        ids: Ids,
        out: Array,
        *,
        own: int,
        slack: int,
        counts: Callable[[], list[int]],
        fetch: Callable[[Ids, Array], None],
        deadline: float,
    ) -> int:
        """Copy rows of other hosts into `out`, no older than `slack` clocks for a rank that has
        made `own` adds, or for the slowest of the others if that has made more; return their
        version. `counts` tells how many adds all ranks that are here have made, this one first;
        `fetch` reads rows from their hosts."""
        at = np.where(ids < self._memory.low, ids, ids - (self._memory.high - self._memory.low))
        needed = max(0, needed_version(max(own, version(counts()[1:])), slack))
        with self.lock.shared(timeout=seconds_until(deadline)):
            oldest = int(self._versions[at].min(initial=own))
            if oldest >= needed:
                rows.read(self._rows, at, out)
                return oldest
        with self.lock.exclusive(timeout=seconds_until(deadline)):
            late = np.unique(at[self._versions[at] < needed])
            if late.size:
                self._renew(late, version(counts()), fetch)
            rows.read(self._rows, at, out)
            return int(self._versions[at].min(initial=own))

    def _renew(self, late: Ids, now: int, fetch: Callable[[Ids, Array], None]) -> None:
        """Fetch rows that are too old. Until they are there, nobody takes them for whole."""
        memory = self._memory
        fresh = np.empty((late.size, *self._rows.shape[1:]), self._rows.dtype)
        fetch(np.where(late < memory.low, late, late + (memory.high - memory.low)), fresh)
        self._versions[late] = -1
        rows.write(self._rows, late, fresh)
        self._versions[late] = now
