"""Some rows of a table, read, and updated together with their state.

These are rows in memory of the host. `on_device` is a module with the same functions, of which
`rows_on` tells, for rows that are tensors on a device:

    zeros  read  merge  update  prepare_addition  make_adder  copy  to_host  await_ready  await_done

An id may be repeated: the row's deltas are then summed, and it is updated once. Infinities and NaN
give no warning, as when all rows are updated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from weft import kernels
from weft._core.arithmetic import Array, address
from weft._core.tables import Ids
from weft._core.updaters import Updater
from weft.errors import InvalidValue

#: bytes; NumPy's void dtypes are shorter
_LONGEST = 1 << 31
#: rows of the largest table for which 4 bytes per row are kept to find repeated ids
_SCRATCH = 1 << 20


def rows_on(device: str) -> Any:
    """Return the module whose functions take rows on a device: for "cpu" this one."""
    if device == "cpu":
        return sys.modules[__name__]
    from weft._core import device_rows

    return device_rows


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: str) -> Array:
    return np.zeros(shape, dtype)


def copy(target: Array, source: Array) -> None:
    """Copy values of one shape and dtype."""
    np.copyto(target, source)


def to_host(rows: Array) -> Array:
    """Return a copy as an array of NumPy's."""
    return np.array(rows)


def await_ready(device: str) -> None:
    """Return when what the calling thread has queued on the device is done, so that it need not be
    waited for under a lock: on the host nothing is queued."""


def await_done(device: str) -> None:
    """Do the same after an update. If it is interrupted, it goes on until the end, and raises."""


def read(table: Array, ids: Ids | None, out: Array | None) -> Array:
    """Copy all rows of a table, or some."""
    if ids is None:
        whole = np.empty_like(table) if out is None else out
        np.copyto(whole, table)
        return whole
    # the ids have been validated: "clip" only avoids a second copy
    some: Array = table.take(ids, 0) if out is None else table.take(ids, 0, out, "clip")
    return some if ids.ndim else np.asarray(some)


def write(table: Array, ids: Ids, rows: Array) -> None:
    """Replace some rows of a table; all arrays are C-contiguous. Of the rows of a repeated id the
    last one stays."""
    row_bytes = rows.itemsize * prod(rows.shape[1:])
    if rows.ndim > 1 and row_bytes < _LONGEST:
        # a row is copied at once, where `table[ids] = rows` takes its elements apart
        row = np.dtype((np.void, row_bytes))
        table.view(row).put(ids, rows.view(row), "clip")
    else:
        table[ids] = rows


class Repeats(NamedTuple):
    """The positions in a list of ids whose id is repeated later, and for each the last position of
    its id."""

    earlier: Ids
    last: Ids


def repeats(ids: Ids, scratch: Array | None = None) -> Repeats | None:
    """Return where ids are repeated; None if no id is. `scratch`, integers of any value for all
    rows of the table, makes it several times faster."""
    if scratch is not None:
        positions = np.arange(ids.size, dtype=scratch.dtype)
        scratch[ids] = positions  # of the positions of one id the last one stays
        last = scratch[ids]
        earlier = (last != positions).nonzero()[0]
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
    if earlier.size > 1 and (last[:-1] == earlier[1:]).any():  # some ids are there three times
        for index in range(earlier.size - 2, -1, -1):
            if earlier[index + 1] == last[index]:
                last[index] = last[index + 1]
    return Repeats(positions[earlier], positions[last])


