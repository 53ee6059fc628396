"""Where the ranks of a group meet: counters and small messages in shared memory.

Meeting. A step is one barrier of all ranks, with a message from each. A rank writes
`step << 8 | code of the call` into its own arrival word and waits until every other rank has
reached the step. Then nobody can be beyond the next step, which uses the other word, so each
word still tells which call its rank made: ranks that made different calls all find out, at
the same step, and can go on afterwards. For the same reason a mailbox is safe to read until
its reader's next step.

A rank whose call refuses its arguments comes to the step too, but does not wait: it publishes
the code with `REFUSED`, and its reason in the mailbox, and raises. It waits for the others
when it makes its next call. So all ranks see the refusal of one, and a refusal on all ranks
costs no wait.

A rank that abandons a call of several steps, by an interrupt or for lack of memory, can make
no further call in this generation. It says so, and ranks that wait for it raise at once
instead of waiting until the deadline.

MeetingMemory. The layout of the memory, in which a place is a rank's index in the block:

    head        for each place: present | decided | left | given up, then the next generation's
                members, one byte per place
    area 0      the even generations
    area 1      the odd generations

and an area is

    lines       for each place 8 words: arrival at even steps | arrival at odd steps
    flags       for each place one byte: asleep
    mailboxes   for even and for odd steps, for each place: a length and 1,016 bytes
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from weft import faults
from weft.engines.local.meeting.roster import Roster
from weft.engines.local.meeting.waiting import Waiter
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import Block, BlockHandle
from weft.errors import (
    Disagreement,
    InvalidValue,
    PeerLost,
    RankState,
    SetupError,
    Stalled,
    UsageError,
    WeftError,
)

#: the calls that a step can belong to; a call's code is its index
CALLS = ("", "barrier", "split", "table", "collective", "collective, under way")
BARRIER, SPLIT, TABLE, COLLECTIVE, UNDER_WAY = range(1, len(CALLS))
#: added to a call's code by a rank that refused its arguments
REFUSED = 0x80


class Meeting:
    """One generation of a group, as seen from one rank. `ranks` are the launch's ranks by place in
    the block; `places` those of this generation, in the order of the group's ranks."""

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
        self._ended = False
        #: whether this rank arrived at its last step without waiting for the others
        self._arrived_without_waiting = False
        #: the recorder's tag of this group and generation; the step is added to it
        self.tag = zlib.crc32(f"{name} {generation}".encode()) << 32
        self._place = self.ranks.index(roster.rank)
        self._memory = MeetingMemory(block, size=len(ranks), generation=generation)
        self._words = block.words
        self.free_cores = free_cores
        self._waiter = Waiter(
            block,
            flags_at=self._memory.flags_at,
            size=len(ranks),
            place=self._place,
            free_cores=free_cores,
        )
        #: the word that tells that this rank has given up, and its value then: one more if it gave
        #: up because it lost another rank
        self.given_up_at = self._memory.head(self._place, GAVE_UP)
        self.given_up_value = 2 * (generation + 1)
        self.rank = self.places.index(self._place)
        self._own = [self._memory.arrival(half, self._place) for half in (0, 1)]
        self._other_places = [place for place in places if place != self._place]
        self._others = tuple(
            [self._memory.arrival(half, place) for place in self._other_places] for half in (0, 1)
        )
        #: for even and odd steps, by rank: the index of the length, and the text
        self._boxes = tuple(
            [self._memory.mailbox(half, place) for place in places] for half in (0, 1)
        )

    def meet(self, call: int, timeout: float) -> None:
        """Wait until every rank has come to this step. Raises PeerLost, Stalled, or Disagreement if
        a rank came for another call."""
        step = self.begin_step(timeout)
        value = step << 8 | call
        if faults.armed:
            faults.reach("meet.before")
        self._waiter.publish(self._own[step & 1], value)
        if faults.armed:
            faults.reach("meet.after")
        agreed = self._await_all(step, timeout, value)
        self.step = step
        if not agreed:
            raise self.disagreement_error()

    def _await_all(self, step: int, timeout: float, value: int = 0) -> bool:
        """Wait until every other rank has reached a step. Return whether all made the same call."""
        words = self._words
        half, target = step & 1, step << 8
        agreed = True
        deadline = 0.0
        for index in self._others[half]:
            if words[index] < target and not self._waiter.spin(index, target):
                deadline = deadline or time.monotonic() + timeout
                check = self._watch_arrivals(half, target, deadline)
                self._waiter.sleep(index, target, deadline, check)
            if words[index] != value:
                agreed = False
        return agreed

    def exchange(self, call: int, message: bytes, timeout: float) -> list[bytes]:
        """Meet, and exchange short messages. Return every rank's message, by rank."""
        boxes = self._fill_mailbox(message, timeout)
        self.meet(call, timeout)
        words = self._words
        return [box[: words[length_at]].tobytes() for length_at, box in boxes]

    def exchange_if_equal(self, call: int, message: bytes, timeout: float) -> list[bytes] | None:
        """Do as `exchange`, but return None if all messages are equal, which is quicker."""
        boxes = self._fill_mailbox(message, timeout)
        self.meet(call, timeout)
        words, length = self._words, len(message)
        for length_at, box in boxes:
            if words[length_at] != length or box[:length] != message:
                return [box[: words[length_at]].tobytes() for length_at, box in boxes]
        return None

    def refuse(self, call: int, reason: str, timeout: float) -> None:
        """Come to the step of a call that this rank refuses, without waiting for the others. They
        raise Disagreement with the reason."""
        self._fill_mailbox(reason.encode()[:MAILBOX_BYTES], timeout)
        step = self.step + 1
        self._waiter.publish(self._own[step & 1], step << 8 | call | REFUSED)
        self.step = step
        self._arrived_without_waiting = True

    def begin_step(self, timeout: float) -> int:
        """Return the number of the next step, once this rank may write its mailbox and slot for it.
        After a step that this rank refused, wait for the others there first: until they have come,
        they may still read its mailbox and slot of the step before."""
        if self._arrived_without_waiting:
            self._await_all(self.step, timeout)
            self._arrived_without_waiting = False
        return self.step + 1

    def _fill_mailbox(self, message: bytes, timeout: float) -> list[tuple[int, memoryview]]:
        """Write this rank's message of the next step. Return all ranks' mailboxes of that step."""
        if len(message) > MAILBOX_BYTES:
            raise InvalidValue(f"a message of {len(message)} bytes; {MAILBOX_BYTES} fit a mailbox")
        boxes = self._boxes[self.begin_step(timeout) & 1]
        length_at, box = boxes[self.rank]
        box[: len(message)] = message
        self._words[length_at] = len(message)
        return boxes

    def abandon_step(self) -> None:
        """Tell those who wait for this rank that it comes to no further step of this generation."""
        self._words[self.given_up_at] = self.given_up_value
        self.wake_all()

    def wake_all(self) -> None:
        """Wake everyone who waits for this rank's next step, so that they check again."""
        for index in self._own:
            self._waiter.wake(index)

    def lost_error(self, rank: int) -> PeerLost | None:
        """Return the error if a rank has ended, left or given up; else None."""
        place = [self.places[rank]]
        lost = self._gone_places(place) or self._given_up(place)
        return self._lost_error(lost) if lost else None

    def validate_present(self) -> None:
        """Raise if this rank has left, runs in a forked child, or has given up pending calls."""
        if self._ended or not self.roster.is_here:
            raise self.roster.unusable_error(f"group {self.name!r}")
        if self._given_up([self._place]):
            raise UsageError(
                f"group {self.name!r} goes on as a new generation, which ends the calls that were "
                "pending; wait for them before:\n    handle.wait()\n    group = group.survivors()"
            )

    def agree_on_survivors(self, timeout: float) -> list[int]:
        """Return the places that are still here: the same list on every rank that calls this.

        The lowest living place decides: it waits until every living one is present, then writes
        the list. If it dies before that, the next lowest takes over; if after, its decision stands,
        because the others check for deaths first and read decisions after.
        """
        deadline = time.monotonic() + timeout
        wanted = self.generation + 1
        self._waiter.publish(self._memory.head(self._place, PRESENT), wanted)
        while True:
            gone = self._gone_places(self.places)
            for place in self.places:
                if self._words[self._memory.head(place, DECIDED)] >= wanted:
                    return self._memory.read_members(place)
            here = [place for place in self.places if place not in gone]
            if here[0] != self._place:
                self._await_head(here[0], DECIDED, wanted, deadline)
                continue
            absent = [p for p in here if self._words[self._memory.head(p, PRESENT)] < wanted]
            if absent:
                self._await_head(absent[0], PRESENT, wanted, deadline)
            else:
                self._memory.clear_next_generation()
                self._memory.write_members(self._place, here)
                self._waiter.publish(self._memory.head(self._place, DECIDED), wanted)

    def next_generation(self, places: Sequence[int]) -> Meeting:
        return Meeting(
            self.block,
            roster=self.roster,
            ranks=self.ranks,
            places=places,
            name=self.name,
            generation=self.generation + 1,
            free_cores=self.free_cores,
        )

    def end(self) -> None:
        """End the waits of this rank's own threads."""
        self._ended = True

    def leave(self) -> None:
        """Tell everyone who waits for this rank that it will not come."""
        self._ended = True
        self._words[self._memory.head(self._place, LEFT)] = 1
        heads = [self._memory.head(self._place, word) for word in (PRESENT, DECIDED)]
        for index in (*self._own, *heads):
            self._waiter.wake(index)

    # waiting, and why it may end

    def _watch_arrivals(self, half: int, target: int, deadline: float) -> Callable[[], bool]:
        def check() -> bool:
            self.validate_present()
            absent = self._absent(self._other_places, half, target)
            # a rank may have come and then ended: read its arrival again
            lost = self._absent(self._gone_places(absent), half, target)
            lost = lost or self._absent(self._given_up(absent), half, target)
            if lost:
                raise self._lost_error(lost)
            if absent and time.monotonic() >= deadline:
                raise self.stalled_error(map(self.places.index, absent))
            return False

        return check

    def _absent(self, places: Sequence[int], half: int, target: int) -> list[int]:
        return [
            place for place in places if self._words[self._memory.arrival(half, place)] < target
        ]

    def _await_head(self, place: int, word: int, wanted: int, deadline: float) -> None:
        def check() -> bool:
            if self._gone_places([place]):
                return True
            if time.monotonic() >= deadline:
                # who decides need not be of this generation
                raise self.stalled_error([i for i, p in enumerate(self.places) if p == place])
            return False

        self._waiter.wait(self._memory.head(place, word), wanted, deadline, check)

    def _gone_places(self, places: Sequence[int]) -> list[int]:
        gone = self.roster.gone([self.ranks[place] for place in places])
        return [
            p for p in places if self.ranks[p] in gone or self._words[self._memory.head(p, LEFT)]
        ]

    def _died(self, places: Sequence[int]) -> list[int]:
        """Return the places whose processes ended without leaving."""
        return [
            place
            for place in self._gone_places(places)
            if not self._words[self._memory.head(place, LEFT)]
            and not self.roster.has_left(self.ranks[place])
        ]

    def _given_up(self, places: Sequence[int]) -> list[int]:
        """Return the places that come to no further step of this generation: those that have given
        up, and those that wait for the next generation."""
        now = self.generation + 1
        words, head = self._words, self._memory.head
        return [
            place
            for place in places
            if words[head(place, GAVE_UP)] >> 1 == now or words[head(place, PRESENT)] >= now
        ]

    def _gave_up_first(self, places: Sequence[int]) -> list[int]:
        """Return the places that gave up on their own, not because they lost another."""
        words, head = self._words, self._memory.head
        return [place for place in places if words[head(place, GAVE_UP)] == self.given_up_value]

    def _lost_error(self, places: Sequence[int]) -> PeerLost:
        if not self._died(places):
            # these may have left or given up because of a rank that died or gave up after it had
            # come to this step
            others = self._other_places
            failed = [place for place in others if self.roster.failed(self.ranks[place])]
            places = self._died(others) or failed or self._gave_up_first(others) or places
        ranks = [self.places.index(place) for place in places]
        self.roster.record_cause(self.ranks[places[0]])
        states = self.roster.states(self.members)
        how = "; ".join(
            f"rank {rank} (pid {states[rank].pid}): {self._how(states[rank])}" for rank in ranks
        )
        return PeerLost(
            f"group {self.name!r} lost {_ranks(ranks)} while rank {self.rank} waited: {how}",
            ranks,
            states,
        )

    def _how(self, state: RankState) -> str:
        """Describe how a rank was lost."""
        if not state.alive:
            return state.status
        entries = self.roster.entries(self.members[state.rank])
        calls = [e.operation for e in entries if e.tag >> 32 == self.tag >> 32]
        calls = [operation for operation in calls if not operation.startswith("survivors")]
        return f"gave up {calls[-1] if calls else state.operation}"

    def stalled_error(self, ranks: Iterable[int]) -> Stalled:
        """Return the error of ranks that have not come by the deadline."""
        ranks = list(ranks)
        return Stalled(
            f"{_ranks(ranks)} of group {self.name!r} did not come in time, but "
            f"{'is' if len(ranks) == 1 else 'are'} alive. Every rank must make the call, also "
            "those that are not the master; if they are only slow, raise timeout=",
            ranks,
            self.roster.states(self.members),
        )

    def disagreement_error(self, words: Mapping[int, str] | None = None) -> Disagreement:
        """Return the error of ranks whose calls at the last step do not match. It shows each rank's
        call: as `words` has it, else as the rank's recorder has it."""
        calls = [
            f"rank {rank} called {self._call_in_words(rank, self.step, (words or {}).get(rank))}"
            for rank in range(len(self.places))
        ]
        return Disagreement(
            f"the ranks of group {self.name!r} made different calls: {'; '.join(calls)}. "
            "All must make the same calls in the same order, with arrays and options alike",
            range(len(self.places)),
            self.roster.states(self.members),
        )

    def _call_in_words(self, rank: int, step: int, words: str | None) -> str:
        """Return what a rank called at a step: as `words` has it, else as its recorder has it;
        where, and why it refused, if it did."""
        place = self.places[rank]
        entries = self.roster.entries(self.ranks[place])
        # a call is recorded with its first step: take this group's last one up to this step
        noted = (e for e in reversed(entries) if self.tag < e.tag <= self.tag + step)
        entry = next(noted, None)
        code = self._words[self._memory.arrival(step, place)] & 0xFF
        called = words or (entry.operation if entry else CALLS[code & ~REFUSED])
        where, why = f" at {entry.line}" if entry else "", ""
        if code & REFUSED:
            length_at, box = self._boxes[step & 1][rank]
            reason = box[: self._words[length_at]].tobytes().decode(errors="replace")
            why = f", which refused: {reason}"
        return f"{called}{where}{why}"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


