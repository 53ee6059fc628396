"""The memory that the ranks of a host share with their agent: HostMemory, and the Bell.

HostMemory, for one generation of a group, made by the agent. Its places are the ranks of the host
in the order of their numbers in the group, and then the agent:

    lines      for each place 8 words: given | summed | filled | done | asked or answered
    flags      for each place one byte: asleep
    report     a length and a text: why the generation ended
    answer     a length and a text: who is where, for a rank that asked
    slots      for even and for odd steps, for each place: texts and small arrays
    ring       chunks of large arrays

Each word has one writer, the place itself. Counters go on from call to call:

    sums       given[r]    chunks that rank r has put into the ring
               summed[r]   1 + the last chunk that rank r has summed for its host; rank k mod L sums
                           chunk k of L ranks; summed[agent]: chunks whose result is in the ring
    moves      filled[p]   1 + the last chunk that place p has put into the ring
               done[p]     chunks that place p has no more use for

The bell. An agent serves several groups and polls MPI, so it cannot sleep on one counter. Before it
naps it sets `asleep` and looks at everything once more; a rank that has stored a counter looks at
`asleep` and rings. A ring that is missed costs a nap, ten milliseconds at most.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np

from weft._core.arithmetic import Array
from weft.engines.local.meeting.roster import Roster
from weft.engines.local.meeting.waiting import Waiter
from weft.engines.local.memory.segment import Block
from weft.engines.local.processes.linux import futex_wait, futex_wake
from weft.engines.mpi.placement import Ring

GIVEN, SUMMED, FILLED, DONE, ASKED = range(5)
_LINE = 8
#: bytes of a slot, and of the texts: of each rank of a group, and at least
_ROOM, _ALL_ROOMS = 512 << 10, 64 << 20
_STATE_BYTES, _TEXT_BYTES = 512, 64 << 10


def room_for(places: int) -> int:
    """Return the bytes of a slot where there are so many places."""
    return max(8192, min(_ROOM, _ALL_ROOMS // (2 * places) // 4096 * 4096))


class HostMemory:
    """The memory of a generation, as seen from one place."""

    def __init__(self, block: Block, *, places: int, most: int, ranks: int, ring: Ring) -> None:
        """`most` are the places of the host that has most, so that slots are alike everywhere."""
        self.block, self.words = block, block.words
        self.places, self.ring = places, ring
        self.room = room_for(most)
        parts = _parts(places, most, ranks, ring)
        self.flags_at, self._report_at, self._answer_at, self._slots_at, self._ring_at = parts[:5]
        self._text = _text_bytes(ranks)
        self._bytes = np.frombuffer(memoryview(block.buffer), np.uint8)

    @staticmethod
    def bytes_for(*, places: int, most: int, ranks: int, ring: Ring) -> int:
        """Return the size of the memory of so many places, in a group of so many ranks."""
        return _parts(places, most, ranks, ring)[-1]

    def word(self, place: int, which: int) -> int:
        """Return the index of a counter."""
        return place * _LINE + which

    def counts(self, which: int) -> list[int]:
        """Return a counter of every place."""
        return self.words[which : self.places * _LINE : _LINE].tolist()

    def slot(self, step: int, place: int) -> Array:
        """Return the bytes of a place's slot at a step."""
        start = self._slots_at + ((step & 1) * self.places + place) * self.room
        return self._bytes[start : start + self.room]

    def chunk(self, number: int, length: int, dtype: Any = np.uint8) -> Array:
        """Return the first `length` bytes of a chunk of the ring."""
        start = self._ring_at + number % self.ring.slots * self.ring.chunk
        return self._bytes[start : start + length].view(dtype)

    # texts

    @property
    def report(self) -> Any:
        """Return why the generation ended; None while it goes on."""
        return self._read(self._report_at)

    @report.setter
    def report(self, value: Any) -> None:
        self._write(self._report_at, value)

    @property
    def answer(self) -> Any:
        """Return what the agent has answered last."""
        return self._read(self._answer_at)

    @answer.setter
    def answer(self, value: Any) -> None:
        self._write(self._answer_at, value)

    def _read(self, at: int) -> Any:
        length = self.words[at // 8]
        return json.loads(self._bytes[at + 8 : at + 8 + length].tobytes()) if length else None

    def _write(self, at: int, value: Any) -> None:
        text = json.dumps(value).encode()
        if len(text) > self._text:
            raise ValueError(f"a text of {len(text)} bytes; {self._text} fit")
        self.words[at // 8] = 0
        self._bytes[at + 8 : at + 8 + len(text)] = np.frombuffer(text, np.uint8)
        self.words[at // 8] = len(text)


def _text_bytes(ranks: int) -> int:
    return _TEXT_BYTES + ranks * _STATE_BYTES


def _parts(places: int, most: int, ranks: int, ring: Ring) -> list[int]:
    """Return where each part after the lines begins, and the end."""
    text = 8 + _text_bytes(ranks)
    starts, at = [], 8 * _LINE * places
    for length in (places, text, text, 2 * places * room_for(most), ring.slots * ring.chunk, 0):
        at = -(-at // 64) * 64
        starts.append(at)
        at += length
    return starts


#: words of a rank's row in the roster that the roster does not use
_ASLEEP, _RINGS = 5, 6


class Bell:
    """Wakes the agent of this host, whichever group it is about."""

    def __init__(self, roster: Roster, agent: int) -> None:
        self._roster = roster
        self._fence = threading.Lock()
        self.move_to(agent)

    def move_to(self, agent: int) -> None:
        """Wake another agent from now on."""
        self.agent = agent
        block, row = self._roster.row_of(agent)
        self._words, self._asleep, self._rings = block.words, row + _ASLEEP, row + _RINGS
        self._address = block.address + 8 * self._rings

    def ring(self) -> None:
        """Wake the agent, if it naps. The caller has stored a counter and passed a fence."""
        words = self._words
        if words[self._asleep]:
            # several ranks may ring at once: one change is enough
            words[self._rings] = (words[self._rings] + 1) & 0xFFFFFFFF
            futex_wake(self._address)

    def prepare(self) -> int:
        """Say that a nap follows. Return what `nap` needs; look at everything once more between."""
        self._words[self._asleep] = 1
        with self._fence:
            pass
        return int(self._words[self._rings])

    def nap(self, seen: int, seconds: float) -> None:
        """Sleep so long, or until somebody rings."""
        futex_wait(self._address, seen, seconds)

    def end_nap(self) -> None:
        self._words[self._asleep] = 0


class RingingWaiter(Waiter):
    """A Waiter that also wakes the agent."""

    bell: Bell

    def wake_sleepers(self, index: int) -> None:
        super().wake_sleepers(index)
        self.bell.ring()
