"""Some columns of an array, as an item. Apart from `columns.py`, because NumPy takes long to load
and is not needed here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft._core.elements import Array


@dataclass(frozen=True)
class ColumnSlice:
    """The columns `start` to `stop` of an array. In the driver `array` may be a handle of
    `Pool.put`, which a worker gets as the array: a view has the whole array's strides, and what is
    computed from it the same bits."""

    array: Array | Any
    start: int
    stop: int

    def view(self) -> Array:
        view: Array = self.array[..., self.start : self.stop]
        return view
