"""Which items are run next, and how many at once. Pure: events in, chunks out.

How long an item takes is not known beforehand. So the first chunks are a small part of all items,
unless an earlier job has shown how long they take. While items prove short, chunks grow, so that
sending them costs little compared to running them. A chunk never holds more than a worker's share
of what is left (guided self-scheduling), unless that takes less time than sending it.

Should items of a chunk prove long all the same, its worker gives back those that it has not begun:
so others run them, and the workers end together.

Of a stream, whose results are consumed one by one, no more is drawn than its `Window` allows. Items
of a `Supply` have the indexes that they come with.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, NamedTuple

from weft._core.drawn import draw
from weft._core.items import Supply, Window, at_hand

#: seconds that a chunk should take: some thirty times what sending it costs
_SECONDS = 0.003
#: seconds that sending a chunk and waiting for its answer costs
_SENDING = 0.0001
#: seconds after which a worker begins no more items of a chunk, and gives them back
LONGEST = 0.01
#: the most items of a chunk in which the worker looks at the clock after each; in a larger one it
#: looks after some, because that takes almost as long as a trivial item
TIMED = 1000
#: bytes of a chunk, there and back, unless one item has more
MOST_BYTES = 4 << 20
#: how often a chunk may fail to reach a worker
_UNDELIVERED = 3
#: how many times as long as the longest before it a chunk may be
_GROWTH = 32
#: a worker's share over the size of a first chunk: if its items prove long, only these few are late
_FIRST = 64
#: chunks for each worker that a stream is ahead of its consumer, unless that is said
_AHEAD = 4

#: returns at most so many of the next items: none at the end, None if none has come yet
Draw = Callable[[int], list[Any] | None]


class Chunk(NamedTuple):
    """Consecutive items, and the index of the first."""

    first: int
    items: list[Any]

    @property
    def span(self) -> str:
        """Return which items they are, as text."""
        last = self.first + len(self.items) - 1
        return f"item {last}" if last == self.first else f"items {self.first} to {last}"


class Cost(NamedTuple):
    """Describe what an item of a function takes on average."""

    seconds: float
    #: bytes there and back
    nbytes: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.seconds < math.inf


UNKNOWN = Cost(math.inf)


def draw_some(
    items: Iterator[Any], size: int, clock: Callable[[], float] = time.perf_counter
) -> list[Any]:
    """Draw at most so many items; fewer if they are slow to come, so that these can be run, or if
    the next one might change them."""
    drawn: list[Any] = []
    deadline = clock() + _SECONDS
    while len(drawn) < size:
        try:
            item, is_safe = draw(items)
        except StopIteration:
            break
        drawn.append(item)
        if not is_safe or clock() > deadline:
            break
    return drawn


class Schedule:
    """The items of one job, and which of them are run next."""

    def __init__(
        self,
        items: Iterable[Any] | Supply,
        workers: int,
        *,
        retries: int = 0,
        expected: Cost = UNKNOWN,
        singly: bool = False,
        window: Window | None = None,
        clock: Callable[[], float] = time.perf_counter,
        feed: Callable[[Iterator[Any]], Draw] | None = None,
    ) -> None:
        """Prepare to run `items` by so many workers.

        `expected` is what items of the function took in earlier jobs. `singly` says that chunks
        have one item each, `window` how far a stream may run ahead. `feed` returns what draws from
        an iterator, for items that may be slow to come; what it has drawn when it raises was not
        drawn.
        """
        #: how many items there are in all; None while that is not known. Until the iterator has
        #: ended it is what their length says, which may be wrong
        self._supply = items if isinstance(items, Supply) else None
        known = isinstance(items, Sized) and self._supply is None
        self.total = len(items) if known else None  # type: ignore[arg-type]
        self._items: Iterator[Any] = iter(() if isinstance(items, Supply) else items)
        #: whether items can be drawn without waiting
        self.at_hand = self._supply is not None or at_hand(items)
        #: draws items that may be slow to come; no method of this object, which would hold itself
        self._draw = feed(self._items) if feed is not None and not self.at_hand else None
        #: whether the next item was asked for and has not come yet, or may not be drawn yet
        self.waiting = False
        self._singly = singly
        self._window = window
        self._clock = clock
        self._workers = workers
        self._retries = retries
        # of items that may be slow to come the first is run at once
        self._expected = expected if self.at_hand else UNKNOWN
        self._taken = 0
        #: whether the iterator has ended
        self._ended = False
        self._again: deque[Chunk] = deque()
        #: how often an item that is run again has been run
        self._runs: dict[int, int] = {}
        self._undelivered: dict[int, int] = {}
        # measured
        self._done = 0
        self._longest = 0
        self._seconds = 0.0
        self._bytes = 0

    def next(self) -> Chunk | None:
        """Return the next chunk; None if there is none left, or while `waiting`."""
        if self._again:
            return self._again.popleft()
        if self._ended or self._supply is not None:
            return None if self._supply is None else self._next_supplied(self._supply)
        if self.exhausted:  # as its length says: one more is only asked for
            size = 1
        else:
            size = self._size()
            if self._window is not None and not self._has_room(self._window, size):
                self.waiting = True
                return None
        items = self._draw(size) if self._draw is not None else self._draw_here(size)
        self.waiting = items is None
        if items is None:
            return None
        if not items:
            self.total, self._ended = self._taken, True
            return None
        chunk = Chunk(self._taken, items)
        self._taken += len(items)
        if self.total is not None and self._taken > self.total:  # it was too small
            self.total = None
        return chunk

    def _next_supplied(self, supply: Supply) -> Chunk | None:
        closed = supply.closed  # before: what is added first is seen
        found = supply.draw(self._size())
        self.waiting = found is None and not closed
        if found is None:
            self._ended = closed
            return None
        self._taken += len(found.items)
        if found.runs:
            for index in range(found.first, found.first + len(found.items)):
                self._runs[index] = found.runs
        return Chunk(found.first, found.items)

    def put_back(self, chunk: Chunk) -> None:
        """Make `next` return a chunk again, before all others."""
        self._again.appendleft(chunk)

    def given_back(self, chunk: Chunk) -> None:
        """Record that a worker has not begun these items, because one before them took long.

        Those next to it are the most likely to be long too. So two for each worker come one by one,
        as many more in chunks of two, then of four.
        """
        start, number = 0, 0
        while start < len(chunk.items):
            size = 1 << number // (2 * self._workers)
            self._again.append(Chunk(chunk.first + start, chunk.items[start : start + size]))
            start, number = start + size, number + 1

    @property
    def exhausted(self) -> bool:
        """Return whether no chunk is left, as far as is known."""
        if self._supply is not None:
            return not self._again and not self._supply
        return not self._again and self.total is not None and self._taken >= self.total

    @property
    def ends_unknown(self) -> bool:
        """Return whether nobody knows how many items an iterator would still give."""
        return self.total is None and self._supply is None

    @property
    def taken(self) -> int:
        """Return how many items have been drawn."""
        return self._taken

    def left(self) -> list[range]:
        """Return the indexes of the items that nobody runs: those to be run again, and those that
        have not been drawn, as far as is known how many there are."""
        spans = [range(chunk.first, chunk.first + len(chunk.items)) for chunk in self._again]
        if self.total is not None and self._taken < self.total:
            spans.append(range(self._taken, self.total))
        return spans + (self._supply.spans() if self._supply is not None else [])

    def _draw_here(self, size: int) -> list[Any]:
        if self.at_hand:
            return list(itertools.islice(self._items, size))
        return draw_some(self._items, size, self._clock)

    def done(self, count: int, seconds: float, size: int) -> None:
        """Record that so many items of a chunk have ended, how many seconds their calls took, and
        how many bytes were sent for them."""
        self._done += count
        self._longest = max(self._longest, count)
        self._seconds += seconds
        self._bytes += size

    @property
    def cost(self) -> Cost:
        """Return what items took; until one has ended, what was expected."""
        done = self._done
        return Cost(self._seconds / done, self._bytes / done) if done else self._expected

    def forget(self, chunk: Chunk) -> None:
        """Drop what was kept in case that a chunk is to be run again. What was is run singly."""
        self._runs.pop(chunk.first, None)
        self._undelivered.pop(chunk.first, None)

    def lost(self, chunk: Chunk, item: int) -> bool:
        """Record that a chunk's worker died in this item. Return whether the item is run again.

        The others of the chunk are: those before it lost their results, those after it never ran.
        """
        again = self._may_run_again(item)
        if item > chunk.first:
            self._again.append(Chunk(chunk.first, chunk.items[: item - chunk.first]))
        if again:
            self._again.append(Chunk(item, [chunk.items[item - chunk.first]]))
        if rest := chunk.items[item - chunk.first + 1 :]:
            self._again.append(Chunk(item + 1, rest))
        return again

    def failed(self, chunk: Chunk, item: int) -> bool:
        """Record that this item of a chunk has failed in a way for which it is to be run again.
        Return whether it is: an item is run no more than `retries` times again."""
        again = self._may_run_again(item)
        if again:
            self._again.append(Chunk(item, [chunk.items[item - chunk.first]]))
        return again

    def _may_run_again(self, item: int) -> bool:
        runs = self._runs.pop(item, 0) + 1
        if runs <= self._retries:
            self._runs[item] = runs
        return runs <= self._retries

    def resend(self, chunk: Chunk) -> bool:
        """Record that a chunk's worker died before it got it. Return whether it is sent again.

        It is sent a few times only: there may be something about it that no worker survives.
        """
        self._undelivered[chunk.first] = self._undelivered.get(chunk.first, 0) + 1
        again = self._undelivered[chunk.first] <= _UNDELIVERED
        if again:
            self._again.append(chunk)
        return again

    def resend_singly(self, chunk: Chunk) -> None:
        """Run a chunk again with one item at a time."""
        self._again.extend(Chunk(chunk.first + i, [item]) for i, item in enumerate(chunk.items))

    def _has_room(self, window: Window, size: int) -> bool:
        """Return whether so many items may be drawn now."""
        most = window.ahead if window.ahead is not None else _AHEAD * self._workers * size
        return window.has_room(self._taken + size - most)

    def _size(self) -> int:
        cost = self.cost
        if self._singly or (self._window is not None and not cost.is_known):
            return 1
        if not cost.is_known:
            return max(1, self._known() // (_FIRST * self._workers))
        size = int(_SECONDS / max(cost.seconds, 1e-9))
        if not self._expected.is_known:
            size = min(size, self._longest * _GROWTH)
        if cost.nbytes > 0:
            size = min(size, int(MOST_BYTES / cost.nbytes))
        if self._window is not None:
            size = min(size, TIMED)  # nobody has asked for what is far ahead
            if self._window.ahead is not None:  # for all workers, twice
                size = min(size, self._window.ahead // (2 * self._workers))
        return max(1, min(size, self._share(cost.seconds)))

    def _share(self, seconds: float) -> int:
        """Return the most that one worker gets of items that take so long: nothing that it has is
        given to another later."""
        if self.ends_unknown:  # of what is to come perhaps as much as has ended
            return self._done // self._workers
        if not self._done:  # earlier jobs say little of these items
            return -(-self._known() // self._workers)
        left = self._known() - self._taken
        worth_sending = int(_SENDING / max(seconds, 1e-9))
        return max(-(-left // self._workers), min(worth_sending, TIMED))

    def _known(self) -> int:
        """Return how many items there are, as far as is known now."""
        return self.total or 0 if self._supply is None else self._taken + len(self._supply)
