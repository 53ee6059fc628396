"""How the ranks of a launch find each other, on one host.

    rank 0                              every other rank
      listen at the launch's address      connect there, retrying until it listens
      receive each one's Hello    <---    Hello: version, rank, size, process
      enroll them in the roster
      Welcome + the memory        --->    map it, watch the others
      close the address                   close the connection

Rank 0 creates the launch's shared memory, unless the launcher has and passed it down. After a
bounded time every rank raises an error that names the ranks that did not come. A rank can be
claimed only once, and processes of another user, version or size are turned away.
"""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass

from weft import faults
from weft._core.launch import Process
from weft._version import __version__
from weft.engines.local.meeting import meeting
from weft.engines.local.meeting.roster import LEFT, Roster, words_for
from weft.engines.local.memory.segment import Block, Segment, whole_pages
from weft.engines.local.processes.channel import Channel, Closed, Hello, Listener, Rejected, Welcome
from weft.engines.local.processes.linux import this_process, translate_os_error
from weft.errors import MissingRank, PeerLost, Refused

_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Identity:
    """A process's place in its launch, as its launcher assigned it."""

    rank: int
    size: int
    #: unique to this launch; programs started side by side never share it
    launch: str
    #: the session number: how often this process has joined the launch before
    session: int = 0
    #: the descriptor of the memory that `weft run` made; -1 under another launcher
    memory: int = -1
    #: the launcher's pid, if it publishes how ranks end
    launcher: int = 0

    @property
    def address(self) -> str:
        return f"{os.geteuid()}/{self.launch}/{self.session}"

    def hello(self) -> Hello:
        return Hello(__version__, self.launch, self.rank, self.size, this_process().start)


@dataclass(frozen=True)
class Joined:
    """Tell what a rank has once all have come: the launch's roster, and the memory to meet in."""

    roster: Roster
    memory: Block


def create_memory(size: int) -> Segment:
    """Create the memory of a launch of `size` ranks: the roster, then the world's meeting."""
    segment = Segment.create(_launch_bytes(size))
    Roster.format(roster_block(segment, size), size)
    return segment


def assemble(identity: Identity, seconds: float) -> Joined:
    """Wait until all ranks are here, and return what they share. Called by every rank. Raises
    MissingRank, Refused, PeerLost."""
    if faults.armed:
        faults.reach("join.start")
    deadline = time.monotonic() + seconds
    meet = _join_as_rank_0 if identity.rank == 0 else _join_as_other_rank
    segment, launcher = meet(identity, deadline, seconds)
    if faults.armed:
        faults.reach("join.mapped")
    roster = Roster(roster_block(segment, identity.size), identity.rank, launcher)
    roster.watch(range(identity.size))
    segment.close_descriptor()
    return Joined(roster, _meeting_block(segment, identity.size))


def _join_as_rank_0(identity: Identity, deadline: float, seconds: float) -> tuple[Segment, int]:
    segment = _launch_memory(identity)
    roster = Roster(roster_block(segment, identity.size), 0)
    try:
        listener = Listener(identity.address)
    except Refused as error:
        raise Refused(f"{error}; is rank 0 running twice?") from None
    members: dict[int, Channel] = {}
    hellos: dict[int, Hello] = {}
    try:
        while len(members) < identity.size - 1:
            _wait_for_any(listener, members, deadline)
            absent = [rank for rank in range(1, identity.size) if rank not in members]
            _notice_ends(members, absent, roster)
            if time.monotonic() >= deadline:
                raise _missing_error(absent, identity, seconds)
            channel = listener.accept()
            if channel is not None:
                _admit(channel, identity, members, hellos)
        # only now: a rank that is still to come may be using the memory of the session before
        _meeting_block(segment, identity.size).clear()
        roster.enroll(0, this_process())
        for rank, hello in hellos.items():
            roster.enroll(rank, Process(members[rank].pid, hello.start))
        welcome = Welcome(identity.launcher)
        for rank, channel in members.items():
            try:
                channel.send(welcome, [segment.descriptor])
            except Closed:
                raise _ended_error(rank, channel) from None
    except (MissingRank, PeerLost, Refused) as error:
        ranks = list(getattr(error, "ranks", ()))
        if isinstance(error, PeerLost):
            roster.record_cause(ranks[0])
        roster.set_state(LEFT)  # for the ranks that were welcomed before the failure
        rejected = Rejected(type(error).__name__, str(error), ranks)
        for channel in members.values():
            channel.send_now(rejected)
        raise
    finally:
        listener.close()
        for channel in members.values():
            channel.close()
    return segment, identity.launcher


def _join_as_other_rank(identity: Identity, deadline: float, seconds: float) -> tuple[Segment, int]:
    channel = _connect(identity, deadline, seconds)
    try:
        channel.send(identity.hello())
        if faults.armed:
            faults.reach("join.sent")
        # at its own deadline rank 0 reports who is missing: leave it time for that
        if not channel.wait(deadline + 1.0):
            raise _missing_error([0], identity, seconds)
        answer, descriptors = channel.receive(Welcome, Rejected)
    except Closed:
        _record_cause(0, identity)
        raise PeerLost(
            f"rank 0 ended while the group was starting (this is rank {identity.rank} "
            f"of {identity.size})",
            [0],
        ) from None
    finally:
        channel.close()
    if isinstance(answer, Rejected):
        if answer.error == PeerLost.__name__:
            _record_cause(answer.ranks[0], identity)
        raise _rejection_error(answer)
    return Segment(descriptors[0], _launch_bytes(identity.size)), answer.launcher


