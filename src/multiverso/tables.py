"""Table handlers: `weft.ArrayTable` and `weft.MatrixTable` under Multiverso's names.

All workers make their tables in the same order. Only the master's `init_value` counts.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

import weft
from multiverso import _session
from multiverso._session import in_own_words
from weft._core.tables import as_array
from weft.errors import InvalidType, InvalidValue

Array = NDArray[Any]


class TableHandler:
    """The interface of both kinds of handler."""

    @in_own_words
    def __init__(self, size: int, init_value: Any = None) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}({size!r}): make an ArrayTableHandler or a MatrixTableHandler"
        )

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Return a copy of the latest values."""
        raise NotImplementedError

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Add numbers to the values."""
        raise NotImplementedError


class ArrayTableHandler(TableHandler):
    """An array of `size` numbers that all workers read and add to.

    `init_value`: what it starts with, by default zeros; of the master alone, whatever the others
    pass. Data may be a list, a range, an array or a tensor, of any shape that has `size` numbers,
    and are rounded to `dtype`.

    Raises what `weft.ArrayTable` does.
    """

    @in_own_words
    def __init__(self, size: int, init_value: Any = None, *, dtype: Any = "float32") -> None:
        start = _start("ArrayTable", init_value, (size,))
        self._table = weft.ArrayTable(
            size if start is None else start, dtype=dtype, consistency=_session.consistency()
        )

    @classmethod
    def _of(cls, table: weft.ArrayTable) -> ArrayTableHandler:
        """Return a handler of a table that there is already."""
        handler = cls.__new__(cls)
        handler._table = table
        return handler

    @property
    def _size(self) -> int:
        """Return the number of elements, by the name that the old examples use."""
        return len(self._table)

    @in_own_words
    def get(self) -> Any:
        """Return a copy of the latest values, in one dimension."""
        return self._table.get()

    @in_own_words
    def add(self, data: Any, sync: bool = False) -> None:
        """Add `size` numbers. It has taken effect on return, with or without `sync`; after
        `init(sync=True)` it will have when everybody has added as often."""
        _validate_sync(sync)
        self._table.add(_flat(data))

    def __repr__(self) -> str:
        return f"<ArrayTableHandler of {self._table!r}>"


class MatrixTableHandler(TableHandler):
    """Rows of numbers, of which workers read and add to all or some.

    `init_value` and data for all rows may be flat. The rest is as in `ArrayTableHandler`.
    """

    @in_own_words
    def __init__(
        self, num_row: int, num_col: int, init_value: Any = None, *, dtype: Any = "float32"
    ) -> None:
        start = _start("MatrixTable", init_value, (num_row, num_col))
        sizes = (num_row, num_col) if start is None else (start,)
        self._table = weft.MatrixTable(*sizes, dtype=dtype, consistency=_session.consistency())

    @property
    def _size(self) -> int:
        """Return the number of elements, by the name that the old examples use."""
        return prod(self._table.shape)

    @in_own_words
    def get(self, row_ids: Any = None) -> Any:
        """Return a copy of all rows, or of these, in the order given."""
        return self._table.get(_ids(row_ids))

    @in_own_words
    def add(self, data: Any = None, row_ids: Any = None, sync: bool = False) -> None:
        """Add to all rows, or one row of data to each row that is named; to one that is named
        several times, their sum."""
        _validate_sync(sync)
        self._table.add(_flat(data), _ids(row_ids))

    def __repr__(self) -> str:
        return f"<MatrixTableHandler of {self._table!r}>"


def _start(kind: str, init_value: Any, shape: tuple[Any, ...]) -> Array | None:
    """Return the values that the master starts a table with; None for zeros and elsewhere."""
    if init_value is None or not weft.is_master():
        return None
    group = weft.group()
    try:
        array = as_array(init_value, "init_value")
        if not all(isinstance(n, (int, np.integer)) for n in shape) or array.size != prod(shape):
            raise InvalidValue(
                f"an init_value of shape {array.shape} for a table of shape {shape}; expected as "
                "many numbers as the table has"
            )
    except Exception as error:
        group.refuse(kind, error)  # the others do not wait for this table
        raise
    return array.reshape(shape)


def _flat(data: Any) -> Any:
    """Return an array in one dimension, as only its size counts; a list as it is."""
    return data.reshape(-1) if hasattr(data, "reshape") else data


def _ids(row_ids: Any) -> Any:
    """Return row ids as a list, also a single one: rows always come as a matrix."""
    if isinstance(row_ids, int):
        return [row_ids]
    return row_ids.reshape(-1) if getattr(row_ids, "ndim", 1) == 0 else row_ids


def _validate_sync(sync: object) -> None:
    if not isinstance(sync, bool):
        raise InvalidType(f"add(sync={sync!r}): expected True or False")
