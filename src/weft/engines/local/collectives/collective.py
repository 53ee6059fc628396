"""How the local engine carries out a collective, from its headers to its result.

    every rank
      small enough? fill the slot          the arrays travel with the first step
      step: exchange headers               unequal shared parts: Disagreement, on every rank
      settle                               the plan, the same on all ranks
      small: read the slots                done, after one step
      large: carry out                     by the quickest path that is open (carry_out.Path)
      on a device: carry out there         once all have agreed on how (device.py)

All ranks take the same path, because they decide by what they all know. Sums are made in the order
of ranks on every path, so the bits are the same too.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from weft import faults
from weft._core.arguments import seconds_until
from weft._core.arithmetic import Array, address
from weft._core.calls import Call, Combination, Reduce, UnlikeArrays
from weft.engines.local.collectives import carry_out, device, transport
from weft.engines.local.collectives.device import DeviceCollectives
from weft.engines.local.collectives.persistent import (
    PersistentPipelinedSum,
    PersistentReduction,
    PersistentSum,
)
from weft.engines.local.collectives.pipelined import can_pipeline, has_kernels
from weft.engines.local.collectives.transport import (
    Header,
    Headers,
    Location,
    Peers,
    SettledHeaders,
    Transport,
    allow_ptrace,
    length_of,
    shared_part_of,
)
from weft.engines.local.meeting.meeting import (
    COLLECTIVE,
    MAILBOX_BYTES,
    UNDER_WAY,
    Meeting,
    make_block,
)
from weft.engines.local.memory.arrays import block_of
from weft.errors import WeftError

_SECRET = struct.Struct("QQ")
#: persistent reductions that are kept
_MOST_REDUCTIONS = 256
#: persistent sums in place that are kept, and with them the mappings of other ranks' arrays
_MOST_SUMS = 4


class Collectives:
    """The collectives of one group, on one rank."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._transport: Transport | None = None
        #: made at the first call with arrays on a device
        self._devices: DeviceCollectives | None = None
        #: by operation, dtype and shape
        self._persistent: dict[tuple[Any, ...], PersistentReduction | PersistentPipelinedSum] = {}
        #: by the array's location, dtype, shape and strides
        self._sums: dict[tuple[Any, ...], PersistentSum] = {}

    def carry_out(self, call: Call, seconds: float) -> None:
        """Carry out a call until it has its result. Every rank makes the same call. Raises
        Disagreement and InvalidValue on every rank, at the end of a step; any other exception
        leaves the ranks out of step."""
        deadline = time.monotonic() + seconds
        transport = self._transport or self._set_up(deadline)
        self._after_meeting(transport, call, self._meet(transport, call, deadline), deadline)

    def _after_meeting(
        self, transport: Transport, call: Call, headers: Headers, deadline: float
    ) -> None:
        """Do all that follows the first step."""
        settled = self._settle_headers(transport, call, headers, deadline)
        if any(header.device == device.NEEDED for header in settled.ranks):
            self._devices = self._devices or DeviceCollectives(self._meeting)
            self._devices.set_up(call.device, deadline)
            if call.placed is not None:
                call.place(self._devices.place_of(call))
            self._after_meeting(transport, call, self._meet(transport, call, deadline), deadline)
            return
        if faults.armed:
            faults.reach("collective.met")
        try:
            plan = call.settle([header.rank_part for header in settled.ranks])
        except UnlikeArrays as unlike:
            words = {rank: f"{call.name}({given})" for rank, given in unlike.ranks.items()}
            raise self._meeting.disagreement_error(words) from None
        if self._devices is not None and any(header.device for header in settled.ranks):
            self._devices.carry_out(plan, settled)
            still_used = False
        elif isinstance(plan, Combination):
            still_used = carry_out.carry_out_combination(transport, plan, settled)
        else:
            still_used = carry_out.carry_out_movement(transport, plan, settled)
        if faults.armed:
            faults.reach("collective.carried")
        # others may still be reading: after several steps, this rank's slot of the first, which it
        # may fill again now; or its own memory
        if settled.several_steps or still_used:
            transport.step(settled.seconds)
        call.finish()  # inside the call: if it is interrupted, this rank is out of step
        if isinstance(plan, Combination) and len(call.source) == 1:
            self._make_persistent_sum(transport, plan, headers, settled)

    def persistent(self, value: Any, op: Any, out: Any) -> Any:
        """Return the persistent reduction for an all_reduce of a plain array, if there is one."""
        if type(value) is not np.ndarray or type(op) is not str:
            on_device = self._devices is not None and hasattr(value, "device")
            return self._devices.persistent(value, op, out) if on_device else None  # type: ignore[union-attr]
        reduction = self._persistent.get((op, value.dtype, value.shape))
        if reduction is not None and reduction.takes(value, out):
            return reduction
        in_place = out is value and op == "sum" and value.flags.behaved
        return self._sums.get(_key_of(value)) if in_place and self._sums else None

    def place_of(self, call: Call) -> str | None:
        """Return where a call is to have its arrays on a device: there, or on the host (None)."""
        self._devices = self._devices or DeviceCollectives(self._meeting)
        return self._devices.place_of(call)

    def close(self) -> None:
        """Drop the persistent reductions, and with them the mappings of other ranks' memory."""
        self._persistent.clear()
        self._sums.clear()
        self._devices = None

    def make_persistent(self, call: Call) -> None:
        """Make a persistent reduction for calls like this one, which was carried out, if it can be
        one."""
        transport = self._transport
        if transport is None or not isinstance(call, Reduce) or call.own:
            return
        value, op = call.value, call.op
        if type(value) is not np.ndarray:
            if self._devices is not None and call.device is not None:
                self._devices.make_persistent(
                    call,
                    transport,
                    fall_back=self._fall_back,
                    disagreement_error=self._disagreement_error,
                )
            return
        small = call.layout.size <= transport.slots.room
        memory = transport.pipelined_memory if not small and can_pipeline(call) else None
        if not value.dtype.isnative or not (small or memory):
            return
        if len(self._persistent) >= _MOST_REDUCTIONS:
            self._persistent.clear()
        message = Header(small, call.common, b"").encode()
        self._persistent[op, value.dtype, value.shape] = (
            PersistentReduction(
                transport,
                message=message,
                like=value,
                op=op,
                disagreement_error=self._disagreement_error,
            )
            if memory is None
            else PersistentPipelinedSum(
                memory, transport, message=message, op=op, fall_back=self._fall_back
            )
        )

    def _make_persistent_sum(
        self, transport: Transport, plan: Combination, headers: Headers, settled: SettledHeaders
    ) -> None:
        """Make a persistent sum of a flat array that was summed in place, if it can be one."""
        if settled.ranks[0].in_slot or settled.several_steps:
            return
        pieces = carry_out.sums_in_place(transport, plan, settled)
        (flat,) = settled.call.source
        if pieces is None or self._reduce(flat, flat, "sum").common != settled.call.common:
            return  # the array was given in another shape, or in a list
        key = _key_of(flat)
        if key not in self._sums and len(self._sums) >= _MOST_SUMS:
            self._sums.clear()
        locations = [(*header.sources, *header.targets) for header in settled.ranks]
        self._sums[key] = PersistentSum(
            transport,
            headers=headers,
            locations=locations,
            pieces=pieces,
            fall_back=self._fall_back,
        )

    def _fall_back(
        self, value: Array, out: Array, op: str, headers: Headers, deadline: float
    ) -> None:
        """Carry out an all_reduce in the general way: it was persistent here, but the headers of
        the first step differ."""
        transport = self._transport or self._set_up(deadline)
        self._after_meeting(transport, self._reduce(value, out, op), headers, deadline)

    def _reduce(self, value: Array, out: Array, op: str) -> Reduce:
        rank, size = self._meeting.rank, len(self._meeting.members)
        call = Reduce("all_reduce", rank, size, value, op=op, weight=None, out=out)
        if call.device is not None:
            call.place(call.device)
        return call

    # the first step

    def _meet(self, transport: Transport, call: Call, deadline: float) -> Headers:
        """Do the first step: exchange headers, or the beginnings of those that are too long."""
        meeting = self._meeting
        step = meeting.begin_step(seconds_until(deadline))
        if self._devices is not None:
            self._devices.await_reads()
        message = Header(True, call.common, call.own).encode()
        if call.placed is not None and self._devices is not None:
            state = self._devices.fill(call)
            message = Header(True, call.common, call.own, device=state).encode()
        elif call.layout.size <= transport.slots.room and len(message) <= MAILBOX_BYTES:
            transport.slots.fill(step, call.source, call.layout.pieces)
            if faults.armed:
                faults.reach("collective.filled")
        else:
            locations = _locations(call, pipelined=transport.can_pipeline and can_pipeline(call))
            sources, targets = locations or ((), ())
            message = Header(False, call.common, call.own, sources, targets).encode()
        answers = meeting.exchange(COLLECTIVE, message[:MAILBOX_BYTES], seconds_until(deadline))
        return Headers(step, message, answers)

    def _settle_headers(
        self, transport: Transport, call: Call, headers: Headers, deadline: float
    ) -> SettledHeaders:
        """Return all ranks' whole headers. Raises Disagreement, on every rank, if they do not
        match."""
        step, message, answers = headers
        if any(shared_part_of(answer) != call.common for answer in answers):
            raise self._disagreement_error(answers)
        lengths = [length_of(answer) for answer in answers]
        several_steps = max(lengths) > MAILBOX_BYTES
        if several_steps:
            answers = transport.exchange_rest(message, answers, lengths, deadline)
        decoded = [Header.decode(answer) for answer in answers]
        return SettledHeaders(call, decoded, step, several_steps, deadline)

    def _disagreement_error(self, answers: Sequence[bytes]) -> WeftError:
        """Return the error of ranks that made different calls."""
        calls = {rank: shared_part_of(answer).decode() for rank, answer in enumerate(answers)}
        return self._meeting.disagreement_error(calls)

    def _set_up(self, deadline: float) -> Transport:
        """Make the slots, and find out whether all ranks can read each other's memory and have the
        kernels."""
        meeting = self._meeting
        rank, size = meeting.rank, len(meeting.members)
        block = make_block(
            meeting,
            COLLECTIVE,
            leader=meeting.members[0],
            size=transport.bytes_for(size),
            seconds=seconds_until(deadline),
            point="collective.made",
        )
        allow_ptrace()
        word = np.frombuffer(os.urandom(8), np.uint64)
        secret = _SECRET.pack(address(word), int(word[0]))
        secrets = meeting.exchange(UNDER_WAY, secret, seconds_until(deadline))
        peers = Peers(meeting)
        reach = all(
            peers.can_reach(other, *_SECRET.unpack(secrets[other]))
            for other in range(size)
            if other != rank
        )
        answers = meeting.exchange(
            UNDER_WAY, bytes([reach, has_kernels()]), seconds_until(deadline)
        )
        self._transport = Transport(
            meeting,
            slots=transport.Slots(block, rank=rank, size=size),
            peers=peers,
            reachable=all(answer[0] for answer in answers),
            kernels=all(answer[1] for answer in answers),
        )
        return self._transport


def _locations(call: Call, *, pipelined: bool) -> tuple[tuple[Location, ...], ...]:
    """Return the locations of a rank's sources and targets. There are none if the call is pipelined
    and a source is not in shared memory: only arrays that are may be summed in place."""
    located = tuple(tuple(map(_location, arrays)) for arrays in (call.source, call.early_target))
    return () if pipelined and not all(source.block for source in located[0]) else located


def _location(array: Array) -> Location:
    return Location(address(array), *block_of(array))


def _key_of(array: Array) -> tuple[Any, ...]:
    """Return the location, dtype, shape and strides of a flat array."""
    return (*_location(array), array.dtype, array.shape, array.strides)
