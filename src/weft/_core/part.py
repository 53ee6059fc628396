"""A part of an array, as an item. It has a module of its own because it does without NumPy, which
takes long to load, unlike `columns.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft._core.elements import Array


@dataclass(frozen=True)
class Part:
    """The columns `start` to `stop` of an array, which is sent whole or seen where it lies: a
    view has the array's own strides, and what is computed from it the same bits."""

    array: Array
    start: int
    stop: int

    def view(self) -> Array:
        return self.array[..., self.start : self.stop]
