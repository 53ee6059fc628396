"""Carrying out a combination: through the slots, or from memory to memory.

Directly, each rank makes its share of the blocks:

    for each block of my share
      every other rank's numbers  --pull-->  scratch, or where the result is made
      combine, in rank order
      the result                  --push-->  whoever gets it

so that a byte is read once by one rank, and written once for each receiver. Arrays that lie in
shared memory are mapped, and need no pull or push.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from weft import faults
from weft._core.calls import Call, Combination
from weft._core.elements import Array, combine
from weft._core.split import Piece, share_of_pieces
from weft.engines.local.means import BLOCK, UNDER_WAY, Means, Place, Said
from weft.engines.local.slots import work_is_shared


def carry(means: Means, plan: Combination, call: Call, said: Said, when: tuple[int, float]) -> bool:
    """Combine; whether others may still be using this rank's memory.

    `when`: the step at which the slots were filled, and the seconds that a step may take.
    """
    step, seconds = when
    if said.fits[0]:  # if one rank's fit, all do: they have the same arrays
        _combine_slots(means, plan, call, call.layout.pieces, when)
        return False
    means.map_new((*call.source, *call.early_target), said, seconds)
    if means.peers is not None or all(map(means.mapped.has, chain(*said.shares))):
        _combine_directly(means, plan, call, said)
        return True
    room = means.slots.room
    for start in range(0, call.layout.size, room):
        pieces = call.layout.window(start, start + room)
        step = means.meeting.step + 1
        means.slots.fill(step, call.source, pieces)
        if faults.armed:
            faults.reach("collective.round")
        means.meeting.meet(UNDER_WAY, seconds)
        _combine_slots(means, plan, call, pieces, (step, seconds))
    return False


def _combine_slots(
    means: Means,
    plan: Combination,
    call: Call,
    pieces: Sequence[Piece],
    when: tuple[int, float],
) -> None:
    """Combine what the slots of a step hold."""
    step, seconds = when
    slots = means.slots
    if not work_is_shared(means.size, call.layout.size):
        for index, start, stop, at in pieces if plan.target else ():
            out = _part(plan.target[index], start, stop)
            _combine_slot(means, plan, (index, at), out, step)
        return
    for index, start, stop, at in share_of_pieces(pieces, means.size, means.rank):
        out = slots.view(step + 1, means.rank, at, stop - start, call.source[index].dtype)
        _combine_slot(means, plan, (index, at), out, step)
    means.meeting.meet(UNDER_WAY, seconds)
    for rank in range(means.size) if plan.target else ():
        for index, start, stop, at in share_of_pieces(pieces, means.size, rank):
            dtype = call.source[index].dtype
            part = slots.view(step + 1, rank, at, stop - start, dtype)
            _part(plan.target[index], start, stop)[...] = part


def _combine_slot(
    means: Means, plan: Combination, which: tuple[int, int], out: Array, step: int
) -> None:
    """Combine the same bytes of all ranks' slots: those of which array, and where in the slot."""
    index, at = which
    view, dtype, length = means.slots.view, out.dtype, out.nbytes
    parts = [view(step, rank, at, length, dtype) for rank in range(means.size)]
    combine(parts, out, plan.op, plan.elements[index], plan.weights)


def _combine_directly(means: Means, plan: Combination, call: Call, said: Said) -> None:
    """Combine this rank's share of the blocks, and hand each to whoever gets the result."""
    own, first_target = said.addresses[means.rank], len(call.source)
    receivers = range(means.size) if plan.root is None else (plan.root,)
    for piece in call.layout.blocks_of(means.rank, means.size, BLOCK):
        if faults.armed:
            faults.reach("collective.block")
        index, start, stop, _ = piece
        mine = _part(call.source[index], start, stop)
        made = _place_for(means, mine, plan.target, own, piece)
        # the first block pulled can lie where the result is made, unless that is `mine`
        first = None if made.address == own[index] + start else made
        parts = _parts(means, said, piece, mine, first)
        combine(parts, made.array, plan.op, plan.elements[index], plan.weights)
        if plan.target and made.address != own[first_target + index] + start:
            _part(plan.target[index], start, stop)[...] = made.array
        for rank in receivers:
            if rank != means.rank:
                means.give(said, rank, first_target + index, made, start)


def _place_for(
    means: Means, mine: Array, target: Sequence[Array], own: Sequence[int], piece: Piece
) -> Place:
    """Where to make the result of a block: in its place, if there is one, and if the numbers there
    are not needed any more when the first two have been combined."""
    index, start, stop, _ = piece
    if target:
        address = own[len(own) - len(target) + index] + start
        if address != own[index] + start or means.rank < 2:
            return Place(_part(target[index], start, stop), address)
    return means.scratch(mine, 2)


def _parts(
    means: Means, said: Said, piece: Piece, mine: Array, first: Place | None
) -> Iterator[Array]:
    """One block of every rank in turn: this rank's own, the others' where they are mapped, or as
    they are pulled, the first one to the place given, if any, the others to two scratch blocks by
    turns."""
    turn = 0
    for rank in range(means.size):
        if rank == means.rank:
            yield mine
            continue
        there = means.mapped.view(
            said.shares[rank][piece.array], piece.start, piece.stop, mine.dtype
        )
        if there is None:
            place = means.scratch(mine, turn % 2) if turn or first is None else first
            means.pull(said, rank, piece, place)
            there = place.array
            turn += 1
        yield there


def _part(array: Array, start: int, stop: int) -> Array:
    """The elements between two bytes."""
    if stop - start == array.nbytes:
        return array
    width = array.dtype.itemsize
    return array[start // width : stop // width]
