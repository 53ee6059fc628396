"""Carrying out a collective over the data paths of transport.py.

Combinations. Small arrays go through the slots. Large ones are pipelined (pipelined.py) if there
is a kernel in C for them. Otherwise they are combined directly, each rank combining its part of the
blocks:

    for each block of my part
      every other rank's numbers  --read-->   scratch, or where the result is made
      combine, in rank order
      the result                  --write-->  each receiver

so that a byte is read once by one rank, and written once for each receiver. Arrays that lie in
shared memory are mapped, and need no read or write; a kernel sums them in place.

Movements. Arrays that are in their ranks' slots are read there; all others take one path. A
broadcast is pipelined if there is a kernel: it reads memory once, and does not read what it
overwrites. Only with 2 ranks whose cores share no cache a copy by the operating system
(process_vm_readv) is quicker. Such a copy can be made by either end: in a broadcast the root writes
its part of each while the receivers read the rest; in a gather all senders write at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np

from weft import faults
from weft._core.arithmetic import Array, address, can_sum_in_place, combine, sum_in_place
from weft._core.calls import Combination, Copy, Movement, Piece, elements, layout_of
from weft.engines.local.collectives.pipelined import can_pipeline
from weft.engines.local.collectives.transport import (
    BLOCK,
    Located,
    Location,
    SettledHeaders,
    Transport,
)

#: bytes that are summed in one call: signals are handled between two
_AT_ONCE = 32 << 20


class Path(Enum):
    """Tell how the numbers of a collective get from rank to rank."""

    #: they are in the slots since the first step
    SLOTS = auto()
    #: they are summed where they lie, in shared memory that all ranks map
    IN_PLACE = auto()
    #: in chunks through memory that all ranks map, by a kernel in C
    PIPELINED = auto()
    #: from one rank's own memory to another's
    DIRECT = auto()
    #: through the slots, a slot's worth per step
    ROUNDS = auto()


def choose_path(*, in_slots: bool, in_place: bool, pipelined: bool, reachable: bool) -> Path:
    """Return the quickest of the paths that are open. Pure. Each argument follows from what all
    ranks know, so all ranks choose the same path."""
    if in_slots:
        return Path.SLOTS
    if in_place:
        return Path.IN_PLACE
    if pipelined:
        return Path.PIPELINED
    return Path.DIRECT if reachable else Path.ROUNDS


# combinations


def carry_out_combination(transport: Transport, plan: Combination, headers: SettledHeaders) -> bool:
    """Combine. Return whether others may still be using this rank's memory."""
    call = headers.call
    in_slots = headers.ranks[0].in_slot  # if one rank's arrays are, all are: they are alike
    located = not in_slots and all(header.sources for header in headers.ranks)
    sums = None
    if located:
        transport.map_new((*call.source, *call.early_target), headers)
        sums = sums_in_place(transport, plan, headers)
    path = choose_path(
        in_slots=in_slots,
        in_place=sums is not None,
        pipelined=not in_slots and transport.can_pipeline and can_pipeline(call),
        reachable=located and (transport.reachable or _all_mapped(transport, headers)),
    )
    if path is Path.SLOTS:
        _combine_slots(transport, plan, call.layout.pieces, headers.step)
    elif path is Path.IN_PLACE:
        for part in sums or ():
            part.run(call.source[part.array])
    elif path is Path.PIPELINED:
        _sum_pipelined(transport, plan, headers)
    elif path is Path.DIRECT:
        _combine_directly(transport, plan, headers)
    else:
        _combine_in_rounds(transport, plan, headers)
    return path in (Path.IN_PLACE, Path.DIRECT)


def _all_mapped(transport: Transport, headers: SettledHeaders) -> bool:
    locations = (at for header in headers.ranks for at in (*header.sources, *header.targets))
    return all(map(transport.mapped.has, locations))


def _combine_slots(
    transport: Transport, plan: Combination, pieces: Sequence[Piece], step: int
) -> None:
    """Combine these pieces from the slots of a step."""
    view, ranks = transport.slots.view, range(transport.size)
    for piece in pieces if plan.target else ():
        out = elements(plan.target, piece)
        parts = [view(step, rank, piece.at, out.nbytes, out.dtype) for rank in ranks]
        combine(parts, out, plan.op, plan.elements[piece.array], plan.weights)


def _combine_in_rounds(transport: Transport, plan: Combination, headers: SettledHeaders) -> None:
    """Combine through the slots, a slot's worth per step."""
    call, room = headers.call, transport.slots.room
    for start in range(0, call.layout.size, room):
        pieces = call.layout.window(start, start + room)
        step = transport.meeting.step + 1
        transport.slots.fill(step, call.source, pieces)
        if faults.armed:
            faults.reach("collective.round")
        transport.step(headers.seconds)
        _combine_slots(transport, plan, pieces, step)


