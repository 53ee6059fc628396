"""Which rows or columns are whose.

part_of, parts_of               so many rows, divided among ranks or slices
choose, part_of_rows            the rows of a batch, and a rank's part of them
slice_rows, RowSlice(s)         these rows of an input: an array, or a dict or tuple of arrays
cut, paste                      an array cut into columns for the workers, their results joined
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft._core.arithmetic import Array
from weft._core.items import ColumnSlice
from weft.adapters import lookup
from weft.errors import InvalidType, InvalidValue


def part_of(length: int, size: int, rank: int) -> tuple[int, int]:
    """Return the rows `start` to `stop` that one of `size` ranks gets of `length`.

    Parts are contiguous and in rank order; they differ by at most one row, the first ones are
    longer.

    >>> [part_of(7, 3, rank) for rank in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    >>> part_of(1, 3, 2)
    (1, 1)
    """
    each, more = divmod(length, size)
    return each * rank + min(rank, more), each * (rank + 1) + min(rank + 1, more)


def parts_of(length: int, size: int) -> list[tuple[int, int]]:
    """Return all parts of so many rows, as `part_of` has them."""
    return [part_of(length, size, part) for part in range(size)]


#: how a user chooses rows: the first n, a slice, or their indexes
Batch = int | slice | Sequence[int] | Any


@dataclass(frozen=True)
class RowSlice:
    """Some rows of an array, taken where they are needed. It is pickled with these rows only; an
    engine whose workers have the array anyway may pickle it by `reduce_whole`."""

    array: Any
    #: a slice, or an array of indexes
    rows: Any

    def __reduce__(self) -> tuple[Any, ...]:
        taken = self.take()
        return _between, (taken, 0, len(taken))

    def reduce_whole(self) -> tuple[Any, ...]:
        """Return what `__reduce__` would, with the whole array in place of its rows."""
        rows = self.rows
        if isinstance(rows, slice):
            return _between, (self.array, rows.start, rows.stop)
        return RowSlice, (self.array, rows)

    def between(self, start: int, stop: int) -> RowSlice:
        """Return some of the rows, from the one at `start` to the one before `stop`."""
        return RowSlice(self.array, _between_rows(self.rows, start, stop))

    def take(self) -> Any:
        """Return the rows."""
        if isinstance(self.array, (list, tuple)) and not isinstance(self.rows, slice):
            return type(self.array)([self.array[row] for row in self.rows])
        # iloc: the rows of a pandas table
        return getattr(self.array, "iloc", self.array)[self.rows]


@dataclass(frozen=True)
class RowSlices:
    """A dict or tuple of row slices: some rows of an input that consists of several arrays."""

    value: Any

    def between(self, start: int, stop: int) -> RowSlices:
        """Return some of the rows, as `RowSlice.between` does."""
        return RowSlices(over_leaves(self.value, lambda leaf: leaf.between(start, stop)))

    def take(self) -> Any:
        """Return the rows."""
        return over_leaves(self.value, lambda leaf: leaf.take())


def slice_rows(value: Any, rows: slice | np.ndarray[Any, Any]) -> RowSlice | RowSlices:
    """Return some rows of an input."""
    if not _is_container(value):
        return RowSlice(value, rows)
    return RowSlices(over_leaves(value, lambda leaf: RowSlice(leaf, rows)))


def _between(array: Any, start: int, stop: int) -> RowSlice:
    return RowSlice(array, slice(start, stop))


class Bounds:
    """A stand-in for the array of a RowSlice that gives the numbers of the first row and of the one
    after the last, for a function that slices its own data."""

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        return np.array([rows.start, rows.stop])


def choose(batch: Batch | None, length: int, option: str = "batch") -> slice | np.ndarray[Any, Any]:
    """Return the rows of a batch of an array of this length: a slice, or indexes from 0 on. Raises
    InvalidType and InvalidValue, which call the batch `option`."""
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
    indexes = indexes.astype(np.intp)  # first, since a narrow integer may not hold the length
    return np.where(indexes < 0, indexes + length, indexes)


def count(rows: slice | np.ndarray[Any, Any]) -> int:
    """Return how many rows were chosen."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def part_of_rows(rows: slice | np.ndarray[Any, Any], parts: int, index: int) -> Any:
    """Return one of several parts of the chosen rows, as even as possible."""
    return _between_rows(rows, *part_of(count(rows), parts, index))


def _between_rows(rows: slice | np.ndarray[Any, Any], start: int, stop: int) -> Any:
    if isinstance(rows, slice):
        return slice(rows.start + start, rows.start + stop)
    return rows[start:stop]


def common_length(inputs: dict[str, Any], *, otherwise: str = "") -> int:
    """Return how many rows each of the split inputs has. Raise unless all have as many; errors end
    with what to do `otherwise`."""
    lengths = {}
    for argument, value in inputs.items():
        for name, leaf in leaves(value, argument):
            try:
                lengths[name] = len(leaf)
            except TypeError:
                raise InvalidType(
                    f"{name} is a {type(leaf).__name__} without rows; expected an array, which is "
                    f"split along its first axis{otherwise}"
                ) from None
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise InvalidValue(
            f"the split inputs have different numbers of rows: {each}; expected as many in each"
            f"{otherwise}"
        )
    return next(iter(lengths.values()), 0)


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of an input, each with its name: itself, or those of a dict or of a tuple of
    arrays, nested as you like. A list is one of rows.

    >>> [name for name, _ in leaves({"a": [1], "b": (np.ones(1), [2])}, "x")]
    ["x['a']", "x['b'][0]", "x['b'][1]"]
    """
    if not _is_container(value):
        yield name, value
        return
    for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from leaves(part, f"{name}[{key!r}]")


def over_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return an input with a function applied to each of its arrays."""
    if not _is_container(value):
        return function(value)
    if isinstance(value, Mapping):
        parts = {key: over_leaves(part, function) for key, part in value.items()}
        if type(value) is dict:
            return parts
        same: Any = copy.copy(value)  # with what a class of its own has besides
        same.update(parts)
        return same
    values = [over_leaves(part, function) for part in value]
    return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)


