"""What one rank has to carry a collective with, and what it has heard from the others."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft._core.elements import Array
from weft._core.split import Piece
from weft._core.values import address
from weft.engines.local.direct import Peers
from weft.engines.local.mapped import Mapped, Share, attached, refer
from weft.engines.local.meeting import CALLS, MAILBOX_BYTES, Meeting
from weft.engines.local.slots import Slots

FIRST, UNDER_WAY = CALLS.index("collective"), CALLS.index("collective, under way")
_LENGTH = struct.Struct("Q")
_END = b"\0"
#: bytes that are pulled, combined and pushed at a time: they stay in the cache meanwhile
BLOCK = 512 << 10


class Said(NamedTuple):
    """What the ranks said at the first step of a collective, by rank."""

    #: whether the arrays are in the slot
    fits: Sequence[bool]
    owns: Sequence[bytes]
    #: where the arrays are that are not: the sources, and the targets if they were known
    addresses: Sequence[Sequence[int]]
    #: which of these lie in shared memory
    shares: Sequence[Sequence[Share]]
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
        self.mapped = Mapped()
        self._scratch = np.empty(3 * BLOCK, np.uint8)
        self._scratch_at = address(self._scratch)

    def scratch(self, like: Array, number: int) -> Place:
        """One of three blocks of this rank's own, as an array like another."""
        start = number * BLOCK
        array = self._scratch[start : start + like.nbytes].view(like.dtype)
        return Place(array, self._scratch_at + start)

    def pull(self, said: Said, rank: int, piece: Piece, place: Place) -> None:
        """Copy a piece of a rank's array to this rank."""
        if self.peers is not None:
            remote = said.addresses[rank][piece.array] + piece.start
            self.peers.pull(rank, remote, place.address, piece.stop - piece.start)

    def give(self, said: Said, rank: int, array: int, made: Place, start: int) -> None:
        """Copy a block to a rank's array, from byte `start` on."""
        length = made.array.nbytes
        there = self.mapped.view(said.shares[rank][array], start, start + length, made.array.dtype)
        if there is not None:
            there[...] = made.array
        elif self.peers is not None:
            remote = said.addresses[rank][array] + start
            self.peers.push(rank, remote, made.address, length)

    def map_new(self, arrays: Sequence[Array], said: Said, seconds: float) -> None:
        """Have every rank map the blocks of all ranks' arrays that it has not mapped yet.

        `arrays` are this rank's.
        """
        names = self.mapped.new(said.shares)
        if not names:
            return
        owners = {
            share.block: rank
            for rank, shares in reversed(list(enumerate(said.shares)))
            for share in shares
        }
        own = {
            share.block: array for share, array in zip(said.shares[self.rank], arrays, strict=True)
        }
        mine = [refer(own[name]) for name in names if owners[name] == self.rank]
        told = [iter(text.split(_END)) for text in self.exchange(_END.join(mine), seconds)]
        found = [attached(next(told[owners[name]]), seconds / 2) for name in names]
        answers = self.exchange(bytes(one is not None for one in found), seconds)
        for index, name in enumerate(names):
            everywhere = all(answer[index] for answer in answers)
            self.mapped.keep(name, found[index] if everywhere else None)

    def exchange(self, text: bytes, seconds: float) -> list[bytes]:
        """Tell each other texts of any length, in as many steps as it takes."""
        message = (_LENGTH.pack(len(text)) + text)[:MAILBOX_BYTES]
        answers = self.meeting.exchange(UNDER_WAY, message, seconds)
        lengths = [_LENGTH.unpack_from(answer)[0] for answer in answers]
        return self.tell_more(text, [one[_LENGTH.size :] for one in answers], lengths, seconds)

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
