"""The agent's part in tables: it keeps the rows of its host, and brings requests to other agents.

    a rank's lane   -> the agent of the rows' host           the rank's own agent sends the slot
    another agent   -> a stream: the requests of one rank, in order; each is carried out by steps
                       that never wait, so a large one, or one that waits for others' adds or for a
                       lock, delays nobody else
    a count         -> told to the other agents, who write it into their hosts' memory

A part is a table's memory on this host: its rows, and words for each rank of the group. The agent
is the only one who writes the words of ranks of other hosts, and what they stage. Its memory is the
agent's, so it outlives the ranks. It is freed when every rank has dropped the table or is gone.

The other speakers of the host map the parts and lanes too, from when they are made (standby.py). If
the agent ends, the next of them takes its place and tells all other hosts:

    HERE  ---->   agents of other hosts: send it what has no answer yet, and what is new of their
                  ranks once more
    it sends what the ranks of its own host have asked and have no answer to once more

So a request may come twice. A change is made once: the part's memory knows the number of each
rank's last one. If the agent ended in the middle of a change, its rank is told.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from weft._core import sharding
from weft._core.arithmetic import Array
from weft._core.sharding import GONE, USES, WINDOW, News
from weft._core.tables import Interrupted
from weft.engines.local.meeting.locks import Lock
from weft.engines.local.meeting.meeting import TROUBLES
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import Block
from weft.engines.local.tables.state import (
    ADDS,
    COUNT,
    INTERRUPTED,
    LOWEST,
    NAMED,
    STATE,
    WHOLE,
    Changes,
    Staging,
)
from weft.engines.mpi import lanes
from weft.engines.mpi.copies import CopyMemory
from weft.engines.mpi.lanes import Answer, LaneMemory, Request, rows_at
from weft.engines.mpi.layout import (
    HostChanges,
    HostGroup,
    HostRanks,
    HostRows,
    Layout,
    encode_writes,
    layout_of,
    places_of,
    shifted,
)
from weft.engines.mpi.mail import Letter, Messages
from weft.engines.mpi.meeting import speakers_of
from weft.engines.mpi.memory import Bell, RingingWaiter
from weft.engines.mpi.standby import DROP, HERE, KEEP, KEPT, NEWS, Kept, LaneKey, Standby, frame_of
from weft.errors import PeerLost

if TYPE_CHECKING:
    from weft.engines.mpi.agent import Agent

_NEWS = struct.Struct("=QIQBQ")
#: seconds between two looks at who of this host is gone
_LOOK = 0.02
#: bytes of requests of other hosts that are here at a time, and of answers for one of them; but
#: requests for a table of which none was carried out for so many seconds hold up those for others
#: no longer: each rank has WINDOW requests under way at most
_MOST_HELD, _STUCK = 64 << 20, 0.5
#: how often a lock that is taken is tried before the agent waits for it, a millisecond at a time
_TRIES = 200

#: bytes of an exception that travels as it is
_LONGEST_ERROR = 64 << 10

Steps = Generator[None, None, Any]


class Part:
    """A table's rows on this host, as the agent has them."""

    def __init__(self, kept: Kept, layout: Layout, tables: Tables, block: Block) -> None:
        group, agent = kept.group, tables.agent
        self.kept, self.key, self.layout, self.block = kept, kept.key, layout, block
        self.group = group
        #: how many processes may map the memory
        self._places = len(places_of(group, agent.roster))
        self.memory = memory = layout.memory(group.at, self._places, block)
        self.ranks = HostRanks(
            group, agent.roster, memory, block, bell=agent.bell, states=lambda: ()
        )
        self.rows = HostRows(
            memory, block, ranks=self.ranks, recorder=agent.recorder, timeout=float("inf")
        )
        self._tables = tables
        #: the group's hosts, by their numbers in the job
        self.hosts = group.placement.order
        self.at = group.at
        #: by rank of this host: what the other hosts were told
        self.told: dict[int, News] = {}
        self.told_at = 0.0
        self.forget_told()
        #: the words of these ranks that others are told of, and what they were
        self._watched = [
            memory.word(rank, which) for rank in group.local for which in (ADDS, STATE)
        ]
        self._seen: list[int] = []
        self._gone: set[int] = set()
        self._copy: CopyMemory | None = None
        self._writers: dict[int, tuple[HostChanges, Staging]] = {}
        #: by rank: the number of an add to some rows that comes in parts, and those of the parts
        #: that were carried out
        self._named: dict[int, tuple[int, Array]] = {}
        #: by rank: the number of the request in the middle of which an earlier agent ended
        self._cut: dict[int, int] = {}
        #: bytes of requests that wait here, and when one was carried out last or began to wait
        self.held, self.moved = 0, time.monotonic()

    def repair(self) -> None:
        """End the changes in the middle of which an earlier agent ended."""
        changes, marks = self.rows.changes, self.rows.marks
        for rank in range(self.layout.ranks):
            if rank not in self.told and changes.write_begun[rank] != changes.write_done[rank]:
                self._cut[rank] = marks.serial[rank]
                if self.rows.is_bsp:  # it applied a clock: no call of a rank could be told
                    self.block.words[self.memory.word(rank, INTERRUPTED)] = 1
                changes.write_done[rank] = changes.write_begun[rank]

    def is_lost(self, host: int, failed: set[int]) -> bool:
        """Return whether no process of a host is left that keeps its part, where its agent has
        ended."""
        gone = {
            self.group.placement.world[rank]
            for rank in self.group.placement.ranks_on(host)
            if self.ranks.state(rank) == GONE
        }
        return failed.union(gone).issuperset(self._tables.speakers_on(host))

    def forget_told(self) -> None:
        """Tell all other hosts anew, as one has another agent."""
        self.told = {rank: News(rank, -1, USES) for rank in self.group.local}
        self._seen = []

    def writer(self, rank: int) -> tuple[HostChanges, Staging]:
        """Return what writes a rank's words, and what it stages."""
        if rank not in self._writers:
            changes = HostChanges(self.block, self.memory, ranks=self.ranks, rank=rank)
            staging = Staging(self.block, self.memory, clocks=self.rows.clocks, changes=changes)
            self._writers[rank] = changes, staging
        return self._writers[rank]

    def open_copy(self) -> bytes:
        """Return a handle of this host's copy of other hosts' rows, which is made for the first
        rank that asks. Raises what allocating memory raises."""
        if self._copy is None:
            block = blocks.allocate(CopyMemory(self.layout, self.at, self._places).nbytes)
            self._copy = CopyMemory(self.layout, self.at, self._places, block)
            self._copy.format()
        if self._copy.block is None:
            return b""
        return blocks.export(self._copy.block.buffer, owned=False).encode()

    # clocks

    def look_for_gone(self) -> None:
        """Note which ranks of this host are gone."""
        gone = self._gone | set(self.ranks.gone_here())
        if gone != self._gone:
            self._gone, self._seen = gone, []

    def news(self, now: float, *, at_once: bool) -> list[News]:
        """Return what is to be told of this host's ranks."""
        words = self.block.words
        seen = [words[index] for index in self._watched]
        if seen == self._seen:
            return []
        if not at_once and not sharding.is_due(self.layout.spec.consistency, now - self.told_at):
            return []
        count, state, marks = self.rows.clocks.count, self.ranks.state, self.rows.marks
        current = [
            News(rank, count(rank), GONE if gone else state(rank), marks.begun[rank] if gone else 0)
            for rank in self.told
            for gone in (rank in self._gone,)
        ]
        changed = sharding.news(current, self.told)
        for entry in changed:
            # it may have added before it left: read the count again
            if entry.state == GONE and count(entry.rank) != entry.adds:
                return self.news(now, at_once=at_once)
            marks.count(entry.rank, entry.counted)
            self.told[entry.rank] = entry
        self._seen = seen
        if changed:
            self.told_at = now
        return changed

    def note(self, entry: News) -> None:
        """Write what another host tells of one of its ranks."""
        self.rows.clocks.note(entry.rank, entry.adds)
        self.rows.marks.count(entry.rank, entry.counted)
        index = self.memory.word(entry.rank, STATE)
        if self.block.words[index] != GONE:
            self.block.words[index] = entry.state
        self.rows.clocks.wake(entry.rank)

    def note_lost_host(self, host: int) -> None:
        for rank in self.group.placement.ranks_on(host):
            self.note(News(rank, self.rows.clocks.count(rank), GONE))

    def is_used(self, *, elsewhere: bool) -> bool:
        """Return whether any rank, or any of another host, uses the table."""
        away = (rank for rank in range(self.layout.ranks) if rank not in self.told)
        if any(self.ranks.state(rank) == USES for rank in away):
            return True
        if elsewhere:
            return False
        return any(rank not in self._gone and self.ranks.state(rank) == USES for rank in self.told)

    # requests of other hosts' ranks

    def carry_out(self, request: Request, body: Array) -> Steps:
        """Carry out a request; return a number, and how the answer's bytes are written."""
        kind = request.kind
        if kind in (lanes.GET_SOME, lanes.GET_RANGE):
            return (yield from self._get(request, body))
        if request.flags & lanes.STAGED:
            return (yield from self._stage(request, body))
        if kind in (lanes.ADD_RANGE, lanes.ADD_SOME):
            if request.serial <= self.rows.marks.serial[request.rank]:
                if self._cut.get(request.rank) == request.serial:
                    raise self._cut_error(request)
                return 0, None  # it has come once more
            add = self._add_range if kind == lanes.ADD_RANGE else self._add_some
            return (yield from add(request, body))
        if kind == lanes.READ and self.rows.is_bsp:
            yield from self._advance(request.clock, *self.writer(request.rank))
        return self._access(request, body)

    def _get(self, request: Request, body: Array) -> Steps:
        rows, (changes, staging) = self.rows, self.writer(request.rank)
        where: Any = slice(request.low, request.high)
        count, some = request.high - request.low, (rows.rows[where], None)
        if request.kind == lanes.GET_SOME:
            where, count = _ids(body, request.named), request.named
            some = rows.rows, where
        message, found = self._message(count)
        if rows.is_bsp:
            yield from self._advance(request.clock, changes, staging)
        elif self.layout.spec.exact:
            for _ in range(3):
                if rows.try_read(*some, found) is not None:
                    return 0, message
                yield
            if request.kind == lanes.GET_RANGE and len(rows.stripes) > 1:
                yield from self._read_stripes(where, found)
                return 0, message
            yield from self._taking(rows.table)
            try:
                changes.mark_dead_writers()
                _copy(rows.rows, where, found)
            finally:
                rows.table.release_taken()
            return 0, message
        _copy(rows.rows, where, found)
        return 0, message

    def _read_stripes(self, where: slice, found: Array) -> Steps:
        """Copy rows while nobody changes their stripes."""
        rows, memory = self.rows, self.memory
        for number in range(memory.stripes):
            low, high = memory.range_of(number)
            first, last = max(low, where.start), min(high, where.stop)
            if first >= last:
                continue
            yield from self._entering(rows.table)
            try:
                yield from self._entering(rows.stripes[number])
                try:
                    found[first - where.start : last - where.start] = rows.rows[first:last]
                finally:
                    rows.stripes[number].leave_entered()
            finally:
                rows.table.leave_entered()

    def _add_range(self, request: Request, body: Array) -> Steps:
        rows, (changes, _) = self.rows, self.writer(request.rank)
        delta = self._rows_in(body, 0, request.high - request.low)
        exact, table, stripe = self.layout.spec.exact, rows.table, rows.stripes[request.number]
        alone = table if len(rows.stripes) == 1 else stripe
        if exact and alone is stripe:
            yield from self._entering(table)
        try:
            if exact:
                yield from self._taking(alone)
            try:
                low = self._first_row(request, changes)
                changes.serial = request.serial
                changes.begin(low, request.high, None)
                rows.add_stripe(request.number, delta)
            except BaseException:
                rows.marks.serial[request.rank] = request.serial - 1  # it may be made again
                raise
            finally:
                changes.write_done[request.rank] = changes.write_begun[request.rank]
                if exact:
                    alone.release_taken()
        finally:
            if exact and alone is stripe:
                table.leave_entered()
        return 0, None

    def _first_row(self, request: Request, changes: Changes) -> int:
        """Return the first row of this host that an add has changed, of which this part follows."""
        words, word = self.block.words, self.memory.word
        follows = changes.reached[request.rank] == request.add
        changes.begin_add(request.add)
        if follows and words[word(request.rank, COUNT)] == WHOLE:
            return min(request.low, words[word(request.rank, LOWEST)])
        return request.low

    def _cut_error(self, request: Request) -> PeerLost:
        name, low = self.layout.spec.name, self.layout.sharding.part(self.at)[0]
        if request.kind == lanes.ADD_RANGE:
            which = f"rows {low + request.low} to {low + request.high - 1}"
        else:
            which = f"{request.named} rows"
        host = self.group.placement.names[self.group.host]
        return PeerLost(
            f"table {name!r}: the process that kept the rows of host {host} ended in the middle of "
            f"this add; {which} of that host may have got it in part. Another process has taken "
            "its place, and the table can be used",
            [],
            [],
        )

    def _add_some(self, request: Request, body: Array) -> Steps:
        rows, (changes, _) = self.rows, self.writer(request.rank)
        ids = _ids(body, request.named)
        delta = self._rows_in(body, request.named, request.named)
        prepared = rows.prepare(delta, ids) if ids.size else None
        exact = self.layout.spec.exact
        if exact:
            yield from self._taking(rows.table)
        try:
            rows.marks.count(request.rank, request.counted)
            if ids.size:
                changes.begin_add(request.add)
                named = self._names(request, ids)
                changes.serial = request.serial
                step = rows.added_steps
                rows.add_rows(delta, ids, prepared, changes, step=step, named=named)
        except BaseException:
            rows.marks.serial[request.rank] = request.serial - 1  # it may be made again
            raise
        finally:
            if exact:
                rows.table.release_taken()
        return 0, None

    def _names(self, request: Request, ids: Array) -> Array:
        """Return the rows here that an add has changed and is about to change, as far as there is
        room to note them."""
        add, before = self._named.get(request.rank, (0, ids[:0]))
        named = np.concatenate([before, ids]) if add == request.add else ids
        self._named[request.rank] = request.add, named[:NAMED].copy()
        return named

    def _stage(self, request: Request, body: Array) -> Steps:
        changes, staging = self.writer(request.rank)
        serial = self.rows.marks.serial
        if request.serial <= serial[request.rank]:
            return 0, None  # it has come once more
        if request.flags & lanes.FIRST:
            yield from self._advance(request.clock, changes, staging)
        if request.kind == lanes.ADD_RANGE:
            staging.stage_whole(request.low, self._rows_in(body, 0, request.high - request.low))
        else:
            delta = self._rows_in(body, request.named, request.named)
            staging.stage_some(request.number, delta, _ids(body, request.named))
        serial[request.rank] = request.serial
        return 0, None

    def _access(self, request: Request, body: Array) -> tuple[int, Array | None]:
        """Carry out what saving and loading need, and what tells of ranks."""
        rows = self.rows
        name = ("rows", *self.layout.spec.updater.state)[request.array]
        if request.kind == lanes.READ:
            message, found = self._message(request.high - request.low)
            found[...] = rows.piece(name, request.low, request.high)
            return 0, message
        if request.kind == lanes.WRITE:
            values = self._rows_in(body, 0, request.high - request.low)
            rows.piece(name, request.low, request.high)[...] = values
        elif request.kind == lanes.SET_STEPS:
            rows.set_steps(request.clock)
        elif request.kind == lanes.COUNTS:
            counts = [rows.clocks.count(rank) for rank in range(self.layout.ranks)]
            return 0, _message_of(np.array(counts, np.int64))
        elif request.kind == lanes.CHANGES:
            return 0, _message_of(np.frombuffer(encode_writes(self.interrupted()), np.uint8))
        return 0, None

    def interrupted(self) -> list[Interrupted]:
        """Return the changes that ranks had begun here when they died, by the table's row ids."""
        low = self.layout.sharding.part(self.at)[0]
        return [shifted(write, low) for write in self.rows.changes.interrupted()]

    def _message(self, count: int) -> tuple[Array, Array]:
        """Return memory for an answer of so many rows, and the rows in it."""
        spec = self.layout.spec
        message = np.empty(lanes.HEADER + count * self.layout.sharding.row_nbytes, np.uint8)
        return message, message[lanes.HEADER :].view(spec.dtype).reshape(count, *spec.row_shape)

    def _rows_in(self, body: Array, count: int, length: int) -> Array:
        """Return the rows in a message, behind `count` ids."""
        spec = self.layout.spec
        start = rows_at(count)
        shape = (length, *spec.row_shape)
        nbytes = length * self.layout.sharding.row_nbytes
        return body[start : start + nbytes].view(spec.dtype).reshape(shape)

    # waiting

    def _advance(self, clock: int, changes: Changes, staging: Staging) -> Steps:
        """Wait until all ranks have made `clock` adds, and apply these."""
        rows = self.rows
        while staging.applied < clock:
            late = partial(self._late, clock)
            while late():
                yield
            yield from self._taking(rows.table)
            try:
                changes.mark_dead_writers()
                while staging.applied < clock:
                    yield from staging.apply_by_parts(staging.applied + 1)
            finally:
                rows.table.release_taken()

    def _late(self, clock: int) -> bool:
        count = self.rows.clocks.count
        late = [rank for rank in range(self.layout.ranks) if count(rank) < clock]
        if not late:
            return False
        gone = self.ranks.gone(late)
        # who is gone may have added before: its count is read again
        return any(rank not in gone for rank in late if count(rank) < clock)

    def _taking(self, lock: Lock) -> Steps:
        """Take a lock alone."""
        tries = 0
        while not lock.try_take(patience=0.001 if tries > _TRIES else 0.0):
            tries += 1
            yield
        try:
            while lock.has_readers():
                yield
        except BaseException:
            lock.release_taken()
            raise

    def _entering(self, lock: Lock) -> Steps:
        """Take a lock together with other readers."""
        tries = 0
        while not lock.try_enter(patience=0.001 if tries > _TRIES else 0.0):
            tries += 1
            yield


