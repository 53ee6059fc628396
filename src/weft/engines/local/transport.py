"""A rank's ways to the others: the meeting, the slots, mapped blocks, and their own memory."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft._core.calls import Call
from weft._core.elements import Array
from weft._core.split import Piece
from weft._core.timeouts import seconds_until
from weft._core.values import address
from weft.engines.local.common_memory import TROUBLES, in_words, setup_error
from weft.engines.local.direct import Peers
from weft.engines.local.first_message import FirstMessage, Location
from weft.engines.local.joint_memory import JointMemory
from weft.engines.local.mapped import Mapped, attach, refer
from weft.engines.local.meeting import UNDER_WAY, Meeting
from weft.engines.local.meeting_memory import MAILBOX_BYTES
from weft.engines.local.slots import Slots

#: bytes that are pulled, combined and pushed at a time: they stay in the cache meanwhile
BLOCK = 512 << 10
_LENGTH = struct.Struct("Q")
_END = b"\0"


class Heard(NamedTuple):
    """The first step of a collective: when it was, what this rank said, and what all have."""

    step: int
    message: bytes
    answers: list[bytes]


class Exchanged(NamedTuple):
    """A collective whose ranks have met: this rank's call, and what every rank said."""

    call: Call
    ranks: Sequence[FirstMessage]
    #: the step at which they met and the slots were filled
    step: int
    #: whether it took further steps until all was said
    several_steps: bool
    #: on the monotonic clock
    deadline: float

    @property
    def seconds(self) -> float:
        """How long the next step may take."""
        return seconds_until(self.deadline)


class Located(NamedTuple):
    """A few elements in this rank's own memory, and where they are."""

    array: Array
    address: int


class Transport:
    """The ways of one rank of a group."""

    def __init__(self, meeting: Meeting, *, slots: Slots, peers: Peers | None, loops: bool) -> None:
        """`peers` is None where some rank cannot reach another's memory; `loops` tells whether all
        ranks have the loops in C."""
        self.meeting, self.slots, self.peers = meeting, slots, peers
        self.rank, self.size = meeting.rank, len(meeting.members)
        #: whether all ranks can work together
        self.can_join = loops and self.size > 1
        #: what they do so in, from the first time on
        self.joint_memory: JointMemory | None = None
        self.mapped = Mapped()
        self._scratch = np.empty(3 * BLOCK, np.uint8)
        self._scratch_at = address(self._scratch)

    def step(self, seconds: float) -> None:
        """Meet in the course of a collective."""
        self.meeting.meet(UNDER_WAY, seconds)

    def ready_joint_memory(self, exchanged: Exchanged) -> JointMemory | None:
        """What all ranks work together in; None where they cannot. All ask when one does. Raises
        SetupError, on every rank."""
        if self.joint_memory is None and self.can_join:
            self.joint_memory = JointMemory(self.meeting, exchanged.seconds)
        return self.joint_memory

    def scratch(self, like: Array, number: int) -> Located:
        """One of three blocks to work with, as an array like another."""
        start = number * BLOCK
        array = self._scratch[start : start + like.nbytes].view(like.dtype)
        return Located(array, self._scratch_at + start)

    def see(self, rank: int, location: Location, piece: Piece, into: Located) -> Array:
        """A piece of a rank's array: where it is mapped, or copied here."""
        there = self.mapped.view(location, piece.start, piece.stop, into.array.dtype)
        if there is not None:
            return there
        remote, length = location.address + piece.start, piece.stop - piece.start
        self._reachable(rank).pull(rank, remote, into.address, length)
        return into.array

    def give(self, rank: int, location: Location, start: int, block: Located) -> None:
        """Write a block to a rank's array, from byte `start` on."""
        array, length = block.array, block.array.nbytes
        there = self.mapped.view(location, start, start + length, array.dtype)
        if there is not None:
            there[...] = array
            return
        self._reachable(rank).push(rank, location.address + start, block.address, length)

    def _reachable(self, rank: int) -> Peers:
        if self.peers is None:
            raise RuntimeError(f"rank {rank}'s array is neither mapped nor reachable")
        return self.peers

    def map_new(self, arrays: Sequence[Array], exchanged: Exchanged) -> None:
        """Have every rank map the blocks of all ranks' arrays that are not mapped yet.

        `arrays` are this rank's sources and targets. Raises SetupError, on every rank, if one could
        not.
        """
        places = [(*said.sources, *said.targets) for said in exchanged.ranks]
        new = self.mapped.new(places)
        if not new:
            return
        owners: dict[int, int] = {}
        for rank, locations in enumerate(places):
            for location in locations:
                owners.setdefault(location.block, rank)
        own = {
            location.block: array for location, array in zip(places[self.rank], arrays, strict=True)
        }
        mine = [refer(own[block]) for block in new if owners[block] == self.rank]
        texts = self.exchange(_END.join(mine), exchanged)
        references = [iter(text.split(_END)) for text in texts]
        found, trouble = [], b""
        for block in new:  # all of them: what nobody attached would be held for ever
            try:
                found.append(attach(next(references[owners[block]]), exchanged.seconds / 2))
            except TROUBLES as error:
                trouble = in_words(error)
        troubles = self.exchange(trouble, exchanged)
        if any(troubles):
            raise setup_error(self.meeting, troubles)
        for block, mapped in zip(new, found, strict=True):
            self.mapped.keep(block, mapped)

    def exchange(self, text: bytes, exchanged: Exchanged) -> list[bytes]:
        """Tell each other texts of any length, in as many steps as it takes."""
        text = _LENGTH.pack(len(text)) + text
        answers = self.meeting.exchange(UNDER_WAY, text[:MAILBOX_BYTES], exchanged.seconds)
        lengths = [_LENGTH.size + _LENGTH.unpack_from(answer)[0] for answer in answers]
        texts = self.exchange_rest(text, answers, lengths, exchanged.deadline)
        return [one[_LENGTH.size :] for one in texts]

    def exchange_rest(
        self, text: bytes, beginnings: Sequence[bytes], lengths: Sequence[int], deadline: float
    ) -> list[bytes]:
        """Every rank's text of which the beginning was heard; the rest, a slot's worth at a time.

        `text` is this rank's.
        """
        whole = [bytearray(beginning) for beginning in beginnings]
        while any(len(one) < length for one, length in zip(whole, lengths, strict=True)):
            told = len(whole[self.rank])
            more = np.frombuffer(text[told : told + self.slots.room], np.uint8)
            step = self.meeting.step + 1
            self.slots.fill(step, [more], [Piece(0, 0, more.nbytes, 0)] if more.nbytes else [])
            self.step(seconds_until(deadline))
            for rank, one in enumerate(whole):
                length = min(lengths[rank] - len(one), self.slots.room)
                one.extend(self.slots.view(step, rank, 0, length, more.dtype).tobytes())
        return [bytes(one) for one in whole]
