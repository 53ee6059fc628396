"""The group of the mpi engine: ranks of several hosts.

Seen from a rank it is a group of the local engine whose meetings have one member more, the agent of
its host, who comes to each step when all other hosts have come (meeting.py).
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft._core.arguments import seconds_until, validate_seconds
from weft.engines.local.group import LocalGroup, ranks_of_color
from weft.engines.local.meeting import rendezvous
from weft.engines.local.meeting.meeting import (
    SPLIT,
    TROUBLES,
    UNDER_WAY,
    Meeting,
    in_words,
)
from weft.engines.local.meeting.roster import Recorder
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import BlockHandle
from weft.engines.mpi.exchange import COLOR
from weft.engines.mpi.meeting import HostMeeting
from weft.engines.mpi.packing import unpack
from weft.errors import SetupError
from weft.resources import Plan

if TYPE_CHECKING:
    from weft._core.arithmetic import Array
    from weft._core.calls import Call
    from weft._core.tables import TableSpec
    from weft.engines.base import Store
    from weft.engines.mpi.collectives import HostCollectives
    from weft.engines.mpi.speaker import Placed


def join(placed: Placed, *, timeout: float, start_timeout: float) -> MpiGroup:
    """Return the world group once every rank has joined. Raises MissingRank, Refused, PeerLost,
    SetupError."""
    deadline = time.monotonic() + start_timeout
    size = placed.local_size
    identity = rendezvous.Identity(placed.local_rank, 2 * size, placed.launch)
    joined = rendezvous.assemble(identity, start_timeout)
    meeting = HostMeeting(
        joined.memory,
        roster=joined.roster,
        ranks=range(2 * size),
        places=[*range(size), size],
        placement=placed.placement,
        host=placed.host,
        name="world",
        generation=0,
        free_cores=False,  # no exchange between hosts is as short as a rank would spin
    )
    set_up(meeting, deadline)
    return MpiGroup(meeting, joined.roster.open_recorder(), timeout=timeout, world=True)


def set_up(meeting: HostMeeting, deadline: float, before: HostMeeting | None = None) -> None:
    """Attach the memory of a generation, with all ranks; `before` is the generation before it.
    Raises SetupError on every rank if one cannot."""
    trouble = b""
    *_, answer = meeting.exchange(UNDER_WAY, b"", seconds_until(deadline))
    try:
        if answer:
            handle, *rest = unpack(answer)
            if before is not None:
                meeting.take_placement(before.placement.part(_members(*rest, deadline=deadline)))
            meeting.attach_memory(_attach(handle, deadline))
    except TROUBLES as error:
        trouble = in_words(error)
    *_, troubles = meeting.exchange(UNDER_WAY, trouble, seconds_until(deadline))
    if troubles:
        raise _setup_error(meeting.name, bytes(troubles).decode(errors="replace"))


def _members(handle: Any, length: Any, *, deadline: float) -> list[int]:
    text = _attach(handle, deadline)
    size = int.from_bytes(length, "little")
    members: list[int] = json.loads(memoryview(text.buffer).cast("B")[:size].tobytes())
    return members


def _attach(handle: Any, deadline: float) -> Any:
    return blocks.attach(BlockHandle.decode(bytes(handle)), seconds_until(deadline) / 2)


def _setup_error(name: str, troubles: str) -> SetupError:
    return SetupError(
        f"group {name!r} could not get memory: {troubles}. The group can be used when there is more"
    )


class MpiGroup(LocalGroup):
    """Processes of several hosts, which meet through shared memory and MPI."""

    _meeting: HostMeeting

    def __init__(
        self, meeting: HostMeeting, recorder: Recorder, *, timeout: float, world: bool = False
    ) -> None:
        super().__init__(meeting, recorder, timeout=timeout, world=world)
        self.rank = meeting.group_rank
        self.size = len(meeting.placement.world)
        self.has_device_tables = self.size == 1
        self.hosts = meeting.placement.hosts
        self._host_collectives: HostCollectives | None = None
        if not world:
            weakref.finalize(self, meeting.drop).atexit = False

    @property
    def plan(self) -> Plan:
        meeting = self._meeting
        return meeting.roster.plan(meeting.members[: len(meeting.local)])

    def survivors(self, *, timeout: float | None = None) -> MpiGroup:
        seconds = self.timeout if timeout is None else validate_seconds(timeout)
        deadline = time.monotonic() + seconds
        with self._calling("survivors", after_giving_up=True):
            places = self._meeting.agree_on_survivors(seconds)
            following = self._meeting.following(places, self._meeting.without_lost(places))
            set_up(following, deadline, before=self._meeting)
            self._meeting.superseded = True
            self._meeting.lanes.clear()  # its tables have theirs, and no other is made
            successor = MpiGroup(following, self._recorder, timeout=self.timeout, world=self._world)
            self._succeed(successor)
            return successor

    def refuse(self, name: str, error: Exception) -> None:
        error.add_note(f"on rank {self.rank} of {self.size}, on host {self.hosts[self.rank]}")
        super().refuse(name, error)

    def make_store(self, spec: TableSpec, values: Array | None) -> Store:
        if self.size == 1:
            return super().make_store(spec, values)
        from weft.engines.mpi.making import make_store

        deadline = time.monotonic() + self.timeout
        made = self._in_step(
            spec.kind,
            lambda: make_store(
                self._meeting,
                self._recorder,
                spec,
                values,
                deadline=deadline,
                timeout=self.timeout,
            ),
            (),
            depth=5,
        )
        if isinstance(made, Exception):
            raise made
        store: Store = made
        return store

    def allocate(self, shape: Any, dtype: Any, device: str = "cpu") -> Array:
        return super(LocalGroup, self).allocate(shape, dtype, device)

    def _exchange(self, call: Call, seconds: float) -> None:
        if self._host_collectives is None:
            from weft.engines.mpi.collectives import HostCollectives

            self._host_collectives = HostCollectives(self._meeting)
        self._host_collectives.carry_out(call, seconds)

    def _split(self, color: int | None, key: int, seconds: float) -> LocalGroup | None:
        meeting = self._meeting
        deadline = time.monotonic() + seconds
        reply = meeting.converse(SPLIT, COLOR.pack(color is not None, color or 0, key), deadline)
        answers, *named = unpack(reply)
        colors = [
            COLOR.unpack(answers[at : at + COLOR.size]) for at in range(0, len(answers), COLOR.size)
        ]
        handles = {
            int(bytes(name)): bytes(handle)
            for name, handle in zip(named[::2], named[1::2], strict=True)
        }
        meeting.splits += 1
        ranks = ranks_of_color(color, colors)
        below: Meeting | None = None
        trouble = b""
        try:
            if color is not None and color in handles:
                below = self._subgroup(color, ranks, handles[color], deadline)
        except TROUBLES as error:
            trouble = in_words(error)
        try:
            meeting.converse(UNDER_WAY, trouble or b"\0", deadline)
        except SetupError as error:
            raise _setup_error(meeting.name, str(error)) from None
        if below is None:
            return None
        if isinstance(below, HostMeeting):
            set_up(below, deadline)
            return MpiGroup(below, self._recorder, timeout=self.timeout)
        group = LocalGroup(below, self._recorder, timeout=self.timeout)
        group.hosts = (meeting.host_name,) * group.size
        return group

    def _subgroup(
        self, color: int, ranks: Sequence[int], handle: bytes, deadline: float
    ) -> Meeting:
        meeting = self._meeting
        placement = meeting.placement.part(ranks)
        here = [ranks[own] for own in placement.ranks_on(meeting.host)]
        members = meeting.launch_places(here)
        block = _attach(handle, deadline)
        if len(placement.order) == 1:
            return meeting.local_subgroup(block, color, members)
        return meeting.subgroup(block, color, placement, members)
