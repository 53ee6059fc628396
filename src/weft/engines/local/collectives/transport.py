"""The data paths from one rank to the others: Transport, and what it is made of.

Slots. Memory through which small arrays pass, and large ones piece by piece:

    for even and for odd steps:
        for each rank:  one slot of `room` bytes

A rank fills its slot and then comes to the step; once all have come, everyone reads the slots it
needs. The slot of a step is filled again two steps later, which nobody reaches before all have come
to the step between: so it is safe to read until the reader's next step, and one meeting per round
is enough.

Header. Encoded as

    whether the arrays are in the slot | of arrays on a device: where these are (device.py)
    the length of the header | the shared part | 0
    if they are not in the slot: how many sources and targets, and the location of each; none where
    all ranks know that the call is pipelined
    the rank's part

The shared part is equal on all ranks, or they disagree. A header may be longer than a mailbox; then
only its beginning arrives at the first step.

Peers. Copies from and to a peer's own memory by the operating system, where it allows that. A byte
that passes through shared memory is copied twice; this way once. It takes the permission to trace
the peer: the same user, and under Yama's scope 1 the peer must have named an ancestor of this
process. Each rank names its launcher, so the ranks of a launch may read each other and nobody else
may.

Mapped. Peers' arrays that lie in shared memory, mapped here, so that nobody has to copy them:

    every rank, at the first step    tells which of its arrays lie in a block, and where in it
    a block new to the group         its owner exports it, the others attach it; if one cannot,
                                     all raise
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

#: bytes that are read, combined and written at a time: few enough to stay in the cache
BLOCK = 512 << 10
_LENGTH = struct.Struct("Q")
_END = b"\0"


class Headers(NamedTuple):
    """The first step of a collective: its number, this rank's header, and what all ranks sent."""

    step: int
    message: bytes
    answers: list[bytes]


class SettledHeaders(NamedTuple):
    """A collective whose headers have been compared: this rank's call, and every rank's header."""

    call: Call
    ranks: Sequence[Header]
    #: the first step, for which the slots were filled
    step: int
    #: whether a header was longer than a mailbox, so that exchanging it took further steps
    several_steps: bool
    #: on the monotonic clock
    deadline: float

    @property
    def seconds(self) -> float:
        """Return how long the next step may take."""
        return seconds_until(self.deadline)


class Located(NamedTuple):
    """Elements in this rank's own memory, and their address."""

    array: Array
    address: int