def _record_cause(rank: int, identity: Identity) -> None:
    """Record, for `weft run` if it is the launcher, whose loss this rank's failure is due to."""
    if identity.memory >= 0:
        segment = _launch_memory(identity)
        Roster(roster_block(segment, identity.size), identity.rank).record_cause(rank)


def _connect(identity: Identity, deadline: float, seconds: float) -> Channel:
    pause = 0.0005
    # without the memory of `weft run` nothing is known about rank 0 before it listens
    segment = _launch_memory(identity) if identity.memory >= 0 else None
    roster = Roster(roster_block(segment, identity.size), identity.rank) if segment else None
    while True:
        try:
            return Channel.connect(identity.address)
        except ConnectionRefusedError:
            if roster and roster.end_published(0):
                raise _never_came_error(0, roster) from None
            if time.monotonic() + pause > deadline:
                raise _missing_error([0], identity, seconds) from None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def _admit(
    channel: Channel, identity: Identity, members: dict[int, Channel], hellos: dict[int, Hello]
) -> None:
    """Receive a caller's Hello and admit it, or answer why not."""
    try:
        if not channel.wait(time.monotonic() + 1.0):
            channel.close()
            return
        hello, _ = channel.receive(Hello)
    except (Closed, Refused):
        channel.close()
        return
    reason = _objection(hello, identity, members)
    if reason is None:
        members[hello.rank], hellos[hello.rank] = channel, hello
        return
    channel.send_now(Rejected(Refused.__name__, reason, [hello.rank]))
    channel.close()
    if hello.job == identity.launch and hello.version != __version__:
        raise Refused(reason)  # waiting will not help: the group cannot start


def _objection(hello: Hello, identity: Identity, members: dict[int, Channel]) -> str | None:
    """Return why a caller is not admitted; None if it is."""
    if hello.job != identity.launch:
        return f"job {hello.job!r} met job {identity.launch!r}; each launch has its own"
    if hello.version != __version__:
        return (
            f"rank {hello.rank} runs weft {hello.version} and rank 0 runs weft {__version__}; "
            "install one version for all ranks"
        )
    if hello.size != identity.size:
        return (
            f"rank {hello.rank} was told of {hello.size} ranks and rank 0 of {identity.size}; "
            "start all ranks with one command"
        )
    if not 0 < hello.rank < identity.size:
        return (
            f"rank {hello.rank} does not exist in a group of {identity.size}, or is rank 0 itself"
        )
    if hello.rank in members:
        return (
            f"rank {hello.rank} is already here as process {members[hello.rank].pid}; a rank "
            "joins once, so start other programs from it after weft.init(), or with a clean "
            "environment"
        )
    return None


def _wait_for_any(listener: Listener, members: dict[int, Channel], deadline: float) -> None:
    """Wait for a caller, for a member's end, or for the next check of absent ranks."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    for channel in members.values():
        poll.register(channel, select.POLLIN)
    poll.poll(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic())) * 1000)


def _notice_ends(members: dict[int, Channel], absent: list[int], roster: Roster) -> None:
    """Raise PeerLost if a rank has ended. A member sends nothing after its Hello, so a readable
    channel means its end. The ends of absent ranks are known only to the launcher."""
    for rank, channel in members.items():
        if channel.wait(0.0):
            raise _ended_error(rank, channel)
    for rank in absent:
        if roster.end_published(rank):
            raise _never_came_error(rank, roster)


def _never_came_error(rank: int, roster: Roster) -> PeerLost:
    return PeerLost(
        f"rank {rank} ended before it came to weft.init(): {roster.describe_end(rank)}; every "
        "rank must call it",
        [rank],
    )


def _ended_error(rank: int, channel: Channel) -> PeerLost:
    return PeerLost(f"rank {rank} (pid {channel.pid}) ended while the group was starting", [rank])


def _rejection_error(answer: Rejected) -> Exception:
    """Return the error that rank 0 raised."""
    for kind in (MissingRank, PeerLost):
        if answer.error == kind.__name__:
            return kind(answer.reason, answer.ranks)
    return Refused(answer.reason)


def _missing_error(ranks: list[int], identity: Identity, seconds: float) -> MissingRank:
    names = ", ".join(map(str, ranks))
    # `weft run` starts all ranks on this host; other launchers may not
    elsewhere = "" if identity.launcher else " Is it on another host? That needs the mpi engine."
    return MissingRank(
        f"rank {names} of {identity.size} did not come within {seconds:g} s; did it fail before "
        f"weft.init()?{elsewhere} For slow starts raise --timeout or WEFT_TIMEOUT",
        ranks,
    )


def _launch_memory(identity: Identity) -> Segment:
    """Return the memory that `weft run` made, or fresh memory under another launcher."""
    if identity.memory < 0:
        return create_memory(identity.size)
    os.set_inheritable(identity.memory, False)  # not for programs that this rank starts
    try:
        descriptor = os.dup(identity.memory)
    except OSError as error:
        raise translate_os_error(error) from error
    return Segment(descriptor, _launch_bytes(identity.size))


def roster_block(segment: Segment, size: int) -> Block:
    return Block(segment, 0, 8 * words_for(size))


def _meeting_block(segment: Segment, size: int) -> Block:
    return Block(segment, 8 * words_for(size), 8 * meeting.words_for(size))


def _launch_bytes(size: int) -> int:
    return whole_pages(8 * (words_for(size) + meeting.words_for(size)))
