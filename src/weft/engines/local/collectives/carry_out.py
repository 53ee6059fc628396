"""Carrying out a combination: through the slots, jointly, or from memory to memory.

Small arrays pass through the slots. Large ones are summed jointly (joint_memory.py), if there is a
loop in C for it. Else they are combined directly, where each rank makes its part of the blocks:

    for each block of my part
      every other rank's numbers  --pull-->  scratch, or where the result is made
      combine, in rank order
      the result                  --push-->  whoever gets it

so that a byte is read once by one rank, and written once for each receiver. Arrays that lie in
shared memory are mapped, and need no pull or push; their sums in place are made by a loop in C.

Carrying out a movement: through the slots, jointly, or from memory to memory.

What one rank sends to all goes jointly (joint_memory.py), if there is a loop in C for it: memory is
read once, and what is written is not read before. Only with 2 ranks whose cores share no cache the
kernel's copies are quicker. Such a copy can be made by either end. Where one rank sends to all, it
pushes its part of each while the receivers pull the rest; where all send to one, all push at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weft import faults
from weft._core.arithmetic import Array, address, can_sum_in_place, combine, copy_to, sum_in_place
from weft._core.calls import Combination, Copy, Movement, Piece, elements, layout_of
from weft.engines.local.collectives.pipelined import can_pipeline
from weft.engines.local.collectives.transport import (
    BLOCK,
    Located,
    Location,
    Peers,
    SettledHeaders,
    Transport,
)

#: bytes that are added up in one call, so that a signal is heard soon
_AT_ONCE = 32 << 20


def carry_out_combination(transport: Transport, plan: Combination, headers: SettledHeaders) -> bool:
    """Combine; whether others may still be using this rank's memory."""
    call = headers.call
    if headers.ranks[0].in_slot:  # if one rank's arrays are, all are: they are alike
        _combine_slots(transport, plan, call.layout.pieces, headers.step)
        return False
    located = all(said.sources for said in headers.ranks)
    if located:
        transport.map_new((*call.source, *call.early_target), headers)
        sums = sums_in_place(transport, plan, headers)
        if sums is not None:
            for one in sums:
                one.add_up(call.source[one.array])
            return True
    if can_pipeline(call) and _sum_pipelined(transport, plan, headers):
        return False
    if located and (transport.peers is not None or _all_mapped(transport, headers)):
        _combine_directly(transport, plan, headers)
        return True
    room = transport.slots.room
    for start in range(0, call.layout.size, room):
        pieces = call.layout.window(start, start + room)
        step = transport.meeting.step + 1
        transport.slots.fill(step, call.source, pieces)
        if faults.armed:
            faults.reach("collective.round")
        transport.step(headers.seconds)
        _combine_slots(transport, plan, pieces, step)
    return False


def _all_mapped(transport: Transport, headers: SettledHeaders) -> bool:
    locations = (one for said in headers.ranks for one in (*said.sources, *said.targets))
    return all(map(transport.mapped.has, locations))


# through the slots


def _combine_slots(
    transport: Transport, plan: Combination, pieces: Sequence[Piece], step: int
) -> None:
    """Combine what the slots of a step hold of these pieces."""
    view, ranks = transport.slots.view, range(transport.size)
    for piece in pieces if plan.target else ():
        out = elements(plan.target, piece)
        parts = [view(step, rank, piece.at, out.nbytes, out.dtype) for rank in ranks]
        combine(parts, out, plan.op, plan.elements[piece.array], plan.weights)


# jointly


def _sum_pipelined(transport: Transport, plan: Combination, headers: SettledHeaders) -> bool:
    """Sum, or take the mean; False if that cannot be done jointly."""
    memory, source = transport.ready_pipelined_memory(headers), headers.call.source
    if memory is None:
        return False
    targets: Sequence[Array | None] = plan.target or [None] * len(source)
    for array, target in zip(source, targets, strict=True):
        memory.add_up(array, target, mean=plan.op == "mean", deadline=headers.deadline)
    return True


# from memory to memory


def _combine_directly(transport: Transport, plan: Combination, headers: SettledHeaders) -> None:
    """Combine this rank's part of the blocks, and hand each to whoever gets the result."""
    source, said = headers.call.source, headers.ranks
    receivers = range(transport.size) if plan.root is None else (plan.root,)
    for piece in headers.call.layout.blocks_of(transport.rank, transport.size, BLOCK):
        if faults.armed:
            faults.reach("collective.block")
        mine = _own(said[transport.rank].sources, source, piece)
        wanted = _own(said[transport.rank].targets, plan.target, piece) if plan.target else None
        made = _place_to_make(transport, mine, wanted)
        parts = _parts(transport, headers, piece, mine, made)
        combine(parts, made.array, plan.op, plan.elements[piece.array], plan.weights)
        if wanted is not None and made.address != wanted.address:
            wanted.array[...] = made.array
        for rank in receivers:
            if rank != transport.rank:
                location = said[rank].targets[piece.array]
                transport.give(rank, location, piece.start, made)


class SumInPlace(NamedTuple):
    """Some numbers of one array, which are to be summed where they are: all ranks' are mapped."""

    array: int
    numbers: slice
    #: of every rank; None in the place of this one's own
    parts: Sequence[Array | None]

    def add_up(self, own: Array) -> None:
        """Have the numbers, of which these are this rank's array, be the sums."""
        if faults.armed:
            faults.reach("collective.block")
        sum_in_place([own[self.numbers] if part is None else part for part in self.parts])


