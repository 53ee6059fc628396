"""How a rank's requests for rows of other hosts reach its agent: lanes, in memory that both map.

    rank                                  agent of its host                  agent of the rows' host
      request into a free message slot
      asked += 1             ---->        sends the slot as it is   ---->    carries it out
      works on its own rows               receives into the slot    <----    answers
      takes the answer       <----        answered[slot] = number

Whoever becomes the agent when the one before has ended sends what has no answer yet once more. So
an answer leaves what was asked as it is, and a request says its number: changes that were made
already are not made again.

A lane is one rank's: WINDOW slots, and the words

    of the rank       asked          how many requests it has made
    of the agent      answered[s]    the number of the last request of slot s that has its answer

Request n lies in slot n % WINDOW, so no more than WINDOW are under way, and the memory is bounded.
A slot is a header, ids, and rows; it travels as one message, and so does the answer, into the same
slot, behind the header, and behind the ids of rows that are asked for. Each request is whole in
itself: if the rank is interrupted or gives up at its deadline, the agents finish those that were
made, and the next call first waits until the slots are free.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft._core.arguments import seconds_until
from weft._core.arithmetic import Array
from weft._core.sharding import ID_BYTES, WINDOW
from weft._core.tables import Ids
from weft.engines.local.memory.segment import Block
from weft.errors import PeerLost, Stalled, UsageError

if TYPE_CHECKING:
    from weft.engines.mpi.meeting import HostMeeting

#: what is asked for: rows that were named, rows from..to; to change them; the rest for saving and
#: loading, and what the agents know
GET_SOME, GET_RANGE, ADD_SOME, ADD_RANGE, READ, WRITE, SET_STEPS, COUNTS, CHANGES = range(9)
#: of the own agent: a handle of the host's copy of other hosts' rows
COPY = 9
#: what comes of it
DONE, FAILED, LOST, UNKNOWN = range(4)
#: flags of a request: it begins an add; it stages under bsp
FIRST, STAGED = 1, 2

_REQUEST = struct.Struct("=QBBHIIQQQQQQQQQ")
_ANSWER, _TAG = struct.Struct("=BQQ"), struct.Struct("=Q")
#: bytes of a slot before ids and rows
HEADER = 128
#: bytes of the messages that travel as one
_TOGETHER = 64 << 10
_LINE = 8


class Request(NamedTuple):
    """Describe what a rank asks of a host."""

    #: the number of the table
    table: int
    kind: int
    flags: int
    #: of "rows" and the state arrays
    array: int
    #: of the group
    rank: int
    #: the number of the host in the job
    host: int
    #: which rows of the host's part, from `low` to `high`, if they are not named
    low: int
    high: int
    #: which stripe that is; or how many rows of the same add went before
    number: int
    #: how many rows are named
    named: int
    #: how many adds of everybody the rows must have, or what is set
    clock: int
    #: the bytes of the message
    length: int
    #: the number of the add, of this rank, that it is a part of; 0: of none
    add: int = 0
    #: how many adds to some rows the rank has begun with this one; 0: it is none that is counted
    counted: int = 0
    #: the number of the request, of this rank
    serial: int = 0


class Answer(NamedTuple):
    """Describe what came of it."""

    code: int
    #: a number
    value: int
    #: the bytes that follow
    length: int


def write_request(slot: Any, request: Request) -> None:
    _REQUEST.pack_into(slot, 0, *request)


def read_request(slot: Any) -> Request:
    return Request(*_REQUEST.unpack_from(slot))


def write_tag(slot: Any, tag: int) -> None:
    """Note in a request with which tag its answer comes."""
    _TAG.pack_into(slot, _REQUEST.size, tag)


def read_tag(slot: Any) -> int:
    tag: int = _TAG.unpack_from(slot, _REQUEST.size)[0]
    return tag


def write_answer(slot: Any, answer: Answer) -> None:
    _ANSWER.pack_into(slot, 0, *answer)


def read_answer(slot: Any) -> Answer:
    return Answer(*_ANSWER.unpack_from(slot))


def answer_in(slot: Array, request: Request) -> Array:
    """Return where in a slot the answer to its request lies: what it asks for stays as it is. Of an
    add that has an answer the rows are needed no more."""
    return slot[rows_at(request.named) if request.kind == GET_SOME else HEADER :]


def room_for_answer(room: int, request: Request) -> int:
    """Return the bytes that an answer to a request may have."""
    return slot_bytes(room) - (rows_at(request.named) if request.kind == GET_SOME else HEADER)


def together(messages: Sequence[tuple[int, Array]]) -> Iterator[list[tuple[int, Array]]]:
    """Divide messages to one host, each with a tag, into those that travel together: several small
    ones that follow each other."""
    some: list[tuple[int, Array]] = []
    size = 0
    for message in messages:
        length = len(message[1])
        if some and size + length > _TOGETHER:
            yield some
            some, size = [], 0
        some.append(message)
        size += length
    if some:
        yield some


def join(messages: Sequence[tuple[int, Array]]) -> Array:
    """Return several messages as one: how many, the tag and length of each, then all."""
    heads = np.array([len(messages), *(n for t, m in messages for n in (t, len(m)))], np.int64)
    ends = np.cumsum([_aligned(heads.nbytes), *(_aligned(len(m)) for _, m in messages)])
    whole = np.empty(int(ends[-1]), np.uint8)
    whole[: heads.nbytes] = heads.view(np.uint8)
    for start, (_, message) in zip(ends.tolist(), messages, strict=False):
        whole[start : start + len(message)] = message
    return whole


def split(whole: Array) -> list[tuple[int, Array]]:
    """Return the messages that `join` has joined, as views."""
    count = int(whole[:8].view(np.int64)[0])
    heads = whole[8 : 8 + 16 * count].view(np.int64).tolist()
    found, start = [], _aligned(8 + 16 * count)
    for tag, length in zip(heads[::2], heads[1::2], strict=True):
        found.append((tag, whole[start : start + length]))
        start += _aligned(length)
    return found


def _aligned(length: int) -> int:
    return -(-length // 64) * 64


def rows_at(count: int) -> int:
    """Return where the rows of a message begin, behind so many ids."""
    return HEADER + -(-count * ID_BYTES // 64) * 64


class LaneMemory:
    """The lanes of the ranks of a host, with the agent's words."""

    def __init__(self, block: Block, *, ranks: int, room: int) -> None:
        self.block, self.words, self.ranks = block, block.words, ranks
        #: the places that wait: the ranks, then the agent
        self.places = ranks + 1
        self.flags_at = 8 * 2 * _LINE * ranks
        self.slot_bytes = slot_bytes(room)
        self._slots_at = _slots_at(ranks)
        self._bytes = np.frombuffer(memoryview(block.buffer), np.uint8)

    @staticmethod
    def bytes_for(*, ranks: int, room: int) -> int:
        return _slots_at(ranks) + ranks * WINDOW * slot_bytes(room)

    def asked_at(self, rank: int) -> int:
        return 2 * _LINE * rank

    def answered_at(self, rank: int, number: int) -> int:
        return 2 * _LINE * rank + _LINE + number % WINDOW

    def slot(self, rank: int, number: int) -> Array:
        """Return the slot of a rank's request."""
        start = self._slots_at + (rank * WINDOW + number % WINDOW) * self.slot_bytes
        return self._bytes[start : start + self.slot_bytes]


