"""Collectives of tensors on a device: reductions and broadcasts, which are the large ones.

As on the host, a rank fills its slot, comes to the step, and reads the slots that it needs. Here
the slots are memory of a device, and one thing more is needed for order: a rank waits for its own
stream before it comes to a step. So all waiting for peers is the meeting's, where deaths and
deadlines are seen, and nothing on the device ever waits for another process.

    fill       my numbers            --copy-->  my slot, of one of two sets in turn
    order      my stream has done that, and what I read two steps ago
    step       all have come
    combine    every rank's slot     --add, in rank order-->  my result, on my stream

The next step of this kind uses the other set, and waits for this one's reads: so a slot is filled
again only when nobody reads it any more.

Which memory the slots are, or whether numbers go through the host instead, is decided by
`choose_path` at the first call, from what all ranks know by then. Gathers and scatters of tensors
go through the host.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

from weft import faults
from weft._core.arguments import seconds_until
from weft._core.arithmetic import BFLOAT16, combine
from weft._core.arrays import as_bytes
from weft._core.calls import Call, Combination, Layout, Movement, Piece, Reduce, elements, layout_of
from weft._core.moves import Broadcast
from weft.engines.local.collectives.persistent import FallBack, PersistentReduction
from weft.engines.local.collectives.transport import (
    ROOM,
    Header,
    Headers,
    SettledHeaders,
    Transport,
)
from weft.engines.local.meeting.devices import TROUBLES, map_segments, raise_any
from weft.engines.local.meeting.meeting import (
    COLLECTIVE,
    UNDER_WAY,
    Meeting,
    in_words,
    make_block,
)
from weft.engines.local.memory import cuda
from weft.errors import InvalidValue, SetupError, WeftError

#: what a rank says of its arrays on a device at the first step: there are none; they are not in a
#: slot, because the slots are still to be made; because they do not fit; they are
NONE, NEEDED, OUTSIDE, IN_SLOT = range(4)
#: the variable that names the path to take, for tests and for who knows better
VARIABLE = "WEFT_GPU_PATH"
#: bytes of the first slots, and of the largest: what does not fit goes in rounds
_FIRST, _LARGEST = 4 << 20, 256 << 20
#: bytes a second that go through the host where ranks of one GPU do, and the time of such a call
_STAGED_RATE, _STAGED_CALL = 6e9, 40e-6
_TRIES = 5
#: persistent reductions that are kept
_MOST_REDUCTIONS = 64


class Path(Enum):
    """Tell how the numbers of tensors get from rank to rank."""

    #: through slots on the devices
    DEVICE = "device"
    #: through slots in memory of the host that the devices reach
    HOST = "host"
    #: copied to the host, and back from there, by a collective of the host
    STAGED = "staged"


class Facts(NamedTuple):
    """Tell what a rank knows of its device."""

    #: which GPU it is; "" if this rank can use none
    identity: str
    #: whether its processes use it at once, and not by turns
    mps: bool


class Policy(NamedTuple):
    """Tell which path a group takes: that, or from so few bytes on the one through the host."""

    path: Path
    staged_below: int = 0

    def of(self, nbytes: int) -> Path:
        return Path.STAGED if nbytes < self.staged_below else self.path


def choose_path(
    facts: Sequence[Facts], *, mapped: bool, turn: float = 0.0, forced: str = ""
) -> Policy:
    """Return the path for a group of ranks with these devices. Pure.

    `mapped` tells whether all ranks map each other's device memory, and `turn` how many seconds a
    small piece of work takes while all ranks have some. Ranks that use one GPU by turns pay for two
    of these in a collective on the device, and for none when the numbers go through the host, which
    copies without them. So there arrays that fit a slot on the host take that way.
    """
    if forced:
        return Policy(Path(forced))
    if not all(fact.identity for fact in facts):
        return Policy(Path.STAGED)
    if not mapped:
        return Policy(Path.HOST)
    shared = len({fact.identity for fact in facts}) < len(facts)
    if not shared or all(fact.mps for fact in facts):
        return Policy(Path.DEVICE)
    border = int((2 * turn - _STAGED_CALL) * _STAGED_RATE)
    return Policy(Path.DEVICE, max(0, min(border, ROOM)))


class DeviceCollectives:
    """The device of one rank of a group, and its slots."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._policy: Policy | None = None
        self._slots: Slots | None = None
        self._device = ""
        self._largest = _LARGEST
        #: how many times the slots were used, by any rank
        self.turn = 0
        self._order: Any = None
        #: what keeps the slots on the host registered; False: they cannot be
        self._registered: Any = None
        #: by operation, dtype, shape and device
        self._persistent: dict[tuple[Any, ...], PersistentOnDevice | PersistentStaged] = {}

    def place_of(self, call: Call) -> str | None:
        """Return where a call is to have its arrays: on their device, or on the host."""
        if not _fits(call):
            return None
        if self._policy is None:
            return call.device
        few = len(call.leaves) == 1  # several are joined by the device, which takes a turn anyway
        nbytes = nbytes_of(call) if few else self._policy.staged_below
        return None if self._policy.of(nbytes) is Path.STAGED else call.device

    def fill(self, call: Call) -> int:
        """Copy a call's arrays to this rank's slot, if they fit. Return what to tell the others."""
        if self._slots is None:
            return NEEDED
        if call.layout.size > self._slots.room:
            return OUTSIDE
        self._slots.fill(self.turn, self._meeting.rank, call.source, call.layout.pieces)
        if faults.armed:
            faults.reach("collective.filled")
        self.finish_filling()
        return IN_SLOT

    def finish_filling(self) -> None:
        """Return when this rank's stream, and its earlier reads, are done."""
        self._order.await_reads()
        self._order.synchronize()

    def end_turn(self) -> None:
        """Go on to the other set of slots."""
        self.turn += 1
        self._order.note_reads()

    def await_reads(self) -> None:
        """Return when this rank has read what it needs of the slots, so that others may fill them
        again once it has come to the next step."""
        if self._order is not None:
            self._order.await_reads()

    def carry_out(self, plan: Combination | Movement, headers: SettledHeaders) -> None:
        """Combine or move, after the first step."""
        filled = all(header.device in (NONE, IN_SLOT) for header in headers.ranks)
        if isinstance(plan, Combination):
            self._combine(plan, headers, filled)
        else:
            self._move(plan, headers, filled)

    # reductions

    def _combine(self, plan: Combination, headers: SettledHeaders, filled: bool) -> None:
        call = headers.call
        if filled:
            self._combine_pieces(plan, call.source, call.layout.pieces)
            return
        room = self._grow(call.layout.size, headers.deadline).room
        for start in range(0, call.layout.size, room):
            pieces = call.layout.window(start, start + room)
            self._fill_and_step(call.source, pieces, headers)
            self._combine_pieces(plan, call.source, pieces)

    def _combine_pieces(
        self, plan: Combination, source: Sequence[Any], pieces: Sequence[Piece]
    ) -> None:
        """Combine these pieces from the slots."""
        slots, own, size = self._ready_slots(), self._meeting.rank, len(self._meeting.members)
        for piece in pieces if plan.target else ():
            out: Any = elements(plan.target, piece)
            mine: Any = elements(source, piece)
            parts = [
                slots.view(self.turn, rank, piece.at, out.nbytes).view(out.dtype)
                for rank in range(size)
            ]
            if can_read_own(mine, out, own) and mine.device == parts[0].device:
                parts[own] = mine
            at = out if out.device == parts[0].device else out.to(parts[0].device)
            combine(parts, at, plan.op, plan.elements[piece.array], plan.weights)
            if at is not out:
                out.copy_(at)
        self.end_turn()

    # broadcasts

    def _move(self, plan: Movement, headers: SettledHeaders, filled: bool) -> None:
        call, rank = headers.call, self._meeting.rank
        (root,) = (rank for rank, header in enumerate(headers.ranks) if header.device)
        layout = layout_of(tuple(plan.sizes[root]))
        room = layout.size if filled else self._grow(layout.size, headers.deadline).room
        for first in range(0, layout.size, max(room, 1)):
            if not filled:
                pieces = layout.window(first, first + room) if rank == root else ()
                parts = [as_bytes(array) for array in call.source]
                self._fill_and_step(parts, pieces, headers)
            self._take(plan, layout, root, first, first + room)
        for copy in plan.incoming if rank == root else ():
            source, target = call.source[copy.from_array], plan.target[copy.to_array]
            target.copy_(source)  # type: ignore[attr-defined]

    def _take(self, plan: Movement, layout: Layout, root: int, first: int, last: int) -> None:
        """Copy from the root's slot what this rank gets of a window."""
        slots = self._ready_slots()
        for copy in plan.incoming if self._meeting.rank != root else ():
            begin = layout.starts[copy.from_array] + copy.from_byte
            low, high = max(first, begin), min(last, begin + copy.length)
            if low < high:
                target = as_bytes(plan.target[copy.to_array])
                start = copy.to_byte + low - begin
                part = slots.view(self.turn, root, low - first, high - low)
                target[start : start + high - low] = part
        self.end_turn()

    # turns

    def _fill_and_step(
        self, source: Sequence[Any], pieces: Sequence[Piece], headers: SettledHeaders
    ) -> None:
        self._ready_slots().fill(self.turn, self._meeting.rank, source, pieces)
        if faults.armed:
            faults.reach("collective.round")
        self.finish_filling()
        self._meeting.meet(UNDER_WAY, headers.seconds)

    # the slots

    def set_up(self, device: str | None, deadline: float) -> None:
        """Decide on the path, and make the first slots. All ranks take part; `device` is that of
        this rank's arrays, if it gave some on a device. Raises SetupError on every rank."""
        if self._policy is not None:
            return
        facts, forced = self._exchange_facts(device, deadline)
        policy = choose_path(facts, mapped=True, forced=forced)
        if policy.path is Path.DEVICE:
            try:
                self._slots = Slots.on_devices(self._meeting, _FIRST, self._device, deadline)
            except SetupError:  # on every rank
                policy = choose_path(facts, mapped=False)
            else:
                turn = self._measure_turn(deadline)
                policy = choose_path(facts, mapped=True, turn=turn, forced=forced)
        if policy.path is Path.HOST:
            try:
                self._slots = Slots.on_host(self._meeting, _FIRST, self._device, deadline)
            except SetupError:
                policy = Policy(Path.STAGED)
        self._order = None if policy.path is Path.STAGED else _torch().Order(self._device)
        self._policy = policy

    def _exchange_facts(self, device: str | None, deadline: float) -> tuple[list[Facts], str]:
        """Return the facts of all ranks, and the path that the user has named, if any. Raises
        InvalidValue on every rank if that is none."""
        facts = Facts("", False)
        try:
            self._device = device or _torch().here("cuda")
            facts = _facts_of(self._device)
        except (*TROUBLES, ImportError, AssertionError):  # this rank can use no GPU
            self._device = ""
        message = json.dumps([*facts, os.environ.get(VARIABLE, "")]).encode()
        answers = self._meeting.exchange(UNDER_WAY, message, seconds_until(deadline))
        known = [json.loads(answer) for answer in answers]
        forced = next((path for _, _, path in known if path), "")
        if forced not in ("", *(path.value for path in Path)):
            raise InvalidValue(
                f"{VARIABLE}={forced}: expected one of {', '.join(path.value for path in Path)}"
            )
        return [Facts(identity, mps) for identity, mps, _ in known], forced

    def _measure_turn(self, deadline: float) -> float:
        """Return how many seconds a small piece of work takes while all ranks have some."""
        slots, times = self._ready_slots(), []
        word: Any = slots.view(0, self._meeting.rank, 0, 64)
        for _ in range(_TRIES):
            self._meeting.meet(UNDER_WAY, seconds_until(deadline))
            began = time.perf_counter()
            word.zero_()
            _torch().synchronize(self._device)
            times.append(time.perf_counter() - began)
        own = json.dumps(sorted(times)[_TRIES // 2]).encode()
        answers = self._meeting.exchange(UNDER_WAY, own, seconds_until(deadline))
        return float(max(map(json.loads, answers)))

    def _grow(self, size: int, deadline: float) -> Slots:
        """Return slots with room for `size` bytes, or the largest that there are; all ranks ask for
        the same."""
        slots = self._ready_slots()
        wanted = min(1 << max(size - 1, 0).bit_length(), self._largest)
        if wanted > slots.room:
            self.await_reads()
            make = Slots.on_devices if slots.path is Path.DEVICE else Slots.on_host
            try:
                self._slots = slots = make(self._meeting, wanted, self._device, deadline)
            except SetupError:  # on every rank: large arrays go in more rounds
                self._largest = slots.room
        return slots

    # persistent reductions

    def persistent(
        self, value: Any, op: Any, out: Any
    ) -> PersistentOnDevice | PersistentStaged | None:
        """Return the persistent reduction for an all_reduce of a tensor, if there is one."""
        if not self._persistent or type(op) is not str:
            return None
        key = op, value.dtype, value.shape, value.device
        reduction = self._persistent.get(key)
        return reduction if reduction is not None and reduction.takes(value, out) else None

    def make_persistent(
        self,
        call: Reduce,
        transport: Transport,
        *,
        fall_back: FallBack,
        disagreement_error: Callable[[Sequence[bytes]], WeftError],
    ) -> None:
        """Make a persistent reduction for calls like this one, which was carried out, if it can be
        one."""
        value = call.value
        if call.own or self._policy is None or not _torch().is_plain(value):
            return
        key = call.op, value.dtype, value.shape, value.device
        if call.placed is not None and self._slots is not None:
            if call.layout.size <= self._slots.room:
                message = Header(True, call.common, b"", device=IN_SLOT).encode()
                self._keep(key, PersistentOnDevice(self, message, call.op, value, fall_back))
        elif call.layout.size <= transport.slots.room and call.elements[0] != BFLOAT16:
            reduction = PersistentReduction(
                transport,
                message=Header(True, call.common, b"").encode(),
                like=call.source[0].reshape(value.shape),
                op=call.op,
                disagreement_error=disagreement_error,
            )
            self._register(transport, value)
            self._keep(key, PersistentStaged(reduction, self._meeting, value))

    def _register(self, transport: Transport, like: Any) -> None:
        """Make this rank's device reach the slots on the host, where that is possible."""
        if self._registered is None and like.device.type == "cuda":
            try:
                self._registered = cuda.RegisteredBlock(
                    transport.slots.block, _torch().number_of(str(like.device))
                )
            except cuda.CudaError:  # then copies take longer
                self._registered = False

    def _keep(self, key: Any, reduction: PersistentOnDevice | PersistentStaged) -> None:
        if len(self._persistent) >= _MOST_REDUCTIONS:
            self._persistent.clear()
        self._persistent[key] = reduction

    @property
    def meeting(self) -> Meeting:
        return self._meeting

    @property
    def slots(self) -> Slots:
        return self._ready_slots()

    def _ready_slots(self) -> Slots:
        if self._slots is None:
            raise SetupError("the slots on devices have not been made")
        return self._slots


def can_read_own(mine: Any, out: Any, rank: int) -> bool:
    """Return whether a rank may take its own numbers from where they are, and not from its slot. In
    place only those of ranks 0 and 1 are read before the first result is written."""
    return rank < 2 or mine.data_ptr() != out.data_ptr()


def nbytes_of(call: Call) -> int:
    """Return the bytes of a call's arrays."""
    return sum(leaf.nbytes for leaf in call.leaves)


def _facts_of(device: str) -> Facts:
    if not device.startswith("cuda"):
        return Facts(device, False)
    number = _torch().number_of(device)
    return Facts(cuda.identity(number), cuda.is_shared_by_mps(number))


class PersistentOnDevice:
    """all_reduce of tensors of one dtype and shape, each of which fits a slot on a device."""

    def __init__(
        self,
        devices: DeviceCollectives,
        message: bytes,
        op: str,
        like: Any,
        fall_back: FallBack,
    ) -> None:
        self._devices, self._message, self._op = devices, message, op
        self._nbytes, self._dtype, self._shape = like.nbytes, like.dtype, like.shape
        self._rank, self._fall_back = devices.meeting.rank, fall_back
        self._slots: Slots | None = None
        #: every rank's slot, of both sets
        self._parts: list[list[Any]] = []

    def takes(self, value: Any, out: Any) -> bool:
        """Return whether a tensor of the prepared dtype and shape can be reduced this way."""
        return bool(_torch().can_write(value, out))

    def run(self, value: Any, out: Any, seconds: float) -> Any:
        """Return the result."""
        devices, deadline = self._devices, time.monotonic() + seconds
        meeting, slots = devices.meeting, devices.slots
        if slots is not self._slots:
            self._take_slots(slots)
        step = meeting.begin_step(seconds)
        parts = self._parts[devices.turn & 1]
        mine = value.detach()
        parts[self._rank].copy_(mine)
        if faults.armed:
            faults.reach("collective.filled")
        devices.finish_filling()
        answers = meeting.exchange_if_equal(COLLECTIVE, self._message, seconds_until(deadline))
        if out is None:
            out = _torch().like(mine)
        if answers is not None:
            headers = Headers(step, self._message, answers)
            self._fall_back(value, out, self._op, headers, deadline)
            return out
        if faults.armed:
            faults.reach("collective.met")
        if can_read_own(mine, out, self._rank):
            parts = [*parts]
            parts[self._rank] = mine
        _torch().combine(parts, out, self._op)
        devices.end_turn()
        if faults.armed:
            faults.reach("collective.carried")
        return out

    def _take_slots(self, slots: Slots) -> None:
        """Prepare views of the slots, which may have grown."""
        self._slots = slots
        self._parts = [
            [
                slots.view(turn, rank, 0, self._nbytes).view(self._dtype).view(self._shape)
                for rank in range(len(self._devices.meeting.members))
            ]
            for turn in (0, 1)
        ]


class PersistentStaged:
    """all_reduce of small tensors of one dtype and shape, through the slots on the host."""

    def __init__(self, reduction: PersistentReduction, meeting: Meeting, like: Any) -> None:
        self._reduction, self._meeting = reduction, meeting
        self._buffers = _torch().StagedBuffers(like, reduction.own)

    def takes(self, value: Any, out: Any) -> bool:
        """Return whether a tensor of the prepared dtype and shape can be reduced this way."""
        return bool(_torch().can_write(value, out))

    def run(self, value: Any, out: Any, seconds: float) -> Any:
        """Return the result."""
        buffers, reduction, deadline = self._buffers, self._reduction, time.monotonic() + seconds
        half = self._meeting.begin_step(seconds) & 1
        buffers.fetch(value, half)
        reduction.run_filled(half, reduction.own[half], buffers.result, seconds_until(deadline))
        return buffers.deliver(value, out)


def _fits(call: Call) -> bool:
    """Return whether a call is one of those that devices carry out."""
    if isinstance(call, Broadcast):
        return True
    if not isinstance(call, Reduce):
        return False
    return all(_torch().can_combine(leaf.element, call.op) for leaf in call.leaves)


class Slots:
    """Two sets of slots, one for each rank, as bytes on this rank's device."""

    def __init__(self, path: Path, room: int, sets: Sequence[Sequence[Any]]) -> None:
        self.path, self.room, self._sets = path, room, sets

    @classmethod
    def on_devices(cls, meeting: Meeting, room: int, device: str, deadline: float) -> Slots:
        """Make slots that lie on their ranks' devices. Raises SetupError on every rank."""
        number = _torch().number_of(device)
        segments = map_segments(meeting, 2 * room, number, deadline)
        whole = [segment.tensor() for segment in segments]
        for segment in segments:
            segment.close_descriptor()
        return cls(
            Path.DEVICE, room, [[one[k * room : (k + 1) * room] for one in whole] for k in (0, 1)]
        )

    @classmethod
    def on_host(cls, meeting: Meeting, room: int, device: str, deadline: float) -> Slots:
        """Make slots in memory of the host, for all ranks' devices. Raises SetupError on every
        rank."""
        size = len(meeting.members)
        block = make_block(
            meeting,
            UNDER_WAY,
            leader=meeting.members[0],
            size=2 * size * room,
            seconds=seconds_until(deadline),
            point="collective.made",
        )
        trouble = b""
        whole: Any = None
        try:
            if device.startswith("cuda"):
                whole = cuda.RegisteredBlock(block, _torch().number_of(device)).tensor()
            else:
                whole = _torch().over(block.buffer)
        except TROUBLES as error:
            trouble = in_words(error)
        raise_any(meeting, trouble, deadline)
        cut = [whole[start : start + room] for start in range(0, 2 * size * room, room)]
        return cls(Path.HOST, room, [cut[:size], cut[size:]])

    def fill(self, turn: int, rank: int, arrays: Sequence[Any], pieces: Sequence[Piece]) -> None:
        """Queue copies of pieces of arrays to a rank's slot."""
        for piece in pieces:
            part: Any = elements(arrays, piece)
            self.view(turn, rank, piece.at, part.nbytes).view(part.dtype).copy_(
                part, non_blocking=True
            )

    def view(self, turn: int, rank: int, at: int, length: int) -> Any:
        """Return `length` bytes of a rank's slot, from byte `at` on."""
        return self._sets[turn & 1][rank][at : at + length]


def _torch() -> Any:
    from weft.adapters import torch_arrays

    return torch_arrays
