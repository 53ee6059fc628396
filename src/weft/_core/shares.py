"""Which host runs which items of a map. Pure: events in, decisions out.

Each host gets its whole share at once, so that a map of short items costs one message per host. A
host that will soon have nothing to do gets what nobody has, else the later half of what another has
not begun. So hosts may be fast or slow, join late, or be lost.

    waiting    nobody has them: from the start, or because their host was lost
    held       a host has them; it says which of these it has not begun
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

#: seconds of work that a host must have left, for another to take from it: some times what it costs
_WORTH_TAKING = 0.01
#: of a stream: seconds of work that are sent to a worker at once, and seconds from which on an item
#: is sent alone
_AT_ONCE, _ALONE = 0.03, 0.003
#: the most items of a stream that are sent to a worker at once
_MOST = 1000


class Spans:
    """A set of whole numbers, mostly consecutive ones."""

    def __init__(self, spans: Iterable[range] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._count = 0
        for span in spans:
            self.add(span)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[range]:
        return iter([range(*pair) for pair in zip(self._starts, self._stops, strict=True)])

    def add(self, span: range) -> None:
        """Add consecutive numbers."""
        if not span:
            return
        self.remove(span)
        at = bisect.bisect_left(self._starts, span.start)
        start, stop = span.start, span.stop
        self._count += len(span)
        if at < len(self._starts) and self._starts[at] == stop:
            stop = self._stops.pop(at)
            del self._starts[at]
        if at > 0 and self._stops[at - 1] == start:
            at -= 1
            start = self._starts.pop(at)
            del self._stops[at]
        self._starts.insert(at, start)
        self._stops.insert(at, stop)

    def remove(self, span: range) -> None:
        """Remove those of these numbers that are in it."""
        if not span:
            return
        at = max(0, bisect.bisect_right(self._starts, span.start) - 1)
        while at < len(self._starts) and self._starts[at] < span.stop:
            start, stop = self._starts[at], self._stops[at]
            left = (start, min(stop, span.start))
            right = (max(start, span.stop), stop)
            rest = [part for part in (left, right) if part[0] < part[1]]
            if rest != [(start, stop)]:
                self._starts[at : at + 1] = [part[0] for part in rest]
                self._stops[at : at + 1] = [part[1] for part in rest]
                self._count += sum(b - a for a, b in rest) - (stop - start)
            at += len(rest)
            if rest and rest[-1] == right:
                break

    def take(self, most: int) -> list[range]:
        """Remove the first numbers, at most so many, and return them."""
        taken: list[range] = []
        while most > 0 and self._starts:
            first = range(self._starts[0], min(self._stops[0], self._starts[0] + most))
            self.remove(first)
            taken.append(first)
            most -= len(first)
        return taken


@dataclass
class _Host:
    workers: int
    held: Spans = field(default_factory=Spans)
    #: those of `held` that it had not begun when it was last heard of
    unbegun: Spans = field(default_factory=Spans)


class Shares:
    """The items of one map and the hosts that run them."""

    def __init__(self, total: int | None, *, retries: int = 0) -> None:
        """Prepare to share so many items; None for those of a stream, which are added as they
        come."""
        self._streamed = total is None
        self._waiting = Spans([range(total or 0)])
        self._hosts: dict[str, _Host] = {}
        self._retries = retries
        #: how often items were run that were lost with their hosts
        self._runs: dict[int, int] = {}
        self._done = 0
        self._seconds = 0.0

    # events

    def join(self, host: str, workers: int) -> None:
        """Add a host."""
        self._hosts[host] = _Host(workers)

    def add(self, span: range) -> None:
        """Add items: of a stream, or such as could not be sent."""
        self._waiting.add(span)

    def drop(self, span: range) -> None:
        """Remove waiting items: they have ended without being run."""
        self._waiting.remove(span)

    def finished(self, host: str, span: range, seconds: float) -> None:
        """Record that a host has run items, and how long that took one worker."""
        self._hosts[host].held.remove(span)
        self._hosts[host].unbegun.remove(span)
        self._done += len(span)
        self._seconds += seconds
        for index in self._runs.keys() & set(span) if self._runs else ():
            del self._runs[index]

    def heard(self, host: str, unbegun: Iterable[range]) -> None:
        """Record which items a host has not begun."""
        self._hosts[host].unbegun = Spans(unbegun)

    def taken_back(self, host: str, spans: Iterable[range]) -> None:
        """Record that a host has given back items."""
        for span in spans:
            self._hosts[host].held.remove(span)
            self._hosts[host].unbegun.remove(span)
            self._waiting.add(span)

    def lose(self, host: str) -> list[range]:
        """Remove a host. Its items wait again: what it had not begun, and what it ran as far as
        retries allow. Return those that are not run again."""
        lost = self._hosts.pop(host)
        for span in lost.unbegun:
            lost.held.remove(span)
            self._waiting.add(span)
        failed = Spans()
        for index in [index for span in lost.held for index in span]:
            runs = self._runs.pop(index, 0) + 1
            if runs <= self._retries:
                self._runs[index] = runs
                self._waiting.add(range(index, index + 1))
            else:
                failed.add(range(index, index + 1))
        return list(failed)

    # decisions

    @property
    def hosts(self) -> list[str]:
        return list(self._hosts)

    @property
    def workers(self) -> int:
        """Return how many workers there are."""
        return sum(host.workers for host in self._hosts.values())

    @property
    def waiting(self) -> list[range]:
        """Return the items that nobody has."""
        return list(self._waiting)

    def held(self, host: str) -> list[range]:
        """Return the items that a host has."""
        return list(self._hosts[host].held)

    def begun(self, host: str) -> list[range]:
        """Return the items that a host runs, or has run, as far as is known."""
        one = self._hosts[host]
        begun = Spans(one.held)
        for span in one.unbegun:
            begun.remove(span)
        return list(begun)

    def runs(self, index: int) -> int:
        """Return how often an item was run before."""
        return self._runs.get(index, 0)

    @property
    def busy(self) -> bool:
        """Return whether a host has items."""
        return any(host.held for host in self._hosts.values())

    @property
    def left(self) -> int:
        """Return how many items have not ended."""
        return len(self._waiting) + sum(len(host.held) for host in self._hosts.values())

    def room(self) -> int:
        """Return how many more items of a stream are wanted now."""
        each = self._at_once()
        wanted = sum(max(0, one.workers * each - len(one.held)) for one in self._hosts.values())
        return max(0, wanted - len(self._waiting))

    def next(self, host: str, most: int | None = None) -> list[range]:
        """Return what a host is to run besides what it has; it has it from now on."""
        one = self._hosts[host]
        if not self._waiting or not self.is_hungry(host):
            return []
        if self._streamed:
            count = one.workers * self._at_once() - len(one.held)
        else:
            hungry = [name for name in self._hosts if self.is_hungry(name)]
            workers = sum(self._hosts[name].workers for name in hungry)
            count = max(-(-len(self._waiting) * one.workers // workers), 1)
        spans = self._waiting.take(count if most is None else min(count, most))
        for span in spans:
            one.held.add(span)
            one.unbegun.add(span)
        return spans

    def unsent(self, host: str, span: range) -> None:
        """Record that items could not be sent to a host with those before them: they wait."""
        self._hosts[host].held.remove(span)
        self._hosts[host].unbegun.remove(span)
        self._waiting.add(span)

    def is_hungry(self, host: str) -> bool:
        """Return whether a host has less to begin than it has workers; of a stream, whether one of
        its workers is free."""
        one = self._hosts[host]
        if self._streamed:
            return len(one.held) < one.workers * self._at_once()
        return len(one.unbegun) < one.workers

    def take_from(self, host: str) -> tuple[str, float] | None:
        """Return from which other host a hungry one is to take, and which part of what that has
        not begun; None if it is not worth it."""
        if self._waiting or self._streamed or not self._done:
            return None
        others = [name for name in self._hosts if name != host]
        richest = max(others, key=self._work_left, default=None)
        if richest is None or self._work_left(richest) <= _WORTH_TAKING:
            return None
        mine, theirs = self._hosts[host].workers, self._hosts[richest].workers
        return richest, mine / (mine + theirs)

    def _work_left(self, host: str) -> float:
        """Return the seconds until a host has begun all that it has."""
        one = self._hosts[host]
        return len(one.unbegun) * self._seconds / self._done / one.workers

    def _at_once(self) -> int:
        """Return how many items of a stream each worker gets at once."""
        cost = self._seconds / self._done if self._done else math.inf
        if cost >= _ALONE:
            return 1
        return max(1, min(int(_AT_ONCE / max(cost, 1e-9)), self._done, _MOST))