def _is_container(value: Any) -> bool:
    if isinstance(value, tuple):  # of anything else, such as numbers, it is one of rows
        return any(isinstance(part, RowSlice) or _is_array(part) for part in value)
    return isinstance(value, Mapping)


def _is_array(part: Any) -> bool:
    return lookup.of(part) is not None or hasattr(part, "iloc") or _is_container(part)


#: for a single column NumPy and BLAS may use other code, and differ in the last bit
_FEWEST = 2
#: how many parts an array is cut into where that must not depend on the number of workers
FIXED = 32
#: elements of an array that are rows, which NumPy could not make a matrix of
_ROWS = (list, tuple, np.ndarray)


def validate_columns(array: Array) -> None:
    """Raise InvalidType or InvalidValue unless an array can be cut into columns."""
    if array.ndim == 0:
        raise InvalidType(
            f"a distributed function got an array without axes, {array!r}; expected a list, or an "
            "array that can be split along its last axis"
        )
    if array.shape[-1] == 0:
        raise InvalidValue(
            f"a distributed function got an array of shape {array.shape}, which has no columns; "
            "expected one column or more along its last axis"
        )
    if array.dtype.hasobject and any(isinstance(row, _ROWS) for row in array.flat):
        raise InvalidValue(
            f"a distributed function got a ragged matrix: an array of objects of shape "
            f"{array.shape} with {_lengths(array)}; expected rows of one length, or a list to call "
            "the function on each row"
        )


def cut(array: Array, parts: int, handle: Any = None) -> list[ColumnSlice]:
    """Return an array as at most so many parts, as even as possible. They have `handle` in place of
    the array, if it is given."""
    columns = array.shape[-1]
    parts = max(1, min(parts, columns // _FEWEST))
    whole = array if handle is None else handle
    return [ColumnSlice(whole, *part_of(columns, parts, part)) for part in range(parts)]


def paste(array: Array, parts: Sequence[ColumnSlice], results: Sequence[object]) -> Array:
    """Return the results of an array's parts as one array, joined along the last axis."""
    arrays = [_as_array(part, result) for part, result in zip(parts, results, strict=True)]
    for part, result in zip(parts, arrays, strict=True):
        columns = part.stop - part.start
        if result.ndim == 0 or result.shape[-1] != columns:
            raise InvalidValue(
                f"the function got columns {part.start} to {part.stop - 1} as an array of shape "
                f"{(*array.shape[:-1], columns)} and returned {_described(result)}; expected one "
                f"result for each column: a last axis of {columns}"
            )
        if result.shape[:-1] != arrays[0].shape[:-1]:
            raise InvalidValue(
                f"the function's results do not fit together: {_described(arrays[0])} for columns "
                f"{parts[0].start} to {parts[0].stop - 1}, {_described(result)} for columns "
                f"{part.start} to {part.stop - 1}; expected the same shape but for the last axis"
            )
    if len(arrays) == 1:
        return arrays[0]
    if any(isinstance(result, np.ma.MaskedArray) for result in arrays):
        # np.concatenate would lose the masks
        joined: Array = np.ma.concatenate(arrays, axis=-1)  # type: ignore[no-untyped-call]
        return joined
    whole = np.concatenate(arrays, axis=-1)
    records = all(isinstance(result, np.recarray) for result in arrays)
    return whole.view(np.recarray) if records else whole  # concatenate makes them plain


def _as_array(part: ColumnSlice, result: object) -> Array:
    try:
        return np.asanyarray(result)
    except ValueError as error:  # lists of different lengths
        raise InvalidValue(
            f"the function got columns {part.start} to {part.stop - 1} and returned a "
            f"{type(result).__name__} that is no array ({error}); expected one result for each "
            f"column: a last axis of {part.stop - part.start}"
        ) from None


def _described(array: Array) -> str:
    return "a single value" if array.ndim == 0 else f"an array of shape {array.shape}"


def _lengths(array: Array) -> str:
    rows = [row for row in array.flat if isinstance(row, _ROWS)]
    lengths = {1 if isinstance(row, np.ndarray) and row.ndim == 0 else len(row) for row in rows}
    return f"rows of {', '.join(map(str, sorted(lengths)))} elements"
