"""An array cut along its last axis, and the results pasted together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weft._core.elements import Array
from weft._core.part import ColumnSlice
from weft._core.split import part_of
from weft.errors import InvalidType, InvalidValue

#: with one column NumPy and BLAS may take another way, and differ in the last bit
_FEWEST = 2
#: into how many parts an array is cut where the cut must not depend on the workers
FIXED = 32
#: as elements of an array: rows that NumPy could not make a matrix of
_ROWS = (list, tuple, np.ndarray)


def validate_columns(array: Array) -> None:
    """Raise unless an array can be cut."""
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
    """Return an array as at most so many parts, as even as can be; `handle` stands for it."""
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
    if any(isinstance(one, np.ma.MaskedArray) for one in arrays):
        # np.concatenate would lose the masks
        joined: Array = np.ma.concatenate(arrays, axis=-1)  # type: ignore[no-untyped-call]
        return joined
    return np.concatenate(arrays, axis=-1)


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
