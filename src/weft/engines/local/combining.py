"""Carrying out a combination: through the slots, jointly, or from memory to memory.

Small arrays pass through the slots. Large ones are summed jointly (joint_memory.py), if there is a
loop in C for it. Else they are combined directly, where each rank makes its part of the blocks:

    for each block of my part
      every other rank's numbers  --pull-->  scratch, or where the result is made
      combine, in rank order
      the result                  --push-->  whoever gets it

so that a byte is read once by one rank, and written once for each receiver. Arrays that lie in
shared memory are mapped, and need no pull or push; their sums in place are made by a loop in C.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from weft import faults
from weft._core.adding import add_up, can_add_up
from weft._core.elements import Array, combine
from weft._core.joint_work import takes
from weft._core.plans import Combination
from weft._core.split import Piece, elements
from weft.engines.local.first_message import Location
from weft.engines.local.transport import BLOCK, Exchanged, Located, Transport

#: bytes that are added up in one call, so that a signal is heard soon
_AT_ONCE = 32 << 20


def carry_out(transport: Transport, plan: Combination, exchanged: Exchanged) -> bool:
    """Combine; whether others may still be using this rank's memory."""
    call = exchanged.call
    if exchanged.ranks[0].in_slot:  # if one rank's arrays are, all are: they are alike
        _combine_slots(transport, plan, call.layout.pieces, exchanged.step)
        return False
    located = all(said.sources for said in exchanged.ranks)
    if located:
        transport.map_new((*call.source, *call.early_target), exchanged)
        sums = sums_in_place(transport, plan, exchanged)
        if sums is not None:
            for one in sums:
                one.add_up(call.source[one.array])
            return True
    if takes(call) and _sum_jointly(transport, plan, exchanged):
        return False
    if located and (transport.peers is not None or _all_mapped(transport, exchanged)):
        _combine_directly(transport, plan, exchanged)
        return True
    room = transport.slots.room
    for start in range(0, call.layout.size, room):
        pieces = call.layout.window(start, start + room)
        step = transport.meeting.step + 1
        transport.slots.fill(step, call.source, pieces)
        if faults.armed:
            faults.reach("collective.round")
        transport.step(exchanged.seconds)
        _combine_slots(transport, plan, pieces, step)
    return False


def _all_mapped(transport: Transport, exchanged: Exchanged) -> bool:
    locations = (one for said in exchanged.ranks for one in (*said.sources, *said.targets))
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


def _sum_jointly(transport: Transport, plan: Combination, exchanged: Exchanged) -> bool:
    """Sum, or take the mean; False if that cannot be done jointly."""
    memory, source = transport.ready_joint_memory(exchanged), exchanged.call.source
    if memory is None:
        return False
    targets: Sequence[Array | None] = plan.target or [None] * len(source)
    for array, target in zip(source, targets, strict=True):
        memory.add_up(array, target, mean=plan.op == "mean", deadline=exchanged.deadline)
    return True


# from memory to memory


def _combine_directly(transport: Transport, plan: Combination, exchanged: Exchanged) -> None:
    """Combine this rank's part of the blocks, and hand each to whoever gets the result."""
    source, said = exchanged.call.source, exchanged.ranks
    receivers = range(transport.size) if plan.root is None else (plan.root,)
    for piece in exchanged.call.layout.blocks_of(transport.rank, transport.size, BLOCK):
        if faults.armed:
            faults.reach("collective.block")
        mine = _own(said[transport.rank].sources, source, piece)
        wanted = _own(said[transport.rank].targets, plan.target, piece) if plan.target else None
        made = _place_to_make(transport, mine, wanted)
        parts = _parts(transport, exchanged, piece, mine, made)
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
        add_up([own[self.numbers] if part is None else part for part in self.parts])


def sums_in_place(
    transport: Transport, plan: Combination, exchanged: Exchanged
) -> list[SumInPlace] | None:
    """This rank's part of sums that a loop in C makes by one pass over memory; None if it cannot
    make these."""
    call, said = exchanged.call, exchanged.ranks
    in_place = plan.root is None and all(one.sources == one.targets != () for one in said)
    mapped = in_place and _all_mapped(transport, exchanged)
    if plan.op != "sum" or not mapped or not all(map(can_add_up, call.source, plan.elements)):
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
    transport: Transport, exchanged: Exchanged, piece: Piece, mine: Located, made: Located
) -> Iterator[Array]:
    """One block of every rank in turn. The first one copied here may lie where the result is made,
    unless this rank's own numbers are there or, from the third rank on, the sum so far; the others
    use two scratch blocks by turns."""
    spare = [transport.scratch(mine.array, number) for number in (0, 1)]
    first = spare[0] if made.address == mine.address else made
    turn = 0
    for rank, said in enumerate(exchanged.ranks):
        if rank == transport.rank:
            yield mine.array
            continue
        into = first if turn == 0 and rank < 2 else spare[turn % 2]
        part = transport.see(rank, said.sources[piece.array], piece, into)
        turn += part is into.array
        yield part
