"""Carrying out a combination: through the slots, or from memory to memory.

Directly, each rank makes its share of the blocks:

    for each block of my share
      every other rank's numbers  --pull-->  scratch, or where the result is made
      combine, in rank order
      the result                  --push-->  whoever gets it

so that a byte is read once by one rank, and written once for each receiver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft import faults
from weft._core.calls import Call, Combination
from weft._core.elements import Array, combine
from weft._core.split import Piece
from weft.engines.local.direct import Peers
from weft.engines.local.means import BLOCK, UNDER_WAY, Means, Place, Said


def carry(means: Means, plan: Combination, call: Call, said: Said, when: tuple[int, float]) -> bool:
    """Combine; whether others may still be using this rank's memory.

    `when`: the step at which the slots were filled, and the seconds that a step may take.
    """
    step, seconds = when
    if said.fits[0]:  # if one rank's fit, all do: they have the same arrays
        _combine_slots(means, plan, call.source, call.layout.pieces, step)
        return False
    if means.peers is not None:
        _combine_directly(means, means.peers, plan, call, said.addresses)
        return True
    room = means.slots.room
    for start in range(0, call.layout.size, room):
        pieces = call.layout.window(start, start + room)
        step = means.meeting.step + 1
        means.slots.fill(step, call.source, pieces)
        if faults.armed:
            faults.reach("collective.round")
        means.meeting.meet(UNDER_WAY, seconds)
        _combine_slots(means, plan, call.source, pieces, step)
    return False


def _combine_slots(
    means: Means, plan: Combination, source: Sequence[Array], pieces: Sequence[Piece], step: int
) -> None:
    if not plan.target:
        return
    view, ranks = means.slots.view, range(means.size)
    for index, start, stop, at in pieces:
        dtype, length = source[index].dtype, stop - start
        parts = [view(step, rank, at, length, dtype) for rank in ranks]
        out = _part(plan.target[index], start, stop)
        combine(parts, out, plan.op, plan.elements[index], plan.weights)


def _combine_directly(
    means: Means, peers: Peers, plan: Combination, call: Call, addresses: Sequence[Sequence[int]]
) -> None:
    """Combine this rank's share of the blocks, and hand each to whoever gets the result."""
    source, own = call.source, addresses[means.rank]
    receivers = range(means.size) if plan.root is None else (plan.root,)
    for piece in call.layout.blocks_of(means.rank, means.size, BLOCK):
        if faults.armed:
            faults.reach("collective.block")
        index, start, stop, _ = piece
        mine = _part(source[index], start, stop)
        made = _place_for(means, mine, plan.target, own, piece)
        # the first block pulled can lie where the result is made, unless that is `mine`
        first = None if made.address == own[index] + start else made
        blocks = _pulled(means, peers, (mine, first), piece, addresses)
        combine(blocks, made.array, plan.op, plan.elements[index], plan.weights)
        if plan.target and made.address != own[len(source) + index] + start:
            _part(plan.target[index], start, stop)[...] = made.array
        for rank in receivers:
            if rank != means.rank:
                target = addresses[rank][len(source) + index] + start
                peers.push(rank, target, made.address, stop - start)


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


def _pulled(
    means: Means,
    peers: Peers,
    here: tuple[Array, Place | None],
    piece: Piece,
    addresses: Sequence[Sequence[int]],
) -> Iterator[Array]:
    """One block of every rank in turn: this rank's own, and the others' as they are pulled, the
    first one to the place given, if any, the others to two scratch blocks by turns."""
    mine, first = here
    turn = 0
    for rank in range(means.size):
        if rank == means.rank:
            yield mine
            continue
        place = means.scratch(mine, turn % 2) if turn or first is None else first
        remote = addresses[rank][piece.array] + piece.start
        peers.pull(rank, remote, place.address, piece.stop - piece.start)
        turn += 1
        yield place.array


def _part(array: Array, start: int, stop: int) -> Array:
    """The elements between two bytes."""
    if stop - start == array.nbytes:
        return array
    width = array.dtype.itemsize
    return array[start // width : stop // width]
