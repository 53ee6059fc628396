"""The memory that the ranks of a group meet in: where its counters and mailboxes lie.

    head        for each place: present | decided | left | gave up, then who is in, one byte per
                place
    area 0      the even generations
    area 1      the odd generations

and an area is

    lines       for each place 8 words: arrival at even steps | arrival at odd steps
    flags       for each place one byte: asleep
    mailboxes   for even and for odd steps, for each place: a length and 1,016 bytes
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.engines.local.segment import Block

_MAILBOX = 128
#: bytes that one rank can tell the others in one step
MAILBOX_BYTES = 8 * (_MAILBOX - 1)
#: the words of a head
PRESENT, DECIDED, LEFT, GAVE_UP = range(4)


def words_for(size: int) -> int:
    """The words that the memory of `size` ranks takes."""
    return size * _head_words(size) + 2 * _area_words(size)


class MeetingMemory:
    """The memory of one generation of a group. It gives indexes of words, for who waits on them."""

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
        """The index of its length, and the text."""
        at = self._mailboxes + ((step & 1) * self._size + place) * _MAILBOX
        return at, self.words[at + 1 : at + _MAILBOX].cast("B")

    def clear_next_generation(self) -> None:
        area = self._area_of(self._generation + 1)
        self.block.clear(area, area + _area_words(self._size))

    def write_members(self, place: int, members: Sequence[int]) -> None:
        """Note in a place's head which places are in the next generation."""
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
