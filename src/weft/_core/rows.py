"""Some rows of a table: read, and updated with the state beside them.

A row may be named several times; its deltas then add up and it is updated once. Infinities and NaN
pass without warning, as they do when all rows are updated.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from weft import kernels
from weft._core.elements import Array
from weft._core.tables import Ids
from weft._core.updaters import Updater
from weft._core.values import address

#: rows for which 4 bytes each are kept, to find those that are named twice
_SCRATCH = 1 << 20


def read(table: Array, ids: Ids | None, out: Array | None) -> Array:
    """A copy of all rows of a table, or of some."""
    if ids is None:
        whole = np.empty_like(table) if out is None else out
        np.copyto(whole, table)
        return whole
    # the ids have been checked: the mode only avoids a second copy
    some: Array = table.take(ids, 0) if out is None else table.take(ids, 0, out, "clip")
    return some if ids.ndim else np.asarray(some)


def write(table: Array, ids: Ids, rows: Array) -> None:
    """Replace some rows of a table; all is C-contiguous. Where an id is named again, the last of
    its rows is the one that stays."""
    if rows.ndim > 1:  # a row is copied at once, where `table[ids] = rows` takes its elements apart
        row = np.dtype((np.void, rows.itemsize * prod(rows.shape[1:])))
        table, rows = table.view(row), rows.view(row)
    table.put(ids, rows, "clip")


class Repeats(NamedTuple):
    """Which positions of a list of ids name a row that a later one names too, and, for each of
    them, the last position that does."""

    earlier: Ids
    last: Ids


def repeats(ids: Ids, scratch: Array | None = None) -> Repeats | None:
    """Where ids are named again; None if each is named once.

    `scratch`, integers of any value for all rows of the table, makes it several times faster.
    """
    if scratch is not None:
        places = np.arange(ids.size, dtype=scratch.dtype)
        scratch[ids] = places  # of those for one row the last one stays
        last = scratch[ids]
        earlier = (last != places).nonzero()[0]
        return Repeats(earlier, last[earlier]) if earlier.size else None
    return _repeats_by_sorting(ids)


def _repeats_by_sorting(ids: Ids) -> Repeats | None:
    bits = ids.size.bit_length()
    if int(ids.max(initial=0)).bit_length() + bits < 64:
        # sorting each id together with its position is several times faster than argsort
        keys = ids << bits
        keys |= np.arange(ids.size)
        keys.sort()
        ordered, positions = keys >> bits, keys
        positions &= (1 << bits) - 1
    else:
        positions = np.argsort(ids, kind="stable")
        ordered = ids[positions]
    earlier = (ordered[1:] == ordered[:-1]).nonzero()[0]
    if not earlier.size:
        return None
    last = earlier + 1
    if earlier.size > 1 and (last[:-1] == earlier[1:]).any():  # some are named three times
        for index in range(earlier.size - 2, -1, -1):
            if earlier[index + 1] == last[index]:
                last[index] = last[index + 1]
    return Repeats(positions[earlier], positions[last])


def merge(ids: Ids, delta: Array) -> tuple[Ids, Array]:
    """Each id once, with the sum of its deltas."""
    found = repeats(ids)
    if found is None:
        return ids, delta
    once = np.ones(ids.size, bool)
    once[found.earlier] = False
    kept = once.nonzero()[0]
    place = np.cumsum(once) - 1
    total = delta.take(kept, 0)
    with np.errstate(all="ignore"):
        np.add.at(total, place[found.last], delta[found.earlier])
    return ids[kept], total


def update(
    arrays: tuple[Array, Mapping[str, Array]],
    ids: Ids | slice,
    delta: Array,
    updater: Updater,
    step: int,
) -> None:
    """Update some rows of a table, given with its state: those of a range, or with these ids, each
    of which is named once."""
    table, state = arrays
    if isinstance(ids, slice):
        beside = {name: array[ids] for name, array in state.items()}
        updater.update(table[ids], beside, delta, step)
        return
    rows = table.take(ids, 0)
    beside = {name: array.take(ids, 0) for name, array in state.items()}
    updater.update(rows, beside, delta, step)
    write(table, ids, rows)
    for name, array in beside.items():
        write(state[name], ids, array)


class Adder:
    """Adds to some rows of a table, as `merge` and `update` would, with memory that it uses again:
    fresh pages cost more than the addition. For one thread at a time."""

    def __init__(self, n_rows: int, dtype: np.dtype[Any]) -> None:
        self._n_rows = n_rows
        self._scratch: Array | None = None
        self._room = np.empty(0, dtype)

    def touch(self, table: Array, ids: Ids, delta: Array) -> None:
        """Bring rows into this processor's cache, so that adding to them, under a lock, is soon
        over."""
        table.take(ids, 0, self._room_like(delta), "clip")

    def find(self, ids: Ids) -> Repeats | None:
        """Where ids are named again; to be called before `add`."""
        if self._scratch is None and self._n_rows <= _SCRATCH:
            self._scratch = np.zeros(self._n_rows, np.int32)
        return repeats(ids, self._scratch)

    def add(self, table: Array, ids: Ids, delta: Array, found: Repeats | None) -> None:
        """Add. Where an id is named again, the last of its rows is the one that stays."""
        room = self._room_like(delta)
        table.take(ids, 0, room, "clip")
        with np.errstate(all="ignore"):
            np.add(room, delta, room)
            if found is not None:
                np.add.at(room, found.last, delta[found.earlier])
        write(table, ids, room)

    def _room_like(self, delta: Array) -> Array:
        if self._room.size < delta.size:
            self._room = np.empty(delta.size, delta.dtype)
        return self._room[: delta.size].reshape(delta.shape)


class CompiledAdder(Adder):
    """The same in C, row after row: nothing is copied out and back, and ids may repeat."""

    def __init__(self, n_rows: int, dtype: np.dtype[Any], add_rows: kernels.AddRows) -> None:
        super().__init__(n_rows, dtype)
        self._add_rows = add_rows

    def touch(self, table: Array, ids: Ids, delta: Array) -> None:
        """Nothing: while one row is added to, those after it are on their way."""

    def find(self, ids: Ids) -> None:
        return None

    def add(self, table: Array, ids: Ids, delta: Array, found: Repeats | None) -> None:
        ids, columns = np.ascontiguousarray(ids), prod(table.shape[1:])
        self._add_rows(address(table), address(ids), ids.size, address(delta), columns)


def make_adder(n_rows: int, dtype: np.dtype[Any]) -> Adder:
    """The quickest one that there is for a table."""
    add_rows = kernels.row_adder(dtype.name)
    return Adder(n_rows, dtype) if add_rows is None else CompiledAdder(n_rows, dtype, add_rows)
