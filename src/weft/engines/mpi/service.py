"""What the agent of a host does for one generation of a group.

    SETTING UP ----> GATHERING  the ranks of this host come to a step
                        |
                     EXCHANGING  with the agents of the other hosts
                        |
                     RELEASING  the agent comes too; back to GATHERING
                        |
                     a rank is lost, or gives up, on whichever host
                        |
                     BROKEN  the report is written, the ranks of this host are told
                        |
                     AGREEING  they want to go on: the next generation has a service of its own

A service is a generator, which the agent's loop advances; it yields where it has to wait. Each
exchange has a number, the same on all hosts. The first one that a lost rank will not come to goes
with the news of its loss, so that those who are still at an earlier one finish it.

AGREEING. Every agent whose ranks want to go on says which of them are there (REPORT) to the agent
of the first living host, which waits for all living hosts and then says who is in the next
generation (DECISION). If it is lost, the next one takes its place; an agent that had the decision
by then tells of it in its next REPORT, as the generation that it is in.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.engines.local.meeting.meeting import (
    COLLECTIVE,
    REFUSED,
    SPLIT,
    TABLE,
    TROUBLES,
    UNDER_WAY,
    in_words,
    words_for,
)
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import Block
from weft.engines.mpi import exchange, making, placement
from weft.engines.mpi.mail import FIRST_TAG, Frame, Letter, PeerFailed
from weft.engines.mpi.meeting import DIFFERENT, DONE, MORE, TROUBLE, HostMeeting, ranks_in_words
from weft.engines.mpi.memory import HostMemory
from weft.engines.mpi.packing import pack, unpack
from weft.engines.mpi.placement import Placement
from weft.errors import RankState

if TYPE_CHECKING:
    from weft.engines.mpi.agent import Agent
    from weft.engines.mpi.tables import LaneSet

#: the kinds of messages
STEP, LOST, ASK, ANSWER, REPORT, DECISION = range(6)
#: seconds between two looks at who is gone
_LOOK = 0.005
#: seconds that a report waits for the states of other hosts, and an answer for theirs
_STATES_SECONDS, _ANSWER_SECONDS = 0.15, 0.5
#: groups, that begin on one host, at a time
TAGS = 1 << 10
#: generations of a group, in one session, whose chunks certainly have different tags
_GENERATIONS = 64

Waiting = Generator[None, None, Any]


class Broken(Exception):
    """Ranks are lost, so this generation has no further step."""

    def __init__(self, lost: Mapping[int, str]) -> None:
        self.lost = dict(lost)


def key_of(name: str) -> int:
    """Return the number that stands for a group in messages."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