_MAILBOX = 128
#: bytes of a rank's message in one step
MAILBOX_BYTES = 8 * (_MAILBOX - 1)
#: the words of a head
PRESENT, DECIDED, LEFT, GAVE_UP = range(4)


def words_for(size: int) -> int:
    """Return how many words the memory of `size` ranks takes."""
    return size * _head_words(size) + 2 * _area_words(size)


class MeetingMemory:
    """The memory of one generation of a group. Words are given by index, to be waited on."""

    def __init__(self, block: Block, *, size: int, generation: int) -> None:
        self.block, self.words = block, block.words
        self._size, self._generation = size, generation
        self._area = self._area_of(generation)
        #: the byte where the sleepers' flags begin
        self.flags_at = 8 * (self._area + 8 * size)
        self._mailboxes = self._area + 8 * size + _bytes_in_words(size)

    def arrival(self, step: int, place: int) -> int:
        return self._area + 8 * place + (step & 1)

    def head(self, place: int, word: int) -> int:
        return place * _head_words(self._size) + word

    def mailbox(self, step: int, place: int) -> tuple[int, memoryview]:
        """Return the index of the length word, and the bytes."""
        at = self._mailboxes + ((step & 1) * self._size + place) * _MAILBOX
        return at, self.words[at + 1 : at + _MAILBOX].cast("B")

    def clear_next_generation(self) -> None:
        area = self._area_of(self._generation + 1)
        self.block.clear(area, area + _area_words(self._size))

    def write_members(self, place: int, members: Sequence[int]) -> None:
        """Write into a place's head which places are in the next generation."""
        row = self._members_of(place)
        row[:] = bytes(other in members for other in range(len(row)))

    def read_members(self, place: int) -> list[int]:
        row = self._members_of(place)
        return [other for other in range(self._size) if row[other]]

    def _members_of(self, place: int) -> memoryview:
        return self.words[self.head(place, 8) : self.head(place + 1, 0)].cast("B")

    def _area_of(self, generation: int) -> int:
        return self._size * _head_words(self._size) + generation % 2 * _area_words(self._size)


