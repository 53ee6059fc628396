"""The agent's part in a collective.

The first step. Each rank's text is a Request: the shared part, which must be the same on all
ranks, the rank's part, and what the agent has to know of its arrays. Small arrays are in the
slots. The agents exchange, in one message each, the shared part, the ranks' parts, and

    of a small reduction    the sum of this host, in the type that totals have
    of a movement           the small arrays

and give their ranks a Reply: all ranks' parts, and the result or the small arrays. Large arrays
follow through the ring, chunk after chunk: a reduction at once, a movement when the ranks have
said what goes where.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft._core.arithmetic import accumulate, finish, wide_type
from weft._core.calls import layout_of
from weft.engines.local.meeting.meeting import COLLECTIVE, UNDER_WAY
from weft.engines.mpi.meeting import DONE, aligned
from weft.engines.mpi.memory import DONE as DONE_WITH
from weft.engines.mpi.memory import FILLED, SUMMED, room_for
from weft.engines.mpi.packing import pack, packed_size, unpack
from weft.engines.mpi.placement import (
    WINDOW,
    MoveChunk,
    Placement,
    Stream,
    SumChunk,
    cut_streams,
    cut_sum,
    ring_for,
)

if TYPE_CHECKING:
    from weft.engines.mpi.service import Service, Waiting

_WEIGHT = struct.Struct("d")
COLOR = struct.Struct("?qq")
#: bytes of the largest reduction that is made in one exchange
_SMALL_SUM = 64 << 10
#: what the ranks' texts begin with, in the middle of a call
STREAMS, DESCRIBE = b"S", b"D"


# what ranks and agents tell each other


class Sum(NamedTuple):
    """Tell what an agent has to know of a reduction: how, and of each array its kind of number, its
    dtype and its bytes."""

    op: str
    root: int | None
    weighted: bool
    arrays: tuple[tuple[str, str, int], ...]

    def encode(self) -> bytes:
        return json.dumps(self).encode()


@lru_cache(maxsize=256)
def decode_sum(text: bytes) -> SumPlan:
    op, root, weighted, arrays = json.loads(text)
    return SumPlan(Sum(op, root, weighted, tuple(map(tuple, arrays))))


class SumPlan:
    """A reduction, laid out: where its arrays are in a slot, and their totals in a message."""

    def __init__(self, how: Sum) -> None:
        self.how = how
        self.elements = [element for element, _, _ in how.arrays]
        self.dtypes = [np.dtype(dtype) for _, dtype, _ in how.arrays]
        self.sizes = tuple(size for _, _, size in how.arrays)
        self.layout = layout_of(self.sizes)
        self.is_small = self.layout.size <= _SMALL_SUM
        kinds = zip(self.dtypes, self.elements, strict=True)
        self.wide = [
            wide_type(dtype, how.op, element, weighted=how.weighted) for dtype, element in kinds
        ]
        self.counts = [
            size // dtype.itemsize for size, dtype in zip(self.sizes, self.dtypes, strict=True)
        ]
        widths = [dtype.itemsize for dtype in self.wide]
        self.wide_layout = layout_of(
            tuple(count * width for count, width in zip(self.counts, widths, strict=True))
        )

    def views(self, buffer: Any) -> list[Any]:
        """Return the arrays that lie in a buffer."""
        return _views(buffer, self.layout, self.dtypes)

    def wide_views(self, buffer: Any) -> list[Any]:
        """Return the totals that lie in a buffer."""
        return _views(buffer, self.wide_layout, self.wide)

    def chunks(self, placement: Placement) -> list[SumChunk]:
        """Return the chunks in which the arrays go through the ring."""
        widths = [dtype.itemsize for dtype in self.wide]
        largest = ring_for(placement.most_on_a_host).chunk
        return cut_sum(self.counts, widths, hosts=len(placement.order), largest=largest)


def _views(buffer: Any, layout: Any, dtypes: Sequence[Any]) -> list[Any]:
    pairs = zip(layout.starts, layout.sizes, dtypes, strict=True)
    return [buffer[start : start + size].view(dtype) for start, size, dtype in pairs]


def most_eager(placement: Placement) -> int:
    """Return the bytes up to which a rank's arrays of a movement go with the first exchange."""
    return max(256, room_for(placement.most_on_a_host + 1) // (2 * len(placement.world)))


def color_of(answer: bytes) -> int | None:
    """Return the color that a rank has named in a split."""
    named, color, _ = COLOR.unpack(answer)
    return color if named else None


def parts_of_split(answers: Sequence[bytes]) -> dict[int, list[int]]:
    """Return the ranks of each color, ordered by key and then by rank."""
    from weft.engines.local.group import ranks_of_color

    decoded = [COLOR.unpack(answer) for answer in answers]
    colors = sorted({color for named, color, _ in decoded if named})
    return {color: ranks_of_color(color, decoded) for color in colors}


# the first step


def collective(service: Service) -> Waiting:
    """Carry out the first step of a collective, and the rest of a large reduction."""
    texts, arrays = yield from service.read_texts()
    commons, owns, orders = zip(*(unpack(text) for text in texts), strict=True)
    if any(common != commons[0] for common in commons):
        yield from service.exchange(0, b"")
        yield from service.differ(_in_words(commons))
        return
    plan = decode_sum(bytes(orders[0])) if len(orders[0]) else None
    if plan is None:
        body = pack([commons[0], *owns, *_eager_arrays(arrays)])
    else:
        body = pack([commons[0], *_own_total(plan, owns, arrays)])
    bodies = yield from service.exchange(COLLECTIVE, body)
    parts = [unpack(body) for body in bodies or ()]
    if bodies is None or any(part[0] != commons[0] for part in parts):
        yield from service.differ(_in_words(commons))
        return
    if plan is None:
        reply, more = _movement_reply(service.placement, parts)
        yield from service.reply(reply)
        service.midway = more
    else:
        yield from _sum(service, plan, [part[1:] for part in parts])


def _in_words(commons: Sequence[Any]) -> list[str]:
    return [bytes(common).decode(errors="replace") for common in commons]


def continue_collective(service: Service) -> Waiting:
    """Carry out what the ranks want next of a collective that is under way."""
    texts, _ = yield from service.read_texts()
    service.midway = False
    first = bytes(texts[0])
    if first.startswith(DESCRIBE):
        service.midway = False
        yield from service.differ([bytes(text)[1:].decode(errors="replace") for text in texts])
        return
    streams = [Stream(*entry) for entry in json.loads(first[1:])]
    service.meeting.arrive(UNDER_WAY, DONE)
    yield from move(service, streams)


# movements


def _eager_arrays(slots: Sequence[Any]) -> list[Any]:
    """Return what each rank of this host has put into its slot: a flag and the bytes."""
    parts: list[Any] = []
    for slot in slots:
        length = int.from_bytes(slot[:8].tobytes(), "little")
        parts += [b"\1" if len(slot) else b"\0", slot[64 : 64 + length].tobytes()]
    return parts


def _movement_reply(placement: Placement, parts: Sequence[Sequence[Any]]) -> tuple[Any, bool]:
    """Return all ranks' parts, whether their arrays follow, and the arrays; and whether some do."""
    size = len(placement.world)
    owns: list[Any] = [b""] * size
    arrays: list[Any] = [b""] * size
    flags = bytearray(size)
    for host, (_, *rest) in zip(placement.order, parts, strict=True):
        ranks = placement.ranks_on(host)
        for index, rank in enumerate(ranks):
            owns[rank] = rest[index]
            flag, arrays[rank] = rest[len(ranks) + 2 * index : len(ranks) + 2 * index + 2]
            flags[rank] = flag[0]
    return memoryview(pack([bytes(flags), *owns, *arrays])), not all(flags)


def read_movement_reply(reply: Any, size: int) -> tuple[list[bytes], list[Any]]:
    """Return all ranks' parts, and their arrays, None for those that are still to come."""
    flags, *rest = unpack(reply)
    owns = [bytes(own) for own in rest[:size]]
    arrays = [
        np.frombuffer(array, np.uint8) if flag else None
        for flag, array in zip(flags, rest[size:], strict=True)
    ]
    return owns, arrays


def move(service: Service, streams: Sequence[Stream]) -> Waiting:
    """Carry out a movement: put what other hosts send into the ring, send what they need."""
    meeting, memory = service.meeting, service.meeting.memory
    slots, base = memory.ring.slots, service.moved
    chunks = cut_streams(streams, service.placement, service.host, largest=memory.ring.chunk)
    passing: deque[_Passing] = deque()
    number = base
    following = next(chunks, None)
    try:
        while following is not None or passing:
            service.look()
            moved = False
            # a slot is free when everybody is done with what was in it
            while following is not None and (
                number < base + slots or min(memory.counts(DONE_WITH)) > number - slots
            ):
                passing.append(_Passing(service, following, number))
                number, following, moved = number + 1, next(chunks, None), True
            in_order, waiting = True, set()
            for chunk in passing:
                moved |= chunk.advance(in_order, chunk.target not in waiting)
                in_order &= not chunk.is_coming
                if chunk.is_to_send:
                    waiting.add(chunk.target)
            while passing and passing[0].is_done:
                meeting.publish_count(DONE_WITH, passing.popleft().number + 1)
            if moved:
                service.agent.progress += 1
            else:
                yield
    finally:
        for chunk in passing:
            service.mail.keep(chunk.requests, chunk)
    service.moved = number


class _Passing:
    """A chunk on its way through this host: it comes, from a rank of this host or from another
    host, and goes on to a host, or to none."""

    def __init__(self, service: Service, chunk: MoveChunk, number: int) -> None:
        self._service, self._chunk, self.number = service, chunk, number
        self._array = service.meeting.memory.chunk(number, chunk.length)
        self._sending: Any = None
        self._receiving: Any = None
        self._writer = -1
        #: whether it comes from another host, and the ranks have not been told that it is there
        self.is_coming = chunk.source is not None
        self.target = chunk.target
        self.is_to_send = chunk.target is not None
        self._is_there = self.is_done = False
        if chunk.source is None:
            self._writer = service.meeting.local.index(chunk.stream.rank)
        else:
            self._source = service.agents[chunk.source]
            self._receiving = service.mail.receive_chunk(self._array, self._source, service.tag)

    def advance(self, in_order: bool, may_send: bool) -> bool:
        """Do what can be done now; return whether that was anything. The ranks are told of chunks
        from other hosts `in_order`, and what goes to one host is sent in order."""
        if self.is_done:
            return False
        service, mail = self._service, self._service.mail
        moved = False
        if not self._is_there:
            self._is_there = moved = self._has_come()
            if not moved:
                return False
        if self.is_coming and in_order:
            service.meeting.publish_count(FILLED, self.number + 1)
            self.is_coming, moved = False, True
        if self.target is not None:
            peer = service.agents[self.target]
            if self.is_to_send and may_send:
                self._sending = mail.send_chunk(self._array, peer, service.tag)
                self.is_to_send, moved = False, True
            if self.is_to_send or not mail.test(self._sending, peer):
                return moved
        self.is_done = not self.is_coming
        return moved or self.is_done

    @property
    def requests(self) -> list[tuple[Any, int]]:
        """Return what is under way, and with whom."""
        found = []
        if self._receiving is not None and not self._is_there:
            found.append((self._receiving, self._source))
        if self._sending is not None and not self.is_done and self.target is not None:
            found.append((self._sending, self._service.agents[self.target]))
        return found

    def _has_come(self) -> bool:
        service = self._service
        if self._receiving is not None:
            return bool(service.mail.test(self._receiving, self._source))
        memory = service.meeting.memory
        there: bool = memory.words[memory.word(self._writer, FILLED)] > self.number
        return there


# reductions


def _own_total(plan: SumPlan, owns: Sequence[Any], slots: Sequence[Any]) -> list[Any]:
    """Return the weights of this host's ranks, and their total if it is small."""
    weights = [bytes(own) for own in owns] if plan.how.weighted else []
    if not plan.is_small:
        return weights
    inputs = [plan.views(slot) for slot in slots]
    total = np.zeros(plan.wide_layout.size, np.uint8)
    numbers = [_WEIGHT.unpack(weight)[0] for weight in weights] or None
    for index, wide in enumerate(plan.wide_views(total)):
        parts = [views[index] for views in inputs]
        accumulate(parts, wide, plan.how.op, plan.elements[index], numbers)
    return [*weights, total]


def _sum(service: Service, plan: SumPlan, parts: Sequence[Sequence[Any]]) -> Waiting:
    """Finish a small reduction; begin and carry out a large one."""
    placement = service.placement
    owns: list[bytes] = [b""] * len(placement.world)
    weights: list[float] = []
    for host, part in zip(placement.order, parts, strict=True):
        ranks = placement.ranks_on(host)
        if not plan.how.weighted:
            weights.append(float(len(ranks)))
            continue
        for rank, own in zip(ranks, part, strict=False):
            owns[rank] = bytes(own)
        weights.append(sum(_WEIGHT.unpack(owns[rank])[0] for rank in ranks))
    head = pack(owns if plan.how.weighted else [])
    if not plan.is_small:
        yield from service.reply(memoryview(head))
        if sum(weights):  # else all ranks raise InvalidValue
            yield from _pipelined_sum(service, plan, weights)
        return
    at = aligned(len(head))
    whole = np.zeros(at + plan.layout.size, np.uint8)
    whole[: len(head)] = np.frombuffer(head, np.uint8)
    if sum(weights):
        totals = [plan.wide_views(np.frombuffer(part[-1], np.uint8)) for part in parts]
        for index, out in enumerate(plan.views(whole[at:])):
            terms = [views[index] for views in totals]
            _combine(plan, index, terms, weights, out)
    yield from service.reply(whole)


def _combine(
    plan: SumPlan, index: int, totals: Sequence[Any], weights: Sequence[float], out: Any
) -> None:
    """Combine the totals of the hosts into the result."""
    counted = [total for total, weight in zip(totals, weights, strict=True) if weight]
    wide = plan.wide[index]
    total = out if wide == out.dtype else np.empty(out.shape, wide)
    accumulate(counted, total, plan.how.op, wide.name)
    finish(total, out, plan.how.op, plan.elements[index], sum(weights))


def read_sum_reply(reply: Any, plan: SumPlan, size: int) -> tuple[list[bytes], list[Any] | None]:
    """Return all ranks' parts and, of a small reduction, the results."""
    owns = [bytes(own) for own in unpack(reply)] or [b""] * size
    if not plan.is_small:
        return owns, None
    return owns, plan.views(reply[aligned(packed_size(reply)) :])


def _pipelined_sum(service: Service, plan: SumPlan, weights: Sequence[float]) -> Waiting:
    """Carry out a large reduction. Chunks begin and end in order, WINDOW are under way."""
    meeting, base = service.meeting, service.summed
    chunks = plan.chunks(service.placement)
    locals_ = len(meeting.local)
    under_way: deque[_Summing] = deque()
    ending: deque[_Summing] = deque()
    begun = ended = base
    try:
        while ended < base + len(chunks) or ending:
            service.look()
            moved = False
            while begun < base + len(chunks) and len(under_way) < WINDOW:
                place = begun % locals_
                if meeting.memory.words[meeting.memory.word(place, SUMMED)] <= begun:
                    break
                if ending and ending[0].number <= begun - WINDOW:
                    break  # its result, which lies where this one's goes, is still being sent
                under_way.append(_Summing(service, plan, chunks[begun - base], begun, weights))
                begun, moved = begun + 1, True
            waits = False
            for summing in under_way:
                # results are sent in the order of the chunks, as they are waited for in that order
                if not (waits and summing.is_owned):
                    moved |= summing.advance()
                    waits |= summing.is_owned and not summing.has_result
            while under_way and under_way[0].has_result:
                ended += 1
                meeting.publish_count(SUMMED, ended)
                ending.append(under_way.popleft())
                moved = True
            while ending and ending[0].advance_sends():
                ending.popleft()
                moved = True
            if moved:
                service.agent.progress += 1
            else:
                yield
    finally:
        for summing in (*under_way, *ending):
            service.mail.keep(summing.requests, summing)
    service.summed = ended


def input_slot(place: int, number: int) -> int:
    """Return where in the ring a rank puts its numbers of a chunk."""
    return place * WINDOW + number % WINDOW


def total_slot(locals_: int, number: int) -> int:
    """Return where in the ring the total of this host is put."""
    return locals_ * WINDOW + number % WINDOW


def result_slot(locals_: int, number: int) -> int:
    """Return where in the ring the result is put."""
    return (locals_ + 1) * WINDOW + number % WINDOW


class _Summing:
    """A chunk of a reduction whose total of this host is there."""

    def __init__(
        self,
        service: Service,
        plan: SumPlan,
        chunk: SumChunk,
        number: int,
        weights: Sequence[float],
    ) -> None:
        self._service, self._plan, self._chunk, self.number = service, plan, chunk, number
        self._weights = weights
        self.has_result = False
        memory, hosts = service.meeting.memory, service.hosts
        count = chunk.stop - chunk.start
        wide, dtype = plan.wide[chunk.array], plan.dtypes[chunk.array]
        locals_ = len(service.meeting.local)
        self._total = memory.chunk(total_slot(locals_, number), count * wide.itemsize)
        self._result = memory.chunk(result_slot(locals_, number), count * dtype.itemsize)
        self._owner = hosts[(number - service.summed) % len(hosts)]
        self.is_owned = self._owner == service.host
        root = plan.how.root
        self._wanted = set(hosts) if root is None else {service.placement.host_of[root]}
        self._parts: dict[int, Any] = {}
        self._receiving: list[tuple[Any, int]] = []
        self._sending: list[tuple[Any, int]] = []
        mail, tag = service.mail, service.tag
        if self.is_owned:
            for host in hosts:
                if host != service.host and weights[hosts.index(host)]:
                    self._parts[host] = np.empty(count * wide.itemsize, np.uint8)
                    peer = service.agents[host]
                    request = mail.receive_chunk(self._parts[host], peer, tag)
                    self._receiving.append((request, peer))
            self._parts[service.host] = self._total
        else:
            peer = service.agents[self._owner]
            if service.host in self._wanted:
                self._receiving.append((mail.receive_chunk(self._result, peer, tag + 1), peer))
            if weights[service.at]:
                self._sending.append((mail.send_chunk(self._total, peer, tag), peer))

    def advance(self) -> bool:
        """Do what can be done now; return whether that was anything."""
        if self.has_result:
            return False
        mail = self._service.mail
        while self._receiving and mail.test(*self._receiving[-1]):
            self._receiving.pop()
        if self._receiving:
            return False
        if self.is_owned:
            self._combine()
        elif self._sending and self._service.host not in self._wanted:
            return self.advance_sends() and self._ended()
        return self._ended()

    def _ended(self) -> bool:
        self.has_result = True
        return True

    def _combine(self) -> None:
        service, plan, array = self._service, self._plan, self._chunk.array
        wide, dtype = plan.wide[array], plan.dtypes[array]
        pairs = list(zip(service.hosts, self._weights, strict=True))
        totals = [self._parts[host].view(wide) for host, weight in pairs if weight]
        weights = [weight for _, weight in pairs if weight]
        _combine(plan, array, totals, weights, self._result.view(dtype))
        for host in self._wanted - {service.host}:
            peer = service.agents[host]
            request = service.mail.send_chunk(self._result, peer, service.tag + 1)
            self._sending.append((request, peer))

    @property
    def requests(self) -> list[tuple[Any, int]]:
        """Return what is under way, and with whom."""
        return [*self._receiving, *self._sending]

    def advance_sends(self) -> bool:
        """Return whether all that this host sends of the chunk has been sent."""
        mail = self._service.mail
        while self._sending and mail.test(*self._sending[-1]):
            self._sending.pop()
        return not self._sending