class Service:
    """One generation of a group, at the agent of one host."""

    def __init__(
        self, agent: Agent, meeting: HostMeeting, agents: Mapping[int, int], *, tag: int
    ) -> None:
        """`agents` are the ranks in MPI of the agents of the group's hosts."""
        self.agent, self.mail, self.meeting = agent, agent.mail, meeting
        self.placement, self.host = meeting.placement, meeting.host
        # `tag` stands for the group in all generations; each has two tags of its own for chunks.
        # What one that broke has left under way must not meet a later one, so it is long until a
        # tag is used again
        self.key, self.group_tag = key_of(f"{agent.session} {meeting.name}"), tag
        most = (self.mail.last_tag - FIRST_TAG) // (2 * TAGS * (max(agent.host_of) + 1))
        ages = max(1, most)
        age = (agent.session * _GENERATIONS + meeting.generation) % ages
        self.tag = FIRST_TAG + 2 * (tag * ages + age)
        self.agents = dict(agents)
        self.hosts = self.placement.order
        self.at = self.hosts.index(self.host)
        #: counts the exchanges; twice that, and one more after an exchange, is how far this host is
        self.number = 0
        self._in_exchange = self._gathering = False
        #: whether the ranks of this host may come to a further step of the last exchange's call
        self.midway = False
        #: whether this generation has no further step
        self._broken = False
        #: by rank: where it will be missed first, how it was lost, and whether for good
        self.lost: dict[int, tuple[int, str, bool]] = {}
        #: by host: where its ranks are
        self.states: dict[int, list[Any]] = {}
        self._inbox: dict[tuple[int, int, int, int], Letter] = {}
        self._looked = 0.0
        self._answers: Waiting | None = None
        #: the ranks with which this generation began, as those of the one before; for REPORT
        self.formed: list[int] | None = None
        #: by the room of a message: the lanes of the ranks of this host; and how many tables they
        #: have made
        self.lanes: dict[int, LaneSet] = {}
        self.tables_made = 0
        #: how many chunks of reductions and of movements have gone through the ring
        self.summed = self.moved = 0

    # life

    def run(self) -> Waiting:
        """Serve until all ranks of this host have left the group."""
        try:
            yield from self._set_up()
            while True:
                codes = yield from self.gather()
                if self.midway and codes[0] != UNDER_WAY:
                    self.midway = False
                    self.look(2 * (self.number + 1))
                yield from self._step(codes)
        except PeerFailed:
            self._broken = True
            self.note_failed(self.mail.failed)
            yield from self._report(self._how_lost())
        except Broken as broken:
            self._broken = True
            yield from self._report(broken.lost)
        yield from self._go_on()

    def take_over(self) -> Waiting:
        """Serve a generation whose agent has ended: all that is left to do is to form the next."""
        self._broken = True
        yield from self._go_on()

    @property
    def is_busy(self) -> bool:
        """Return whether other hosts wait for what this one does for a step that its ranks have
        come to, even if these have left since."""
        return not (self._gathering or self._broken)

    def say_farewell(self) -> None:
        """Tell the other hosts who has left by now, as the agent ends."""
        if self._broken:
            self._look_for_gone_here()
        else:
            self._look_for_lost_here()

    def _set_up(self) -> Waiting:
        """Make the memory of this generation, with the ranks of this host."""
        meeting = self.meeting
        yield from self.gather()
        self.midway = True
        trouble, handles = b"", b""
        made: list[Block] = []  # until the ranks have attached them
        try:
            handles = self._make_memory(made)
        except TROUBLES as error:
            trouble = in_words(error)
        meeting.arrive_with(UNDER_WAY, handles)
        yield from self.gather()
        said = [box for box in meeting.messages()[:-1] if box]
        troubles = yield from self.exchange(UNDER_WAY, pack([trouble, *said]))
        meeting.arrive_with(UNDER_WAY, self.troubles_in_words(troubles))
        self.midway = False

    def _make_memory(self, made: list[Block]) -> bytes:
        """Make the memory, and a text with the members of a later generation. Return handles."""
        meeting = self.meeting
        most = meeting.placement.most_on_a_host
        size = HostMemory.bytes_for(
            places=len(meeting.places),
            most=most + 1,
            ranks=len(meeting.placement.world),
            ring=placement.ring_for(most),
        )
        block = blocks.allocate(size)
        block.clear()
        meeting.attach_memory(block)
        handles = [blocks.export(block.buffer, owned=False).encode()]
        if self.formed is not None:
            members = json.dumps(self.formed).encode()
            text = blocks.allocate(len(members))
            memoryview(text.buffer).cast("B")[: len(members)] = members
            made.append(text)
            handles += [blocks.export(text.buffer, owned=False).encode(), _number(len(members))]
        return pack(handles)

    def troubles_in_words(self, troubles: Sequence[Any]) -> bytes:
        lines = []
        for host, body in zip(self.hosts, troubles, strict=True):
            texts = (bytes(text).strip(b"\0").decode(errors="replace") for text in unpack(body))
            said = [text for text in texts if text]
            lines += [f"host {self.placement.names[host]}: {text}" for text in dict.fromkeys(said)]
        return "; ".join(lines)[:1000].encode()

    # waiting

    def until(self, ready: Callable[[], bool]) -> Waiting:
        """Wait until something holds. Raises Broken if ranks are lost meanwhile."""
        while not ready():
            self.look()
            yield
        self.agent.progress += 1

    def look(self, position: int | None = None) -> None:
        """Raise Broken if a rank is lost that is needed here and now, or at a position."""
        self._look_at_times(self._look_for_lost_here)
        if not self.lost:
            return
        everywhere = self.position if position is None else position
        # who of this host comes to no further step is missed at the next one, whatever it is for
        here = max(everywhere, 2 * (self.number + 1)) if self._gathering else everywhere
        lost = {
            rank: how
            for rank, (first, how, _) in self.lost.items()
            if first <= (here if rank in self.meeting.local else everywhere)
        }
        if lost:
            raise Broken(lost)

    @property
    def position(self) -> int:
        """Return what this host waits for: twice the number of an exchange for that exchange and
        for the ranks of this host to come to it, and one more for what follows it in a call."""
        if self._gathering and not self.midway:
            return 2 * (self.number + 1)
        return 2 * self.number + (not self._in_exchange)

    def _look_at_times(self, look: Callable[[], None]) -> None:
        now = time.monotonic()
        if now - self._looked >= _LOOK:
            self._looked = now
            look()

    def _look_for_lost_here(self) -> None:
        lost = {}
        for rank, gone in self.meeting.missing_here().items():
            # in the middle of a call it is missed at once, unless it has done its part of it
            between = (self._gathering and not self.midway) or not self.meeting.broke_off(rank)
            first = 2 * (self.number + 1) if between else self.position
            known = self.lost.get(rank)
            if known is None or gone > known[2] or first < known[0]:
                lost[rank] = (first, self.meeting.how_lost(rank), gone)
        if lost:
            self.note_lost(lost)
            self._tell_lost()

    def _look_for_gone_here(self) -> None:
        """Note ranks of this host that have left or ended since this generation ended, and tell
        the other hosts."""
        following = 2 * (self.number + 1)
        news = {
            rank: (following, self.meeting.how_lost(rank), True)
            for rank in self.meeting.gone_here()
            if rank not in self.lost or not self.lost[rank][2]
        }
        if news:
            self.note_lost(news)
            self._tell_lost()

    def gather(self) -> Waiting:
        """Wait until the ranks of this host have come to the next step; return their codes."""
        self._gathering = True
        yield from self.until(self.meeting.all_arrived)
        self._gathering = False
        return self.meeting.codes()

    # news of losses

    def note_lost(self, lost: Mapping[int, tuple[int, str, bool]]) -> None:
        for rank, (first, how, gone) in lost.items():
            known = self.lost.get(rank)
            if known is None:
                self.lost[rank] = (first, how, gone)
            else:
                text = how if gone and not known[2] else known[1]
                self.lost[rank] = (min(first, known[0]), text, gone or known[2])

    def note_failed(self, failed: set[int]) -> None:
        """Note the ranks whose processes in MPI have failed."""
        for rank, world in enumerate(self.placement.world):
            if world in failed and rank not in self.lost:
                self.lost[rank] = (0, "ended, as MPI tells", True)

    def _how_lost(self) -> dict[int, str]:
        return {rank: how for rank, (_, how, _) in self.lost.items()}

    def _tell_lost(self) -> None:
        self.agent.tables.tell(at_once=True)  # what the lost have added, first
        self.states[self.host] = self._states_here()
        news = {str(rank): entry for rank, entry in self.lost.items()}
        self._to_others(LOST, json.dumps([news, self.states[self.host]]).encode())

    def _states_here(self) -> list[Any]:
        return [list(astuple(state)) for state in self.meeting.local_states()]

    def _to_others(self, kind: int, body: bytes, number: int = 0) -> None:
        for host in self.hosts:
            if host != self.host:
                self._send(host, kind, body, number)

    def _send(self, host: int, kind: int, body: bytes, number: int = 0, turn: int = 0) -> None:
        frame = Frame(self.key, self.meeting.generation, kind, turn, number)
        self.mail.send(self.agents[host], frame, body)

    def _report(self, lost: Mapping[int, str]) -> Waiting:
        """Write why the generation ends, with everybody's states, and give it up."""
        self._tell_lost()  # whoever has noticed it: all hosts end this generation
        deadline = time.monotonic() + _STATES_SECONDS
        while len(self.states) < len(self._living_hosts()) and time.monotonic() < deadline:
            yield
        how = "; ".join(
            f"rank {rank} (host {self.placement.hosts[rank]}): {lost[rank]}"
            for rank in sorted(lost)
        )
        name = self.meeting.name
        message = f"group {name!r} lost {ranks_in_words(sorted(lost))}: {how}"
        self.meeting.give_up([message, sorted(lost), self._all_states()])
        self.agent.progress += 1

    def _all_states(self) -> list[Any]:
        """Return the states of all ranks, as far as they are known."""
        known = {state[0]: state for states in self.states.values() for state in states}
        rows = []
        for rank, host in enumerate(self.placement.hosts):
            status = self.lost[rank][1] if rank in self.lost else "unknown"
            unknown = RankState(rank, 0, status, "", 0.0, "", host)
            rows.append(known.get(rank, list(astuple(unknown))))
        return rows

    def _living_hosts(self) -> list[int]:
        """Return the hosts that have a rank which is not known to have left or ended."""
        for_good = {rank for rank, (_, _, gone) in self.lost.items() if gone}
        living = {h for rank, h in enumerate(self.placement.host_of) if rank not in for_good}
        return [host for host in self.hosts if host in living]

    # messages

    def receive(self, letter: Letter) -> None:
        """Take a message for this generation."""
        kind, host = letter.frame.kind, self._host_of(letter.sender)
        self.agents[host] = letter.sender
        if kind == LOST:
            news, self.states[host] = json.loads(letter.body)
            self.note_lost({int(rank): tuple(entry) for rank, entry in news.items()})
        elif kind == ASK:
            body = [self._late_here(letter.frame.number), self._states_here()]
            self._send(host, ANSWER, json.dumps(body).encode(), letter.frame.number)
        else:
            frame = letter.frame
            self._inbox[frame.kind, frame.number, frame.turn, host] = letter
        self.agent.progress += 1

    def _host_of(self, sender: int) -> int:
        return self.agent.host_of[sender]

    # exchanges

    def exchange(self, code: int, body: bytes) -> Waiting:
        """Exchange a body with the other agents. Return the bodies in the order of hosts, or None
        if the hosts have come with different codes."""
        self.number += 1
        self._in_exchange = True
        # who has met knows what the others have added before
        self.agent.tables.tell(at_once=True)
        bodies = yield from self._all_bodies(bytes([code]) + body)
        self._in_exchange = False
        if any(other[0] != code for other in bodies) or code == DIFFERENT:
            return None
        return [memoryview(other)[1:] for other in bodies]

    def _all_bodies(self, own: bytes) -> Waiting:
        size, at = len(self.hosts), self.at
        have: dict[int, Any] = {at: own}
        for turn in range(placement.rounds(size)):
            direct = size <= placement.DIRECT
            for other in placement.sends_to(size, at, turn):
                body = (
                    own
                    if direct
                    else pack([p for i in sorted(have) for p in (_number(i), have[i])])
                )
                self._send(self.hosts[other], STEP, body, self.number, turn)
            sources = [self.hosts[i] for i in placement.receives_from(size, at, turn)]
            wanted = [(STEP, self.number, turn, host) for host in sources]
            yield from self.until(partial(self._have_come, wanted))
            for key in wanted:
                body = self._inbox.pop(key).body
                if direct:
                    have[self.hosts.index(key[3])] = body
                else:
                    parts = unpack(body)
                    for number, part in zip(parts[::2], parts[1::2], strict=True):
                        have[int.from_bytes(number, "little")] = part
        return [have[i] for i in range(size)]

    def _have_come(self, keys: Sequence[tuple[int, int, int, int]]) -> bool:
        return all(key in self._inbox for key in keys)

    def differ(self, words: Sequence[str | None]) -> Waiting:
        """Show all ranks which call each has made. `words` are those of this host's calls, as far
        as they are known."""
        known = {place: text for place, text in enumerate(words) if text}
        calls = self.meeting.calls_in_words(known)
        body = json.dumps([calls, self._states_here()]).encode()
        bodies = yield from self.exchange(UNDER_WAY, body)
        rows: dict[int, str] = {}
        states: list[Any] = []
        for said in bodies or ():
            calls, here = json.loads(bytes(said))
            rows |= {int(rank): call for rank, call in calls.items()}
            states += here
        ranks = sorted(rows)
        lines = [f"rank {rank} called {rows[rank]}" for rank in ranks]
        text = json.dumps([lines, sorted(states)]).encode()
        if len(text) > self.meeting.memory.room:  # some of thousands of ranks are enough
            text = json.dumps([[line[:200] for line in lines[:16]], []]).encode()
        self.meeting.arrive(DIFFERENT, DONE, text)

    # steps

    def _step(self, codes: Sequence[int]) -> Waiting:
        code = codes[0] if len(set(codes)) == 1 and not codes[0] & REFUSED else DIFFERENT
        if code == COLLECTIVE:
            yield from exchange.collective(self)
        elif code == UNDER_WAY:
            yield from exchange.continue_collective(self)
        elif code == SPLIT:
            yield from self._split()
        elif code == TABLE:
            yield from making.make_table(self)
        else:
            bodies = yield from self.exchange(code, b"")
            if bodies is None:
                yield from self.differ([None] * len(codes))
            else:
                self.meeting.arrive(code, DONE)

    def read_texts(self) -> Waiting:
        """Return the texts of the ranks of this host at the step that they have come to, and what
        lies in each slot from where its arrays are; nothing where they are not in it."""
        meeting = self.meeting
        requests = meeting.requests()
        room = meeting.memory.room
        step = meeting.step + 1
        slots = [meeting.memory.slot(step, place) for place in range(len(requests))]
        texts = [
            slot[: min(length, room)].tobytes()
            for slot, (length, _) in zip(slots, requests, strict=True)
        ]
        arrays = [
            slot[at:] if at else slot[:0] for slot, (_, at) in zip(slots, requests, strict=True)
        ]
        if any(length > room for length, _ in requests):
            arrays = [array.copy() for array in arrays]  # further steps use the slots anew
        while any(len(text) < length for text, (length, _) in zip(texts, requests, strict=True)):
            meeting.arrive(meeting.codes()[0], MORE)
            yield from self.gather()
            step = meeting.step + 1
            for place, (length, _) in enumerate(requests):
                rest = min(length - len(texts[place]), room)
                texts[place] += meeting.memory.slot(step, place)[:rest].tobytes()
        return texts, arrays

    def reply(self, whole: Any) -> Waiting:
        """Give the ranks of this host an answer, in as many steps as it takes."""
        meeting, room = self.meeting, self.meeting.memory.room
        # with the ranks' own code, which says that a call is under way after long texts
        meeting.arrive(meeting.codes()[0], DONE, whole[:room], len(whole))
        self.midway = True
        for start in range(room, len(whole), room):
            yield from self.gather()
            meeting.arrive(UNDER_WAY, DONE, whole[start : start + room], len(whole))
        self.midway = False

    def _split(self) -> Waiting:
        """Form subgroups: each has a block to meet in on each of its hosts, and where it spans
        hosts a service."""
        texts, _ = yield from self.read_texts()
        reserved = self.agent.reserve_tags(len(set(texts)))
        bodies = yield from self.exchange(SPLIT, pack([_number(reserved), *texts]))
        if bodies is None:
            yield from self.differ([None] * len(texts))
            return
        answers: list[bytes] = [b""] * len(self.placement.world)
        tags = {}
        for host, body in zip(self.hosts, bodies, strict=True):
            number, *theirs = unpack(body)
            tags[host] = int.from_bytes(number, "little")
            for rank, answer in zip(self.placement.ranks_on(host), theirs, strict=True):
                answers[rank] = bytes(answer)
        self.meeting.splits += 1
        parts, made = exchange.parts_of_split(answers), _Made()
        try:
            for color, ranks in parts.items():
                self._make_subgroup(color, ranks, _tag(color, parts, self.placement, tags), made)
        except TROUBLES as error:
            made.trouble = in_words(error)
        yield from self.reply(memoryview(pack([b"".join(answers), *made.handles])))
        yield from self._begin_subgroups(made)

    def _make_subgroup(self, color: int, ranks: Sequence[int], tag: int, made: _Made) -> None:
        """Make the block and, over hosts, the service of a subgroup, if it has ranks here."""
        part = self.placement.part(ranks)
        if self.host not in part.order:
            return
        spans = len(part.order) > 1
        here = [ranks[own] for own in part.ranks_on(self.host)]
        members = self.meeting.launch_places(here)
        block = blocks.allocate(8 * words_for(len(members) + spans))
        block.clear()
        made.blocks.append(block)
        handle = blocks.export(block.buffer, owned=False).encode()
        made.handles += [str(color).encode(), handle]
        if spans:
            below = self.meeting.subgroup(block, color, part, members)
            agents = {host: self.agents[host] for host in part.order}
            made.services.append(Service(self.agent, below, agents, tag=tag))

    def _begin_subgroups(self, made: _Made) -> Waiting:
        """Serve the subgroups, once all ranks of all hosts have what they need for them."""
        self.midway = True
        yield from self.gather()
        texts, _ = yield from self.read_texts()
        self.midway = False
        troubles = yield from self.exchange(UNDER_WAY, pack([made.trouble, *texts]))
        words = b"" if troubles is None else self.troubles_in_words(troubles)
        if troubles is None:
            yield from self.differ([None] * len(texts))
        elif words:
            self.meeting.arrive(UNDER_WAY, TROUBLE, words)
        else:
            for service in made.services:
                self.agent.start(service)
            self.meeting.arrive(UNDER_WAY, DONE)

    # who is where, for ranks that have waited in vain

    def attend(self) -> None:
        """Answer ranks of this host that ask where everybody is."""
        if self._answers is None and self.meeting.asks():
            self._answers = self._answer()
        if self._answers is not None and next(self._answers, self) is self:
            self._answers = None

    def _answer(self) -> Waiting:
        position, asked = self.position, self.meeting.asked()
        others = [host for host in self.hosts if host != self.host]
        for host in others:
            self._send(host, ASK, b"", position)
        deadline = time.monotonic() + _ANSWER_SECONDS
        keys = [(ANSWER, position, 0, host) for host in others]
        while not all(key in self._inbox for key in keys) and time.monotonic() < deadline:
            yield
        late = self._late_here(position)
        self.states[self.host] = self._states_here()
        silent = []
        for key in keys:
            if key not in self._inbox:
                silent.append(key[3])
                late += self.placement.ranks_on(key[3])
            else:
                theirs, self.states[key[3]] = json.loads(self._inbox.pop(key).body)
                late += theirs
        late = sorted(set(late)) or [r for h in others for r in self.placement.ranks_on(h)]
        self.meeting.answer(asked, [self._stall_in_words(late, silent), late, self._all_states()])

    def _stall_in_words(self, late: Sequence[int], silent: Sequence[int]) -> str:
        names = ", ".join(self.placement.names[host] for host in silent)
        why = f"; host {names} does not answer" if silent else ""
        return (
            f"{ranks_in_words(late)} of group {self.meeting.name!r} did not come in time{why}. "
            "Every rank must make the call, also those that are not the master; if they are only "
            "slow, raise timeout="
        )

    def _late_here(self, position: int) -> list[int]:
        """Return the ranks of this host that have not come to an exchange."""
        return self.meeting.late_here() if self._gathering and position >= self.position else []

    # the next generation

    def _go_on(self) -> Waiting:
        """Wait for ranks of this host that want to go on; form the next generation with the other
        hosts. Return when all ranks of this host have left."""
        meeting = self.meeting
        while True:
            living = meeting.living_here()
            if not living:
                self.say_farewell()
                return
            waiting = [index for index in living if meeting.present(meeting.places[index])]
            # an agent that is about to end leaves that to the one that takes its place
            if waiting and len(waiting) == len(living) and not self.agent.is_ending():
                break
            self._look_at_times(self._look_for_gone_here)
            yield
        ranks = yield from self._agree([meeting.local[index] for index in waiting])
        places = [meeting.places[index] for index in waiting if meeting.local[index] in ranks]
        places.append(meeting.ranks.index(self.agent.place))
        following = meeting.following(places, self.placement.part(ranks))
        service = Service(self.agent, following, self.agents, tag=self.group_tag)
        service.formed = ranks
        self.agent.start(service)
        meeting.decide(places)
        self.agent.progress += 1

    def _agree(self, present: list[int]) -> Waiting:
        """Return the ranks of the next generation, the same on all hosts."""
        self.agents[self.host] = self.agent.mpi_rank
        reported_to = (-1, -1)
        while True:
            hosts = self._living_hosts()
            first = hosts[0]
            if first == self.host:
                reports = {
                    host: self._inbox[REPORT, 0, 0, host]
                    for host in hosts
                    if (REPORT, 0, 0, host) in self._inbox
                }
                if len(reports) == len(hosts) - 1:
                    ranks = list(present)
                    for letter in reports.values():
                        ranks += json.loads(letter.body)[0]
                    ranks.sort()
                    body = json.dumps([ranks, list(self.agents.items())]).encode()
                    for host in reports:
                        self._send(host, DECISION, body)
                    return ranks
            else:
                if reported_to != (first, self.agents[first]):
                    self._send(first, REPORT, json.dumps([present, self.formed]).encode())
                    reported_to = first, self.agents[first]
                decision = DECISION, 0, 0, first
                if decision in self._inbox:
                    ranks, agents = json.loads(self._inbox.pop(decision).body)
                    self.agents = dict(agents)
                    return ranks
            formed = self.agent.formed_elsewhere(self.key, self.meeting.generation + 1)
            if formed is not None:
                return formed
            self._look_at_times(self._look_for_gone_here)
            yield


@dataclass
class _Made:
    """Hold what an agent has made for subgroups."""

    #: until the ranks have attached them
    blocks: list[Block] = field(default_factory=list)
    #: colors, each with the handle of its block
    handles: list[bytes] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)
    trouble: bytes = b""


def _tag(
    color: int, parts: Mapping[int, Sequence[int]], placement: Placement, tags: Mapping[int, int]
) -> int:
    """Return the number that stands for a subgroup: its first host's, of which `tags` has the first
    that is free there."""
    first = placement.part(parts[color]).order[0]
    there = set(placement.ranks_on(first))
    colors = [other for other, ranks in parts.items() if there & set(ranks)]
    return first * TAGS + (tags[first] + colors.index(color)) % TAGS


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")
