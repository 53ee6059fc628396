"""A rank's ways to the others: the meeting, the slots, mapped blocks, and their own memory.

The memory through which small arrays, and large ones piece by piece, pass between ranks.

    for even and for odd steps:
        for each rank:  one slot of `room` bytes

A rank fills its slot and then comes to the step; once all have come, everyone
reads whose slots it needs. The slot of a step is filled again two steps later,
which nobody reaches before all have come to the step between: so it is safe to
read until the reader's next step, and one meeting per round is enough.

What a rank says at the first step of a collective.

    whether its arrays are in its slot | how long the message is | common | 0
    where its arrays are, if they are not in the slot: how many sources and targets, then each; none
    if that does not matter, because all ranks know that they sum jointly
    own

A message may be longer than a mailbox; then what is heard first is its beginning.

Copies straight out of, and into, a peer's own memory, where the kernel allows it.

A byte that passes through shared memory is copied twice; this way once. It needs
the permission to trace the peer: the same user, and under Yama's scope 1 that the
peer has named an ancestor of this process. Each rank names its launcher, so the
ranks of a job may read each other and nobody else is let in.

Peers' arrays that lie in shared memory, mapped here: nobody has to copy them in or out.

    every rank, at the first step    which of my arrays lie in a block, and where in it
    a block new to the group         its owner refers to it, the others attach it; if one could
                                     not, all raise
    from then on                     the peer's array is an array here

All ranks see the same blocks in the same order, so all know which ones are new. The blocks used
last are kept for the next calls.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft._core.arguments import seconds_until
from weft._core.arithmetic import Array, address
from weft._core.calls import LINE, Call, Piece, elements
from weft.engines.local.collectives.pipelined import PipelinedMemory
from weft.engines.local.meeting.meeting import (
    MAILBOX_BYTES,
    TROUBLES,
    UNDER_WAY,
    Meeting,
    in_words,
    setup_error,
)
from weft.engines.local.memory import blocks
from weft.engines.local.memory.arrays import buffer_of
from weft.engines.local.memory.segment import Block, BlockHandle
from weft.engines.local.processes.linux import allow_ptrace_by, read_memory, write_memory
from weft.errors import PeerLost

#: bytes that are pulled, combined and pushed at a time: they stay in the cache meanwhile
BLOCK = 512 << 10

_LENGTH = struct.Struct("Q")

_END = b"\0"


class Headers(NamedTuple):
    """The first step of a collective: when it was, what this rank said, and what all have."""

    step: int
    message: bytes
    answers: list[bytes]


class SettledHeaders(NamedTuple):
    """A collective whose ranks have met: this rank's call, and what every rank said."""

    call: Call
    ranks: Sequence[Header]
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
        self.can_pipeline = loops and self.size > 1
        #: what they do so in, from the first time on
        self.pipelined_memory: PipelinedMemory | None = None
        self.mapped = Mapped()
        self._scratch = np.empty(3 * BLOCK, np.uint8)
        self._scratch_at = address(self._scratch)

    def step(self, seconds: float) -> None:
        """Meet in the course of a collective."""
        self.meeting.meet(UNDER_WAY, seconds)

    def ready_pipelined_memory(self, headers: SettledHeaders) -> PipelinedMemory | None:
        """What all ranks work together in; None where they cannot. All ask when one does. Raises
        SetupError, on every rank."""
        if self.pipelined_memory is None and self.can_pipeline:
            self.pipelined_memory = PipelinedMemory(self.meeting, headers.seconds)
        return self.pipelined_memory

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
        self._reachable(rank).read(rank, remote, into.address, length)
        return into.array

    def give(self, rank: int, location: Location, start: int, block: Located) -> None:
        """Write a block to a rank's array, from byte `start` on."""
        array, length = block.array, block.array.nbytes
        there = self.mapped.view(location, start, start + length, array.dtype)
        if there is not None:
            there[...] = array
            return
        self._reachable(rank).write(rank, location.address + start, block.address, length)

    def _reachable(self, rank: int) -> Peers:
        if self.peers is None:
            raise RuntimeError(f"rank {rank}'s array is neither mapped nor reachable")
        return self.peers

    def map_new(self, arrays: Sequence[Array], headers: SettledHeaders) -> None:
        """Have every rank map the blocks of all ranks' arrays that are not mapped yet.

        `arrays` are this rank's sources and targets. Raises SetupError, on every rank, if one could
        not.
        """
        places = [(*said.sources, *said.targets) for said in headers.ranks]
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
        mine = [export(own[block]) for block in new if owners[block] == self.rank]
        texts = self.exchange(_END.join(mine), headers)
        references = [iter(text.split(_END)) for text in texts]
        found, trouble = [], b""
        for block in new:  # all of them: what nobody attached would be held for ever
            try:
                found.append(attach(next(references[owners[block]]), headers.seconds / 2))
            except TROUBLES as error:
                trouble = in_words(error)
        troubles = self.exchange(trouble, headers)
        if any(troubles):
            raise setup_error(self.meeting, troubles)
        for block, mapped in zip(new, found, strict=True):
            self.mapped.keep(block, mapped)

    def exchange(self, text: bytes, headers: SettledHeaders) -> list[bytes]:
        """Tell each other texts of any length, in as many steps as it takes."""
        text = _LENGTH.pack(len(text)) + text
        answers = self.meeting.exchange(UNDER_WAY, text[:MAILBOX_BYTES], headers.seconds)
        lengths = [_LENGTH.size + _LENGTH.unpack_from(answer)[0] for answer in answers]
        texts = self.exchange_rest(text, answers, lengths, headers.deadline)
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


