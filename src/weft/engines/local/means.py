"""What one rank has to carry a collective with, and what it has heard from the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft._core.elements import Array
from weft._core.split import Piece
from weft._core.values import address
from weft.engines.local.direct import Peers
from weft.engines.local.meeting import CALLS, Meeting
from weft.engines.local.slots import Slots

FIRST, UNDER_WAY = CALLS.index("collective"), CALLS.index("collective, under way")
#: bytes that are pulled, combined and pushed at a time: they stay in the cache meanwhile
BLOCK = 512 << 10


class Said(NamedTuple):
    """What the ranks said at the first step of a collective, by rank."""

    #: whether the arrays are in the slot
    fits: Sequence[bool]
    owns: Sequence[bytes]
    #: where the arrays are that are not: the sources, and the targets if they were known
    addresses: Sequence[Sequence[int]]
    #: whether it took several steps to say it
    several: bool


class Place(NamedTuple):
    """Where a block lies."""

    array: Array
    address: int


class Means:
    """A rank's ways to the others: the meeting, the slots, and their memory where allowed."""

    def __init__(self, meeting: Meeting, *, slots: Slots, peers: Peers | None) -> None:
        self.meeting, self.slots = meeting, slots
        #: None where some rank cannot reach another's memory
        self.peers = peers
        self.rank, self.size = meeting.members.index(meeting.roster.rank), len(meeting.members)
        self._scratch = np.empty(3 * BLOCK, np.uint8)
        self._scratch_at = address(self._scratch)

    def scratch(self, like: Array, number: int) -> Place:
        """One of three blocks of this rank's own, as an array like another."""
        start = number * BLOCK
        array = self._scratch[start : start + like.nbytes].view(like.dtype)
        return Place(array, self._scratch_at + start)

    def tell_more(
        self, text: bytes, heard: Sequence[bytes], lengths: Sequence[int], seconds: float
    ) -> list[bytes]:
        """Every rank's text of which the beginning was heard; the rest, a slot's worth at a time.

        `text` is this rank's.
        """
        whole = [bytearray(beginning) for beginning in heard]
        while any(len(one) < length for one, length in zip(whole, lengths, strict=True)):
            told = len(whole[self.rank])
            more = np.frombuffer(text[told : told + self.slots.room], np.uint8)
            step = self.meeting.step + 1
            self.slots.fill(step, [more], [Piece(0, 0, more.nbytes, 0)] if more.nbytes else [])
            self.meeting.meet(UNDER_WAY, seconds)
            for rank, one in enumerate(whole):
                length = min(lengths[rank] - len(one), self.slots.room)
                one.extend(self.slots.view(step, rank, 0, length, more.dtype).tobytes())
        return [bytes(one) for one in whole]
