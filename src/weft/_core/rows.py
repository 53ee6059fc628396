"""Some rows of a table: read, and updated with the state beside them.

A row id may be named several times; its deltas then add up, in the order in which they were given,
and the row is updated once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft._core.tables import Array, Ids
from weft._core.updaters import Updater


def read(table: Array, ids: Ids, out: Array) -> None:
    """Copy rows of a table. The ids have been checked: the mode only avoids a second copy."""
    table.take(ids, 0, out, "clip")


def merge(ids: Ids, delta: Array) -> tuple[Ids, Array]:
    """Each id once, with the sum of its deltas."""
    ids = ids.reshape(-1)
    ordered = np.sort(ids)
    if not (ordered[1:] == ordered[:-1]).any():
        return ids, delta
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    return ordered[starts], np.add.reduceat(delta[order], starts, axis=0, dtype=delta.dtype)


def update(
    arrays: tuple[Array, Mapping[str, Array]], ids: Ids, delta: Array, updater: Updater, step: int
) -> None:
    """Update some rows of a table, given with its state; each id is named once."""
    table, state = arrays
    rows = table.take(ids, 0)
    beside = {name: array.take(ids, 0) for name, array in state.items()}
    updater.update(rows, beside, delta, step)
    table[ids] = rows
    for name, array in beside.items():
        state[name][ids] = array
