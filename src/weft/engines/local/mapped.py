"""Peers' arrays that lie in shared memory, mapped here: nobody has to copy them in or out.

    every rank, at the first step    which of my arrays lie in a block, and where in it
    a block new to the group         its owner refers to it, the others attach it; if one could
                                     not, all raise
    from then on                     the peer's array is an array here

All ranks see the same blocks in the same order, so all know which ones are new. The blocks used
last are kept for the next calls.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft._core.elements import Array
from weft._core.values import address
from weft.engines.local import blocks
from weft.engines.local.first_message import Location
from weft.engines.local.references import Reference

#: blocks of peers that stay mapped; what their owners drop goes back when others take their place
_BLOCKS_KEPT = 16


def block_of(array: Array) -> tuple[int, int]:
    """The block that an array lies in, 0 if in none, and at which of its bytes it begins."""
    buffer = buffer_of(array)
    if buffer is None:
        return 0, 0
    return blocks.name_of(buffer), address(array) - ctypes.addressof(buffer)


def buffer_of(array: Array) -> Any:
    """The buffer of the block that an array lies in; None if it lies in ordinary memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if base is not None and blocks.is_block(base) else None


def refer(array: Array) -> bytes:
    """What stands for the block that an array lies in."""
    return blocks.refer(buffer_of(array)).encode()


def attach(reference: bytes, seconds: float) -> Array:
    """All bytes of the block that a reference stands for."""
    block = blocks.attach(Reference.decode(reference), seconds)
    return np.frombuffer(memoryview(block.buffer), np.uint8)


class Mapped:
    """The blocks of a group's ranks that are mapped in all of them."""

    def __init__(self) -> None:
        #: by name
        self._bytes: OrderedDict[int, Array] = OrderedDict()

    def new(self, locations: Sequence[Sequence[Location]]) -> list[int]:
        """The blocks among the ranks' arrays that have not been seen yet; the others are noted as
        used."""
        used = dict.fromkeys(one.block for rank in locations for one in rank if one.block)
        for name in used:
            if name in self._bytes:
                self._bytes.move_to_end(name)
        while len(self._bytes) > max(_BLOCKS_KEPT, len(used)):
            self._bytes.popitem(last=False)
        return [name for name in used if name not in self._bytes]

    def keep(self, name: int, mapped: Array) -> None:
        """Note a new block, and where it is."""
        self._bytes[name] = mapped

    def has(self, location: Location) -> bool:
        """Whether every rank can see an array that lies there."""
        return location.block in self._bytes

    def view(self, location: Location, start: int, stop: int, dtype: np.dtype[Any]) -> Array | None:
        """The bytes `start` to `stop` of the array that lies there, as numbers."""
        whole = self._bytes.get(location.block)
        if whole is None:
            return None
        return whole[location.offset + start : location.offset + stop].view(dtype)