def slot_bytes(room: int) -> int:
    """Return the bytes of a slot that has room for so many bytes of ids and rows, and the headers
    of a request and its answer."""
    return -(-(2 * HEADER + room + 64) // 4096) * 4096


def _slots_at(ranks: int) -> int:
    return -(-(8 * 2 * _LINE * ranks + ranks + 1) // 4096) * 4096


class Message(NamedTuple):
    """A request, and what goes with it."""

    request: Request
    ids: Ids | None = None
    #: writes rows into the message
    fill: Callable[[Array], None] | None = None
    #: takes the answer's bytes
    take: Callable[[Array], None] | None = None


class Lane:
    """A rank's lane, as the rank sees it. One thread uses it at a time."""

    def __init__(self, memory: LaneMemory, meeting: HostMeeting) -> None:
        self._memory, self._meeting = memory, meeting
        self._rank = meeting.rank
        self._waiter = meeting.waiter_of(memory.block, memory.flags_at, memory.places, meeting.rank)
        self._asked = memory.asked_at(self._rank)
        self._turn = threading.RLock()
        self._in_turn = 0

    def converse(
        self,
        name: str,
        messages: Iterable[Message],
        deadline: float,
        *,
        meanwhile: Callable[[], None] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Make requests about a table, and take all answers. As soon as no more fit, or all are
        made, do something `meanwhile`. The deadline ends `seconds` after the first request.

        Raises PeerLost where the rows are lost, Stalled, and what an updater has raised.
        """
        if not self._turn.acquire(timeout=max(0.0, min(seconds_until(deadline), _LONGEST))):
            raise Stalled(
                f"table {name!r}: another thread of rank {self._meeting.group_rank} is still in "
                "a call of a table",
                [self._meeting.group_rank],
                self._meeting.local_states(),
            )
        if self._in_turn:  # the call that it is within goes on, and ends the turn
            self._turn.release()
            raise UsageError(
                f"table {name!r} is used by a signal handler in the middle of another table's call"
            )
        try:
            self._in_turn = threading.get_ident()
            self._converse(name, messages, deadline, meanwhile, seconds)
        finally:
            self._in_turn = 0
            self._turn.release()

    def _converse(
        self,
        name: str,
        messages: Iterable[Message],
        deadline: float,
        meanwhile: Callable[[], None] | None,
        seconds: float | None,
    ) -> None:
        under_way: deque[tuple[int, Message]] = deque()
        error: Exception | None = None
        for message in messages:
            if len(under_way) == WINDOW:
                if meanwhile is not None:
                    work, meanwhile = meanwhile, None
                    work()
                error = self._take(name, *under_way.popleft(), deadline)
                if error is not None:
                    break
            number = self._memory.words[self._asked] + 1
            self._await(name, number, number - WINDOW, deadline)
            self._make(number, message)
            under_way.append((number, message))
            if seconds is not None:
                deadline, seconds = time.monotonic() + seconds, None
        try:
            if meanwhile is not None and error is None:
                meanwhile()
        finally:
            while under_way:
                later = self._take(name, *under_way.popleft(), deadline)
                error = error or later
        if error is not None:
            raise error

    def _make(self, number: int, message: Message) -> None:
        slot = self._memory.slot(self._rank, number)
        request, ids, fill, _ = message
        write_request(slot, request._replace(serial=number))
        if ids is not None:
            slot[HEADER : HEADER + ids.nbytes].view(ids.dtype)[...] = ids
        if fill is not None:
            fill(slot[rows_at(request.named) : request.length])
        self._waiter.publish(self._asked, number)

    def _take(self, name: str, number: int, message: Message, deadline: float) -> Exception | None:
        """Wait for an answer and take it; return the error that it is."""
        self._await(name, number, number, deadline)
        answered = answer_in(self._memory.slot(self._rank, number), message.request)
        answer = read_answer(answered)
        body = answered[HEADER : HEADER + answer.length]
        if answer.code == DONE:
            if message.take is not None:
                message.take(body)
            return None
        request = message.request
        if answer.code == LOST and request.kind == ADD_SOME and not request.named:
            return None  # it was only to be told of the add
        return self._error(name, request, answer, body)

    def _error(self, name: str, request: Request, answer: Answer, body: Array) -> Exception:
        import cloudpickle

        if answer.code == FAILED:
            try:
                error: Exception = cloudpickle.loads(body.tobytes())
            except Exception as own:  # a class's own unpickling may raise anything
                error = RuntimeError(
                    f"table {name!r}: an agent has raised what this process cannot load: {own!r}"
                )
            return error
        host = self._meeting.placement.names[request.host]
        ranks = self._meeting.placement.ranks_on(request.host)
        why = {LOST: "is lost", UNKNOWN: "does not know the table any more"}[answer.code]
        return HostGone(host, ranks, why)

    def _await(self, name: str, number: int, target: int, deadline: float) -> None:
        """Wait until the slot of a request has the answer `target`."""
        index = self._memory.answered_at(self._rank, number)
        words = self._memory.words
        if target <= 0 or words[index] >= target:
            return
        meeting = self._meeting

        def check() -> bool:
            if not meeting.roster.is_here:
                raise meeting.roster.unusable_error(f"table {name!r}")
            if not meeting.follow_agent() and words[index] < target:
                raise self._agent_error(name)
            if words[index] < target and time.monotonic() >= deadline:
                raise self._stalled_error(name, number)
            return False

        self._waiter.wait(index, target, deadline, check)

    def _agent_error(self, name: str) -> PeerLost:
        meeting = self._meeting
        return PeerLost(
            f"table {name!r}: no process of host {meeting.host_name} is left in MPI, through which "
            "its ranks reach rows of other hosts",
            meeting.local,
            meeting.local_states(),
        )

    def _stalled_error(self, name: str, number: int) -> Stalled:
        meeting = self._meeting
        request = read_request(self._memory.slot(self._rank, number))
        ranks = meeting.placement.ranks_on(request.host)
        adds = request.kind in (ADD_SOME, ADD_RANGE)
        more = "; what was sent of this add is carried out if the host goes on" if adds else ""
        name_of_host = meeting.placement.names[request.host]
        return Stalled(
            f"table {name!r}: host {name_of_host} has not answered in time{more}",
            ranks,
            meeting.local_states(),
        )


#: seconds that a lock can be waited for
_LONGEST = threading.TIMEOUT_MAX


class HostGone(Exception):
    """A host does not answer any more. The store tells which rows it had."""

    def __init__(self, host: str, ranks: list[int], why: str) -> None:
        super().__init__(host, ranks, why)
        self.host, self.ranks, self.why = host, ranks, why