def _ids(body: Array, count: int) -> Any:
    return body[lanes.HEADER : lanes.HEADER + count * sharding.ID_BYTES].view(np.intp)


def _copy(rows: Array, where: Any, out: Array) -> None:
    if isinstance(where, slice):
        np.copyto(out, rows[where])
    else:
        rows.take(where, 0, out, "clip")


def _message_of(array: Array) -> Array:
    message = np.empty(lanes.HEADER + array.nbytes, np.uint8)
    message[lanes.HEADER :] = array.view(np.uint8)
    return message


class Stream:
    """The requests of one rank of another host, in order."""

    def __init__(self) -> None:
        #: who has sent each, for which table
        self.waiting: deque[tuple[int, Part, Array]] = deque()
        #: what is carried out now
        self.steps: Steps | None = None


@dataclass
class LaneSet:
    """The lanes of the ranks of this host in one generation of a group."""

    key: LaneKey
    memory: LaneMemory
    #: by host: the tag of its answers for the first slot of the first rank
    first_tags: dict[int, int]
    #: by rank: how many requests were taken
    taken: list[int]
    waiter: Any
    #: by rank and slot: the number of the request, and the host that is to answer
    under_way: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def tag(self, rank: int, slot: int, host: int) -> int:
        """Return the tag of the answer of a host to the request in a rank's slot."""
        return self.first_tags[host] + rank * WINDOW + slot

    def waits_at(self, tag: int, host: int) -> tuple[int, int] | None:
        """Return the rank and the slot that wait for an answer from a host; None if none does."""
        at = tag - self.first_tags.get(host, tag + 1)
        place = divmod(at, WINDOW)
        waits = 0 <= at < len(self.taken) * WINDOW and self.under_way.get(place, (0, -1))[1] == host
        return place if waits else None


