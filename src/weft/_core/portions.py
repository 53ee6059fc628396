"""Which rows of its inputs a rank works on, and in which slices. Functions of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft._core.split import part_of
from weft.errors import InvalidType, InvalidValue

#: how a user chooses rows: the first n, a slice, or their indexes
Batch = int | slice | Sequence[int] | Any


@dataclass(frozen=True)
class RowSlice:
    """Some rows of an array, taken where they are needed.

    Pickled, it has only the rows that are needed; an engine whose workers have the array anyway
    may pickle it by `reduce_whole`.
    """

    array: Any
    #: a slice, or an array of indexes
    rows: Any

    def __reduce__(self) -> tuple[Any, ...]:
        taken = self.take()
        return _between, (taken, 0, len(taken))

    def reduce_whole(self) -> tuple[Any, ...]:
        """Return what pickle takes for the whole array and which rows are meant."""
        rows = self.rows
        if isinstance(rows, slice):
            return _between, (self.array, rows.start, rows.stop)
        return RowSlice, (self.array, rows)

    def take(self) -> Any:
        if isinstance(self.array, (list, tuple)) and not isinstance(self.rows, slice):
            return type(self.array)([self.array[row] for row in self.rows])
        return getattr(self.array, "iloc", self.array)[self.rows]  # a table of pandas: its rows


def _between(array: Any, start: int, stop: int) -> RowSlice:
    return RowSlice(array, slice(start, stop))


class Bounds:
    """Rows by their numbers: as an array of a RowSlice, it gives the first and the one after the
    last of some rows, for a function that cuts what it has by itself."""

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        return np.array([rows.start, rows.stop])


def choose(batch: Batch | None, length: int, option: str = "batch") -> slice | np.ndarray[Any, Any]:
    """The rows that a batch means, of an array of this length: a slice, or indexes from 0 on."""
    if batch is None:
        return slice(0, length)
    if isinstance(batch, (int, np.integer)) and not isinstance(batch, bool):
        if not 0 <= batch <= length:
            raise InvalidValue(
                f"{option}={batch}: expected the first 0 to {length} rows, as there are {length}"
            )
        return slice(0, int(batch))
    if isinstance(batch, slice):
        chosen = range(length)[batch]
        if chosen.step == 1:
            return slice(chosen.start, max(chosen.start, chosen.stop))
        return np.asarray(chosen, dtype=np.intp)
    indexes = np.asarray(batch)
    if indexes.ndim != 1 or (indexes.size and indexes.dtype.kind not in "iu"):
        raise InvalidType(
            f"{option} is a {type(batch).__name__} of shape {indexes.shape} and dtype "
            f"{indexes.dtype}; expected a number of rows, a slice, or a list of row indexes"
        )
    wrong = (indexes < -length) | (indexes >= length)
    if wrong.any():
        raise InvalidValue(
            f"{option} has the row {indexes[wrong][0]}; expected rows of -{length} to {length - 1}"
        )
    indexes = indexes.astype(np.intp)  # first: a sum of narrow integers could not hold the length
    return np.where(indexes < 0, indexes + length, indexes)


def count(rows: slice | np.ndarray[Any, Any]) -> int:
    """How many rows were chosen."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def part(rows: slice | np.ndarray[Any, Any], parts: int, index: int) -> Any:
    """One of several parts of the chosen rows, as even as can be."""
    start, stop = part_of(count(rows), parts, index)
    if isinstance(rows, slice):
        return slice(rows.start + start, rows.start + stop)
    return rows[start:stop]


def common_length(inputs: dict[str, Any], *, otherwise: str = "") -> int:
    """How many rows the split inputs have: all the same. Errors say what to do `otherwise`."""
    lengths = {}
    for name, value in inputs.items():
        try:
            lengths[name] = len(value)
        except TypeError:
            raise InvalidType(
                f"{name} is a {type(value).__name__} without rows; expected an array, which is "
                f"split along its first axis{otherwise}"
            ) from None
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InvalidValue(
            f"the split inputs have different numbers of rows: {found}; expected as many in each"
            f"{otherwise}"
        )
    return next(iter(lengths.values()), 0)
