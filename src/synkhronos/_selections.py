"""The options of a call, read and validated. Functions of values."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft._core import partition
from weft._core.partition import Batch, common_length, count
from weft.errors import InvalidType, InvalidValue


def choose(batch: Batch | None, length: int, option: str = "batch") -> Any:
    """Return the rows of a batch: a slice, or indexes. Raises InvalidType and InvalidValue, also
    for a slice that ends after the last row, which would choose fewer rows than it says."""
    if isinstance(batch, slice) and batch.stop is not None and batch.stop > length:
        raise InvalidValue(
            f"{option}={batch}: expected an end of {length} at most, as there are {length} rows; "
            f"the last ones are slice({batch.start}, None)"
        )
    return partition.choose(batch, length, option)


def rows_of(
    named: Mapping[str, Any], minibatches: Collection[str], batch: Batch | None, otherwise: str = ""
) -> Any:
    """Return the chosen rows of values, some of which have the rows of the batch alone. Raises
    InvalidType and InvalidValue for rows that are not there; where numbers of rows differ the error
    ends with `otherwise`."""
    whole = {name: one for name, one in named.items() if batch is None or name not in minibatches}
    lengths = {name: len(named[name]) for name in minibatches}
    if whole:
        length = common_length(dict(whole), otherwise=otherwise)
    else:  # of the batch only the number of its rows counts
        length = max([reach(batch), *lengths.values()]) if lengths else 0
    rows = choose(batch, length)
    validate_minibatches(lengths, count(rows))
    return rows


def reach(batch: Batch | None) -> int:
    """Return how many rows a batch needs at least: 7 for the first 7, slice(3, 7), [2, 6]."""
    if isinstance(batch, (int, np.integer)):
        return int(batch)
    if isinstance(batch, slice):
        return batch.stop or 0
    indexes = np.asarray(batch)
    return int(indexes.max()) + 1 if indexes.size and indexes.dtype.kind in "iu" else 0


def validate_slices(slices: object, rows: int | None) -> None:
    """Raise unless `num_slices` fits so many rows; None where they are not known."""
    if isinstance(slices, bool) or not isinstance(slices, (int, np.integer)):
        raise InvalidType(f"num_slices={slices!r}: expected a whole number")
    if slices < 1 or (rows is not None and slices > max(1, rows)):
        most = "more" if rows is None else f"{max(1, rows)}, as many as there are rows"
        raise InvalidValue(f"num_slices={slices}: expected 1 to {most}")


def cut_of(batch_s: Any, several: bool, sliceable: Sequence[Any]) -> str | None:
    """Return how the sliceable variables are to be cut: "bounds", "indexes", or None."""
    if batch_s is not None and not sliceable:
        raise InvalidValue(
            f"batch_s={batch_s!r} was given to a function without sliceable variables; build it "
            "with sliceable_shareds=[...], or choose rows of inputs with batch="
        )
    if not sliceable or (batch_s is None and not several):
        return None
    chosen = batch_s if _is_one_each(batch_s) else [batch_s]
    return "bounds" if all(_is_range(one) for one in chosen) else "indexes"


def selections(batch_s: Any, size: int) -> list[Any]:
    """Return each rank's own choice of rows."""
    if not _is_one_each(batch_s):
        return [batch_s] * size
    if len(batch_s) != size:
        raise InvalidValue(
            f"batch_s has choices of rows for {len(batch_s)} ranks; expected one for all, or "
            f"{size}: one for each rank"
        )
    return list(batch_s)


def _is_one_each(batch_s: Any) -> bool:
    """Return whether it is a list of choices; a list of numbers is one choice, of indexes."""
    return isinstance(batch_s, (list, tuple)) and not all(
        isinstance(one, (int, np.integer)) for one in batch_s
    )


def _is_range(selection: Any) -> bool:
    if isinstance(selection, slice):
        return selection.step in (None, 1)
    return selection is None or isinstance(selection, (int, np.integer))


def borders(rows: Any, size: int) -> list[int]:
    """Return where the parts of the chosen rows begin, and where the last one ends: of a slice its
    rows, of indexes their positions. Parts are as even as possible; the last ones are longer.

    >>> borders(slice(0, 8), 3), borders(slice(3, 6), 2)
    ([0, 2, 5, 8], [3, 4, 6])
    """
    start, stop = (rows.start, rows.stop) if isinstance(rows, slice) else (0, len(rows))
    return [int(one) for one in np.linspace(start, stop, size + 1, dtype=np.int64)]


def slices(length: int, count: int) -> Iterable[tuple[int, int]]:
    """Return where each of a rank's slices of so many rows begins and ends: as parts do."""
    return itertools.pairwise(borders(slice(0, length), count))


class Part(NamedTuple):
    """A rank's part of the chosen rows."""

    #: in inputs that have all rows: a slice, or indexes
    rows: Any
    #: in inputs that have those of the batch alone, in their order
    positions: slice

    @property
    def length(self) -> int:
        return int(self.positions.stop - self.positions.start)


def parts(rows: Any, size: int) -> list[Part]:
    """Return each rank's part of the chosen rows."""
    edges = borders(rows, size)
    found = []
    for start, stop in itertools.pairwise(edges):
        own = slice(start, stop) if isinstance(rows, slice) else rows[start:stop]
        found.append(Part(own, slice(start - edges[0], stop - edges[0])))
    return found


def validate_minibatches(lengths: Mapping[str, int], rows: int) -> None:
    """Raise InvalidValue unless each input that has the rows of a batch has enough of them."""
    for name, length in lengths.items():
        if length < rows:
            raise InvalidValue(
                f"the batch has {rows} rows, and the minibatch {name} has {length}; expected "
                f"{rows} or more: its rows belong to those of the batch, in their order"
            )


def subset_of(subset: Any, outputs: int) -> tuple[int, ...]:
    """Return `output_subset` as a tuple of positions. Raises InvalidType, InvalidValue."""
    if not isinstance(subset, (list, tuple)) or not all(
        isinstance(one, (int, np.integer)) and not isinstance(one, bool) for one in subset
    ):
        raise InvalidType(
            f"output_subset={subset!r}: expected a list of positions, for example [0]"
        )
    for one in subset:
        if not 0 <= one < outputs:
            raise InvalidValue(f"output_subset has {one}; expected positions of 0 to {outputs - 1}")
    return tuple(subset)
