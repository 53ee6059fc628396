"""The group of the local engine: ranks that meet in shared memory.

A group is in one of these states, as far as a call is concerned:

    state          `_current`   `_given_up`   how it gets there             what may be called
    free           None         ""            join, split, survivors        anything
    in a call      the call's   ""            `_begin`                      nothing: a second thread
                   own list                                                 gets UsedConcurrently
    given up       None         the call      an exception leaves a         `survivors`, `leave`
                                              collective half way (`_in_step`)
    superseded     None         any           `survivors` has made          `leave`; the successor
                                              `successor`
    left           any          any           `leave`, or a fork            nothing

and a call passes through

    _begin         raise unless the group is free (given up will do for `survivors`); wait for
                   pending async calls; set `_current`; write the recorder's entry
    the work       steps of the meeting
    the end        `_current` back to None, and the entry closed, by whoever set it

`_calling` does this for `split`, `survivors` and `make_store`, `_in_step` for collectives, and
`barrier` inline. Only collectives give up, and not at Disagreement, InvalidValue and SetupError,
which all ranks raise at the same step, so that the group is free again. If calls are pending,
`survivors` gives them up first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from weft._core.arguments import validate_seconds
from weft._core.failures import caller_line
from weft.engines.background import Background
from weft.engines.base import Group
from weft.engines.local.meeting import rendezvous
from weft.engines.local.meeting.meeting import (
    BARRIER,
    COLLECTIVE,
    SPLIT,
    Meeting,
    join_without_block,
    make_block,
    words_for,
)
from weft.engines.local.meeting.roster import Recorder
from weft.engines.local.memory.segment import Block
from weft.engines.refusals import left_error, superseded_error, validate_split
from weft.errors import (
    Disagreement,
    InvalidValue,
    PeerLost,
    SetupError,
    UsageError,
    UsedConcurrently,
    WeftError,
)
from weft.resources import Plan, host_name

if TYPE_CHECKING:
    from weft._core.arithmetic import Array
    from weft._core.calls import Call
    from weft._core.tables import TableSpec
    from weft.engines.base import Handle, Store
    from weft.engines.local.collectives.collective import Collectives

_COLOR = struct.Struct("?qq")
#: The arguments of collectives that were left half way. Peers may still write to these arrays, so
#: they are kept alive until all ranks that are left have come to `survivors`.
_unfinished: dict[Meeting, tuple[Any, ...]] = {}


def join(identity: rendezvous.Identity, *, timeout: float, start_timeout: float) -> LocalGroup:
    """Return the world group once every rank has joined. Raises MissingRank, Refused, PeerLost."""
    joined = rendezvous.assemble(identity, start_timeout)
    ranks = range(identity.size)
    world = Meeting(
        joined.memory,
        roster=joined.roster,
        ranks=ranks,
        places=ranks,
        name="world",
        generation=0,
        free_cores=joined.roster.plan(ranks).free_cores,
    )
    return LocalGroup(world, joined.roster.open_recorder(), timeout=timeout, world=True)


def forget_unfinished(group: Group) -> None:
    """Release the arrays of unfinished collectives, once all peers of a group have ended."""
    if isinstance(group, LocalGroup):
        _unfinished.pop(group._meeting, None)


class LocalGroup(Group):
    """Processes of this machine that meet in shared memory."""

    has_device_tables = True

    def __init__(
        self, meeting: Meeting, recorder: Recorder, *, timeout: float, world: bool = False
    ) -> None:
        self.name = meeting.name
        self.rank = meeting.members.index(meeting.roster.rank)
        self.size = len(meeting.members)
        self.hosts = (host_name(),) * self.size
        self.generation = meeting.generation
        self.timeout = timeout
        self._meeting = meeting
        self._recorder = recorder
        self._world = world
        self._splits = 0
        self._suffix = "" if self.name == "world" else f" of {self.name}"
        self._barrier = f"barrier{self._suffix}"
        #: the call that a thread is in: a fresh list for each, so that only that call ends it
        self._current: list[str] | None = None
        self._entry = 0
        #: the recorder's name of each collective: the same string for all calls, which is quicker
        self._operations: dict[str, str] = {}
        #: the collective that was left half way; after that only `survivors` can be called
        self._given_up = ""
        self._collectives: Collectives | None = None
        self._background = Background(self.name)
        #: those of earlier generations, in case closing one was interrupted
        self._former: tuple[Background, ...] = ()

    @property
    def plan(self) -> Plan:
        return self._meeting.roster.plan(self._meeting.members)

    def barrier(self, *, timeout: float | None = None) -> None:
        seconds = self.timeout if timeout is None else validate_seconds(timeout)
        current = [self._barrier]
        try:
            self._begin(current)
            self._meeting.meet(BARRIER, seconds)
        finally:
            if self._current is current:
                self._current = None
                self._recorder.leave(self._entry)

    def split(
        self, color: int | None, *, key: int = 0, timeout: float | None = None
    ) -> LocalGroup | None:
        seconds = self.timeout if timeout is None else validate_seconds(timeout)
        color, key = validate_split(color, key)
        with self._calling("split"):
            return self._split(color, key, seconds)

    def survivors(self, *, timeout: float | None = None) -> LocalGroup:
        seconds = self.timeout if timeout is None else validate_seconds(timeout)
        with self._calling("survivors", after_giving_up=True):
            places = self._meeting.agree_on_survivors(seconds)
            following = self._meeting.next_generation(places)
            successor = LocalGroup(
                following, self._recorder, timeout=self.timeout, world=self._world
            )
            self._succeed(successor)
            return successor

    def _succeed(self, successor: LocalGroup) -> None:
        """Hand over to the next generation."""
        successor._former = (*self._former[-3:], self._background)
        self.successor = successor
        self._close_collectives()
        _unfinished.pop(self._meeting, None)
        self._background.close()

    def make_store(self, spec: TableSpec, values: Array | None) -> Store:
        if self.size == 1:  # nobody to share it with
            from weft.engines.serial.store import SerialStore

            self._validate_usable()
            return SerialStore(self, spec, values)
        from weft.engines.local.tables.store import make_store

        with self._calling(spec.kind):
            return make_store(self._meeting, self._recorder, spec, values, timeout=self.timeout)

    def refuse(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._in_step(name, self._meeting.refuse, (COLLECTIVE, reason, self.timeout))

    def leave(self) -> None:
        if self.has_left or not self._meeting.roster.is_here:
            return
        self.has_left = True
        self._meeting.end()
        try:
            for background in (*self._former, self._background):
                background.close()  # before the others know: it may be writing to their memory
        finally:
            if self._world:
                self._meeting.roster.leave()
            self._meeting.leave()
            self._close_collectives()

    # collectives

    def all_reduce(
        self,
        value: Any,
        op: str = "sum",
        *,
        weight: float | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        if weight is None and not async_op and timeout is None and self._collectives is not None:
            persistent = self._collectives.persistent(value, op, out)
            if persistent is not None:
                arguments = value, out, self.timeout
                return self._in_step("all_reduce", persistent.run, arguments, depth=4)
        return super().all_reduce(
            value, op, weight=weight, out=out, async_op=async_op, timeout=timeout
        )

    def carry_out(self, call: Call, *, timeout: float) -> None:
        self._in_step(call.name, self._exchange, (call, timeout), depth=6)
        if call.name == "all_reduce" and self._collectives is not None:
            self._collectives.make_persistent(call)

    def place_of(self, call: Call) -> str | None:
        return call.device if self.size == 1 else self._ready_collectives().place_of(call)

    def _exchange(self, call: Call, seconds: float) -> None:
        if self.size == 1 and call.placed is not None:
            from weft.engines.serial.group import carry_out

            carry_out(call)
        else:
            self._ready_collectives().carry_out(call, seconds)

    def _ready_collectives(self) -> Collectives:
        if self._collectives is None:
            from weft.engines.local.collectives.collective import Collectives

            self._collectives = Collectives(self._meeting)
        return self._collectives

    def allocate(self, shape: Any, dtype: Any, device: str = "cpu") -> Array:
        zeros = super().allocate(shape, dtype, device)
        if self.size == 1:
            return zeros
        import numpy as np

        from weft.engines.local.memory.arrays import copy_in

        # as a plain ndarray, which is described more quickly
        return copy_in(zeros).view(np.ndarray)

    def _start(self, call: Call, seconds: float) -> Handle:
        self._validate_usable()
        line = caller_line()

        def work() -> Any:
            with nullcontext() if call.stream is None else call.stream.current():
                self._in_step(call.name, self._exchange, (call, seconds), line=line)
                return call.result()

        return self._background.start(work, call.name)

    def _in_step(
        self,
        name: str,
        work: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        depth: int = 5,
        line: str = "",
    ) -> Any:
        """Do the work of a collective. Afterwards the ranks are in step, or this one has given up.
        `line` is the source line of an async call."""
        current = [self._operations.setdefault(name, name + self._suffix)]
        try:
            self._begin(current, depth, line)
            return work(*arguments)
        except (Disagreement, InvalidValue, SetupError):
            raise  # on every rank, at the same step
        except BaseException as error:
            if self._current is current:
                # a signal handler may raise here too: what matters is stored before the first call
                meeting = self._meeting
                self._given_up = f"{current[0]} ({error.__class__.__name__})"
                _unfinished[meeting] = arguments
                lost_another = error.__class__ is PeerLost
                meeting.block.words[meeting.given_up_at] = meeting.given_up_value + lost_another
                meeting.wake_all()
            raise
        finally:
            if self._current is current:
                self._current = None
                self._recorder.leave(self._entry)

    def _close_collectives(self) -> None:
        if self._collectives is not None:
            self._collectives.close()
            self._collectives = None

    # before and after every call

    @contextmanager
    def _calling(self, operation: str, *, after_giving_up: bool = False) -> Iterator[None]:
        """Begin and end a call. `barrier` does the same inline, where a context manager would cost
        more than the rest."""
        current = [operation + self._suffix]
        try:
            self._begin(current, depth=5, after_giving_up=after_giving_up)
            yield
        finally:
            if self._current is current:
                self._current = None
                self._recorder.leave(self._entry)

    def _begin(
        self, current: list[str], depth: int = 3, line: str = "", after_giving_up: bool = False
    ) -> None:
        """Check that the group can be used, and record the operation and its source line.

        Calls are made in order: a blocking call waits until the pending ones have ended, and
        `survivors` ends them.

        Between reading and setting `_current` there is no call, so no other thread and no signal
        handler can come between. Whoever has set it resets it, however the call ends.
        """
        meeting = self._meeting
        if self.has_left or not meeting.roster.is_here or self.successor is not None:
            raise self._unusable_error()
        if self._background.pending and not line:
            if after_giving_up:
                self._given_up = self._given_up or "its pending calls"
                meeting.abandon_step()
            self._background.finish()
        if self._given_up and not after_giving_up:
            raise self._unusable_error()
        if self._current is None:
            self._current = current
        else:
            raise self._concurrent_use_error(current[0])
        tag = meeting.tag + meeting.step + 1
        if line:
            self._entry = self._recorder.enter_at(current[0], line, tag)
        else:
            self._entry = self._recorder.enter(current[0], tag, depth)

    def _validate_usable(self) -> None:
        gone = self.has_left or not self._meeting.roster.is_here
        if gone or self.successor is not None or self._given_up:
            raise self._unusable_error()

    def _unusable_error(self) -> WeftError:
        if not self._meeting.roster.is_here:
            return self._meeting.roster.unusable_error(f"group {self.name!r}")
        if self.has_left:
            return left_error(f"group {self.name!r}")
        if self.successor is None:
            return UsageError(
                f"group {self.name!r} is out of step since {self._given_up} on this rank; the "
                "ranks that are still here can go on as a new generation:\n"
                "    group = group.survivors()"
            )
        return superseded_error(self)

    def _concurrent_use_error(self, operation: str) -> UsedConcurrently:
        roster, tag = self._meeting.roster, self._meeting.tag
        others = [
            f" (in {entry.operation}, {entry.line})"
            for entry in roster.entries(roster.rank)
            if not entry.ended and entry.tag >> 32 == tag >> 32
        ]
        return UsedConcurrently(
            f"{operation}() while another thread uses group {self.name!r}{''.join(others[-1:])}; "
            "ranks could not tell which call belongs to which. Give each thread a group:\n"
            "    mine = group.split(0)  # once per thread, before the threads start"
        )

    # split, step by step

    def _split(self, color: int | None, key: int, seconds: float) -> LocalGroup | None:
        message = _COLOR.pack(color is not None, color or 0, key)
        answers = self._meeting.exchange(SPLIT, message, seconds)
        self._splits += 1
        part = ranks_of_color(color, [_COLOR.unpack(answer) for answer in answers])
        if color is None:
            join_without_block(self._meeting, SPLIT, seconds)
            return None
        members = [self._meeting.members[rank] for rank in part]
        block = make_block(
            self._meeting,
            SPLIT,
            leader=members[0],
            size=8 * words_for(len(members)),
            seconds=seconds,
            prepare=Block.clear,
            point="split.made",
        )
        below = Meeting(
            block,
            roster=self._meeting.roster,
            ranks=members,
            places=range(len(members)),
            name=f"{self.name}/{self._splits}.{color}",
            generation=0,
            free_cores=self._meeting.free_cores,
        )
        return LocalGroup(below, self._recorder, timeout=self.timeout)


def ranks_of_color(color: int | None, answers: Sequence[tuple[bool, int, int]]) -> list[int]:
    """Return the ranks that named the same color, ordered by key and then by rank. Pure."""
    same = [
        (key, rank) for rank, (named, other, key) in enumerate(answers) if named and other == color
    ]
    return [rank for _, rank in sorted(same)]
