"""Where the ranks of a group meet: counters and small messages in a block of shared memory.

    head        for each place: present | decided | left, then who is in, one byte per place
    area 0      the even generations
    area 1      the odd generations

and an area is

    lines       for each place 8 words: arrival at even steps | arrival at odd steps
    flags       for each place one byte: asleep
    mailboxes   for even and for odd steps, for each place: a length and 1,016 bytes

A step is one meeting of all. Each rank writes `step << 8 | code of the call`
into its own arrival word and waits until every other has reached the step;
then nobody can have gone further than the next step, which uses the other
word, so each word still tells which call its rank made: ranks that made
different calls all find out, at the same step, and can go on afterwards. For
the same reason a mailbox is safe to read until its reader's next step.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

from weft import faults
from weft.engines.local.roster import Roster
from weft.engines.local.segment import Block
from weft.engines.local.waiting import Waiter
from weft.errors import Disagreement, InvalidValue, PeerLost, Stalled

#: what a step can be for; a call's code is its index
CALLS = ("", "barrier", "split", "lock")
_MAILBOX = 128
#: bytes that one rank can tell the others in one step
MAILBOX_BYTES = 8 * (_MAILBOX - 1)


def _bytes_in_words(size: int) -> int:
    return -(-size // 64) * 8


def _head_line(size: int) -> int:
    return 8 + _bytes_in_words(size)


def _area(size: int) -> int:
    return 8 * size + _bytes_in_words(size) + 2 * size * _MAILBOX


def words_for(size: int) -> int:
    """The words that the meeting place of `size` ranks takes."""
    return size * _head_line(size) + 2 * _area(size)


class Meeting:
    """One generation of a group, as seen from one rank.

    `ranks` are the job's ranks of all places in the block; `places` those that take part in
    this generation, in the order of the group's ranks.
    """

    def __init__(
        self,
        block: Block,
        *,
        roster: Roster,
        ranks: Sequence[int],
        places: Sequence[int],
        name: str,
        generation: int,
        free_cores: bool,
    ) -> None:
        self.block, self.roster, self.name, self.generation = block, roster, name, generation
        self.ranks, self.places = tuple(ranks), tuple(places)
        self.members = [ranks[place] for place in places]
        self.step = 0
        #: how the recorder names this group, generation and step: add the step
        self.tag = zlib.crc32(f"{name} {generation}".encode()) << 32
        size = len(ranks)
        self._size = size
        self._place = self.ranks.index(roster.rank)
        self._words = block.words
        self._area_at = size * _head_line(size) + generation % 2 * _area(size)
        self._boxes_at = self._area_at + 8 * size + _bytes_in_words(size)
        self._free_cores = free_cores
        self._waiter = Waiter(
            block,
            flags_at=8 * (self._area_at + 8 * size),
            size=size,
            place=self._place,
            free_cores=free_cores,
        )
        self._own = self._area_at + 8 * self._place
        self._other_places = [place for place in places if place != self._place]
        self._others = tuple(
            [self._arrival(half, place) for place in self._other_places] for half in (0, 1)
        )

    def meet(self, call: int, timeout: float) -> None:
        """Return when every rank has come to this step.

        Raises PeerLost, Stalled, or Disagreement if one came for another call.
        """
        step = self.step + 1
        half = step & 1
        target = step << 8
        value = target | call
        if faults.armed:
            faults.reach("meet.before")
        self._waiter.publish(self._own + half, value)
        if faults.armed:
            faults.reach("meet.after")
        words = self._words
        agreed = True
        deadline = 0.0
        for index in self._others[half]:
            if words[index] < target and not self._waiter.spin(index, target):
                deadline = deadline or time.monotonic() + timeout
                check = self._watch_arrivals(half, target, deadline)
                self._waiter.sleep(index, target, deadline, check)
            if words[index] != value:
                agreed = False
        self.step = step
        if not agreed:
            raise self._disagreement(step)

    def exchange(self, call: int, message: bytes, timeout: float) -> list[bytes]:
        """Meet, and tell each other a little; every rank's message, by rank."""
        if len(message) > MAILBOX_BYTES:
            raise InvalidValue(f"a message of {len(message)} bytes; {MAILBOX_BYTES} fit a mailbox")
        half = (self.step + 1) & 1
        length_at, box = self._mailbox(half, self._place)
        box[: len(message)] = message
        self._words[length_at] = len(message)
        self.meet(call, timeout)
        answers = []
        for place in self.places:
            length_at, box = self._mailbox(half, place)
            answers.append(bytes(box[: self._words[length_at]]))
        return answers

    def agree_on_survivors(self, timeout: float) -> list[int]:
        """The places still here, the same list for every rank that calls it.

        The lowest living place decides: it waits until every living one is present, then writes
        down who that is. If it dies before, the next lowest takes over; if after, its decision
        stands, because it is looked for after deaths are.
        """
        deadline = time.monotonic() + timeout
        wanted = self.generation + 1
        self._waiter.publish(self._head(self._place), wanted)
        while True:
            gone = self._gone_places(self.places)
            for place in self.places:
                if self._words[self._head(place) + 1] >= wanted:
                    return self._read_decision(place)
            here = [place for place in self.places if place not in gone]
            if here[0] != self._place:
                self._await_head(here[0], 1, wanted, deadline)
                continue
            absent = [p for p in here if self._words[self._head(p)] < wanted]
            if absent:
                self._await_head(absent[0], 0, wanted, deadline)
            else:
                self._write_decision(here, wanted)

    def next_generation(self, places: Sequence[int]) -> Meeting:
        return Meeting(
            self.block,
            roster=self.roster,
            ranks=self.ranks,
            places=places,
            name=self.name,
            generation=self.generation + 1,
            free_cores=self._free_cores,
        )

    def leave(self) -> None:
        """Have everyone who waits for this rank see that it will not come."""
        self._words[self._head(self._place) + 2] = 1
        for index in (
            self._own,
            self._own + 1,
            self._head(self._place),
            self._head(self._place) + 1,
        ):
            self._waiter.wake(index)

    # waiting, and why it may end

    def _watch_arrivals(self, half: int, target: int, deadline: float) -> Callable[[], bool]:
        def check() -> bool:
            if not self.roster.is_here:
                raise self.roster.unusable(f"group {self.name!r}")
            absent = self._absent(self._other_places, half, target)
            # one that came and then ended has come: look again
            gone = self._absent(self._gone_places(absent), half, target)
            if gone:
                raise self._lost(gone)
            if absent and time.monotonic() >= deadline:
                raise self._stalled(absent)
            return False

        return check

    def _absent(self, places: Sequence[int], half: int, target: int) -> list[int]:
        return [place for place in places if self._words[self._arrival(half, place)] < target]

    def _await_head(self, place: int, word: int, wanted: int, deadline: float) -> None:
        def check() -> bool:
            if self._gone_places([place]):
                return True
            if time.monotonic() >= deadline:
                raise self._stalled([place])
            return False

        self._waiter.wait(self._head(place) + word, wanted, deadline, check)

    def _gone_places(self, places: Sequence[int]) -> list[int]:
        gone = self.roster.gone([self.ranks[place] for place in places])
        return [p for p in places if self.ranks[p] in gone or self._words[self._head(p) + 2]]

    def _lost(self, places: Sequence[int]) -> PeerLost:
        ranks = [self.places.index(place) for place in places]
        self.roster.blame(self.ranks[places[0]])
        states = self.roster.states(self.members)
        how = "; ".join(
            f"rank {rank} (pid {states[rank].pid}): {states[rank].status}" for rank in ranks
        )
        return PeerLost(
            f"group {self.name!r} lost {_ranks(ranks)} while rank {self._rank} waited: {how}",
            ranks,
            states,
        )

    def _stalled(self, places: Sequence[int]) -> Stalled:
        ranks = [self.places.index(place) for place in places]
        return Stalled(
            f"{_ranks(ranks)} of group {self.name!r} did not come in time, but "
            f"{'is' if len(ranks) == 1 else 'are'} alive; if that is expected, raise timeout=",
            ranks,
            self.roster.states(self.members),
        )

    def _disagreement(self, step: int) -> Disagreement:
        half = step & 1
        calls = []
        for rank, place in enumerate(self.places):
            code = self._words[self._arrival(half, place)] & 0xFF
            entries = self.roster.entries(self.ranks[place])
            entry = next((e for e in entries if e.tag == self.tag + step), None)
            where = f" at {entry.line}" if entry else ""
            calls.append(f"rank {rank} called {CALLS[code]}{where}")
        return Disagreement(
            f"the ranks of group {self.name!r} made different calls: {'; '.join(calls)}. "
            "All must make the same calls in the same order",
            range(len(self.places)),
            self.roster.states(self.members),
        )

    # the layout

    @property
    def _rank(self) -> int:
        return self.places.index(self._place)

    def _arrival(self, half: int, place: int) -> int:
        return self._area_at + 8 * place + half

    def _head(self, place: int) -> int:
        return place * _head_line(self._size)

    def _mailbox(self, half: int, place: int) -> tuple[int, memoryview]:
        at = self._boxes_at + (half * self._size + place) * _MAILBOX
        return at, self._words[at + 1 : at + _MAILBOX].cast("B")

    def _write_decision(self, places: Sequence[int], wanted: int) -> None:
        other = self._size * _head_line(self._size) + wanted % 2 * _area(self._size)
        self.block.clear(other, other + _area(self._size))
        at = self._head(self._place)
        row = self._words[at + 8 : at + _head_line(self._size)].cast("B")
        row[:] = bytes(place in places for place in range(len(row)))
        self._waiter.publish(at + 1, wanted)

    def _read_decision(self, place: int) -> list[int]:
        at = self._head(place)
        row = self._words[at + 8 : at + _head_line(self._size)].cast("B")
        return [p for p in self.places if row[p]]


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
