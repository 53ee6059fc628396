"""The flight recorder: what each rank is doing, readable by its peers at any time.

Every rank owns a strip of shared memory and is its only writer:

    ring        16 entries of 5 words, overwritten in turn
                    number | texts | began | ended | group and step
    texts       64 texts of 184 bytes (operation names, source lines), each with its length

An entry is found by its number (entry n lies at n % 16) and is open while
`ended` is 0. Times are CLOCK_MONOTONIC in nanoseconds, the same in every
process. Writing one entry takes about half a microsecond, so it is always on:
a source line is written as text once and after that named by its number, until
a newer text takes its place; what an entry of the ring names stays.
"""

from __future__ import annotations

import itertools
import struct
import sys
from dataclasses import dataclass
from time import monotonic_ns
from types import CodeType, FrameType

from weft._core.failures import OUTSIDE, is_outside

_RING = 16
_ENTRY = 5
_TEXTS = 64
_TEXT_WORDS = 24
_TEXTS_AT = _RING * _ENTRY
#: words of one rank's strip
STRIP_WORDS = -(-(_TEXTS_AT + _TEXTS * _TEXT_WORDS) // 8) * 8

_NO_CALL: tuple[str, CodeType | None, int, int] = ("", None, -1, 0)
_pack_entry = struct.Struct(f"{_ENTRY}Q").pack_into
_getframe = sys._getframe


@dataclass(frozen=True)
class Entry:
    """One operation of one rank."""

    number: int
    operation: str
    line: str
    began: int
    #: 0 while the rank is in it
    ended: int
    #: tells groups, generations and steps apart; the same number on every rank
    tag: int


NOTHING = Entry(0, "nothing yet", "", 0, 0, 0)


class Recorder:
    """The writing side: this rank's own strip."""

    def __init__(self, words: memoryview, at: int) -> None:
        self._words = words
        self._ring = at
        self._texts = at + _TEXTS_AT
        # next() on a counter is atomic, so threads get different entries
        self._numbers = itertools.count(1)
        self._written = itertools.count(0)
        #: the texts, by their numbers, and the numbers of both texts of a call
        self._by_number: list[str | None] = [None] * _TEXTS
        self._known: dict[str, int] = {}
        self._sites: dict[tuple[str, str, int], int] = {}
        self._last = _NO_CALL

    def enter(self, operation: str, tag: int = 0, depth: int = 1) -> int:
        """Note that this rank begins `operation`; returns the place for `leave`.

        The source line is that of the first caller outside weft. `depth` is how many callers are
        certainly inside: looking at a frame costs as much as all the rest, so they are skipped.
        """
        frame = _getframe(depth)
        code = frame.f_code
        while not OUTSIDE.get(code.co_filename):
            if is_outside(code.co_filename) or frame.f_back is None:
                break
            frame = frame.f_back
            code = frame.f_code
        # most calls come from the line of the call before
        last_operation, last_code, last_instruction, texts = self._last
        if (
            code is not last_code
            or frame.f_lasti != last_instruction
            or operation is not last_operation
        ):
            texts = self._look_up(operation, frame)
        return self._note(texts, tag)

    def enter_at(self, operation: str, line: str, tag: int = 0) -> int:
        """As `enter`, for an operation that was asked for before, at `line`."""
        site = (operation, line, 0)
        texts = self._sites.get(site)
        if texts is None:
            texts = self._sites[site] = self._write_both(operation, line)
        return self._note(texts, tag)

    def _note(self, texts: int, tag: int) -> int:
        number = next(self._numbers)
        at = self._ring + number % _RING * _ENTRY
        # no number while it is half written
        _pack_entry(self._words, 8 * at, 0, texts, monotonic_ns(), 0, tag)
        self._words[at] = number
        return at

    def leave(self, at: int) -> None:
        """Note that the operation at this place has ended."""
        self._words[at + 3] = monotonic_ns()

    def _look_up(self, operation: str, frame: FrameType) -> int:
        """The numbers of the two texts of a call, written down when they are new."""
        code = frame.f_code
        site = (operation, code.co_filename, frame.f_lineno)
        texts = self._sites.get(site)
        if texts is None:
            line = f"{code.co_filename}:{frame.f_lineno}"
            texts = self._sites[site] = self._write_both(operation, line)
        self._last = operation, code, frame.f_lasti, texts
        return texts

    def _write_both(self, operation: str, line: str) -> int:
        number = self._write(operation)
        return number << 32 | self._write(line, keep=number)

    def _write(self, text: str, keep: int = -1) -> int:
        if text in self._known:
            return self._known[text]
        index = self._place_for_text(keep)
        before = self._by_number[index]
        if before is not None:
            self._known.pop(before, None)
            self._sites.clear()
            self._last = _NO_CALL
        data = text.encode(errors="replace")[-(_TEXT_WORDS - 1) * 8 :]
        at = self._texts + index * _TEXT_WORDS
        self._words[at] = len(data)
        target = self._words[at + 1 : at + _TEXT_WORDS].cast("B")
        target[: len(data)] = data
        self._by_number[index] = text
        self._known[text] = index
        return index

    def _place_for_text(self, keep: int) -> int:
        """Each has its turn, but for those whose text an entry of the ring names or is about to."""
        entries = self._words[self._ring : self._ring + _RING * _ENTRY].tolist()
        named = {number for texts in entries[1::_ENTRY] for number in divmod(texts, 1 << 32)}
        named |= {keep}
        return next(turn % _TEXTS for turn in self._written if turn % _TEXTS not in named)


def entries(words: memoryview, at: int) -> list[Entry]:
    """A strip's entries, oldest first. Any process may read; a torn entry is left out."""
    found = []
    for index in range(_RING):
        place = at + index * _ENTRY
        number, texts, began, ended, tag = words[place : place + _ENTRY]
        if number and words[place] == number:
            operation, line = _text(words, at, texts >> 32), _text(words, at, texts & 0xFFFFFFFF)
            found.append(Entry(number, operation, line, began, ended, tag))
    return sorted(found, key=lambda entry: entry.number)


def current(words: memoryview, at: int) -> Entry:
    """What the strip's rank is in, or else was in last."""
    found = entries(words, at)
    return next((entry for entry in found if not entry.ended), found[-1] if found else NOTHING)


def _text(words: memoryview, at: int, index: int) -> str:
    place = at + _TEXTS_AT + index % _TEXTS * _TEXT_WORDS
    data = words[place + 1 : place + _TEXT_WORDS].tobytes()
    return data[: min(words[place], len(data))].decode(errors="replace")
