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
    PreparedJointSum,
    PreparedReduction,
    PreparedSum,
)
from weft.engines.local.collectives.pipelined import has_loops, takes
from weft.engines.local.collectives.transport import (
    Exchanged,
    FirstMessage,
    Heard,
    Location,
    Peers,
    Transport,
    allow_ptrace,
    common_of,
    length_of,
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
_PREPARED = 256

#: prepared sums that are kept, and with them the mappings of other ranks' arrays
_SUMS = 4


class Collectives:
    """Carries out the collectives of one group, on one rank."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._transport: Transport | None = None
        #: by operation, dtype and shape
        self._prepared: dict[tuple[Any, ...], PreparedReduction | PreparedJointSum] = {}
        #: by where the array lies
        self._sums: dict[tuple[Any, ...], PreparedSum] = {}

    def carry_out(self, call: Call, seconds: float) -> None:
        """Exchange and carry until the call has its result. Every rank makes the same call.

        Raises Disagreement and InvalidValue on every rank alike, at the end of a step; anything
        else leaves the ranks out of step.
        """
        deadline = time.monotonic() + seconds
        transport = self._transport or self._set_up(deadline)
        self._after_meeting(transport, call, self._meet(transport, call, deadline), deadline)

    def _after_meeting(
        self, transport: Transport, call: Call, heard: Heard, deadline: float
    ) -> None:
        """What follows the first step."""
        exchanged = self._hear_out(transport, call, heard, deadline)
        if faults.armed:
            faults.reach("collective.met")
        try:
            plan = call.settle([said.own for said in exchanged.ranks])
        except UnlikeArrays as unlike:
            words = {rank: f"{call.name}({given})" for rank, given in unlike.ranks.items()}
            raise self._meeting.disagreement(words) from None
        if isinstance(plan, Combination):
            still_used = carry_out.carry_out_combination(transport, plan, exchanged)
        else:
            still_used = carry_out.carry_out_movement(transport, plan, exchanged)
        if faults.armed:
            faults.reach("collective.carried")
        # what was said in several steps, or is in a slot since the first of them, may still be
        # read when this rank fills its slot again, or be in its own memory
        if exchanged.several_steps or still_used:
            transport.step(exchanged.seconds)
        call.finish()  # within the step: where it is interrupted, this rank must not go on
        if isinstance(plan, Combination) and len(call.source) == 1:
            self._prepare_sum(transport, plan, heard, exchanged)

    def prepared(
        self, value: Any, op: Any, out: Any
    ) -> PreparedReduction | PreparedJointSum | PreparedSum | None:
        """The quick way for an all_reduce of a plain array like one before, if there is one."""
        if type(value) is not np.ndarray or type(op) is not str:
            return None
        found = self._prepared.get((op, value.dtype, value.shape))
        if found is not None and found.takes(value, out):
            return found
        in_place = out is value and op == "sum" and value.flags.behaved
        return self._sums.get(_key_of(value)) if in_place and self._sums else None

    def close(self) -> None:
        """Give up what is prepared, and with it what is mapped of other ranks' memory."""
        self._prepared.clear()
        self._sums.clear()

    def prepare(self, call: Call) -> None:
        """Make the quick way for calls like this one, which was carried out, if it can have one."""
        transport = self._transport
        if transport is None or not isinstance(call, Reduce) or call.own:
            return
        value, op = call.value, call.op
        if type(value) is not np.ndarray:
            return
        small = call.layout.size <= transport.slots.room
        memory = transport.joint_memory if not small and takes(call) else None
        if not value.dtype.isnative or not (small or memory):
            return
        if len(self._prepared) >= _PREPARED:
            self._prepared.clear()
        message = FirstMessage(small, call.common, b"").encode()
        self._prepared[op, value.dtype, value.shape] = (
            PreparedReduction(
                transport, message=message, like=value, op=op, disagreement=self._disagreement
            )
            if memory is None
            else PreparedJointSum(memory, transport, message=message, op=op, go_on=self._go_on)
        )

    def _prepare_sum(
        self, transport: Transport, plan: Combination, heard: Heard, exchanged: Exchanged
    ) -> None:
        """The same for an array of one dimension that was summed where it lies."""
        if exchanged.ranks[0].in_slot or exchanged.several_steps:
            return
        pieces = carry_out.sums_in_place(transport, plan, exchanged)
        (flat,) = exchanged.call.source
        if pieces is None or self._reduce(flat, flat, "sum").common != exchanged.call.common:
            return  # it was given in another shape, or in a list
        key = _key_of(flat)
        if key not in self._sums and len(self._sums) >= _SUMS:
            self._sums.clear()
        locations = [(*said.sources, *said.targets) for said in exchanged.ranks]
        self._sums[key] = PreparedSum(
            transport, heard=heard, locations=locations, pieces=pieces, go_on=self._go_on
        )

    def _go_on(self, value: Array, out: Array, op: str, heard: Heard, deadline: float) -> None:
        """Carry out an all_reduce that was prepared, but at whose first step ranks have said
        something else."""
        transport = self._transport or self._set_up(deadline)
        self._after_meeting(transport, self._reduce(value, out, op), heard, deadline)

    def _reduce(self, value: Array, out: Array, op: str) -> Reduce:
        rank, size = self._meeting.rank, len(self._meeting.members)
        return Reduce("all_reduce", rank, size, value, op=op, weight=None, out=out)

    # the first step

    def _meet(self, transport: Transport, call: Call, deadline: float) -> Heard:
        """Meet, and hear what every rank calls, or the beginning of it."""
        meeting = self._meeting
        step = meeting.begin_step(seconds_until(deadline))
        message = FirstMessage(True, call.common, call.own).encode()
        if call.layout.size <= transport.slots.room and len(message) <= MAILBOX_BYTES:
            transport.slots.fill(step, call.source, call.layout.pieces)
            if faults.armed:
                faults.reach("collective.filled")
        else:
            locations = _locations(call, joint=transport.can_join and takes(call))
            message = FirstMessage(False, call.common, call.own, *locations).encode()
        answers = meeting.exchange(COLLECTIVE, message[:MAILBOX_BYTES], seconds_until(deadline))
        return Heard(step, message, answers)

    def _hear_out(
        self, transport: Transport, call: Call, heard: Heard, deadline: float
    ) -> Exchanged:
        """What every rank calls, to the end."""
        step, message, answers = heard
        if any(common_of(answer) != call.common for answer in answers):
            raise self._disagreement(answers)
        lengths = [length_of(answer) for answer in answers]
        several_steps = max(lengths) > MAILBOX_BYTES
        if several_steps:
            answers = transport.exchange_rest(message, answers, lengths, deadline)
        said = [FirstMessage.decode(answer) for answer in answers]
        return Exchanged(call, said, step, several_steps, deadline)

    def _disagreement(self, answers: Sequence[bytes]) -> WeftError:
        """The error of ranks that made different calls."""
        said = {rank: common_of(answer).decode() for rank, answer in enumerate(answers)}
        return self._meeting.disagreement(said)

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
        answers = meeting.exchange(UNDER_WAY, bytes([reach, has_loops()]), seconds_until(deadline))
        self._transport = Transport(
            meeting,
            slots=transport.Slots(block, rank=rank, size=size),
            peers=peers if all(answer[0] for answer in answers) else None,
            loops=all(answer[1] for answer in answers),
        )
        return self._transport


def _locations(call: Call, *, joint: bool) -> tuple[tuple[Location, ...], ...]:
    """Where a rank's sources and targets are. It does not say so if they are to be summed jointly,
    but for arrays in shared memory, which may be summed where they are."""
    found = tuple(tuple(map(_location, arrays)) for arrays in (call.source, call.early_target))
    return () if joint and not all(one.block for one in found[0]) else found


def _location(array: Array) -> Location:
    return Location(address(array), *block_of(array))


def _key_of(array: Array) -> tuple[Any, ...]:
    """Where an array of one dimension lies, and all that there is to know of it."""
    return (*_location(array), array.dtype, array.shape, array.strides)
