"""How a rank of a group over hosts carries out a collective.

    request ->  meet: the agents exchange  ->  reply: all ranks' parts, and small results
                settle                         the plan, the same on all ranks
    large?      sums         my numbers, chunk after chunk, into the ring; every so many a sum of
                             this host's; results out of the ring
                movements    what goes where, to the agent; then my arrays into the ring, and what
                             is mine out of it

exchange.py has the agent's part, memory.py the counters.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft import faults
from weft._core.arithmetic import Array, accumulate
from weft._core.calls import (
    Call,
    Combination,
    Copy,
    Layout,
    Movement,
    Reduce,
    UnlikeArrays,
    elements,
    layout_of,
)
from weft.engines.local.meeting.meeting import COLLECTIVE, UNDER_WAY
from weft.engines.mpi import exchange
from weft.engines.mpi.exchange import DESCRIBE, STREAMS, Sum, SumPlan
from weft.engines.mpi.meeting import HostMeeting
from weft.engines.mpi.memory import DONE, FILLED, GIVEN, SUMMED
from weft.engines.mpi.packing import pack
from weft.engines.mpi.placement import WINDOW, Stream, cut_streams

_WEIGHT = struct.Struct("d")
_BYTES = np.dtype(np.uint8)
#: descriptions of reductions that are kept
_MOST_KNOWN = 256


class HostCollectives:
    """The collectives of one group over hosts, on one rank."""

    def __init__(self, meeting: HostMeeting) -> None:
        self._meeting, self._memory = meeting, meeting.memory
        self._size = len(meeting.placement.world)
        self._eager = exchange.most_eager(meeting.placement)
        #: how many chunks of reductions and of movements have gone through the ring
        self._summed = self._moved = 0
        #: by the shared part of a call
        self._known: dict[bytes, tuple[bytes, SumPlan]] = {}

    def carry_out(self, call: Call, seconds: float) -> None:
        """Carry out a call until it has its result. Every rank makes the same call. Raises
        Disagreement, InvalidValue and SetupError on every rank alike; any other exception leaves
        the ranks out of step."""
        deadline = time.monotonic() + seconds
        if isinstance(call, Reduce):
            self._reduce(call, deadline)
        else:
            self._move(call, deadline)
        call.finish()

    def _settle(self, call: Call, owns: Sequence[bytes], deadline: float) -> Any:
        try:
            return call.settle(owns)
        except UnlikeArrays as unlike:
            given = unlike.ranks.get(self._meeting.group_rank)
            words = f"{call.name}({given})" if given else call.common.decode()
            # all ranks are here: the agents collect what each has called, and all raise that
            self._meeting.converse(UNDER_WAY, DESCRIBE + words.encode(), deadline)
            raise

    # reductions

    def _reduce(self, call: Reduce, deadline: float) -> None:
        order, plan = self._known.get(call.common) or self._describe(call)
        text = pack([call.common, call.own, order])
        if plan.is_small:
            reply = self._meeting.converse(
                COLLECTIVE, text, deadline, size=plan.layout.size, fill=lambda at: _fill(at, call)
            )
        else:
            reply = self._meeting.converse(COLLECTIVE, text, deadline)
        if faults.armed:
            faults.reach("collective.met")
        owns, results = exchange.read_sum_reply(reply, plan, self._size)
        settled: Combination = self._settle(call, owns, deadline)
        if results is None:
            self._sum_large(call, plan, settled, owns, deadline)
        else:
            for result, target in zip(results, settled.target, strict=False):
                target[...] = result
        if faults.armed:
            faults.reach("collective.carried")

    def _describe(self, call: Reduce) -> tuple[bytes, SumPlan]:
        triples = zip(call.elements, call.source, strict=True)
        arrays = tuple((element, array.dtype.str, array.nbytes) for element, array in triples)
        order = Sum(call.op, call.root, bool(call.own), arrays).encode()
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[call.common] = order, exchange.decode_sum(order)
        return self._known[call.common]

    def _sum_large(
        self,
        call: Reduce,
        plan: SumPlan,
        settled: Combination,
        owns: Sequence[bytes],
        deadline: float,
    ) -> None:
        meeting = self._meeting
        chunks, base = plan.chunks(meeting.placement), self._summed
        me, here = meeting.rank, len(meeting.local)
        weights = None
        if plan.how.weighted:
            weights = [_WEIGHT.unpack(owns[rank])[0] for rank in meeting.local]
        for number in range(base, base + len(chunks) + WINDOW):
            if number - WINDOW >= base:
                chunk = chunks[number - WINDOW - base]
                meeting.await_count(here, SUMMED, number - WINDOW + 1, deadline)
                if settled.target:
                    at = exchange.result_slot(here, number - WINDOW)
                    target = settled.target[chunk.array][chunk.start : chunk.stop]
                    target[...] = self._memory.chunk(at, target.nbytes, target.dtype)
            if number - base >= len(chunks):
                continue
            chunk = chunks[number - base]
            if faults.armed:
                faults.reach("collective.block")
            mine = call.source[chunk.array][chunk.start : chunk.stop]
            if here > 1:
                at = exchange.input_slot(me, number)
                self._memory.chunk(at, mine.nbytes, mine.dtype)[...] = mine
                meeting.publish_count(GIVEN, number + 1)
            if number % here == me:
                self._sum_here(
                    plan, chunk.array, mine, number=number, weights=weights, deadline=deadline
                )
        self._summed = base + len(chunks)

    def _sum_here(
        self,
        plan: SumPlan,
        array: int,
        mine: Array,
        *,
        number: int,
        weights: Sequence[float] | None,
        deadline: float,
    ) -> None:
        """Sum a chunk of this host's ranks, in their order."""
        meeting, here = self._meeting, len(self._meeting.local)
        parts = []
        for place in range(here):
            if place == meeting.rank:
                parts.append(mine)
                continue
            meeting.await_count(place, GIVEN, number + 1, deadline)
            at = exchange.input_slot(place, number)
            parts.append(self._memory.chunk(at, mine.nbytes, mine.dtype))
        wide = plan.wide[array]
        at = exchange.total_slot(here, number)
        total = self._memory.chunk(at, mine.size * wide.itemsize, wide)
        accumulate(parts, total, plan.how.op, plan.elements[array], weights)
        meeting.publish_count(SUMMED, number + 1)

    # movements

    def _move(self, call: Call, deadline: float) -> None:
        size = call.layout.size
        text = pack([call.common, call.own, b""])
        fill = None

        def fill_eager(slot: Any) -> None:
            slot[:8] = np.frombuffer(size.to_bytes(8, "little"), np.uint8)
            _fill(slot[64:], call)

        if size <= self._eager:
            fill = fill_eager
        reply = self._meeting.converse(COLLECTIVE, text, deadline, size=64 + size, fill=fill)
        if faults.armed:
            faults.reach("collective.met")
        owns, arrays = exchange.read_movement_reply(reply, self._size)
        plan: Movement = self._settle(call, owns, deadline)
        layouts = [layout_of(tuple(sizes)) for sizes in plan.sizes]
        incoming = _Incoming(plan, layouts)
        me = self._meeting.group_rank
        for rank, array in enumerate(arrays):
            if rank == me:
                incoming.take_own(call.source, me)
            elif array is not None:
                incoming.take(rank, 0, array)
        streams = _streams(call, plan, layouts, arrays)
        if streams:
            self._move_large(call, incoming, streams, deadline)
        if faults.armed:
            faults.reach("collective.carried")

    def _move_large(
        self, call: Call, incoming: _Incoming, streams: Sequence[Stream], deadline: float
    ) -> None:
        meeting, memory = self._meeting, self._memory
        text = STREAMS
        if meeting.rank == 0:
            text += json.dumps(streams).encode()
        meeting.converse(UNDER_WAY, text, deadline)
        placement, slots, me = meeting.placement, memory.ring.slots, meeting.group_rank
        agent = len(meeting.local)
        chunks = cut_streams(streams, placement, meeting.host, largest=memory.ring.chunk)
        number = self._moved
        for number, chunk in enumerate(chunks, self._moved):
            source = chunk.stream.rank
            if faults.armed:
                faults.reach("collective.block")
            if source == me:
                for place in range(agent + 1):
                    meeting.await_count(place, DONE, number - slots + 1, deadline)
                room = memory.chunk(number, chunk.length)
                for piece in call.layout.window(chunk.start, chunk.start + chunk.length):
                    part = elements(call.source, piece)
                    room[piece.at : piece.at + part.nbytes].view(part.dtype)[...] = part
                meeting.publish_count(FILLED, number + 1)
            elif incoming.wants(source, chunk.start, chunk.length):
                here = placement.host_of[source] == meeting.host
                writer = meeting.local.index(source) if here else agent
                meeting.await_count(writer, FILLED, number + 1, deadline)
                incoming.take(source, chunk.start, memory.chunk(number, chunk.length))
            meeting.publish_count(DONE, number + 1)
            self._moved = number + 1