def sums_in_place(
    transport: Transport, plan: Combination, headers: SettledHeaders
) -> list[SumInPlace] | None:
    """This rank's part of sums that a loop in C makes by one pass over memory; None if it cannot
    make these."""
    call, said = headers.call, headers.ranks
    in_place = plan.root is None and all(one.sources == one.targets != () for one in said)
    mapped = in_place and _all_mapped(transport, headers)
    if plan.op != "sum" or not mapped or not all(map(can_sum_in_place, call.source, plan.elements)):
        return None
    found = []
    for piece in call.layout.blocks_of(transport.rank, transport.size, _AT_ONCE):
        dtype = call.source[piece.array].dtype
        parts = [
            None
            if rank == transport.rank
            else transport.mapped.view(one.sources[piece.array], piece.start, piece.stop, dtype)
            for rank, one in enumerate(said)
        ]
        numbers = slice(piece.start // dtype.itemsize, piece.stop // dtype.itemsize)
        found.append(SumInPlace(piece.array, numbers, parts))
    return found


def _own(locations: Sequence[Location], arrays: Sequence[Array], piece: Piece) -> Located:
    return Located(elements(arrays, piece), locations[piece.array].address + piece.start)


def _place_to_make(transport: Transport, mine: Located, wanted: Located | None) -> Located:
    """Where the result of a block is made: where it is wanted, unless that would overwrite numbers
    before their turn. Those of ranks 0 and 1 have had it when the first result is written."""
    if wanted is not None and (wanted.address != mine.address or transport.rank < 2):
        return wanted
    return transport.scratch(mine.array, 2)


def _parts(
    transport: Transport, headers: SettledHeaders, piece: Piece, mine: Located, made: Located
) -> Iterator[Array]:
    """One block of every rank in turn. The first one copied here may lie where the result is made,
    unless this rank's own numbers are there or, from the third rank on, the sum so far; the others
    use two scratch blocks by turns."""
    spare = [transport.scratch(mine.array, number) for number in (0, 1)]
    first = spare[0] if made.address == mine.address else made
    turn = 0
    for rank, said in enumerate(headers.ranks):
        if rank == transport.rank:
            yield mine.array
            continue
        into = first if turn == 0 and rank < 2 else spare[turn % 2]
        part = transport.see(rank, said.sources[piece.array], piece, into)
        turn += part is into.array
        yield part


_BYTES = np.dtype(np.uint8)


def carry_out_movement(transport: Transport, plan: Movement, headers: SettledHeaders) -> bool:
    """Move; whether others may still be using this rank's memory."""
    mover = _Mover(transport, plan, headers)
    mover.read_slots()
    directly = False
    if mover.beyond_slots and not mover.broadcast_pipelined():
        directly = transport.peers is not None
        if transport.peers is None:
            mover.move_in_rounds()
        else:
            mover.push(transport.peers)
            mover.pull(transport.peers)
    mover.copy_own()  # last: the others need not wait for it
    return directly


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
            for rank, said in enumerate(headers.ranks)
            if not said.in_slot and self._layouts[rank].size
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

    def broadcast_pipelined(self) -> bool:
        """Have all ranks work on what one sends to all; whether that was done."""
        transport = self._transport
        if self._headers.call.name != "broadcast":
            return False
        memory = transport.ready_pipelined_memory(self._headers)
        if memory is None or (transport.peers is not None and memory.leave_to_kernel()):
            return False
        (root,) = self.beyond_slots
        here = transport.rank == root
        for array in self._source if here else self._target:
            source, target = (array, None) if here else (None, array)
            memory.broadcast(root, source, target, deadline=self._headers.deadline)
        return True

    def move_in_rounds(self) -> None:
        """A slot's worth of every array that is not in its slot at a time."""
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

    def push(self, peers: Peers) -> None:
        """Send this rank's part of each copy, where senders have one."""
        if not self._pushed_of(1.0):
            return
        table = np.array([address(array) for array in self._target], np.uint64).tobytes()
        tables = self._transport.exchange(table, self._headers)
        targets = [np.frombuffer(one, np.uint64).tolist() for one in tables]
        if self._transport.rank not in self.beyond_slots:
            return
        for copy in self._plan.outgoing:
            if faults.armed:
                faults.reach("collective.block")
            length = int(self._pushed_of(copy.length))
            skipped = copy.length - length
            remote = targets[copy.to_rank][copy.to_array] + copy.to_byte + skipped
            local = address(self._source[copy.from_array]) + copy.from_byte + skipped
            peers.write(copy.to_rank, remote, local, length)

    def pull(self, peers: Peers) -> None:
        """Fetch what the senders do not push."""
        for copy in self._from_memory:
            if faults.armed:
                faults.reach("collective.block")
            location = self._headers.ranks[copy.from_rank].sources[copy.from_array]
            local = address(self._target[copy.to_array]) + copy.to_byte
            length = copy.length - int(self._pushed_of(copy.length))
            peers.read(copy.from_rank, location.address + copy.from_byte, local, length)

    def copy_own(self) -> None:
        for copy in self._plan.incoming:
            if copy.from_rank == self._transport.rank:
                own = self._source[copy.from_array]
                self._write(copy, 0, own[copy.from_byte : copy.from_byte + copy.length])

    def _pushed_of(self, length: float) -> float:
        """How much of so many bytes the sender carries: all, if everybody sends to one; its share
        of the work, if one sends the same to all; else nothing."""
        parts = {"gather": 1.0, "broadcast": 1 / self._transport.size}
        return length * parts.get(self._headers.call.name, 0.0)

    def _begin(self, copy: Copy) -> int:
        """Where a copy begins in its sender's buffer."""
        return self._layouts[copy.from_rank].starts[copy.from_array] + copy.from_byte

    def _write(self, copy: Copy, offset: int, part: Array) -> None:
        begin = copy.to_byte + offset
        copy_to(self._target[copy.to_array][begin : begin + len(part)], part)