def _sum_pipelined(transport: Transport, plan: Combination, headers: SettledHeaders) -> None:
    """Sum, or take the mean, by the kernels."""
    memory, source = transport.ready_pipelined_memory(headers), headers.call.source
    targets: Sequence[Array | None] = plan.target or [None] * len(source)
    for array, target in zip(source, targets, strict=True):
        memory.sum(array, target, mean=plan.op == "mean", deadline=headers.deadline)


def _combine_directly(transport: Transport, plan: Combination, headers: SettledHeaders) -> None:
    """Combine this rank's part of the blocks, and write each result to its receivers."""
    source, ranks = headers.call.source, headers.ranks
    receivers = range(transport.size) if plan.root is None else (plan.root,)
    for piece in headers.call.layout.blocks_of(transport.rank, transport.size, BLOCK):
        if faults.armed:
            faults.reach("collective.block")
        mine = _own(ranks[transport.rank].sources, source, piece)
        wanted = _own(ranks[transport.rank].targets, plan.target, piece) if plan.target else None
        result = _result_buffer(transport, mine, wanted)
        parts = _parts(transport, headers, piece, mine, result)
        combine(parts, result.array, plan.op, plan.elements[piece.array], plan.weights)
        if wanted is not None and result.address != wanted.address:
            wanted.array[...] = result.array
        for rank in receivers:
            if rank != transport.rank:
                location = ranks[rank].targets[piece.array]
                transport.write_block(rank, location, piece.start, result)


class SumInPlace(NamedTuple):
    """A slice of one array that is summed where it lies: all ranks' arrays are mapped."""

    array: int
    numbers: slice
    #: the slice of every rank's array; None for this rank's own
    parts: Sequence[Array | None]

    def run(self, own: Array) -> None:
        """Replace the numbers by their sums, on all ranks. `own` is this rank's array."""
        if faults.armed:
            faults.reach("collective.block")
        sum_in_place([own[self.numbers] if part is None else part for part in self.parts])