class Tables:
    """All tables over hosts that this agent keeps a part of."""

    def __init__(self, agent: Agent, messages: Messages) -> None:
        self.agent, self._mail, self._messages = agent, agent.mail, messages
        self._parts: dict[int, Part] = {}
        self._lanes: dict[LaneKey, LaneSet] = {}
        self._streams: dict[tuple[LaneKey, int], Stream] = {}
        #: by host: its agent, as a rank in MPI
        self.agents = {host: self.speakers_on(host)[0] for host in {*agent.host_of}}
        #: by host that has another agent: the one before, of which something may still come
        self._before: dict[int, int] = {}
        #: by rank in MPI: the bells of the other speakers of this host; and which of them map which
        #: table
        speakers = zip(self.speakers_on(agent.host), speakers_of(agent.roster), strict=True)
        self._standbys = {rank: Bell(agent.roster, place) for rank, place in speakers}
        self._kept: dict[int, set[int]] = {}
        #: what is to be sent in this turn, by agent
        self._requests: dict[int, list[tuple[int, Array]]] = {}
        self._answers: dict[int, list[tuple[int, Array]]] = {}
        self._looked = 0.0
        self._failed = 0

    def speakers_on(self, host: int) -> list[int]:
        """Return the ranks in MPI of a host's speakers."""
        return [rank for rank, its in enumerate(self.agent.host_of) if its == host]

    def add_part(self, kept: Kept, layout: Layout, block: Block) -> Part:
        """Keep a table's part, and have the other speakers of this host map it."""
        part = self._parts[kept.key] = Part(kept, layout, self, block)
        self._kept[kept.key] = set()
        self._to_standbys(KEEP, kept.encode())
        return part

    def is_kept(self, key: int) -> bool:
        """Return whether all other speakers of this host that are there map a table."""
        return self._kept.get(key, set()).issuperset(self._living_standbys())

    def drop_part(self, key: int) -> None:
        if self._parts.pop(key, None) is not None:
            self._kept.pop(key, None)
            self._to_standbys(DROP, key.to_bytes(8, "little"))

    def open_lanes(self, key: LaneKey, group: HostGroup, memory: LaneMemory) -> LaneSet:
        """Serve the lanes of the ranks of a group on this host."""
        count = len(group.members)
        first = self._messages.reserve_tags(count * WINDOW)
        waiter = RingingWaiter(
            memory.block,
            flags_at=memory.flags_at,
            size=memory.places,
            place=count,
            free_cores=False,
        )
        waiter.bell = self.agent.bell
        first_tags = dict.fromkeys(group.placement.order, first)
        opened = LaneSet(key, memory, first_tags, [0] * count, waiter)
        self._lanes[key] = opened
        return opened

    # other speakers of this host, and agents that take the place of others

    def _living_standbys(self) -> list[int]:
        places = {bell.agent: rank for rank, bell in self._standbys.items()}
        later = [place for place in places if place > self.agent.place]
        gone = self.agent.roster.gone(later)
        return [places[place] for place in later if place not in gone]

    def _to_standbys(self, kind: int, body: bytes) -> None:
        for rank in self._living_standbys():
            self._mail.send(rank, frame_of(kind, self.agent.session), body)
            self._standbys[rank].ring()

    def take_over(self, standby: Standby) -> None:
        """Serve what an agent that has ended has kept."""
        self.agents.update(standby.agents)
        self.agents[self.agent.host] = self.agent.mpi_rank
        for kept, block, lanes_block in standby.tables.values():
            layout = layout_of(kept.spec(), kept.group.placement)
            part = self._parts[kept.key] = Part(kept, layout, self, block)
            self._kept[kept.key] = set(self._standbys)
            part.repair()
            if lanes_block is not None and kept.lane not in self._lanes:
                room = layout.sharding.room
                memory = LaneMemory(lanes_block, ranks=len(kept.group.members), room=room)
                self.open_lanes(kept.lane, kept.group, memory)
        for opened in self._lanes.values():
            self._take_again(opened)
        for rank, host in enumerate(self.agent.host_of):
            if host != self.agent.host:
                self._mail.send(rank, frame_of(HERE, self.agent.session), b"")

    def _take_again(self, opened: LaneSet) -> None:
        """Take the requests of this host's ranks that have no answer."""
        memory = opened.memory
        for rank in range(len(opened.taken)):
            opened.taken[rank] = asked = memory.words[memory.asked_at(rank)]
            for number in range(max(1, asked - WINDOW + 1), asked + 1):
                if memory.words[memory.answered_at(rank, number)] < number:
                    self._bring(opened, rank, number)

    def _follow(self, agent: int) -> None:
        """Make an agent that has taken another's place serve its host."""
        host = self.agent.host_of[agent]
        if self.agents[host] == agent:
            return
        self._before[host], self.agents[host] = self.agents[host], agent
        for part in self._parts.values():
            if host in part.hosts:
                part.forget_told()

    def _send_again(self) -> None:
        """Send requests to agents that have taken another's place, once nothing of that one comes
        any more into the slots of these requests."""
        for host, before in list(self._before.items()):
            if self._messages.comes_from(before):
                continue
            del self._before[host]
            for opened in self._lanes.values():
                if host not in opened.first_tags:
                    continue
                count = len(opened.taken) * WINDOW
                opened.first_tags[host] = self._messages.reserve_tags(count)
                for (rank, _), (number, its) in list(opened.under_way.items()):
                    if its == host:
                        self._bring(opened, rank, number)

    @property
    def is_needed(self) -> bool:
        """Return whether ranks of other hosts use what this host keeps."""
        return any(part.is_used(elsewhere=True) for part in self._parts.values())

    @property
    def all_sent(self) -> bool:
        return self._messages.all_sent

    def flush(self) -> None:
        """Let messages go that are being sent."""
        self._messages.poll(self._room_for)

    # the loop

    def turn(self) -> bool:
        """Do what can be done now; return whether that was anything."""
        now = time.monotonic()
        moved = self._note_failures()
        if now - self._looked >= _LOOK:
            self._looked = now
            self._look()
        if self._before:
            self._send_again()
        for opened in self._lanes.values():
            moved |= self._take_requests(opened)
        self._send_requests()
        for sender, tag, memory in self._messages.poll(self._room_for):
            moved = True
            if tag == Messages.REQUEST:
                self._receive_request(sender, memory, now)
            elif tag == Messages.REQUESTS:
                for _, request in lanes.split(memory):
                    self._receive_request(sender, request, now)
            elif tag == Messages.ANSWERS:
                for its_tag, answer in lanes.split(memory):
                    self._room_for(sender, its_tag, len(answer))[:] = answer
                    self._receive_answer(sender, its_tag)
            else:
                self._receive_answer(sender, tag)
        moved |= self._advance_streams(now)
        self._send_answers()
        moved |= self.tell(now)
        return moved

    def tell(self, now: float | None = None, *, at_once: bool = False) -> bool:
        """Tell the other hosts what is new of the ranks of this one."""
        now = time.monotonic() if now is None else now
        bodies: dict[int, bytearray] = {}
        for part in self._parts.values():
            for entry in part.news(now, at_once=at_once):
                record = _NEWS.pack(part.key, *entry)
                for host in part.hosts:
                    if host != part.hosts[part.at]:
                        bodies.setdefault(self.agents[host], bytearray()).extend(record)
        for agent, body in bodies.items():
            self._mail.send(agent, frame_of(NEWS, self.agent.session), bytes(body))
        return bool(bodies)

    def receive(self, letter: Letter) -> None:
        """Take a message of another speaker."""
        kind, session = letter.frame.kind, letter.frame.number
        if session != self.agent.session:
            return
        if kind == NEWS:
            for key, *entry in _NEWS.iter_unpack(letter.body):
                if key in self._parts:
                    self._parts[key].note(News(*entry))
        elif kind == HERE:
            self._follow(letter.sender)
        elif kind == KEPT:
            key = int.from_bytes(letter.body, "little")
            self._kept.get(key, set()).add(letter.sender)

    def say_farewell(self) -> None:
        """Tell the other hosts what became of the ranks of this one, as the agent ends."""
        self._look()
        self.tell(at_once=True)
        for stream in self._streams.values():
            if stream.steps is not None:
                stream.steps.close()  # release locks: another agent carries it out

    def _look(self) -> None:
        """Look who is gone, and free what nobody uses any more."""
        for key, part in list(self._parts.items()):
            part.look_for_gone()
            if not part.is_used(elsewhere=False):
                self.tell(at_once=True)
                self.drop_part(key)
        for lane in self._lanes.keys() - {part.kept.lane for part in self._parts.values()}:
            if not self.agent.serves(*lane[:2]):
                del self._lanes[lane]
        for its, stream in list(self._streams.items()):
            if its[0] not in self._lanes and not stream.waiting:
                del self._streams[its]
        self._note_lost_hosts()

    def _note_failures(self) -> bool:
        if len(self._mail.failed) == self._failed:
            return False
        self._failed = len(self._mail.failed)
        self._note_lost_hosts()
        return True

    def _note_lost_hosts(self) -> None:
        """Find the hosts of which no process is left that keeps tables. Where only the agent has
        ended, what it was asked waits for the one that takes its place."""
        failed = self._mail.failed
        silent = {host for host, agent in self.agents.items() if agent in failed}
        if not silent:
            return
        for part in self._parts.values():
            for host in silent.intersection(part.hosts):
                if part.is_lost(host, failed):
                    part.note_lost_host(host)
        for opened in self._lanes.values():
            for (rank, slot), (number, host) in list(opened.under_way.items()):
                if host in silent and self._is_lost(opened, rank, number, host):
                    self._answer_lost(opened, rank, slot, number)

    def _is_lost(self, opened: LaneSet, rank: int, number: int, host: int) -> bool:
        """Return whether what a request asks for is lost."""
        part = self._parts.get(lanes.read_request(opened.memory.slot(rank, number)).table)
        return part is None or part.is_lost(host, self._mail.failed)

    # what the ranks of this host ask of others

    def _take_requests(self, opened: LaneSet) -> bool:
        memory, moved = opened.memory, False
        for rank, taken in enumerate(opened.taken):
            asked = memory.words[memory.asked_at(rank)]
            if asked == taken:
                continue
            moved = True
            for number in range(taken + 1, asked + 1):
                self._bring(opened, rank, number)
            opened.taken[rank] = asked
        return moved

    def _send_requests(self) -> None:
        """Send what the ranks of this host ask for, the small requests to one host as one."""
        for agent, requests in self._requests.items():
            for some in lanes.together(requests):
                if len(some) == 1:
                    self._messages.send(some[0][1], agent, Messages.REQUEST)
                else:
                    self._messages.send(lanes.join(some), agent, Messages.REQUESTS)
        self._requests.clear()

    def _send_answers(self) -> None:
        """Send what came of requests, the small answers to one host as one."""
        for agent, answers in self._answers.items():
            for some in lanes.together(answers):
                if len(some) == 1:
                    self._messages.send(some[0][1], agent, some[0][0])
                else:
                    self._messages.send(lanes.join(some), agent, Messages.ANSWERS)
        self._answers.clear()

    def _bring(self, opened: LaneSet, rank: int, number: int) -> None:
        slot = opened.memory.slot(rank, number)
        request = lanes.read_request(slot)
        agent = self.agents[request.host]
        opened.under_way[rank, number % WINDOW] = number, request.host
        if request.kind == lanes.COPY:
            self._answer_copy(opened, rank, number, request)
            return
        if agent in self._mail.failed:
            if self._is_lost(opened, rank, number, request.host):
                self._answer_lost(opened, rank, number % WINDOW, number)
            return
        if request.host in self._before:
            return  # it is sent with those that the agent before has not answered
        tag = opened.tag(rank, number % WINDOW, request.host)
        lanes.write_tag(slot, tag)
        self._requests.setdefault(agent, []).append((tag, slot[: request.length]))

    def _answer_copy(self, opened: LaneSet, rank: int, number: int, request: Request) -> None:
        """Give a rank of this host a handle of the host's copy of other hosts' rows."""
        slot = lanes.answer_in(opened.memory.slot(rank, number), request)
        part = self._parts.get(request.table)
        code, body = lanes.UNKNOWN, np.empty(0, np.uint8)
        if part is not None:
            try:
                code, body = lanes.DONE, np.frombuffer(part.open_copy(), np.uint8)
            except TROUBLES as error:
                code, body = lanes.FAILED, _pickled(error)
        slot[lanes.HEADER : lanes.HEADER + body.size] = body
        lanes.write_answer(slot, Answer(code, 0, body.size))
        self._publish(opened, rank, number % WINDOW)

    def _answer_lost(self, opened: LaneSet, rank: int, slot: int, number: int) -> None:
        asked = opened.memory.slot(rank, number)
        answered = lanes.answer_in(asked, lanes.read_request(asked))
        lanes.write_answer(answered, Answer(lanes.LOST, 0, 0))
        self._publish(opened, rank, slot)

    def _receive_answer(self, sender: int, tag: int) -> None:
        found = self._waiting_for(sender, tag)
        if found is not None:
            opened, rank, slot = found
            self._publish(opened, rank, slot)

    def _publish(self, opened: LaneSet, rank: int, slot: int) -> None:
        number, _ = opened.under_way.pop((rank, slot), (0, 0))
        if number:
            opened.waiter.publish(opened.memory.answered_at(rank, number), number)

    def _waiting_for(self, sender: int, tag: int) -> tuple[LaneSet, int, int] | None:
        """Return the rank and the slot of this host that wait for an answer; None if none do."""
        host = self.agent.host_of[sender]
        for opened in self._lanes.values():
            if (place := opened.waits_at(tag, host)) is not None:
                return opened, *place
        return None

    # what ranks of other hosts ask

    def _room_for(self, sender: int, tag: int, length: int) -> Any:
        """Return where a message goes: an answer into its slot, a request into fresh memory."""
        if tag in (Messages.REQUEST, Messages.REQUESTS):
            held = self._held_bytes() + self._messages.coming_bytes
            if held and held + length > _MOST_HELD:
                return None
            return np.empty(length, np.uint8)
        found = self._waiting_for(sender, tag)
        if found is not None:
            opened, rank, slot = found
            asked = opened.memory.slot(rank, slot)
            return lanes.answer_in(asked, lanes.read_request(asked))[:length]
        # of a session that has ended, or an answer that another agent gives once more
        return np.empty(length, np.uint8)

    def _held_bytes(self) -> int:
        """Return the bytes of requests that wait, but for those of tables of which none is carried
        out, as somebody who holds a lock is stopped."""
        since = time.monotonic() - _STUCK
        return sum(part.held for part in self._parts.values() if part.moved > since)

    def _receive_request(self, sender: int, memory: Array, now: float) -> None:
        request = lanes.read_request(memory)
        part = self._parts.get(request.table)
        if part is None:
            self._answer(sender, lanes.read_tag(memory), Answer(lanes.UNKNOWN, 0, 0))
            return
        if not part.held:
            part.moved = now
        part.held += len(memory)
        stream = self._streams.setdefault((part.kept.lane, request.rank), Stream())
        stream.waiting.append((sender, part, memory))

    def _advance_streams(self, now: float) -> bool:
        moved = False
        for stream in list(self._streams.values()):
            while True:
                if stream.steps is None:
                    # who takes no answers, as its link is cut, holds up only itself
                    if not stream.waiting or self._unsent(stream.waiting[0][0]) > _MOST_HELD:
                        break
                    stream.steps = self._carry_out(*stream.waiting[0])
                try:
                    next(stream.steps)
                    break
                except StopIteration:
                    moved, stream.steps = True, None
                    _, part, memory = stream.waiting.popleft()
                    part.held, part.moved = part.held - len(memory), now
        return moved

    def _unsent(self, agent: int) -> int:
        """Return the bytes of answers for an agent that have not gone yet."""
        waiting = (memory for _, memory in self._answers.get(agent, ()))
        return self._messages.sending_bytes(agent) + sum(map(len, waiting))

    def _carry_out(self, sender: int, part: Part, memory: Array) -> Steps:
        """Carry out a request, and send what came of it."""
        request = lanes.read_request(memory)
        message: Array | None = None
        code, value = lanes.DONE, 0
        try:
            value, message = yield from part.carry_out(request, memory)
        except Exception as error:
            code, message = lanes.FAILED, _message_of(_pickled(error))
        room = lanes.room_for_answer(part.layout.sharding.room, request)
        if message is not None and len(message) > room:
            text = f"an answer of {len(message)} bytes, for which there is no room"
            code, message = lanes.FAILED, _message_of(_pickled(RuntimeError(text)))
        length = 0 if message is None else len(message) - lanes.HEADER
        self._answer(sender, lanes.read_tag(memory), Answer(code, value, length), message)

    def _answer(self, sender: int, tag: int, answer: Answer, message: Array | None = None) -> None:
        """Send an answer, with the message that it heads."""
        message = np.empty(lanes.HEADER, np.uint8) if message is None else message
        lanes.write_answer(message, answer)
        self._answers.setdefault(sender, []).append((tag, message))


def _pickled(error: Exception) -> Array:
    """Return an exception as bytes; if it cannot be pickled, or is long, its message in another."""
    import cloudpickle

    try:
        text = cloudpickle.dumps(error)
    except Exception:
        text = b""
    if not 0 < len(text) <= _LONGEST_ERROR:
        text = cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"[:1000]))
    return np.frombuffer(text, np.uint8)
