"""A step of the ranks of one host and their agent.

    the ranks of a host                      their agent
      texts and small arrays into slots
      arrive                        ---->    all have come: exchange with the agents of other hosts
                                             result into the agent's slot
      go on                         <----    arrive

The agent is a member of each meeting, who comes last. So a step of the ranks of one host is a step
of all ranks, and deaths, deadlines and calls that differ are noticed as in any meeting. What
follows a loss is different: the agent gives up the generation, and its report says who was lost,
on whichever host, and where everybody was.

A text that is longer than a slot takes further steps, for which the agent does not wait for other
hosts. The agent's mailbox says what comes next.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any

import numpy as np

from weft import faults
from weft._core.arguments import seconds_until
from weft.engines.local.meeting.meeting import (
    DECIDED,
    GAVE_UP,
    LEFT,
    MAILBOX_BYTES,
    PRESENT,
    UNDER_WAY,
    Meeting,
)
from weft.engines.local.meeting.roster import Roster
from weft.engines.local.memory.segment import Block
from weft.engines.mpi.memory import ASKED, Bell, HostMemory, RingingWaiter
from weft.engines.mpi.placement import Placement, ring_for
from weft.errors import Disagreement, PeerLost, RankState, SetupError, Stalled

if TYPE_CHECKING:
    from weft.engines.mpi.lanes import Lane

#: what a rank's mailbox holds: the length of its text, where its arrays are in the slot (0: they
#: are not); the agent's: what comes next, the length of its text, and of all it has to say
REQUEST, REPLY = struct.Struct("=QQ"), struct.Struct("=BQQ")
#: what comes next: nothing more; the rest of the ranks' texts; or an error that all ranks raise
DONE, MORE, TROUBLE = range(3)
#: the code of an agent's arrival if the ranks have made different calls
DIFFERENT = 0
#: seconds that a rank waits for the agent's report of a loss, and for its answer about a stall
_REPORT, _ANSWER = 0.5, 1.0


class HostMeeting(Meeting):
    """One generation of a group, as seen from a rank or from the agent of one host.

    The places of its block are the group's ranks on this host, then whoever may be their agent.
    """

    memory: HostMemory

    def __init__(
        self,
        block: Block,
        *,
        roster: Roster,
        ranks: Sequence[int],
        places: Sequence[int],
        placement: Placement,
        host: int,
        name: str,
        generation: int,
        free_cores: bool,
    ) -> None:
        """A rank learns the `placement` of a later generation when it attaches its memory; until
        then it has that of all who may be in it."""
        super().__init__(
            block,
            roster=roster,
            ranks=ranks,
            places=places,
            name=name,
            generation=generation,
            free_cores=free_cores,
        )
        self.host = host
        #: by the room of a message: where this rank asks for rows of other hosts
        self.lanes: dict[int, Lane] = {}
        #: how often the group was split
        self.splits = 0
        self.has_memory = False
        #: whether there is a later generation
        self.superseded = False
        #: the place in the launch of the agent of this generation
        self.agent = self.members[-1]
        self.take_placement(placement)
        self.bell = Bell(roster, self.agent)
        self._waiter = self.waiter_of(block, self._memory.flags_at, len(ranks), self._place)

    def waiter_of(self, block: Block, flags_at: int, size: int, place: int) -> RingingWaiter:
        waiter = RingingWaiter(
            block, flags_at=flags_at, size=size, place=place, free_cores=self.free_cores
        )
        waiter.bell = self.bell
        return waiter

    def follow_agent(self) -> bool:
        """Make the bell wake the process that serves this host's tables now; return whether there
        is one."""
        living = living_speakers(self.roster)
        if living and self.bell.agent != living[0]:
            self.bell.move_to(living[0])
            self.bell.ring()
        return bool(living)

    def take_placement(self, placement: Placement) -> None:
        self.placement = placement
        #: the group's ranks on this host
        self.local = placement.ranks_on(self.host)
        #: this rank's number in the group; -1 for the agent
        self.group_rank = self.local[self.rank] if self.rank < len(self.local) else -1

    def attach_memory(self, block: Block) -> None:
        """Use the generation's memory, which the agent has made."""
        self.has_memory = True
        self.memory = HostMemory(
            block,
            places=len(self.places),
            most=self.placement.most_on_a_host + 1,
            ranks=len(self.placement.world),
            ring=ring_for(self.placement.most_on_a_host),
        )
        #: for the counters of the memory
        self.counters = self.waiter_of(block, self.memory.flags_at, len(self.places), self.rank)

    # what a rank does

    def converse(
        self,
        call: int,
        text: bytes,
        deadline: float,
        *,
        size: int = 0,
        fill: Callable[[Any], None] | None = None,
    ) -> Any:
        """Meet, with a text for all agents, and return theirs: a view of bytes that holds until the
        next step. `fill` writes `size` bytes of arrays, if they fit into the slot. Raises
        Disagreement and SetupError on all ranks alike."""
        step = self.begin_step(seconds_until(deadline))
        slot, sent = self.memory.slot(step, self.rank), 0
        at = aligned(len(text))  # not 0: no text is empty
        if fill is None or at + size > len(slot):
            at = 0
        else:
            fill(slot[at : at + size])
        if faults.armed:
            faults.reach("collective.filled")
        collected: list[bytes] = []
        while True:
            part = text[sent : sent + len(slot)]
            slot[: len(part)] = np.frombuffer(part, np.uint8)
            sent += len(part)
            boxes = self._fill_mailbox(REQUEST.pack(len(text), at), seconds_until(deadline))
            self.meet(call, seconds_until(deadline))
            _, box = boxes[-1]
            following, length, whole = REPLY.unpack(box[: REPLY.size])
            answer = self.memory.slot(self.step, len(self.local))[:length]
            if following == TROUBLE:
                raise SetupError(answer.tobytes().decode())
            if following == DONE:
                if length == whole:
                    return answer
                collected.append(answer.tobytes())
                if sum(map(len, collected)) == whole:
                    return np.frombuffer(b"".join(collected), np.uint8)
            call = UNDER_WAY
            slot = self.memory.slot(self.begin_step(seconds_until(deadline)), self.rank)

    def await_count(self, place: int, which: int, target: int, deadline: float) -> None:
        """Wait until a counter of a place has reached `target`."""
        index = self.memory.word(place, which)
        if self.memory.words[index] < target:
            check = self._watch_counter(place, index, target, deadline)
            self.counters.wait(index, target, deadline, check)

    def publish_count(self, which: int, value: int) -> None:
        """Set a counter of this place."""
        self.counters.publish(self.memory.word(self.rank, which), value)

    def _watch_counter(
        self, place: int, index: int, target: int, deadline: float
    ) -> Callable[[], bool]:
        def check() -> bool:
            self.validate_present()
            words = self.memory.words
            for other in (self.places[place], self.places[-1]):
                if (self._gone_places([other]) or self._given_up([other])) and words[
                    index
                ] < target:
                    raise self._lost_error([other])
            if words[index] < target and time.monotonic() >= deadline:
                raise self.stalled_error([place])
            return False

        return check

    # what the agent does

    def all_arrived(self) -> bool:
        """Return whether all ranks of this host have come to the next step."""
        words, target = self._words, (self.step + 1) << 8
        return all(words[index] >= target for index in self._others[(self.step + 1) & 1])

    def codes(self) -> list[int]:
        """Return the code of each rank's call at the next step, to which all have come."""
        return [self._words[index] & 0xFF for index in self._others[(self.step + 1) & 1]]

    def messages(self) -> list[bytes]:
        """Return each rank's message at the next step, to which all have come."""
        boxes = self._boxes[(self.step + 1) & 1]
        return [box[: self._words[length_at]].tobytes() for length_at, box in boxes]

    def requests(self) -> list[tuple[int, int]]:
        """Return the length of each rank's text at the next step, and where its arrays are."""
        boxes = self._boxes[(self.step + 1) & 1][:-1]
        return [REQUEST.unpack(box[: REQUEST.size]) for _, box in boxes]

    def arrive(self, code: int, following: int, text: Any = b"", whole: int | None = None) -> None:
        """Come to the next step, with a text in the slot: a part of `whole` bytes, or all."""
        slot = self.memory.slot(self.step + 1, self.rank)
        if len(text):
            slot[: len(text)] = np.frombuffer(text, np.uint8)
        size = len(text) if whole is None else whole
        self.arrive_with(code, REPLY.pack(following, len(text), size))

    def arrive_with(self, code: int, message: bytes) -> None:
        """Come to the next step, with a message in the mailbox."""
        step = self.step + 1
        length_at, box = self._boxes[step & 1][self.rank]
        box[: len(message)] = message
        self._words[length_at] = len(message)
        self.step = step
        self._waiter.publish(self._own[step & 1], step << 8 | code)

    def missing_here(self) -> dict[int, bool]:
        """Return the ranks of this host that will not come to the next step, and whether they have
        left or died, or have only given up this generation."""
        half, target = (self.step + 1) & 1, (self.step + 1) << 8
        absent = self._absent(self._other_places, half, target)
        gone = self._absent(self._gone_places(absent), half, target)
        given_up = self._absent(self._given_up(absent), half, target)
        return {self.local[self.places.index(place)]: place in gone for place in (*given_up, *gone)}

    def gone_here(self) -> list[int]:
        """Return the ranks of this host that have left or ended."""
        gone = self._gone_places(self._other_places)
        return [self.local[self.places.index(place)] for place in gone]

    def how_lost(self, rank: int) -> str:
        """Return how a rank of this host was lost, in words."""
        index = self.local.index(rank)
        place = self.places[index]
        (state,) = self.roster.states([self.members[index]])
        if state.alive and self.roster.gone([self.ranks[place] + self._half]):
            return "its process in MPI has ended"
        if state.alive and not self._words[self._memory.head(place, LEFT)]:
            entries = self.roster.entries(self.ranks[place])
            calls = [e.operation for e in entries if e.tag >> 32 == self.tag >> 32]
            return f"gave up {calls[-1] if calls else state.operation}"
        return state.status if not state.alive else "left"

    def broke_off(self, rank: int) -> bool:
        """Return whether a rank of this host that is lost may have been in the middle of a call: it
        gave up, or it ended; not one that has left or goes on after its last call."""
        place = self.places[self.local.index(rank)]
        words, head = self._words, self._memory.head
        if words[head(place, GAVE_UP)] >> 1 == self.generation + 1:
            return True
        left = words[head(place, LEFT)] or self.roster.has_left(self.ranks[place])
        return not (left or self.present(place))

    def launch_places(self, ranks: Sequence[int]) -> list[int]:
        """Return the places in the launch of ranks of this host."""
        return [self.members[self.local.index(rank)] for rank in ranks]

    def living_here(self) -> list[int]:
        """Return the indexes of this host's ranks that have neither left nor ended."""
        gone = self._gone_places(self._other_places)
        return [index for index, place in enumerate(self.places[:-1]) if place not in gone]

    def late_here(self) -> list[int]:
        """Return the ranks of this host that have not come to the next step."""
        half, target = (self.step + 1) & 1, (self.step + 1) << 8
        absent = self._absent(self._other_places, half, target)
        return [self.local[self.places.index(place)] for place in absent]

    def give_up(self, report: Any) -> None:
        """End the generation, and tell the ranks of this host why."""
        if not self.has_memory:  # it was to be made: into the mailbox, as far as it fits
            message, ranks, _ = report
            text = json.dumps([message[:300], ranks[:50]]).encode()[:MAILBOX_BYTES]
            length_at, box = self._boxes[(self.step + 1) & 1][self.rank]
            box[: len(text)] = text
            self._words[length_at] = len(text)
            self.abandon_step()
            return
        self.memory.report = report
        self.abandon_step()
        for place in range(len(self.places)):
            for which in range(ASKED):
                self.counters.wake(self.memory.word(place, which))

    def asked(self) -> list[int]:
        """Return how often each place has asked; the agent's: how many of these are answered."""
        return self.memory.counts(ASKED)

    def asks(self) -> bool:
        """Return whether a rank has asked where everybody is, and has no answer."""
        if not self.has_memory:
            return False
        *asked, answered = self.asked()
        return sum(asked) > answered

    def answer(self, asked: Sequence[int], answer: Any) -> None:
        """Answer all who had asked by then."""
        self.memory.answer = answer
        self.publish_count(ASKED, sum(asked[:-1]))

    def drop(self) -> None:
        """Leave a group that nothing in this process refers to any more, so that its agent can end
        serving it. Safe in finalizers."""
        if not self.superseded and self.roster.is_here:
            self._words[self._memory.head(self._place, LEFT)] = 1

    # what went wrong, on whichever host

    def _gone_places(self, places: Sequence[int]) -> list[int]:
        """Return those that are gone: a rank also if its process in MPI has ended."""
        gone = set(super()._gone_places(places))
        ranks = [self.ranks[place] for place in places]
        speakers = {rank + self._half: rank for rank in ranks if rank < self._half}
        mute = self.roster.gone(list(speakers)) if speakers else ()
        gone |= {self.ranks.index(speakers[speaker]) for speaker in mute}
        return [place for place in places if place in gone]

    @property
    def _half(self) -> int:
        return self.roster.size // 2

    def validate_present(self) -> None:
        super().validate_present()
        self._validate_in_mpi()

    def _validate_in_mpi(self) -> None:
        if self.roster.rank < self._half and self.roster.gone([self.roster.rank + self._half]):
            how = self.roster.describe_end(self.roster.rank + self._half)
            raise PeerLost(
                f"the process that stands for rank {self.group_rank} in MPI {how}; without it this "
                "rank can reach no other host",
                [self.group_rank],
                self.local_states(),
            )

    def _lost_error(self, places: Sequence[int]) -> PeerLost:
        """Return the error as the agent reports it, or, if it has ended, as this host knows it."""
        deadline = time.monotonic() + _REPORT
        while (report := self._report()) is None and time.monotonic() < deadline:
            if self.roster.gone([self.agent]):
                break
            time.sleep(0.001)
        if report is not None:
            return PeerLost(*_of_report(report))
        lost = [self.local[i] for i in map(self.places.index, places) if i < len(self.local)]
        states = self.local_states()
        if not lost:
            mute = self.agent - self._half
            lost = [rank for rank, here in enumerate(self.placement.host_of) if here == self.host]
            how = f"its process in MPI, that of rank {mute} of this host, has ended"
        else:
            how = "; ".join(f"rank {s.rank} {s.status}" for s in states if s.rank in lost)
        return PeerLost(
            f"group {self.name!r} lost {ranks_in_words(lost)} of host {self.host_name}: {how}",
            lost,
            states,
        )

    def _report(self) -> Any:
        """Return why the agent has given up this generation; None if it has not."""
        if self.has_memory:
            return self.memory.report
        if not self._given_up([self.places[-1]]):
            return None
        length_at, box = self._boxes[(self.step + 1) & 1][-1]
        message, ranks = json.loads(box[: self._words[length_at]].tobytes())
        return [message, ranks, [astuple(state) for state in self.local_states()]]

    def stalled_error(self, ranks: Iterable[int]) -> Stalled:
        """Return the error of ranks that have not come by the deadline. The agent is asked where
        those of other hosts are."""
        answer = self._ask() if self.has_memory else None
        if answer is not None:
            return Stalled(*_of_report(answer))
        late = [self.local[i] for i in ranks if i < len(self.local)]
        if late:
            who = ranks_in_words(late)
        else:
            (agent,) = self.roster.states([self.agent])
            who = f"the agent of host {self.host_name} (process {agent.pid}, {agent.status})"
        return Stalled(
            f"{who} of group {self.name!r} did not come in time",
            late,
            self.local_states(),
        )

    def _ask(self) -> Any:
        """Return the agent's answer to who is where; None if there is none."""
        place = len(self.local)
        before = self.memory.words[self.memory.word(place, ASKED)]
        own = self.memory.word(self.rank, ASKED)
        self.publish_count(ASKED, self.memory.words[own] + 1)
        deadline = time.monotonic() + _ANSWER
        while self.memory.words[self.memory.word(place, ASKED)] == before:
            if time.monotonic() >= deadline or self.roster.gone([self.agent]):
                return None
            time.sleep(0.001)
        return self.memory.answer

    def disagreement_error(self, words: Mapping[int, str] | None = None) -> Disagreement:
        """Return the error of ranks whose calls do not match, with every rank's call."""
        boxes = self._boxes[self.step & 1]
        _, length, _ = REPLY.unpack(boxes[-1][1][: REPLY.size])
        text = self.memory.slot(self.step, len(self.local))[:length].tobytes()
        return disagreement(self.name, text)

    @property
    def host_name(self) -> str:
        return self.placement.names[self.host]

    def local_states(self) -> list[RankState]:
        """Return the states of the group's ranks on this host."""
        states = self.roster.states(self.members[: len(self.local)])
        return [
            RankState(**{**asdict(state), "rank": self.local[state.rank], "host": self.host_name})
            for state in states
        ]

    def all_states(self) -> list[RankState]:
        """Return the states of the group's ranks on all hosts, as far as the agent can tell."""
        answer = self._ask() if self.has_memory else None
        return self.local_states() if answer is None else _of_report(answer)[2]

    def calls_in_words(self, words: Mapping[int, str]) -> dict[int, str]:
        """Return the call that each rank of this host has made at the next step. `words` are those
        of its places, as far as they are known."""
        step = self.step + 1
        places = enumerate(self.local)
        return {rank: self._call_in_words(at, step, words.get(at)) for at, rank in places}

    # subgroups, and the next generation

    def subgroup(
        self, block: Block, color: int, placement: Placement, members: Sequence[int]
    ) -> HostMeeting:
        """Return the meeting of a subgroup over hosts. `members` are the places in the launch of
        its ranks on this host."""
        return HostMeeting(
            block,
            roster=self.roster,
            ranks=[*members, self.agent],
            places=range(len(members) + 1),
            placement=placement,
            host=self.host,
            name=f"{self.name}/{self.splits}.{color}",
            generation=0,
            free_cores=self.free_cores,
        )

    def local_subgroup(self, block: Block, color: int, members: Sequence[int]) -> Meeting:
        """Return the meeting of a subgroup of this host alone."""
        return Meeting(
            block,
            roster=self.roster,
            ranks=members,
            places=range(len(members)),
            name=f"{self.name}/{self.splits}.{color}",
            generation=0,
            free_cores=self.free_cores,
        )

    def following(self, places: Sequence[int], placement: Placement) -> HostMeeting:
        """Return the next generation, of these places on this host."""
        return HostMeeting(
            self.block,
            roster=self.roster,
            ranks=self.ranks,
            places=places,
            placement=placement,
            host=self.host,
            name=self.name,
            generation=self.generation + 1,
            free_cores=self.free_cores,
        )

    def without_lost(self, places: Sequence[int]) -> Placement:
        """Return the placement without the ranks of this host that are not among these places."""
        here = {rank: place in places for rank, place in zip(self.local, self.places, strict=False)}
        ranks = range(len(self.placement.world))
        return self.placement.part([rank for rank in ranks if here.get(rank, True)])

    def agree_on_survivors(self, timeout: float) -> list[int]:
        """Return the places of this host in the next generation: its ranks, then its agent.

        The first process of this host that is still in MPI decides, together with those of other
        hosts (service.py).
        """
        deadline = time.monotonic() + timeout
        wanted = self.generation + 1
        self._waiter.publish(self._memory.head(self._place, PRESENT), wanted)
        while True:
            self._validate_in_mpi()
            for place, rank in enumerate(self.ranks):
                decided = self._words[self._memory.head(place, DECIDED)] >= wanted
                if rank >= self._half and decided:
                    return self._memory.read_members(place)
            agents = [place for place, rank in enumerate(self.ranks) if rank >= self._half]
            living = [
                place for place in agents if not super(HostMeeting, self)._gone_places([place])
            ]
            if not living:
                raise self._lost_error([agents[0]])
            Bell(self.roster, self.ranks[living[0]]).ring()
            self._await_head(living[0], DECIDED, wanted, deadline)

    def present(self, place: int) -> bool:
        """Return whether a place waits for the next generation."""
        present: bool = self._words[self._memory.head(place, PRESENT)] > self.generation
        return present

    def decide(self, places: Sequence[int]) -> None:
        """Tell the ranks of this host who is in the next generation."""
        self._memory.clear_next_generation()
        self._memory.write_members(self._place, places)
        self._waiter.publish(self._memory.head(self._place, DECIDED), self.generation + 1)


def speakers_of(roster: Roster) -> range:
    """Return the places in the launch of a host's speakers, of which the first that is there is the
    agent."""
    return range(roster.size // 2, roster.size)


def living_speakers(roster: Roster) -> list[int]:
    """Return the speakers of a host that are still there."""
    speakers = speakers_of(roster)
    gone = set(roster.gone(speakers))
    return [speaker for speaker in speakers if speaker not in gone]


def aligned(length: int) -> int:
    """Round a length up to a whole number of cache lines."""
    return -(-length // 64) * 64


def disagreement(name: str, text: bytes) -> Disagreement:
    """Return the error that an agent describes."""
    calls, states = json.loads(text)
    return Disagreement(
        f"the ranks of group {name!r} made different calls: {'; '.join(calls)}. "
        "All must make the same calls in the same order, with arrays and options alike",
        range(len(calls)),
        [RankState(*state) for state in states],
    )


def _of_report(report: Any) -> tuple[str, list[int], list[RankState]]:
    message, ranks, states = report
    return message, ranks, [RankState(*state) for state in states]


def ranks_in_words(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
