"""The agent's part in tables: it keeps the rows of its host, and brings requests to other agents.

    a rank's lane   -> the agent of the rows' host           the rank's own agent sends the slot
    another agent   -> a stream: the requests of one rank, in order; each is carried out by steps
                       that never wait, so a large one, or one that waits for others' adds or for a
                       lock, delays nobody else
    a count         -> told to the other agents, who write it into their hosts' memory

A part is a table's memory on this host: its rows, and words for each rank of the group. The agent
is the only one who writes the words of ranks of other hosts, and what they stage. Its memory is the
agent's, so it outlives the ranks. It is freed when every rank has dropped the table or is gone.
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
from weft.engines.local.tables.state import ADDS, STATE, Changes, Staging, TableMemory
from weft.engines.local.tables.store import SharedRows
from weft.engines.mpi import lanes
from weft.engines.mpi.copies import CopyMemory
from weft.engines.mpi.lanes import Answer, LaneMemory, Request, rows_at
from weft.engines.mpi.layout import HostRanks, Layout, encode_writes, shifted
from weft.engines.mpi.mail import Frame, Letter, Messages

if TYPE_CHECKING:
    from weft.engines.mpi.agent import Agent
    from weft.engines.mpi.service import Service

#: the key of messages about tables, which are for no group
KEY = 0
_NEWS = struct.Struct("=QIQB")
#: seconds between two looks at who of this host is gone
_LOOK = 0.02
#: bytes of requests of other hosts that are here at a time, and of answers for one of them
_MOST_HELD = 64 << 20
#: how often a lock that is taken is tried before the agent waits for it, a millisecond at a time
_TRIES = 200

#: bytes of an exception that travels as it is
_LONGEST_ERROR = 64 << 10

Steps = Generator[None, None, Any]


class Part:
    """A table's rows on this host, as the agent has them."""

    def __init__(
        self, key: int, layout: Layout, service: Service, block: Block, memory: TableMemory
    ) -> None:
        meeting = service.meeting
        self.key, self.layout, self.block, self.memory = key, layout, block, memory
        self.ranks = HostRanks(meeting, memory, block)
        self.rows = SharedRows(
            memory,
            block,
            ranks=self.ranks,
            recorder=service.agent.recorder,
            timeout=float("inf"),
        )
        self._meeting, self._service = meeting, service
        #: the group's hosts, by their numbers in the job
        self.hosts = service.hosts
        self.at = service.at
        #: by rank of this host: what the other hosts were told
        self.told = {rank: News(rank, 0, USES) for rank in meeting.local}
        self.told_at = 0.0
        #: the words of these ranks that others are told of, and what they were
        self._watched = [
            memory.word(rank, which) for rank in meeting.local for which in (ADDS, STATE)
        ]
        self._seen: list[int] = []
        self._gone: set[int] = set()
        self._copy: CopyMemory | None = None
        self._writers: dict[int, tuple[Changes, Staging]] = {}

    @property
    def agents(self) -> dict[int, int]:
        """Return the ranks in MPI of the agents, by host."""
        return self._service.agents

    def writer(self, rank: int) -> tuple[Changes, Staging]:
        """Return what writes a rank's words, and what it stages."""
        if rank not in self._writers:
            changes = Changes(self.block, self.memory, ranks=self.ranks, rank=rank)
            staging = Staging(self.block, self.memory, clocks=self.rows.clocks, changes=changes)
            self._writers[rank] = changes, staging
        return self._writers[rank]

    def open_copy(self) -> bytes:
        """Return a handle of this host's copy of other hosts' rows, which is made for the first
        rank that asks. Raises what allocating memory raises."""
        if self._copy is None:
            places = len(self._meeting.places)
            block = blocks.allocate(CopyMemory(self.layout, self.at, places).nbytes)
            self._copy = CopyMemory(self.layout, self.at, places, block)
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
        count, state = self.rows.clocks.count, self.ranks.state
        current = (
            News(rank, count(rank), GONE if rank in self._gone else state(rank))
            for rank in self.told
        )
        changed = sharding.news(current, self.told)
        for entry in changed:
            # it may have added before it left: read the count again
            if entry.state == GONE and count(entry.rank) != entry.adds:
                return self.news(now, at_once=at_once)
            self.told[entry.rank] = entry
        self._seen = seen
        if changed:
            self.told_at = now
        return changed

    def note(self, entry: News) -> None:
        """Write what another host tells of one of its ranks."""
        self.rows.clocks.note(entry.rank, entry.adds)
        index = self.memory.word(entry.rank, STATE)
        if self.block.words[index] != GONE:
            self.block.words[index] = entry.state
        self.rows.clocks.wake(entry.rank)

    def note_lost_host(self, host: int) -> None:
        for rank in self._meeting.placement.ranks_on(host):
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

    def carry_out(self, request: Request, body: Array, stream: Stream) -> Steps:
        """Carry out a request; return a number, and how the answer's bytes are written."""
        kind = request.kind
        if kind in (lanes.GET_SOME, lanes.GET_RANGE):
            return (yield from self._get(request, body))
        if request.flags & lanes.STAGED:
            return (yield from self._stage(request, body))
        if kind == lanes.ADD_RANGE:
            return (yield from self._add_range(request, body))
        if kind == lanes.ADD_SOME:
            return (yield from self._add_some(request, body, stream))
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
                changes.begin(request.low, request.high, None)
                rows.add_stripe(request.number, delta)
            finally:
                changes.write_done[request.rank] = changes.write_begun[request.rank]
                if exact:
                    alone.release_taken()
        finally:
            if exact and alone is stripe:
                table.leave_entered()
        return 0, None

    def _add_some(self, request: Request, body: Array, stream: Stream) -> Steps:
        rows, (changes, _) = self.rows, self.writer(request.rank)
        ids = _ids(body, request.named)
        delta = self._rows_in(body, request.named, request.named)
        prepared = rows.prepare(delta, ids) if ids.size else None
        exact = self.layout.spec.exact
        if exact:
            yield from self._taking(rows.table)
        try:
            if request.flags & lanes.COUNTED:
                rows.count_step()
                stream.step = rows.added_steps
            if ids.size:
                rows.add_rows(delta, ids, prepared, changes, stream.step)
        finally:
            if exact:
                rows.table.release_taken()
        return 0, None

    def _stage(self, request: Request, body: Array) -> Steps:
        changes, staging = self.writer(request.rank)
        if request.flags & lanes.FIRST:
            yield from self._advance(request.clock, changes, staging)
        if request.kind == lanes.ADD_RANGE:
            staging.stage_whole(request.low, self._rows_in(body, 0, request.high - request.low))
        else:
            delta = self._rows_in(body, request.named, request.named)
            staging.stage_some(request.number, delta, _ids(body, request.named))
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
        self.waiting: deque[tuple[int, int, Array]] = deque()
        #: what is carried out now
        self.steps: Steps | None = None
        #: of the add whose parts come: its number among all
        self.step = 0


