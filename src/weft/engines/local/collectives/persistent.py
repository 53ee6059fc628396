"""Persistent reductions: an all_reduce like an earlier one, all but whose numbers is prepared.

Summing a thousand numbers takes less time than describing the array, so a loop that reduces arrays
of the same shape should describe them once. The same goes for one array in shared memory that is
summed in place at each step of a training, between which this code falls out of the processor's
cache. A persistent reduction sends and does exactly what `Collectives` does for such a call, so
some ranks may have it and others not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft import faults
from weft._core.arguments import seconds_until
from weft._core.arithmetic import OPERATIONS, Array, accumulates_as_stored, combine
from weft.engines.local.collectives.carry_out import SumInPlace
from weft.engines.local.collectives.pipelined import PipelinedMemory
from weft.engines.local.collectives.transport import Headers, Location, Transport
from weft.engines.local.meeting.meeting import COLLECTIVE
from weft.engines.local.memory.arrays import buffer_of
from weft.errors import WeftError

#: carries out an all_reduce in the general way, where other ranks' headers differ: (value, out, op,
#: headers, deadline)
FallBack = Callable[[Array, Array, str, Headers, float], None]


class PersistentPipelinedSum:
    """all_reduce of large arrays of one dtype and shape, pipelined."""

    def __init__(
        self,
        memory: PipelinedMemory,
        transport: Transport,
        *,
        message: bytes,
        op: str,
        fall_back: FallBack,
    ) -> None:
        self._memory, self._meeting = memory, transport.meeting
        self._message, self._op, self._fall_back = message, op, fall_back

    def takes(self, value: Array, out: Any) -> bool:
        """Return whether an array of the prepared dtype and shape can be reduced this way: it is
        contiguous, and not in shared memory, where it may be summed in place."""
        return (
            value.flags.c_contiguous
            and value.flags.aligned
            and buffer_of(value) is None
            and (out is None or _is_plain_output(value, out))
        )

    def run(self, value: Array, out: Array | None, seconds: float) -> Array:
        """Return the result."""
        meeting, deadline = self._meeting, time.monotonic() + seconds
        step = meeting.begin_step(seconds)
        answers = meeting.exchange_if_equal(COLLECTIVE, self._message, seconds_until(deadline))
        if out is None:
            out = np.empty_like(value)
        if answers is not None:
            headers = Headers(step, self._message, answers)
            self._fall_back(value, out, self._op, headers, deadline)
            return out
        if faults.armed:
            faults.reach("collective.met")
        self._memory.sum(
            value.reshape(-1), out.reshape(-1), mean=self._op == "mean", deadline=deadline
        )
        if faults.armed:
            faults.reach("collective.carried")
        return out


def _is_plain_output(value: Array, out: Any) -> bool:
    """Return whether the results of `value` can be written to `out` without further checks."""
    return (
        type(out) is np.ndarray
        and out.shape == value.shape
        and out.dtype is value.dtype
        and out.flags.carray
        and (out is value or not np.may_share_memory(value, out))
    )


class PersistentSum:
    """all_reduce of one array in place, while all ranks' arrays are mapped and have not moved since
    the last call."""

    def __init__(
        self,
        transport: Transport,
        *,
        headers: Headers,
        locations: Sequence[Sequence[Location]],
        pieces: Sequence[SumInPlace],
        fall_back: FallBack,
    ) -> None:
        """Prepare. `locations` are those of all ranks' arrays, `pieces` this rank's part."""
        self._transport, self._headers, self._locations = transport, headers, locations
        self._pieces, self._fall_back = pieces, fall_back

    def run(self, value: Array, out: Array, seconds: float) -> Array:
        """Return the result. `value` and `out` are the array that this was prepared for."""
        meeting, deadline = self._transport.meeting, time.monotonic() + seconds
        step = meeting.begin_step(seconds)
        # the header fits a mailbox: it was exchanged in one step
        answers = meeting.exchange(COLLECTIVE, self._headers.message, seconds_until(deadline))
        # `new` is called on every rank alike: which blocks stay mapped depends on which were used
        if answers != self._headers.answers or self._transport.mapped.new(self._locations):
            headers = self._headers._replace(step=step, answers=answers)
            self._fall_back(value, out, "sum", headers, deadline)
            return out
        if faults.armed:
            faults.reach("collective.met")
        for piece in self._pieces:
            piece.run(value)
        if faults.armed:
            faults.reach("collective.carried")
        self._transport.step(seconds_until(deadline))
        return out


class PersistentReduction:
    """all_reduce of small arrays of one dtype and shape by one operation."""

    def __init__(
        self,
        transport: Transport,
        *,
        message: bytes,
        like: Array,
        op: str,
        disagreement_error: Callable[[Sequence[bytes]], WeftError],
    ) -> None:
        self._meeting, self._message, self._op = transport.meeting, message, op
        self._disagreement_error = disagreement_error
        self._rank = transport.rank
        self._dtype, self._shape = like.dtype, like.shape
        self._element = like.dtype.name
        self._parts = tuple(
            [
                transport.slots.view(half, rank, 0, like.nbytes, like.dtype).reshape(like.shape)
                for rank in range(transport.size)
            ]
            for half in (0, 1)
        )
        #: this rank's slots, of even and of odd steps
        self.own = tuple(parts[transport.rank] for parts in self._parts)
        self._function = OPERATIONS[op]
        self._quick = (
            op != "mean" and len(self._parts[0]) > 1 and accumulates_as_stored(like.dtype, op)
        )

    def takes(self, _value: Array, out: Any) -> bool:
        """Return whether results can be written to `out` without further checks."""
        return out is None or (
            type(out) is np.ndarray
            and out.shape == self._shape
            and out.dtype is self._dtype
            and out.flags.behaved
        )

    def run(self, value: Array, out: Array | None, seconds: float) -> Array:
        """Return the result. `value` has the prepared dtype and shape; it is read before `out`,
        which may be the same or overlap it, is written."""
        half = self._meeting.begin_step(seconds) & 1
        self.own[half][...] = value
        return self.run_filled(half, value, out, seconds)

    def run_filled(self, half: int, value: Array, out: Array | None, seconds: float) -> Array:
        """Return the result of a step that has begun, and for which this rank's slot, `own[half]`,
        has the values of `value`, which may be the slot itself."""
        if faults.armed:
            faults.reach("collective.filled")
        answers = self._meeting.exchange_if_equal(COLLECTIVE, self._message, seconds)
        if answers is not None:
            raise self._disagreement_error(answers)
        if faults.armed:
            faults.reach("collective.met")
        parts = self._parts[half]
        if out is None or self._rank < 2:
            # a sixth faster than from its slot. In place this is right for ranks 0 and 1 only,
            # whose numbers are read before the first result is written
            parts = [*parts]
            parts[self._rank] = value
        if out is None:
            out = np.empty(self._shape, self._dtype)
        if self._quick:
            function = self._function
            total = function(parts[0], parts[1], out=out)
            for part in parts[2:]:
                function(total, part, out=out)
        else:
            combine(parts, out, self._op, self._element)
        if faults.armed:
            faults.reach("collective.carried")
        return out
