"""The flight recorder: what each rank is doing, readable by its peers at any time.

Every rank owns a strip of shared memory and is its only writer:

    word 0      how many texts it has written
    ring        16 entries of 6 words, overwritten in turn
                    number | texts | began | ended | group | step
    texts       64 texts of 184 bytes (operation names, source lines), each with its length

An entry is found by its number (entry n lies at n % 16) and is open while
`ended` is 0. Times are CLOCK_MONOTONIC in nanoseconds, the same in every
process. Writing one entry takes well under a microsecond, so it is always on.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from dataclasses import dataclass

_RING = 16
_ENTRY = 6
_TEXTS = 64
_TEXT_WORDS = 24
_RING_AT = 1
_TEXTS_AT = _RING_AT + _RING * _ENTRY
#: words of one rank's strip
STRIP_WORDS = -(-(_TEXTS_AT + _TEXTS * _TEXT_WORDS) // 8) * 8

_LIBRARY = tuple(
    os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))), name)
    + os.sep
    for name in ("weft", "multiverso", "synkhronos", "playdoh", "distfun")
)


@dataclass(frozen=True)
class Entry:
    """One operation of one rank."""

    number: int
    operation: str
    line: str
    began: int
    #: 0 while the rank is in it
    ended: int
    #: tells groups and generations apart, the same number on every rank
    group: int
    step: int


NOTHING = Entry(0, "nothing yet", "", 0, 0, 0, 0)


class Recorder:
    """The writing side: this rank's own strip."""

    def __init__(self, words: memoryview, at: int) -> None:
        self._words = words
        self._ring = at + _RING_AT
        self._texts = at + _TEXTS_AT
        self._count = at
        # next() on a counter is atomic, so threads get different entries
        self._numbers = itertools.count(1)
        self._written = itertools.count(0)
        self._known: dict[object, int] = {}

    def enter(self, operation: str, group: int = 0, step: int = 0) -> int:
        """Note that this rank begins `operation`; returns the place for `leave`."""
        frame = sys._getframe(2)
        code = frame.f_code
        while _inside(code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
            code = frame.f_code
        site = (code.co_filename, code.co_firstlineno, frame.f_lasti, operation)
        texts = self._known.get(site)
        if texts is None:
            line = f"{code.co_filename}:{frame.f_lineno}"
            texts = self._known[site] = self._write(operation) << 32 | self._write(line)
        words = self._words
        number = next(self._numbers)
        at = self._ring + number % _RING * _ENTRY
        words[at] = 0  # no entry while it is half written
        words[at + 1] = texts
        words[at + 2] = time.monotonic_ns()
        words[at + 3] = 0
        words[at + 4] = group
        words[at + 5] = step
        words[at] = number
        return at

    def leave(self, at: int) -> None:
        """Note that the operation at this place has ended."""
        self._words[at + 3] = time.monotonic_ns()

    def _write(self, text: str) -> int:
        if text in self._known:
            return self._known[text]
        turn = next(self._written)
        if turn and turn % _TEXTS == 0:
            self._known.clear()  # the oldest texts are about to be overwritten
        index = turn % _TEXTS
        data = text.encode(errors="replace")[-(_TEXT_WORDS - 1) * 8 :]
        at = self._texts + index * _TEXT_WORDS
        self._words[at] = len(data)
        target = self._words[at + 1 : at + _TEXT_WORDS].cast("B")
        target[: len(data)] = data
        self._words[self._count] = turn + 1
        self._known[text] = index
        return index


def entries(words: memoryview, at: int) -> list[Entry]:
    """A strip's entries, oldest first. Any process may read; a torn entry is left out."""
    found = []
    for index in range(_RING):
        place = at + _RING_AT + index * _ENTRY
        number, texts, began, ended, group, step = words[place : place + _ENTRY]
        if number and words[place] == number:
            operation, line = _text(words, at, texts >> 32), _text(words, at, texts & 0xFFFFFFFF)
            found.append(Entry(number, operation, line, began, ended, group, step))
    return sorted(found, key=lambda entry: entry.number)


def current(words: memoryview, at: int) -> Entry:
    """What the strip's rank is in, or else was in last."""
    found = entries(words, at)
    return next((entry for entry in found if not entry.ended), found[-1] if found else NOTHING)


def _text(words: memoryview, at: int, index: int) -> str:
    place = at + _TEXTS_AT + index % _TEXTS * _TEXT_WORDS
    data = words[place + 1 : place + _TEXT_WORDS].tobytes()
    return data[: min(words[place], len(data))].decode(errors="replace")


_inside_cache: dict[str, bool] = {}


def _inside(filename: str) -> bool:
    """Whether a source file belongs to weft, so that the line to show is further out."""
    known = _inside_cache.get(filename)
    if known is None:
        known = _inside_cache[filename] = filename.startswith(_LIBRARY)
    return known