def _bytes_in_words(size: int) -> int:
    return -(-size // 64) * 8


def _head_words(size: int) -> int:
    return 8 + _bytes_in_words(size)


def _area_words(size: int) -> int:
    return 8 * size + _bytes_in_words(size) + 2 * size * _MAILBOX


#: what allocating or mapping memory may raise; RuntimeError if no thread can be started
TROUBLES = (WeftError, MemoryError, RuntimeError)


def make_block(
    meeting: Meeting,
    call: int,
    *,
    leader: int,
    size: int,
    seconds: float,
    prepare: Callable[[Block], None] = lambda block: None,
    point: str,
) -> Block:
    """Return a block that `leader`, a rank of the launch, allocates and the others map.

    Ranks that name the same leader get the same block. All ranks of the meeting take part, in steps
    of this call; `prepare` initializes the block, and `point` is the fault point after that. Raises
    SetupError on every rank if one could not allocate or map its block.
    """
    block, reference, trouble = None, b"", b""
    if leader == meeting.roster.rank:
        try:
            block = blocks.allocate(size)
            prepare(block)
            reference = blocks.export(block.buffer).encode()
            if faults.armed:
                faults.reach(point)
        except TROUBLES as error:
            trouble = in_words(error)
    try:
        answers = meeting.exchange(call, reference, seconds)
    except BaseException:  # an interrupt too
        if reference:  # nobody will attach it: attach it here, or the block is held for ever
            blocks.attach(BlockHandle.decode(reference))
        raise
    offer = answers[meeting.members.index(leader)]
    if offer:
        try:
            # in half the time, so that the others, who wait, still learn what went wrong
            block = blocks.attach(BlockHandle.decode(offer), seconds / 2)
        except TROUBLES as error:
            trouble = in_words(error)
    _raise_any(meeting, call, meeting.exchange(call, trouble, seconds), seconds)
    if block is None:
        raise SetupError(f"rank {leader} of the job offered no memory; look for its own error")
    return block


def join_without_block(meeting: Meeting, call: int, seconds: float) -> None:
    """Take part in the steps of `make_block` without getting a block."""
    meeting.exchange(call, b"", seconds)
    _raise_any(meeting, call, meeting.exchange(call, b"", seconds), seconds)


def in_words(error: Exception) -> bytes:
    """Return an error's message, cut to fit a mailbox."""
    return (str(error) or repr(error)).encode()[:MAILBOX_BYTES]


def _raise_any(meeting: Meeting, call: int, troubles: Sequence[bytes], seconds: float) -> None:
    if any(troubles):
        # the leader may have been interrupted meanwhile and have freed the block: then that is the
        # cause, and this step raises it
        meeting.exchange(call, b"", seconds)
        raise setup_error(meeting, troubles)


def setup_error(meeting: Meeting, troubles: Sequence[bytes]) -> SetupError:
    """Return the same error on every rank, with the message of each rank that has one."""
    words = [text.decode(errors="replace") for text in troubles]
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(words) if text]
    return SetupError(
        f"group {meeting.name!r} could not get memory: {'; '.join(lines)}. The group can be "
        "used when there is more"
    )
