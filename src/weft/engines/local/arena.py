"""Blocks of segments, recycled.

Touching fresh pages costs as much as copying into them, so memory that is no
longer used stays warm for the next block of its kind: small blocks are cut
from arenas that many share (one descriptor each, not one per array), large
ones have a segment of their own. What nobody has wanted for `WARM_SECONDS`
goes back to the system (`Arenas.trim`, called by the keeper).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from weft.engines.local.references import Extent
from weft.engines.local.segment import Segment, whole_pages
from weft.errors import OutOfMemory

#: blocks are cut in cache lines
LINE = 64
#: from here on a block has a segment of its own
LARGE = 32 << 20
#: arenas grow from the first to the second size as more is shared
_SMALLEST_ARENA, _LARGEST_ARENA = 1 << 20, 64 << 20
#: unused memory of at most this much is kept for good
_KEPT = 16 << 20
#: what a program does between two calls often takes more than a second, and seldom more than this
WARM_SECONDS = 5.0


class FreeList:
    """Which ranges of [0, size) are free. Pure: knows numbers only."""

    def __init__(self, size: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        """`taken` are the starts and lengths of the ranges that are in use."""
        self.size = size
        self._starts: list[int] = []
        self._ends: list[int] = []
        end = 0
        for start, length in (*sorted(taken), (size, 0)):
            if end < start:
                self._starts.append(end)
                self._ends.append(start)
            end = start + length

    def take(self, length: int) -> int | None:
        """The start of a range now in use, from the tightest free one that fits; None if none."""
        fitting = [
            (end - start, index)
            for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True))
            if end - start >= length
        ]
        if not fitting:
            return None
        _, index = min(fitting)
        start = self._starts[index]
        self._starts[index] += length
        if self._starts[index] == self._ends[index]:
            del self._starts[index], self._ends[index]
        return start

    def give(self, start: int, length: int) -> None:
        """Return a range; neighbours grow together."""
        end = start + length
        index = bisect_left(self._starts, start)
        joins_next = index < len(self._starts) and self._starts[index] == end
        joins_last = index > 0 and self._ends[index - 1] == start
        if joins_last and joins_next:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_last:
            self._ends[index - 1] = end
        elif joins_next:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    @property
    def unused(self) -> bool:
        """Whether nothing is taken."""
        return self._starts == [0] and self._ends == [self.size]


@dataclass(eq=False)
class _Arena:
    number: int
    segment: Segment
    free: FreeList
    #: whether it was made for one block
    large: bool
    #: since when nothing of it is in use
    idle_since: float = field(default=0.0)


@dataclass(frozen=True)
class Range:
    """A part of a segment that has been given out."""

    arena: int
    segment: Segment
    offset: int
    length: int

    @property
    def extent(self) -> Extent:
        """The same in numbers, for other processes."""
        return Extent(self.arena, self.offset, self.length)


class Arenas:
    """All memory that this process has made for sharing. Not thread-safe: the keeper locks."""

    def __init__(self) -> None:
        self._arenas: dict[int, _Arena] = {}
        self._last = 0
        #: whether what is unused is kept for later
        self._warm = True

    def take(self, size: int) -> Range:
        """At least `size` bytes, warm if possible. Raises OutOfMemory, OutOfDescriptors."""
        self._warm = True
        length = whole_pages(size) if size >= LARGE else -(-max(size, 1) // LINE) * LINE
        for arena in self._candidates(length):
            offset = arena.free.take(length)
            if offset is not None:
                return Range(arena.number, arena.segment, offset, length)
        try:
            arena = self._grow(length)
        except OutOfMemory:
            if not self.clear():
                raise
            arena = self._grow(length)
        offset = arena.free.take(length)
        return Range(arena.number, arena.segment, offset or 0, length)

    def give(self, taken: Range) -> None:
        """Take a range back; it stays warm for a while."""
        arena = self._arenas[taken.arena]
        arena.free.give(taken.offset, taken.length)
        if arena.free.unused:
            arena.idle_since = time.monotonic()

    def recount(self, taken: Iterable[Range]) -> None:
        """Find out anew what is free, from what is in use, when counting was interrupted."""
        used: dict[int, list[tuple[int, int]]] = {number: [] for number in self._arenas}
        for one in taken:
            used[one.arena].append((one.offset, one.length))
        for number, arena in self._arenas.items():
            arena.free = FreeList(arena.segment.size, used[number])

    def clear(self) -> bool:
        """Return to the system all that is unused, now and until more is taken; whether there was
        any."""
        self._warm = False
        idle = [arena for arena in self._arenas.values() if arena.free.unused]
        for arena in idle:
            del self._arenas[arena.number]
        return bool(idle)

    def trim(self) -> float | None:
        """Return to the system what has been unused for long; seconds until the next time, if any.

        Arenas of up to `_KEPT` bytes in all are kept.
        """
        now = time.monotonic()
        idle = sorted(
            (a for a in self._arenas.values() if a.free.unused), key=lambda a: a.segment.size
        )
        kept, next_time = 0, None
        for arena in idle:
            kept += arena.segment.size
            due = arena.idle_since + WARM_SECONDS - now if self._warm else 0.0
            if kept > _KEPT and due <= 0:
                del self._arenas[arena.number]
            elif kept > _KEPT:
                next_time = due if next_time is None else min(next_time, due)
        return next_time

    @property
    def needs_trimming(self) -> bool:
        """Whether there is memory that should go back once it is unused."""
        return self.size > _KEPT

    @property
    def size(self) -> int:
        """Bytes reserved, in use or warm."""
        return sum(arena.segment.size for arena in self._arenas.values())

    def _candidates(self, length: int) -> list[_Arena]:
        """Arenas of the right kind, tightest first.

        A small block never goes into a large segment, which it would keep from being reused.
        """
        if length < LARGE:
            return [arena for arena in self._arenas.values() if not arena.large]
        fitting = (a for a in self._arenas.values() if a.large and a.segment.size <= 2 * length)
        return sorted(fitting, key=lambda arena: arena.segment.size)

    def _grow(self, length: int) -> _Arena:
        large = length >= LARGE
        segment = Segment.create(length if large else max(length, self._next_size()))
        self._last += 1
        arena = _Arena(self._last, segment, FreeList(segment.size), large)
        self._arenas[arena.number] = arena
        return arena

    def _next_size(self) -> int:
        shared = sum(a.segment.size for a in self._arenas.values() if not a.large)
        return max(_SMALLEST_ARENA, min(_LARGEST_ARENA, shared))