_HEAD = struct.Struct("=?Q")

_COUNTS = struct.Struct("=II")

_HEADER_END = b"\0"


class Location(NamedTuple):
    """Where an array is: in its process, and in a block of shared memory (number 0: in none)."""

    address: int
    block: int
    offset: int


class Header(NamedTuple):
    """What one rank says."""

    in_slot: bool
    shared_part: bytes
    rank_part: bytes
    #: where the arrays are that are not in the slot; the targets only if they are known already
    sources: tuple[Location, ...] = ()
    targets: tuple[Location, ...] = ()

    def encode(self) -> bytes:
        rest = self.shared_part + _HEADER_END
        if not self.in_slot:
            table = np.array([*self.sources, *self.targets], np.uint64).tobytes()
            rest += _COUNTS.pack(len(self.sources), len(self.targets)) + table
        rest += self.rank_part
        return _HEAD.pack(self.in_slot, _HEAD.size + len(rest)) + rest

    @classmethod
    def decode(cls, message: bytes) -> Header:
        """The mirror of `encode`, for a message that was heard to its end."""
        in_slot, _ = _HEAD.unpack_from(message)
        shared_part, _, rest = message[_HEAD.size :].partition(_HEADER_END)
        if in_slot:
            return cls(True, shared_part, rest)
        sources, targets = _COUNTS.unpack_from(rest)
        end = _COUNTS.size + 24 * (sources + targets)
        table = np.frombuffer(rest[_COUNTS.size : end], np.uint64).reshape(-1, 3).tolist()
        locations = tuple(Location(*row) for row in table)
        return cls(False, shared_part, rest[end:], locations[:sources], locations[sources:])


def shared_part_of(message: bytes) -> bytes:
    """A message's `common`, which is in its beginning."""
    return message[_HEAD.size :].partition(_HEADER_END)[0]


def length_of(message: bytes) -> int:
    """How long a message is of which the beginning was heard."""
    return int(_HEAD.unpack_from(message)[1])


#: whether ranks try to reach each other; where they may not, large arrays go through the slots in
#: rounds, which tests have by this
ALLOWED = True

#: for one call into the kernel, so that a signal is heard soon
_MOST = 32 << 20

#: seconds after which a peer is looked for again
_FRESH = 0.05

#: seconds that the kernel may take to end a process whose memory it has taken away
_ENDING = 30.0


class Peers:
    """The memory of the ranks that meet."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        #: when each was last seen alive
        self._seen = [0.0] * len(meeting.members)
        self._pids = [meeting.roster.process(member).pid for member in meeting.members]

    def read(self, rank: int, remote: int, local: int, length: int) -> None:
        """Copy from a rank's memory to this process's. Raises PeerLost."""
        self._copy(read_memory, rank, remote, local, length)

    def write(self, rank: int, remote: int, local: int, length: int) -> None:
        """Copy from this process's memory to a rank's. Raises PeerLost."""
        self._copy(write_memory, rank, remote, local, length)

    def _copy(
        self,
        copy: Callable[[int, int, int, int], int],
        rank: int,
        remote: int,
        local: int,
        length: int,
    ) -> None:
        for done in range(0, length, _MOST):
            self._look_for(rank)
            part = min(_MOST, length - done)
            try:
                copied = copy(self._pids[rank], remote + done, local + done, part)
            except OSError as error:
                raise self._lost_error(rank) or error from None
            if copied != part:
                raise self._lost_error(rank) or OSError(f"{copied} of {part} bytes were copied")

    def _look_for(self, rank: int) -> None:
        """Raise PeerLost if a rank is gone. The pid of one that has ended is given to a new process
        when all numbers have been used, which takes seconds at the least."""
        self._meeting.validate_present()
        now = time.monotonic()
        if now - self._seen[rank] > _FRESH:
            lost = self._meeting.lost_error(rank)
            if lost is not None:
                raise lost
            self._seen[rank] = now

    def _lost_error(self, rank: int) -> PeerLost | None:
        """The loss of a rank whose memory is out of reach: that of one that ends is so before its
        end is known. None if it turns out to live."""
        deadline = time.monotonic() + _ENDING
        while (lost := self._meeting.lost_error(rank)) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return lost

    def can_reach(self, rank: int, word: int, value: int) -> bool:
        """Whether a rank's memory can be read: the 8 bytes at `word` are tried, and compared."""
        if not ALLOWED:
            return False
        seen = ctypes.c_uint64()
        try:
            read_memory(self._pids[rank], word, ctypes.addressof(seen), 8)
        except OSError:
            return False
        return seen.value == value


def allow_ptrace() -> None:
    """Allow the launcher's other children to read this process, where Yama would forbid it.

    A process without a launcher, which is a child of the first process, allows nobody.
    """
    parent = os.getppid()
    if parent > 1 and _yama_scope() == "1":
        allow_ptrace_by(parent)


def _yama_scope() -> str:
    """Whom processes of one user may trace: anybody (0), their descendants (1), or nobody."""
    try:
        return Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:  # a kernel without Yama
        return "0"


#: blocks of peers that stay mapped; what their owners drop goes back when others take their place
_BLOCKS_KEPT = 16


def export(array: Array) -> bytes:
    """What stands for the block that an array lies in."""
    return blocks.export(buffer_of(array)).encode()


def attach(reference: bytes, seconds: float) -> Array:
    """All bytes of the block that a reference stands for."""
    block = blocks.attach(BlockHandle.decode(reference), seconds)
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