@dataclass
class LaneSet:
    """The lanes of the ranks of this host in one generation of a group."""

    memory: LaneMemory
    #: the tag of the answers for the first slot of the first rank
    first_tag: int
    #: by rank: how many requests were taken
    taken: list[int]
    service: Service
    waiter: Any
    #: by rank and slot: the number of the request, and the host that is to answer
    under_way: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def last_tag(self) -> int:
        return self.first_tag + len(self.taken) * WINDOW - 1


class Tables:
    """All tables over hosts that this agent keeps a part of."""

    def __init__(self, agent: Agent, messages: Messages) -> None:
        self._agent, self._mail, self._messages = agent, agent.mail, messages
        self._parts: dict[int, Part] = {}
        self._lanes: list[LaneSet] = []
        self._streams: dict[tuple[int, int], Stream] = {}
        #: what is to be sent in this turn, by agent
        self._requests: dict[int, list[tuple[int, Array]]] = {}
        self._answers: dict[int, list[tuple[int, Array]]] = {}
        self._held = 0
        self._looked = 0.0
        self._failed = 0

    def add_part(self, part: Part) -> None:
        self._parts[part.key] = part

    def drop_part(self, key: int) -> None:
        self._parts.pop(key, None)

    def open_lanes(self, service: Service, memory: LaneMemory) -> LaneSet:
        """Serve the lanes of the ranks of a group on this host."""
        count = len(service.meeting.local)
        first_tag = self._messages.reserve_tags(count * WINDOW)
        waiter = service.meeting.waiter_of(
            memory.block, memory.flags_at, memory.places, service.meeting.rank
        )
        opened = LaneSet(memory, first_tag, [0] * count, service, waiter)
        self._lanes.append(opened)
        return opened

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
        if not self._parts and not self._lanes:
            self._messages.poll(self._room_for)
            return False
        now = time.monotonic()
        moved = self._note_failures()
        if now - self._looked >= _LOOK:
            self._looked = now
            self._look()
        for opened in self._lanes:
            moved |= self._take_requests(opened)
        self._send_requests()
        for sender, tag, memory in self._messages.poll(self._room_for):
            moved = True
            if tag == Messages.REQUEST:
                self._receive_request(sender, memory)
            elif tag == Messages.REQUESTS:
                for _, request in lanes.split(memory):
                    self._receive_request(sender, request)
            elif tag == Messages.ANSWERS:
                for its_tag, answer in lanes.split(memory):
                    self._room_for(sender, its_tag, len(answer))[:] = answer
                    self._receive_answer(its_tag)
            else:
                self._receive_answer(tag)
        moved |= self._advance_streams()
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
                        bodies.setdefault(part.agents[host], bytearray()).extend(record)
        frame = Frame(KEY, 0, 0, 0, 0)
        for agent, body in bodies.items():
            self._mail.send(agent, frame, bytes(body))
        return bool(bodies)

    def receive_news(self, letter: Letter) -> None:
        for key, *entry in _NEWS.iter_unpack(letter.body):
            if key in self._parts:
                self._parts[key].note(News(*entry))

    def say_farewell(self) -> None:
        """Tell the other hosts what became of the ranks of this one, as the agent ends."""
        self._look()
        self.tell(at_once=True)

    def _look(self) -> None:
        """Look who is gone, and free what nobody uses any more."""
        for key, part in list(self._parts.items()):
            part.look_for_gone()
            if not part.is_used(elsewhere=False):
                self.tell(at_once=True)
                del self._parts[key]

    def _note_failures(self) -> bool:
        failed = self._mail.failed
        if len(failed) == self._failed:
            return False
        self._failed = len(failed)
        for part in self._parts.values():
            for host, agent in part.agents.items():
                if agent in failed:
                    part.note_lost_host(host)
        for opened in self._lanes:
            for (rank, slot), (number, host) in list(opened.under_way.items()):
                if opened.service.agents[host] in failed:
                    self._answer_lost(opened, rank, slot, number)
        return True

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
        agent = opened.service.agents[request.host]
        opened.under_way[rank, number % WINDOW] = number, request.host
        if request.kind == lanes.COPY:
            self._answer_copy(opened, rank, number, request)
            return
        if agent in self._mail.failed:
            self._answer_lost(opened, rank, number % WINDOW, number)
            return
        tag = opened.first_tag + rank * WINDOW + number % WINDOW
        lanes.write_tag(slot, tag)
        self._requests.setdefault(agent, []).append((tag, slot[: request.length]))

    def _answer_copy(self, opened: LaneSet, rank: int, number: int, request: Request) -> None:
        """Give a rank of this host a handle of the host's copy of other hosts' rows."""
        slot, part = opened.memory.slot(rank, number), self._parts.get(request.table)
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
        lanes.write_answer(opened.memory.slot(rank, number), Answer(lanes.LOST, 0, 0))
        self._publish(opened, rank, slot)

    def _receive_answer(self, tag: int) -> None:
        opened = self._lanes_of(tag)
        if opened is not None:
            self._publish(opened, *divmod(tag - opened.first_tag, WINDOW))

    def _publish(self, opened: LaneSet, rank: int, slot: int) -> None:
        number, _ = opened.under_way.pop((rank, slot), (0, 0))
        if number:
            opened.waiter.publish(opened.memory.answered_at(rank, number), number)

    def _lanes_of(self, tag: int) -> LaneSet | None:
        for opened in self._lanes:
            if opened.first_tag <= tag <= opened.last_tag:
                return opened
        return None

    # what ranks of other hosts ask

    def _room_for(self, sender: int, tag: int, length: int) -> Any:
        """Return where a message goes: an answer into its slot, a request into fresh memory."""
        if tag in (Messages.REQUEST, Messages.REQUESTS):
            held = self._held + self._messages.coming_bytes
            if held and held + length > _MOST_HELD:
                return None
            return np.empty(length, np.uint8)
        opened = self._lanes_of(tag)
        if opened is not None:
            rank, slot = divmod(tag - opened.first_tag, WINDOW)
            if (rank, slot) in opened.under_way:
                return opened.memory.slot(rank, slot)[:length]
        return np.empty(length, np.uint8)  # of a session that has ended

    def _receive_request(self, sender: int, memory: Array) -> None:
        tag = lanes.read_tag(memory)
        stream = self._streams.setdefault((sender, tag // WINDOW), Stream())
        stream.waiting.append((sender, tag, memory))
        self._held += len(memory)

    def _advance_streams(self) -> bool:
        moved = False
        for stream in list(self._streams.values()):
            while True:
                if stream.steps is None:
                    # who takes no answers, as its link is cut, holds up only itself
                    if not stream.waiting or self._unsent(stream.waiting[0][0]) > _MOST_HELD:
                        break
                    stream.steps = self._carry_out(stream, *stream.waiting[0])
                try:
                    next(stream.steps)
                    break
                except StopIteration:
                    moved, stream.steps = True, None
                    self._held -= len(stream.waiting.popleft()[2])
        return moved

    def _unsent(self, agent: int) -> int:
        """Return the bytes of answers for an agent that have not gone yet."""
        waiting = (memory for _, memory in self._answers.get(agent, ()))
        return self._messages.sending_bytes(agent) + sum(map(len, waiting))

    def _carry_out(self, stream: Stream, sender: int, tag: int, memory: Array) -> Steps:
        """Carry out a request, and send what came of it."""
        request = lanes.read_request(memory)
        part = self._parts.get(request.table)
        message: Array | None = None
        code, value = lanes.DONE, 0
        if part is None:
            code = lanes.UNKNOWN
        else:
            try:
                value, message = yield from part.carry_out(request, memory, stream)
            except Exception as error:
                code, message = lanes.FAILED, _message_of(_pickled(error))
            if message is not None and len(message) > lanes.slot_bytes(part.layout.sharding.room):
                text = f"an answer of {len(message)} bytes, for which there is no room"
                code, message = lanes.FAILED, _message_of(_pickled(RuntimeError(text)))
        if message is None:
            message = np.empty(lanes.HEADER, np.uint8)
        lanes.write_answer(message, Answer(code, value, len(message) - lanes.HEADER))
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
