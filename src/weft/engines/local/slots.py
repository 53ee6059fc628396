"""The memory through which small arrays, and large ones piece by piece, pass between ranks.

    for even and for odd steps:
        for each rank:  one slot of `room` bytes

A rank fills its slot and then comes to the step; once all have come, everyone
reads whose slots it needs. The slot of a step is filled again two steps later,
which nobody reaches before all have come to the step between: so it is safe to
read until the reader's next step, and one meeting per round is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from weft._core.elements import Array
from weft._core.split import LINE, Piece, elements
from weft.engines.local.segment import Block

#: Arrays up to this many bytes pass through the slots in one round; larger ones are copied from
#: process to process, where that is allowed. Measured (docs/performance.md).
ROOM = 1 << 20
#: for all slots of a group together, where there are many ranks
_ALL_SLOTS = 128 << 20
_VIEWS_KEPT = 4096


def room_for(size: int) -> int:
    """The bytes of one slot in a group of `size` ranks."""
    return max(4096, min(ROOM, _ALL_SLOTS // (2 * size) // LINE * LINE))


def bytes_for(size: int) -> int:
    """The bytes that the slots of `size` ranks take."""
    return 2 * size * room_for(size)


class Slots:
    """All slots of one group, as seen from one rank."""

    def __init__(self, block: Block, *, rank: int, size: int) -> None:
        self.room = room_for(size)
        self._rank, self._size = rank, size
        self._bytes = np.frombuffer(memoryview(block.buffer), np.uint8)
        self._views: dict[tuple[int, int, int, int, Any], Array] = {}

    def fill(self, step: int, arrays: Sequence[Array], pieces: Iterable[Piece]) -> None:
        """Copy pieces of arrays into this rank's slot for a step."""
        for piece in pieces:
            part = elements(arrays, piece)
            self.view(step, self._rank, piece.at, part.nbytes, part.dtype)[...] = part

    def view(self, step: int, rank: int, at: int, length: int, dtype: np.dtype[Any]) -> Array:
        """`length` bytes of a rank's slot, from byte `at` on, as numbers."""
        key = (step & 1, rank, at, length, dtype)
        found = self._views.get(key)
        if found is None:
            start = ((step & 1) * self._size + rank) * self.room + at
            found = self._bytes[start : start + length].view(dtype)
            if len(self._views) >= _VIEWS_KEPT:
                self._views.clear()
            self._views[key] = found
        return found
