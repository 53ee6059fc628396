"""Which items are run next, and how many at once. Pure: events in, batches out.

Nobody knows beforehand how long an item takes. The first batches are a small part of what there
is, however long their items may be, unless it is known how long they took in an earlier job; then,
as long as items prove short, batches grow, so that sending them costs little beside running them.
A batch never holds more than its share of what is left, so that the workers end together, unless
that would be so little that sending it costs more. Where an item proves long after all, what its
worker has not begun is taken back, and given to others that are idle.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, NamedTuple

#: seconds that a batch should take: some thirty times what sending it costs; and near the end,
#: some three times
_SECONDS, _FEWEST_SECONDS = 0.003, 0.0003
#: bytes of arrays in a batch, unless one item has more
MOST_BYTES = 4 << 20
#: how often a batch may not come to its worker
_STRAYS = 3
#: how much a batch may be longer than those before
_GROWTH = 32
#: which part of a worker's share the first batch is: an unlucky one keeps it busy for so long only
_FIRST = 64
#: into how many stretches a batch is divided, at most
_STRETCHES = 128
#: seconds after which a batch takes longer than any was meant to
OVERDUE = 2 * _SECONDS


#: takes at most so many items from where they come; none at the end, None if none is here yet
Draw = Callable[[int], list[Any] | None]


class Batch(NamedTuple):
    """Consecutive items, and the index of the first."""

    first: int
    items: list[Any]

    @property
    def span(self) -> str:
        """Which items they are, in words."""
        last = self.first + len(self.items) - 1
        return f"item {last}" if last == self.first else f"items {self.first} to {last}"

    def cut(self, size: int) -> tuple[Batch, Batch]:
        """The first items, and the others."""
        return Batch(self.first, self.items[:size]), Batch(self.first + size, self.items[size:])

    @property
    def stretch(self) -> int:
        """How many of them are run without a pause in which the rest can be taken back."""
        return max(1, len(self.items) // _STRETCHES)

    @property
    def permits(self) -> int:
        """How many stretches there are after the first, each of which needs a permit."""
        return (len(self.items) - 1) // self.stretch


class Cost(NamedTuple):
    """What an item of a function takes, on the average."""

    seconds: float
    #: of its arrays
    nbytes: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.seconds < math.inf


UNKNOWN = Cost(math.inf)


class Schedule:
    """The items of one job, on their way to the workers."""

    def __init__(
        self,
        items: Iterable[Any],
        workers: int,
        *,
        retries: int = 0,
        expected: Cost = UNKNOWN,
        clock: Callable[[], float] = time.perf_counter,
        feed: Callable[[Iterator[Any]], Draw] | None = None,
    ) -> None:
        """`expected` is what is known of the function from earlier jobs. `feed` makes of items that
        may be slow to come what draws them without waiting."""
        #: how many items there are in all; None while nobody knows
        self.total = len(items) if isinstance(items, Sized) else None
        self._items: Iterator[Any] = iter(items)
        #: whether no item has to be waited for
        self.at_hand = isinstance(items, (list, tuple, range))
        self._draw: Draw = self._draw_here
        if feed is not None and not self.at_hand:
            self._draw = feed(self._items)
        #: whether items were asked for that have not come yet
        self.waiting = False
        self._clock = clock
        self._workers = workers
        self._retries = retries
        # items that may be slow to come are not waited for before the first is run
        self._expected = expected if self.at_hand else UNKNOWN
        self._taken = 0
        self._again: deque[Batch] = deque()
        #: taken back, in pieces that are cut when they are given out
        self._returned: deque[Batch] = deque()
        self._losses: dict[int, int] = {}
        self._strays: dict[int, int] = {}
        # measured
        self._done = 0
        self._longest = 0
        self._seconds = 0.0
        self._bytes = 0

    def next(self) -> Batch | None:
        """What to run next; None when everything has been given out, or `waiting`."""
        if self._again:
            return self._again.popleft()
        if self._returned:
            return self._next_returned()
        items = self._draw(self._size())
        self.waiting = items is None
        if items is None:
            return None
        if not items:
            self.total = self._taken
            return None
        batch = Batch(self._taken, items)
        self._taken += len(items)
        return batch

    def _next_returned(self) -> Batch:
        """A piece of what was taken back: the others may prove long too, so never all of it."""
        batch = self._returned.popleft()
        share = -(-len(batch.items) // (2 * self._workers))
        piece, rest = batch.cut(min(share, self._size()))
        if rest.items:
            self._returned.appendleft(rest)
        return piece

    @property
    def taken(self) -> int:
        """How many items have been drawn."""
        return self._taken

    def _draw_here(self, size: int) -> list[Any]:
        """At most so many items; fewer where they are slow to come: what is here is run first."""
        if self.at_hand:
            return list(itertools.islice(self._items, size))
        items, deadline = [], self._clock() + _SECONDS
        for item in itertools.islice(self._items, size):
            items.append(item)
            if self._clock() > deadline:
                break
        return items

    def done(self, batch: Batch, seconds: float, size: int) -> None:
        """A batch has ended: how long its calls took, and how many bytes its arrays had."""
        self._done += len(batch.items)
        self._longest = max(self._longest, len(batch.items))
        self._seconds += seconds
        self._bytes += size

    @property
    def cost(self) -> Cost:
        """What items took; as long as none has ended, what was expected."""
        done = self._done
        return Cost(self._seconds / done, self._bytes / done) if done else self._expected

    def take_back(self, batch: Batch, begun: int) -> Batch:
        """Only so many items of a batch were or will be begun: have the others given out again. The
        batch as it is now."""
        kept, rest = batch.cut(begun)
        if rest.items:
            self._returned.append(rest)
            self._expected = UNKNOWN  # as it was, they would not have been stuck
        return kept

    def lost(self, batch: Batch, item: int) -> bool:
        """A batch's worker died in this item; whether the item is to be run again.

        The others of the batch are: those before it lost their results, those after it never ran.
        """
        self._losses[item] = self._losses.get(item, 0) + 1
        again = self._losses[item] <= self._retries
        if item > batch.first:
            self._again.append(Batch(batch.first, batch.items[: item - batch.first]))
        if again:
            self._again.append(Batch(item, [batch.items[item - batch.first]]))
        if rest := batch.items[item - batch.first + 1 :]:
            self._again.append(Batch(item + 1, rest))
        return again

    def never_came(self, batch: Batch) -> bool:
        """A batch's worker died before it had it; whether it is run again, as if it had not been
        given out. Not for ever: there may be something about it that no worker survives."""
        self._strays[batch.first] = self._strays.get(batch.first, 0) + 1
        again = self._strays[batch.first] <= _STRAYS
        if again:
            self._again.append(batch)
        return again

    def one_by_one(self, batch: Batch) -> None:
        """Run a batch again with one item at a time."""
        self._again.extend(Batch(batch.first + i, [item]) for i, item in enumerate(batch.items))

    def _size(self) -> int:
        cost = self.cost
        if not cost.is_known:
            return max(1, (self.total or 0) // (_FIRST * self._workers))
        each = max(cost.seconds, 1e-9)
        size = int(_SECONDS / each)
        if not self._expected.is_known:
            size = min(size, self._longest * _GROWTH)
        if cost.nbytes > 0:
            size = min(size, int(MOST_BYTES / cost.nbytes))
        if self.total is not None:
            share = -(-(self.total - self._taken) // (2 * self._workers))
            size = min(size, max(share, int(_FEWEST_SECONDS / each)))
        return max(1, size)