class Transport:
    """The data paths of one rank of a group."""

    def __init__(
        self, meeting: Meeting, *, slots: Slots, peers: Peers, reachable: bool, kernels: bool
    ) -> None:
        self.meeting, self.slots, self.peers = meeting, slots, peers
        self.rank, self.size = meeting.rank, len(meeting.members)
        #: whether all ranks can read and write each other's memory
        self.reachable = reachable
        #: whether all ranks have the kernels in C
        self.can_pipeline = kernels and self.size > 1
        #: made at the first call that needs it
        self.pipelined_memory: PipelinedMemory | None = None
        self.mapped = Mapped()
        self._scratch = np.empty(3 * BLOCK, np.uint8)
        self._scratch_at = address(self._scratch)

    def step(self, seconds: float) -> None:
        """Meet in the middle of a collective."""
        self.meeting.meet(UNDER_WAY, seconds)

    def ready_pipelined_memory(self, headers: SettledHeaders) -> PipelinedMemory:
        """Return the memory of pipelined calls; make it, with all ranks, at the first call. Only
        where `can_pipeline` holds. Raises SetupError, on every rank."""
        if self.pipelined_memory is None:
            self.pipelined_memory = PipelinedMemory(self.meeting, headers.seconds)
        return self.pipelined_memory

    def scratch(self, like: Array, number: int) -> Located:
        """Return one of three scratch blocks, as an array of the dtype and size of `like`."""
        start = number * BLOCK
        array = self._scratch[start : start + like.nbytes].view(like.dtype)
        return Located(array, self._scratch_at + start)

    def read_piece(self, rank: int, location: Location, piece: Piece, into: Located) -> Array:
        """Return a piece of a rank's array: a view if it is mapped, else a copy in `into`."""
        there = self.mapped.view(location, piece.start, piece.stop, into.array.dtype)
        if there is not None:
            return there
        remote, length = location.address + piece.start, piece.stop - piece.start
        self.peers.read(rank, remote, into.address, length)
        return into.array

    def write_block(self, rank: int, location: Location, start: int, block: Located) -> None:
        """Write a block to a rank's array, from byte `start` on."""
        array, length = block.array, block.array.nbytes
        there = self.mapped.view(location, start, start + length, array.dtype)
        if there is not None:
            there[...] = array
        else:
            self.peers.write(rank, location.address + start, block.address, length)

    def map_new(self, arrays: Sequence[Array], headers: SettledHeaders) -> None:
        """Map the blocks of all ranks' arrays that are not mapped yet, on every rank. `arrays` are
        this rank's sources and targets. Raises SetupError, on every rank, if one cannot."""
        by_rank = [(*header.sources, *header.targets) for header in headers.ranks]
        new = self.mapped.new(by_rank)
        if not new:
            return
        owners: dict[int, int] = {}
        for rank, locations in enumerate(by_rank):
            for location in locations:
                owners.setdefault(location.block, rank)
        own = {
            location.block: array
            for location, array in zip(by_rank[self.rank], arrays, strict=True)
        }
        handles: dict[int, bytes] = {}
        attached, trouble = [], b""
        try:
            mine = [block for block in new if owners[block] == self.rank]
            handles = {block: blocks.export(buffer_of(own[block])).encode() for block in mine}
        except TROUBLES as error:
            trouble = in_words(error)
        try:
            texts = self.exchange(_END.join(handles.values()), headers)
        except BaseException:  # an interrupt too
            for handle in handles.values():  # or they are never freed: nobody else attaches them
                attach(handle, headers.seconds)
            raise
        references = [iter(text.split(_END) if text else ()) for text in texts]
        for block in new:  # all, even after a failure: a block that nobody attaches is never freed
            try:
                if handle := next(references[owners[block]], b""):
                    attached.append(attach(handle, headers.seconds / 2))
            except TROUBLES as error:
                trouble = in_words(error)
        troubles = self.exchange(trouble, headers)
        if any(troubles):
            raise setup_error(self.meeting, troubles)
        for block, mapped in zip(new, attached, strict=True):
            self.mapped.keep(block, mapped)

    def exchange(self, text: bytes, headers: SettledHeaders) -> list[bytes]:
        """Exchange texts of any length, in as many steps as that takes."""
        text = _LENGTH.pack(len(text)) + text
        answers = self.meeting.exchange(UNDER_WAY, text[:MAILBOX_BYTES], headers.seconds)
        lengths = [_LENGTH.size + _LENGTH.unpack_from(answer)[0] for answer in answers]
        texts = self.exchange_rest(text, answers, lengths, headers.deadline)
        return [whole[_LENGTH.size :] for whole in texts]

    def exchange_rest(
        self, text: bytes, beginnings: Sequence[bytes], lengths: Sequence[int], deadline: float
    ) -> list[bytes]:
        """Return every rank's whole text: exchange the rest, a slot's worth per step. `text` is
        this rank's; the `beginnings` of all have arrived already."""
        texts = [bytearray(beginning) for beginning in beginnings]
        while any(len(got) < length for got, length in zip(texts, lengths, strict=True)):
            sent = len(texts[self.rank])
            more = np.frombuffer(text[sent : sent + self.slots.room], np.uint8)
            step = self.meeting.step + 1
            self.slots.fill(step, [more], [Piece(0, 0, more.nbytes, 0)] if more.nbytes else [])
            self.step(seconds_until(deadline))
            for rank, got in enumerate(texts):
                length = min(lengths[rank] - len(got), self.slots.room)
                got.extend(self.slots.view(step, rank, 0, length, more.dtype).tobytes())
        return [bytes(got) for got in texts]


#: Arrays up to this many bytes pass through the slots in one step. Measured (docs/performance.md).
ROOM = 1 << 20
#: bytes of all slots of a group together, where there are many ranks
_ALL_SLOTS = 128 << 20


