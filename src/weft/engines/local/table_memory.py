"""The memory of one table, in one block that all ranks map.

    words 0-7      applied | progress | unused
    for each rank  adds | interrupted | lowest | highest | ids | unused
    write_begun    of all ranks side by side, and then write_done
    flags          of sleepers, one byte for each rank
    locks          one for the table, one for each stripe
    steps          how many adds each stripe has had, and how many adds to some rows there were
    ids            for each rank, of the rows it is changing, as far as there is room
    rows | one array for each state of the updater
    staged         under bsp, for each rank: how many rows | their ids | their deltas

Each rank writes only its own words; `applied`, `progress`, `steps` and the arrays are written under
the locks. A stripe is a run of rows that is locked by itself, so that passes over the whole table
follow each other instead of waiting for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from weft._core.elements import Array
from weft._core.split import part_of
from weft._core.tables import TableSpec
from weft.engines.local import locks
from weft.engines.local.segment import Block

#: words at the beginning
APPLIED, PROGRESS = 0, 1
#: words of a rank
ADDS, INTERRUPTED, LOWEST, HIGHEST, COUNT = range(5)
#: in place of a number of rows: all of them
WHOLE = 2**63 - 1
#: rows that an interrupted add can name one by one
NAMED = 504
_LINE = 8
_PAGE = 4096
#: Large enough that taking two locks for each costs a hundredth of the pass (docs/performance.md).
_STRIPE = 4 << 20
_MOST_STRIPES = 64


class TableMemory:
    """Where everything is, and the arrays over it; `block` is None to find out how much it is."""

    def __init__(self, spec: TableSpec, size: int, block: Block | None = None) -> None:
        self.spec, self.size = spec, size
        self.stripes = min(max(1, spec.nbytes // _STRIPE), _MOST_STRIPES, spec.n_rows)
        self._block = block
        self._end = 8 * _LINE
        self._lines = self._take(8 * _LINE * size)
        self.write_begun_at = self._take(8 * size) // 8
        self.write_done_at = self._take(8 * size) // 8
        self.flags_at = self._take(size)
        self._locks = [self._take(8 * locks.words_for(size)) for _ in range(self.stripes + 1)]
        self._steps = self._take(8 * (self.stripes + 1))
        self._ids = [self._take(8 * NAMED) for _ in range(size)]
        row_bytes = prod(spec.row_shape) * spec.dtype.itemsize
        self._rows = self._take(spec.n_rows * row_bytes, _PAGE)
        self._state = {
            name: self._take(spec.n_rows * row_bytes, _PAGE) for name in spec.updater.state
        }
        staged = range(size if spec.consistency.name == "bsp" else 0)
        self._staged = [
            (self._take(8 * (1 + spec.n_rows), _PAGE), self._take(spec.n_rows * row_bytes, _PAGE))
            for _ in staged
        ]
        self.nbytes = self._end

    def _take(self, length: int, align: int = 8 * _LINE) -> int:
        start = -(-self._end // align) * align
        self._end = start + length
        return start

    def word(self, rank: int, which: int) -> int:
        """Return the index of one of a rank's words."""
        return self._lines // 8 + _LINE * rank + which

    def range_of(self, stripe: int) -> tuple[int, int]:
        """Return the first row of a stripe, and the row behind its last."""
        return part_of(self.spec.n_rows, self.stripes, stripe)

    def lock_blocks(self) -> Iterator[Block]:
        """Yield the memory of the table's lock, then of the stripes'."""
        block = self._mapped()
        for start in self._locks:
            yield Block(block.segment, block.offset + start, 8 * locks.words_for(self.size))

    def format(self, values: Array | None) -> None:
        """Make memory, fresh or used, a table with these rows that nobody has added to."""
        block = self._mapped()
        block.clear(0, self._rows // 8)
        for lock in self.lock_blocks():
            locks.Lock.format(lock)
        self.rows[...] = 0 if values is None else values
        for array in self.state.values():
            array[...] = 0

    # the arrays

    @property
    def rows(self) -> Array:
        return self._array(self._rows, self.spec.shape, self.spec.dtype)

    @property
    def state(self) -> dict[str, Array]:
        return {
            name: self._array(start, self.spec.shape, self.spec.dtype)
            for name, start in self._state.items()
        }

    @property
    def steps(self) -> Array:
        return self._array(self._steps, (self.stripes + 1,), np.dtype(np.int64))

    def ids(self, rank: int) -> Array:
        return self._array(self._ids[rank], (NAMED,), np.dtype(np.int64))

    def staged(self, rank: int) -> tuple[Array, Array, Array]:
        """Return how many rows a rank has staged, their ids and their deltas."""
        start, deltas = self._staged[rank]
        whole = self._array(start, (1 + self.spec.n_rows,), np.dtype(np.int64))
        return whole[:1], whole[1:], self._array(deltas, self.spec.shape, self.spec.dtype)

    def _array(self, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        buffer = memoryview(self._mapped().buffer)
        array: Array = np.ndarray(shape, dtype, buffer=buffer, offset=start)
        return array

    def _mapped(self) -> Block:
        if self._block is None:
            raise RuntimeError("this table has no memory yet")
        return self._block
