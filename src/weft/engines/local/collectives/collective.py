"""How the local engine carries out a collective.

    every rank
      small enough? fill the slot          the arrays travel with the first step
      step: exchange `common` and `own`    different ones: Disagreement, on every rank
      settle                               the plan, the same for all
      small: read the slots                done, after one step
      large: carry out                     in one of three ways (combining.py, moving.py)
        jointly                              chunk by chunk, by a loop in C, if there is one for it
        directly                             copy from process to process, step
        through the slots                    a round per slot's worth: fill, step, read

All ranks take the same way, because they decide by what they all know. The
order of sums is the order of ranks in either way, so the bits are the same too.
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
from weft.engines.local.collectives import carry_out, transport
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

#: prepared reductions that are kept
_MOST_REDUCTIONS = 256

#: prepared sums that are kept, and with them the mappings of other ranks' arrays
_MOST_SUMS = 4


class Collectives:
    """Carries out the collectives of one group, on one rank."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._transport: Transport | None = None
        #: by operation, dtype and shape
        self._persistent: dict[tuple[Any, ...], PersistentReduction | PersistentPipelinedSum] = {}
        #: by where the array lies
        self._sums: dict[tuple[Any, ...], PersistentSum] = {}

    def carry_out(self, call: Call, seconds: float) -> None:
        """Exchange and carry until the call has its result. Every rank makes the same call.

        Raises Disagreement and InvalidValue on every rank alike, at the end of a step; anything
        else leaves the ranks out of step.
        """
        deadline = time.monotonic() + seconds
        transport = self._transport or self._set_up(deadline)
        self._after_meeting(transport, call, self._meet(transport, call, deadline), deadline)

    def _after_meeting(
        self, transport: Transport, call: Call, headers: Headers, deadline: float
    ) -> None:
        """What follows the first step."""
        settled = self._settle_headers(transport, call, headers, deadline)
        if faults.armed:
            faults.reach("collective.met")
        try:
            plan = call.settle([header.rank_part for header in settled.ranks])
        except UnlikeArrays as unlike:
            words = {rank: f"{call.name}({given})" for rank, given in unlike.ranks.items()}
            raise self._meeting.disagreement_error(words) from None
        if isinstance(plan, Combination):
            still_used = carry_out.carry_out_combination(transport, plan, settled)
        else:
            still_used = carry_out.carry_out_movement(transport, plan, settled)
        if faults.armed:
            faults.reach("collective.carried")
        # what was said in several steps, or is in a slot since the first of them, may still be
        # read when this rank fills its slot again, or be in its own memory
        if settled.several_steps or still_used:
            transport.step(settled.seconds)
        call.finish()  # within the step: where it is interrupted, this rank must not go on
        if isinstance(plan, Combination) and len(call.source) == 1:
            self._make_persistent_sum(transport, plan, headers, settled)

    def persistent(
        self, value: Any, op: Any, out: Any
    ) -> PersistentReduction | PersistentPipelinedSum | PersistentSum | None:
        """The quick way for an all_reduce of a plain array like one before, if there is one."""
        if type(value) is not np.ndarray or type(op) is not str:
            return None
        found = self._persistent.get((op, value.dtype, value.shape))
        if found is not None and found.takes(value, out):
            return found
        in_place = out is value and op == "sum" and value.flags.behaved
        return self._sums.get(_key_of(value)) if in_place and self._sums else None

    def close(self) -> None:
        """Give up what is prepared, and with it what is mapped of other ranks' memory."""
        self._persistent.clear()
        self._sums.clear()

    def make_persistent(self, call: Call) -> None:
        """Make the quick way for calls like this one, which was carried out, if it can have one."""
        transport = self._transport
        if transport is None or not isinstance(call, Reduce) or call.own:
            return
        value, op = call.value, call.op
        if type(value) is not np.ndarray:
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
                transport, message=message, like=value, op=op, disagreement=self._disagreement
            )
            if memory is None
            else PersistentPipelinedSum(
                memory, transport, message=message, op=op, fall_back=self._fall_back
            )
        )

    def _make_persistent_sum(
        self, transport: Transport, plan: Combination, headers: Headers, settled: SettledHeaders
    ) -> None:
        """The same for an array of one dimension that was summed where it lies."""
        if settled.ranks[0].in_slot or settled.several_steps:
            return
        pieces = carry_out.sums_in_place(transport, plan, settled)
        (flat,) = settled.call.source
        if pieces is None or self._reduce(flat, flat, "sum").common != settled.call.common:
            return  # it was given in another shape, or in a list
        key = _key_of(flat)
        if key not in self._sums and len(self._sums) >= _MOST_SUMS:
            self._sums.clear()
        locations = [(*said.sources, *said.targets) for said in settled.ranks]
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
        """Carry out an all_reduce that was prepared, but at whose first step ranks have said
        something else."""
        transport = self._transport or self._set_up(deadline)
        self._after_meeting(transport, self._reduce(value, out, op), headers, deadline)

    def _reduce(self, value: Array, out: Array, op: str) -> Reduce:
        rank, size = self._meeting.rank, len(self._meeting.members)
        return Reduce("all_reduce", rank, size, value, op=op, weight=None, out=out)

    # the first step

    def _meet(self, transport: Transport, call: Call, deadline: float) -> Headers:
        """Meet, and hear what every rank calls, or the beginning of it."""
        meeting = self._meeting
        step = meeting.begin_step(seconds_until(deadline))
        message = Header(True, call.common, call.own).encode()
        if call.layout.size <= transport.slots.room and len(message) <= MAILBOX_BYTES:
            transport.slots.fill(step, call.source, call.layout.pieces)
            if faults.armed:
                faults.reach("collective.filled")
        else:
            locations = _locations(call, pipelined=transport.can_pipeline and can_pipeline(call))
            message = Header(False, call.common, call.own, *locations).encode()
        answers = meeting.exchange(COLLECTIVE, message[:MAILBOX_BYTES], seconds_until(deadline))
        return Headers(step, message, answers)

    def _settle_headers(
        self, transport: Transport, call: Call, headers: Headers, deadline: float
    ) -> SettledHeaders:
        """What every rank calls, to the end."""
        step, message, answers = headers
        if any(shared_part_of(answer) != call.common for answer in answers):
            raise self._disagreement(answers)
        lengths = [length_of(answer) for answer in answers]
        several_steps = max(lengths) > MAILBOX_BYTES
        if several_steps:
            answers = transport.exchange_rest(message, answers, lengths, deadline)
        said = [Header.decode(answer) for answer in answers]
        return SettledHeaders(call, said, step, several_steps, deadline)

    def _disagreement(self, answers: Sequence[bytes]) -> WeftError:
        """The error of ranks that made different calls."""
        said = {rank: shared_part_of(answer).decode() for rank, answer in enumerate(answers)}
        return self._meeting.disagreement_error(said)

    def _set_up(self, deadline: float) -> Transport:
        """Make the slots, and find out whether ranks can reach each other's memory."""
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
        told = meeting.exchange(UNDER_WAY, secret, seconds_until(deadline))
        peers = Peers(meeting)
        reach = all(
            peers.can_reach(other, *_SECRET.unpack(told[other]))
            for other in range(size)
            if other != rank
        )
        answers = meeting.exchange(
            UNDER_WAY, bytes([reach, has_kernels()]), seconds_until(deadline)
        )
        self._transport = Transport(
            meeting,
            slots=transport.Slots(block, rank=rank, size=size),
            peers=peers if all(answer[0] for answer in answers) else None,
            loops=all(answer[1] for answer in answers),
        )
        return self._transport


def _locations(call: Call, *, pipelined: bool) -> tuple[tuple[Location, ...], ...]:
    """Where a rank's sources and targets are. It does not say so if they are to be summed jointly,
    but for arrays in shared memory, which may be summed where they are."""
    found = tuple(tuple(map(_location, arrays)) for arrays in (call.source, call.early_target))
    return () if pipelined and not all(one.block for one in found[0]) else found


def _location(array: Array) -> Location:
    return Location(address(array), *block_of(array))


def _key_of(array: Array) -> tuple[Any, ...]:
    """Where an array of one dimension lies, and all that there is to know of it."""
    return (*_location(array), array.dtype, array.shape, array.strides)