def room_for(size: int) -> int:
    """Return the bytes of one slot in a group of `size` ranks."""
    return max(4096, min(ROOM, _ALL_SLOTS // (2 * size) // LINE * LINE))


def bytes_for(size: int) -> int:
    """Return the bytes that the slots of `size` ranks take."""
    return 2 * size * room_for(size)


class Slots:
    """All slots of one group, as seen from one rank."""

    def __init__(self, block: Block, *, rank: int, size: int) -> None:
        self.room, self.block = room_for(size), block
        self._rank, self._size = rank, size
        self._bytes = np.frombuffer(memoryview(block.buffer), np.uint8)

    def fill(self, step: int, arrays: Sequence[Array], pieces: Iterable[Piece]) -> None:
        """Copy pieces of arrays into this rank's slot for a step."""
        for piece in pieces:
            part = elements(arrays, piece)
            self.view(step, self._rank, piece.at, part.nbytes, part.dtype)[...] = part

    def view(self, step: int, rank: int, at: int, length: int, dtype: np.dtype[Any]) -> Array:
        """Return `length` bytes of a rank's slot, from byte `at` on, as an array of `dtype`."""
        start = ((step & 1) * self._size + rank) * self.room + at
        return self._bytes[start : start + length].view(dtype)


_HEAD = struct.Struct("=?BQ")
_COUNTS = struct.Struct("=II")


class Location(NamedTuple):
    """Locate an array: its address in its process, and its block of shared memory (0: none)."""

    address: int
    block: int
    offset: int


class Header(NamedTuple):
    """Describe what one rank sends at the first step of a collective."""

    in_slot: bool
    shared_part: bytes
    rank_part: bytes
    #: of the arrays, if they are not in the slot; of the targets only if they are known already
    sources: tuple[Location, ...] = ()
    targets: tuple[Location, ...] = ()
    #: what device.py says of arrays on a device; 0 if there are none
    device: int = 0

    def encode(self) -> bytes:
        rest = self.shared_part + _END
        if not self.in_slot:
            table = np.array([*self.sources, *self.targets], np.uint64).tobytes()
            rest += _COUNTS.pack(len(self.sources), len(self.targets)) + table
        rest += self.rank_part
        return _HEAD.pack(self.in_slot, self.device, _HEAD.size + len(rest)) + rest

    @classmethod
    def decode(cls, message: bytes) -> Header:
        """Return the header that `encode` made this message of. It must be complete."""
        in_slot, device, _ = _HEAD.unpack_from(message)
        shared_part, _, rest = message[_HEAD.size :].partition(_END)
        if in_slot:
            return cls(True, shared_part, rest, device=device)
        sources, targets = _COUNTS.unpack_from(rest)
        end = _COUNTS.size + 24 * (sources + targets)
        table = np.frombuffer(rest[_COUNTS.size : end], np.uint64).reshape(-1, 3).tolist()
        locations = tuple(Location(*row) for row in table)
        return cls(False, shared_part, rest[end:], locations[:sources], locations[sources:])


def shared_part_of(message: bytes) -> bytes:
    """Return the shared part of an encoded header, of which the beginning is enough."""
    return message[_HEAD.size :].partition(_END)[0]


def length_of(message: bytes) -> int:
    """Return the length of an encoded header, of which the beginning is enough."""
    return int(_HEAD.unpack_from(message)[2])


#: whether ranks try to read each other's memory; tests set it to False, to have large arrays go
#: through the slots in rounds
ALLOWED = True
#: bytes of one system call: signals are handled between two
_MOST = 32 << 20
#: seconds for which a peer that was seen alive is not checked again
_FRESH = 0.05
#: seconds that the kernel may take from freeing a process's memory to ending it
_ENDING = 30.0


class Peers:
    """The other ranks' own memory."""

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
        self, copy: Callable[..., int], rank: int, remote: int, local: int, length: int
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
        """Raise PeerLost if a rank is gone. Its pid goes to another process only after all numbers
        have been used, which takes seconds at least, so an old answer is good for a while."""
        self._meeting.validate_present()
        now = time.monotonic()
        if now - self._seen[rank] > _FRESH:
            lost = self._meeting.lost_error(rank)
            if lost is not None:
                raise lost
            self._seen[rank] = now

    def _lost_error(self, rank: int) -> PeerLost | None:
        """Return the error of a rank whose memory cannot be read; None if it turns out to live. An
        ending process loses its memory before its end is known, so wait for that."""
        deadline = time.monotonic() + _ENDING
        while (lost := self._meeting.lost_error(rank)) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return lost

    def can_reach(self, rank: int, word: int, value: int) -> bool:
        """Return whether a rank's memory can be read: the 8 bytes at `word` must be `value`."""
        if not ALLOWED:
            return False
        seen = ctypes.c_uint64()
        try:
            read_memory(self._pids[rank], word, ctypes.addressof(seen), 8)
        except OSError:
            return False
        return seen.value == value


def allow_ptrace() -> None:
    """Allow the launcher's other children to read this process's memory, where Yama lets processes
    read their descendants only (scope 1). Without a launcher, as a child of process 1, allow
    nobody."""
    try:
        scope = Path("/proc/sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:  # a kernel without Yama
        return
    if scope == "1" and os.getppid() > 1:
        allow_ptrace_by(os.getppid())


#: blocks of peers that stay mapped. One that its owner has dropped is freed when others replace it
_BLOCKS_KEPT = 16


def attach(reference: bytes, seconds: float) -> Array:
    """Return all bytes of the block that an encoded handle stands for."""
    block = blocks.attach(BlockHandle.decode(reference), seconds)
    return np.frombuffer(memoryview(block.buffer), np.uint8)


class Mapped:
    """The blocks that all ranks of a group map."""

    def __init__(self) -> None:
        #: by block number
        self._bytes: OrderedDict[int, Array] = OrderedDict()

    def new(self, locations: Sequence[Sequence[Location]]) -> list[int]:
        """Return the blocks of the ranks' arrays that are not mapped; mark the others as used."""
        used = dict.fromkeys(at.block for rank in locations for at in rank if at.block)
        for name in used:
            if name in self._bytes:
                self._bytes.move_to_end(name)
        while len(self._bytes) > max(_BLOCKS_KEPT, len(used)):
            self._bytes.popitem(last=False)
        return [name for name in used if name not in self._bytes]

    def keep(self, name: int, mapped: Array) -> None:
        """Add a block that has been mapped."""
        self._bytes[name] = mapped

    def has(self, location: Location) -> bool:
        """Return whether every rank maps the block of this location."""
        return location.block in self._bytes

    def view(self, location: Location, start: int, stop: int, dtype: np.dtype[Any]) -> Array | None:
        """Return bytes `start` to `stop` of the array at a location; None if it is not mapped."""
        whole = self._bytes.get(location.block)
        if whole is None:
            return None
        return whole[location.offset + start : location.offset + stop].view(dtype)
