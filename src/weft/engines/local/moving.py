"""Carrying out a movement: through the slots, or from memory to memory.

Directly, a copy can be made by either end. Where one rank sends to all, it pushes its part of each
copy while the receivers pull the rest; where all send to one, all push at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft import faults
from weft._core.calls import Call
from weft._core.elements import Array
from weft._core.moves import Copy, Movement
from weft._core.split import Layout, layout_of
from weft._core.values import address
from weft.engines.local.direct import Peers
from weft.engines.local.means import UNDER_WAY, Means, Said

_BYTES = np.dtype(np.uint8)


def carry(means: Means, plan: Movement, call: Call, said: Said, when: tuple[int, float]) -> bool:
    """Move; whether others may still be using this rank's memory.

    `when`: the step at which the slots were filled, and the seconds that a step may take.
    """
    step, seconds = when
    source = [array.view(_BYTES) for array in call.source]
    target = [array.view(_BYTES) for array in plan.target]
    layouts = [layout_of(tuple(sizes)) for sizes in plan.sizes]
    for copy in plan.incoming:
        if copy.source != means.rank and said.fits[copy.source]:
            at = layouts[copy.source].starts[copy.from_array] + copy.start
            _write(target, copy, 0, means.slots.view(step, copy.source, at, copy.length, _BYTES))
    late = [rank for rank, fits in enumerate(said.fits) if not fits and layouts[rank].size]
    directly = bool(late) and means.peers is not None
    if late and means.peers is None:
        _move_in_rounds(means, plan, (source, target), layouts, (late, seconds))
    elif means.peers is not None and late:
        if plan.pushed:
            places = _exchange_places(means, target, seconds)
            _push(means.peers, plan, source, places, late)
        _pull(means, means.peers, plan, target, (said.addresses, late))
    for copy in plan.incoming:
        if copy.source == means.rank:  # last: the others need not wait for it
            own = source[copy.from_array]
            _write(target, copy, 0, own[copy.start : copy.start + copy.length])
    return directly


def _pull(
    means: Means,
    peers: Peers,
    plan: Movement,
    target: Sequence[Array],
    whence: tuple[Sequence[Sequence[int]], Sequence[int]],
) -> None:
    addresses, late = whence
    for copy in plan.incoming:
        if copy.source in late and copy.source != means.rank:
            if faults.armed:
                faults.reach("collective.block")
            remote = addresses[copy.source][copy.from_array] + copy.start
            local = address(target[copy.to_array]) + copy.place
            peers.pull(copy.source, remote, local, copy.length - _pushed(copy, plan))


def _push(
    peers: Peers,
    plan: Movement,
    source: Sequence[Array],
    places: Sequence[Sequence[int]],
    late: Sequence[int],
) -> None:
    for copy in plan.outgoing:
        if copy.source in late:
            if faults.armed:
                faults.reach("collective.block")
            length = _pushed(copy, plan)
            skipped = copy.length - length
            remote = places[copy.target][copy.to_array] + copy.place + skipped
            local = address(source[copy.from_array]) + copy.start + skipped
            peers.push(copy.target, remote, local, length)


def _pushed(copy: Copy, plan: Movement) -> int:
    """How many of a copy's last bytes its sender carries."""
    return int(copy.length * plan.pushed)


def _exchange_places(means: Means, target: Sequence[Array], seconds: float) -> list[list[int]]:
    """Where the results of every rank go."""
    table = np.array([address(array) for array in target], np.uint64).tobytes()
    return [np.frombuffer(one, np.uint64).tolist() for one in means.exchange(table, seconds)]


def _move_in_rounds(
    means: Means,
    plan: Movement,
    arrays: tuple[Sequence[Array], Sequence[Array]],
    layouts: Sequence[Layout],
    late_and_seconds: tuple[Sequence[int], float],
) -> None:
    (source, target), (late, seconds) = arrays, late_and_seconds
    slots, room = means.slots, means.slots.room
    for first in range(0, max(layouts[rank].size for rank in late), room):
        step = means.meeting.step + 1
        if means.rank in late:
            slots.fill(step, source, layouts[means.rank].window(first, first + room))
        if faults.armed:
            faults.reach("collective.round")
        means.meeting.meet(UNDER_WAY, seconds)
        for copy in plan.incoming:
            if copy.source in late and copy.source != means.rank:
                begin = layouts[copy.source].starts[copy.from_array] + copy.start
                low, high = max(first, begin), min(first + room, begin + copy.length)
                if low < high:
                    part = slots.view(step, copy.source, low - first, high - low, _BYTES)
                    _write(target, copy, low - begin, part)


def _write(target: Sequence[Array], copy: Copy, offset: int, part: Array) -> None:
    place = copy.place + offset
    target[copy.to_array][place : place + len(part)] = part