def occurrences(ids: Ids) -> Ids:
    """Return for each position in a list of ids how often its id has come before.

    >>> occurrences(np.array([7, 5, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    lengths = np.diff(np.append(starts, ids.size))
    counts = np.empty_like(order)
    counts[order] = np.arange(ids.size) - np.repeat(starts, lengths)
    return counts


def merge(ids: Ids, delta: Array) -> tuple[Ids, Array]:
    """Return each id once, with the sum of its deltas."""
    repeated = repeats(ids)
    if repeated is None:
        return ids, delta
    once = np.ones(ids.size, bool)
    once[repeated.earlier] = False
    kept = once.nonzero()[0]
    index = np.cumsum(once) - 1
    total = delta.take(kept, 0)
    with np.errstate(all="ignore"):
        np.add.at(total, index[repeated.last], delta[repeated.earlier])
    return ids[kept], total


def update(
    arrays: tuple[Array, Mapping[str, Array]],
    ids: Ids | slice,
    delta: Array,
    updater: Updater,
    step: int,
    *,
    out: Array | None = None,
) -> None:
    """Update some rows of a table, given with its state: those of a range, which are then copied to
    `out`, or with these ids, none of which is repeated."""
    table, state = arrays
    if isinstance(ids, slice):
        beside = {name: array[ids] for name, array in state.items()}
        some = table[ids]
        updater.update(some, beside, delta, step)
        if out is not None:
            np.copyto(out, some)
        return
    rows = table.take(ids, 0)
    beside = {name: array.take(ids, 0) for name, array in state.items()}
    updater.update(rows, beside, delta, step)
    write(table, ids, rows)
    for name, array in beside.items():
        write(state[name], ids, array)


def prepare_addition(table: Array, where: Ids | slice, delta: Array) -> Callable[[], object]:
    """Return what adds a delta to some rows, none of them named twice, when it is called. It has no
    code in Python, so no signal handler runs between the store before the call and its effect."""
    if isinstance(where, slice):
        return partial(np.add, table[where], delta, table[where])
    changed = table.take(where, 0)
    with np.errstate(all="ignore"):
        changed += delta
    return partial(table.__setitem__, where, changed)


class Adder(Protocol):
    """Add to some rows of a table, one after the other. For one thread at a time."""

    def prepare(self, table: Array, ids: Ids, delta: Array, *, touch: bool) -> Any:
        """Do what can be done before the table is locked. Return what `add` needs of it. `touch`:
        bring the rows into this processor's cache, so that `add` takes less time."""

    def add(self, table: Array, ids: Ids, delta: Array, prepared: Any) -> None: ...


def make_adder(n_rows: int, dtype: np.dtype[Any]) -> Adder:
    """Return the fastest Adder for a table."""
    kernel = kernels.add_rows_kernel(dtype.name)
    return NumpyAdder(n_rows, dtype) if kernel is None else CompiledAdder(kernel)


class CompiledAdder:
    """An Adder in C: rows are not copied out and back, and ids may repeat."""

    def __init__(self, kernel: kernels.AddRows) -> None:
        self._kernel = kernel

    def prepare(self, table: Array, ids: Ids, delta: Array, *, touch: bool) -> None:
        """Do nothing: the kernel prefetches rows while it adds to those before."""

    def add(self, table: Array, ids: Ids, delta: Array, prepared: None) -> None:
        ids = ids if ids.flags.carray else ids.copy()
        places = address(table), len(table), address(ids), ids.size, address(delta)
        done = self._kernel(*places, prod(table.shape[1:]))
        if done < ids.size:
            raise InvalidValue(
                f"the row ids were changed while they were in use: {ids[done]} is not in a table "
                f"of {len(table)} rows; {done} of {ids.size} rows were added to"
            )


class NumpyAdder:
    """An Adder in NumPy, with memory that it reuses: fresh pages cost more than the addition."""

    def __init__(self, n_rows: int, dtype: np.dtype[Any]) -> None:
        self._n_rows = n_rows
        self._scratch: Array | None = None
        self._room = np.empty(0, dtype)

    def prepare(self, table: Array, ids: Ids, delta: Array, *, touch: bool) -> Repeats | None:
        """Return where ids are repeated."""
        if self._scratch is None and self._n_rows <= _SCRATCH:
            self._scratch = np.zeros(self._n_rows, np.int32)
        repeated = repeats(ids, self._scratch)
        if touch:
            table.take(ids, 0, self._room_like(delta), "clip")
        return repeated

    def add(self, table: Array, ids: Ids, delta: Array, prepared: Repeats | None) -> None:
        room = self._room_like(delta)
        table.take(ids, 0, room, "clip")
        with np.errstate(all="ignore"):
            np.add(room, delta, room)
            if prepared is not None:  # of an id's rows the last one stays
                lasts = np.unique(prepared.last)
                room[lasts] = table[ids[lasts]]
                positions = np.concatenate((prepared.earlier, lasts))
                order = positions.argsort()
                into = np.concatenate((prepared.last, lasts))[order]
                np.add.at(room, into, delta[positions[order]])
        write(table, ids, room)

    def _room_like(self, delta: Array) -> Array:
        if self._room.size < delta.size:
            self._room = np.empty(delta.size, delta.dtype)
        return self._room[: delta.size].reshape(delta.shape)