def sums_in_place(
    transport: Transport, plan: Combination, headers: SettledHeaders
) -> list[SumInPlace] | None:
    """Return this rank's part of sums that a kernel makes in one pass over memory; None if there is
    no kernel for them or an array is not mapped."""
    call, ranks = headers.call, headers.ranks
    in_place = plan.root is None and all(rank.sources == rank.targets != () for rank in ranks)
    mapped = in_place and _all_mapped(transport, headers)
    if plan.op != "sum" or not mapped or not all(map(can_sum_in_place, call.source, plan.elements)):
        return None
    sums = []
    for piece in call.layout.blocks_of(transport.rank, transport.size, _AT_ONCE):
        dtype = call.source[piece.array].dtype
        parts = [
            None
            if rank == transport.rank
            else transport.mapped.view(header.sources[piece.array], piece.start, piece.stop, dtype)
            for rank, header in enumerate(ranks)
        ]
        numbers = slice(piece.start // dtype.itemsize, piece.stop // dtype.itemsize)
        sums.append(SumInPlace(piece.array, numbers, parts))
    return sums


def _own(locations: Sequence[Location], arrays: Sequence[Array], piece: Piece) -> Located:
    return Located(elements(arrays, piece), locations[piece.array].address + piece.start)


def _result_buffer(transport: Transport, mine: Located, wanted: Located | None) -> Located:
    """Return where to make the result of a block: in the target, unless that would overwrite
    operands that are still to be read. Those of ranks 0 and 1 are read before the first result is
    written."""
    if wanted is not None and (wanted.address != mine.address or transport.rank < 2):
        return wanted
    return transport.scratch(mine.array, 2)


def _parts(
    transport: Transport, headers: SettledHeaders, piece: Piece, mine: Located, result: Located
) -> Iterator[Array]:
    """Yield one block of every rank, in order. The first block that is copied here may use the
    result's buffer, unless that holds this rank's own numbers or, from the third rank on, the
    partial sum; the others alternate between two scratch blocks."""
    spare = [transport.scratch(mine.array, number) for number in (0, 1)]
    first = spare[0] if result.address == mine.address else result
    turn = 0
    for rank, header in enumerate(headers.ranks):
        if rank == transport.rank:
            yield mine.array
            continue
        into = first if turn == 0 and rank < 2 else spare[turn % 2]
        part = transport.read_piece(rank, header.sources[piece.array], piece, into)
        turn += part is into.array
        yield part


# movements

_BYTES = np.dtype(np.uint8)


def carry_out_movement(transport: Transport, plan: Movement, headers: SettledHeaders) -> bool:
    """Move. Return whether others may still be using this rank's memory."""
    mover = _Mover(transport, plan, headers)
    mover.read_slots()
    path = choose_path(
        in_slots=not mover.beyond_slots,
        in_place=False,
        pipelined=mover.is_pipelined(),
        reachable=transport.reachable,
    )
    if path is Path.PIPELINED:
        mover.broadcast_pipelined()
    elif path is Path.DIRECT:
        mover.write()
        mover.read()
    elif path is Path.ROUNDS:
        mover.move_in_rounds()
    mover.copy_own()  # last: the others need not wait for it
    return path is Path.DIRECT


class _Mover:
    """One rank's part in a movement."""

    def __init__(self, transport: Transport, plan: Movement, headers: SettledHeaders) -> None:
        self._transport, self._plan, self._headers = transport, plan, headers
        self._source = [array.view(_BYTES) for array in headers.call.source]
        self._target = [array.view(_BYTES) for array in plan.target]
        self._layouts = [layout_of(tuple(sizes)) for sizes in plan.sizes]
        #: ranks whose arrays are not in their slots
        self.beyond_slots = [
            rank
            for rank, header in enumerate(headers.ranks)
            if not header.in_slot and self._layouts[rank].size
        ]
        others = [copy for copy in plan.incoming if copy.from_rank != transport.rank]
        self._from_slots = [c for c in others if headers.ranks[c.from_rank].in_slot]
        self._from_memory = [c for c in others if not headers.ranks[c.from_rank].in_slot]

    def read_slots(self) -> None:
        for copy in self._from_slots:
            begin = self._begin(copy)
            part = self._transport.slots.view(
                self._headers.step, copy.from_rank, begin, copy.length, _BYTES
            )
            self._write(copy, 0, part)

    def is_pipelined(self) -> bool:
        """Return whether this is a broadcast for the kernels. Asked once, on all ranks."""
        transport, broadcast = self._transport, self._headers.call.name == "broadcast"
        if not self.beyond_slots or not broadcast or not transport.can_pipeline:
            return False
        memory = transport.ready_pipelined_memory(self._headers)
        return not transport.reachable or not memory.leave_to_system()

    def broadcast_pipelined(self) -> None:
        """Bring the root's arrays to all ranks by the kernels."""
        memory = self._transport.ready_pipelined_memory(self._headers)
        (root,) = self.beyond_slots
        here = self._transport.rank == root
        for array in self._source if here else self._target:
            source, target = (array, None) if here else (None, array)
            memory.broadcast(root, source, target, deadline=self._headers.deadline)

    def move_in_rounds(self) -> None:
        """Move a slot's worth per step of the arrays that are not in their slots."""
        slots, room, rank = self._transport.slots, self._transport.slots.room, self._transport.rank
        longest = max((self._layouts[rank].size for rank in self.beyond_slots), default=0)
        for first in range(0, longest, room):
            step = self._transport.meeting.step + 1
            if rank in self.beyond_slots:
                slots.fill(step, self._source, self._layouts[rank].window(first, first + room))
            if faults.armed:
                faults.reach("collective.round")
            self._transport.step(self._headers.seconds)
            for copy in self._from_memory:
                begin = self._begin(copy)
                low, high = max(first, begin), min(first + room, begin + copy.length)
                if low < high:
                    part = slots.view(step, copy.from_rank, low - first, high - low, _BYTES)
                    self._write(copy, low - begin, part)

    def write(self) -> None:
        """Write to the receivers what the senders carry of each copy."""
        if not self._written_of(1.0):
            return
        table = np.array([address(array) for array in self._target], np.uint64).tobytes()
        tables = self._transport.exchange(table, self._headers)
        targets = [np.frombuffer(table, np.uint64).tolist() for table in tables]
        if self._transport.rank not in self.beyond_slots:
            return
        for copy in self._plan.outgoing:
            if faults.armed:
                faults.reach("collective.block")
            length = int(self._written_of(copy.length))
            skipped = copy.length - length
            remote = targets[copy.to_rank][copy.to_array] + copy.to_byte + skipped
            local = address(self._source[copy.from_array]) + copy.from_byte + skipped
            self._transport.peers.write(copy.to_rank, remote, local, length)

    def read(self) -> None:
        """Read from the senders what they do not write."""
        for copy in self._from_memory:
            if faults.armed:
                faults.reach("collective.block")
            location = self._headers.ranks[copy.from_rank].sources[copy.from_array]
            local = address(self._target[copy.to_array]) + copy.to_byte
            remote = location.address + copy.from_byte
            length = copy.length - int(self._written_of(copy.length))
            self._transport.peers.read(copy.from_rank, remote, local, length)

    def copy_own(self) -> None:
        for copy in self._plan.incoming:
            if copy.from_rank == self._transport.rank:
                own = self._source[copy.from_array]
                self._write(copy, 0, own[copy.from_byte : copy.from_byte + copy.length])

    def _written_of(self, length: float) -> float:
        """Return how many of `length` bytes the sender writes: all in a gather, its share of the
        work in a broadcast, else none."""
        parts = {"gather": 1.0, "broadcast": 1 / self._transport.size}
        return length * parts.get(self._headers.call.name, 0.0)

    def _begin(self, copy: Copy) -> int:
        """Return the byte of its sender's buffer at which a copy begins."""
        return self._layouts[copy.from_rank].starts[copy.from_array] + copy.from_byte

    def _write(self, copy: Copy, offset: int, part: Array) -> None:
        begin = copy.to_byte + offset
        np.copyto(self._target[copy.to_array][begin : begin + len(part)], part)