def _fill(slot: Any, call: Call) -> None:
    """Copy a call's arrays into a slot, as its layout has them."""
    for piece in call.layout.pieces:
        part = elements(call.source, piece)
        slot[piece.at : piece.at + part.nbytes].view(part.dtype)[...] = part


class _Incoming:
    """Take what a rank gets of a movement."""

    def __init__(self, plan: Movement, layouts: Sequence[Layout]) -> None:
        self._target = [array.view(np.uint8) if array.nbytes else array for array in plan.target]
        #: by sender: where each copy begins in its buffer
        self._by_rank: dict[int, list[tuple[int, Copy]]] = {}
        for copy in plan.incoming:
            begin = layouts[copy.from_rank].starts[copy.from_array] + copy.from_byte
            self._by_rank.setdefault(copy.from_rank, []).append((begin, copy))

    def wants(self, rank: int, start: int, length: int) -> bool:
        """Return whether this rank gets some of these bytes of a rank's buffer."""
        copies = self._by_rank.get(rank, ())
        return any(begin < start + length and start < begin + c.length for begin, c in copies)

    def take(self, rank: int, start: int, array: Array) -> None:
        """Take what is wanted of bytes of a rank's buffer, from byte `start` on."""
        for begin, copy in self._by_rank.get(rank, ()):
            low, high = max(start, begin), min(start + len(array), begin + copy.length)
            if low < high:
                at = copy.to_byte + low - begin
                target = self._target[copy.to_array]
                target[at : at + high - low] = array[low - start : high - start]

    def take_own(self, source: Sequence[Array], rank: int) -> None:
        """Copy what this rank gets of itself."""
        for _, copy in self._by_rank.get(rank, ()):
            part = source[copy.from_array].view(np.uint8)
            part = part[copy.from_byte : copy.from_byte + copy.length]
            self._target[copy.to_array][copy.to_byte : copy.to_byte + copy.length] = part


def _streams(
    call: Call, plan: Movement, layouts: Sequence[Layout], arrays: Sequence[Any]
) -> list[Stream]:
    """Return what has to go through the ring, the same on all ranks: the buffers of ranks whose
    arrays were too large for the first exchange."""
    late = [rank for rank, array in enumerate(arrays) if array is None and layouts[rank].size]
    if call.name in ("broadcast", "all_gather"):
        return [Stream(rank, 0, layouts[rank].size, None) for rank in late]
    return [
        Stream(
            copy.from_rank,
            layouts[copy.from_rank].starts[copy.from_array] + copy.from_byte,
            copy.length,
            copy.to_rank,
        )
        for copy in plan.copies
        if copy.from_rank in late and copy.from_rank != copy.to_rank
    ]
