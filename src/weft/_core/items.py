"""A map's job: what is asked of a pool, its results, and how a function is called with an item.

    Job  --a pool-->  Finished, chunk by chunk, in any order  --Collected-->  all results, in order
                                                              --Delivery-->   one result at a time

In this order: `Job`, `Finished`, `Collected`, `Delivery`, and the `Window` of a stream; the
`Supply` of a job whose items come and go while it runs; `bind` and
the callables that it makes of a user's function; the items that stand for something else: `Zipped`,
`NOTHING` and `ColumnSlice`. NumPy takes long to load and is not needed here, so the code that cuts
arrays is in `partition.py`.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.errors import Cancelled, InvalidType, Stalled

if TYPE_CHECKING:
    from weft._core.arithmetic import Array


class Job(NamedTuple):
    """Calls of one function with many items, as a pool carries them out."""

    #: what the pool's `prepare` returned
    function: Any
    items: Iterable[Any]
    #: random generators are seeded from it before each item; None leaves them alone
    seed: int | None = None
    #: how often an item is run again that has lost its worker, or raised one of `retry_on`
    retries: int = 0
    retry_on: tuple[type[Exception], ...] = ()
    #: whether the rest is run when an item fails
    keep_going: bool = False
    #: whether every worker runs exactly one item
    one_each: bool = False
    #: seconds for the whole job, and for one item
    timeout: float | None = None
    timeout_each: float | None = None
    #: how far the job may run ahead of the consumer of its results; None: any distance
    window: Window | None = None
    #: tells whether the job was cancelled; None if it cannot be
    cancelled: Callable[[], bool] | None = None
    #: of `timeout`, the seconds that had passed when the pool got the job
    elapsed: float = 0.0


class Finished(NamedTuple):
    """A chunk of items that has ended."""

    first: int
    #: the results; None for an item that failed
    values: list[Any]
    #: the exceptions of the items that failed, by index
    failures: dict[int, Exception]
    worker: int
    pid: int
    seconds: float = 0.0
    #: bytes to the worker and back
    sent: int = 0
    received: int = 0
    #: where the worker runs; empty for items that reached none
    host: str = ""

    def without(self, indexes: Collection[int]) -> Iterator[Finished]:
        """Yield the chunk in parts without these items. What it says of its transport and time is
        in the first part."""
        first, part = self.first, self
        for end in [*sorted(indexes), self.first + len(self.values)]:
            if first < end:
                values = self.values[first - self.first : end - self.first]
                failures = {i: error for i, error in self.failures.items() if first <= i < end}
                yield part._replace(first=first, values=values, failures=failures)
                part = part._replace(seconds=0.0, sent=0, received=0)
            first = end + 1


#: items that are reported together when none of them has begun
_TOGETHER = 4096


def not_begun(spans: Iterable[range], timeout: float | None) -> Iterator[Finished]:
    """Yield items that had not begun at the deadline of their job, as failures."""
    for span in spans:
        for first in range(span.start, span.stop, _TOGETHER):
            indexes = range(first, min(first + _TOGETHER, span.stop))
            which = f"item {first}" if len(indexes) == 1 else f"items {first} to {indexes[-1]}"
            error = Cancelled(f"{which} had not begun when {timeout} s had passed")
            failures: dict[int, Exception] = dict.fromkeys(indexes, error)
            yield Finished(first, [None] * len(indexes), failures, worker=-1, pid=0)


def not_drawn(index: int, timeout: float | None) -> Finished:
    """Return what stands for all items that an iterator has not given at the deadline: one more
    failure, so that nobody takes the others for all there are."""
    error = Stalled(
        f"the iterator had neither given item {index} nor ended when {timeout} s had passed; how "
        "many more there are is not known"
    )
    return Finished(index, [None], {index: error}, worker=-1, pid=0)


def add_note_of_runs(error: Exception, index: int, retries: int) -> None:
    """Add to an item's last exception how often the item was run."""
    error.add_note(f"item {index} was run {retries + 1} times: retries={retries}")


class Collected:
    """The results of a job so far, in the order of its items."""

    def __init__(self, total: int | None, *, keep_failures: bool) -> None:
        #: how many items there are; None while that is not known
        self.total = total
        self.results: list[Any] = [None] * (total or 0)
        self._keep_failures = keep_failures
        #: how many items have ended, and how many of them failed
        self.finished = 0
        self.failed = 0

    def add(self, chunk: Finished) -> None:
        """Add a chunk. Raises its first failure, unless failures are kept as results."""
        if chunk.failures and not self._keep_failures:
            raise chunk.failures[min(chunk.failures)]
        end = chunk.first + len(chunk.values)
        if end > len(self.results):
            self.results += [None] * (end - len(self.results))
        self.results[chunk.first : end] = chunk.values
        for index, error in chunk.failures.items():
            self.results[index] = error
        self.finished += len(chunk.values)
        self.failed += len(chunk.failures)


class Delivery:
    """The results of a stream that have come and were not taken yet."""

    def __init__(self, *, ordered: bool) -> None:
        """Deliver them in the order of their items, or as they come."""
        self._ordered = ordered
        #: by the index of their first item
        self._chunks: dict[int, Finished] = {}
        #: of the chunk that is being delivered: each item's index, result and exception
        self._outcomes: deque[tuple[int, Any, Exception | None]] = deque()
        self._next = 0

    def add(self, chunk: Finished) -> None:
        """Add a chunk that has come."""
        self._chunks[chunk.first] = chunk

    def take(self) -> tuple[int, Any, Exception | None] | None:
        """Return the next item's index, its result, and its exception if it has failed; None if it
        has not come."""
        if not self._outcomes:
            first = self._next if self._ordered else next(iter(self._chunks), -1)
            chunk = self._chunks.pop(first, None)
            if chunk is None:
                return None
            self._next = first + len(chunk.values)
            for index, value in enumerate(chunk.values, first):
                self._outcomes.append((index, value, chunk.failures.get(index)))
        return self._outcomes.popleft()


class Window:
    """Tell how far a job runs ahead of the consumer of its results.

    Two threads use it: one that consumes, and one that carries out the job. The first counts, then
    looks whether the other waits; that says for what it waits, then looks at the count.
    """

    def __init__(self, ahead: int | None = None) -> None:
        """Allow so many items that are drawn and not consumed; None: a few chunks per worker."""
        self.ahead = ahead
        #: whether the consumer wants no more
        self.closed = False
        #: how many items it has consumed, and at how many more can be drawn
        self._consumed = 0
        self._resume = math.inf
        #: wakes who carries out the job
        self.wake: Callable[[], None] = lambda: None

    def consume(self) -> None:
        """Count one more item as consumed."""
        self._consumed += 1
        if self._consumed >= self._resume:
            self.wake()

    def has_room(self, consumed: int) -> bool:
        """Return whether so many items have been consumed. If not, `wake` is called when they
        have."""
        self._resume = consumed
        enough = self._consumed >= consumed
        if enough:
            self._resume = math.inf
        return enough


class Supplied(NamedTuple):
    """Consecutive items that a job is given to run."""

    #: the index of the first
    first: int
    items: list[Any]
    #: how often they were run before
    runs: int = 0


class Supply:
    """The items of a job that come while it runs, and that can be taken back until they begin.

    A pool draws from it as from any items. Somebody else, in another thread, adds items under the
    indexes that they have among all, takes back the last ones, and closes it when no more come.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        """Be used by several threads, which take this lock."""
        self._lock = lock
        self._waiting: deque[Supplied] = deque()
        self._count = 0
        #: whether no more items come
        self.closed = False
        #: wakes who carries out the job
        self.wake: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """Return how many items wait to be drawn."""
        return self._count

    def add(self, supplied: Supplied) -> None:
        """Add items after the others."""
        with self._lock:
            self._waiting.append(supplied)
            self._count += len(supplied.items)
        self.wake()

    def close(self) -> None:
        """Add no more items: the job ends with those that are here."""
        self.closed = True
        self.wake()

    def draw(self, most: int) -> Supplied | None:
        """Remove the first items, at most so many, and return them; None if none wait."""
        with self._lock:
            if not self._waiting:
                return None
            found = self._waiting.popleft()
            if len(found.items) > most:
                rest = found._replace(first=found.first + most, items=found.items[most:])
                self._waiting.appendleft(rest)
                found = found._replace(items=found.items[:most])
            self._count -= len(found.items)
            return found

    def take_back(self, most: int) -> list[range]:
        """Remove the last items, at most so many. Return their indexes."""
        taken: list[range] = []
        with self._lock:
            while most > 0 and self._waiting:
                last = self._waiting.pop()
                keep = max(0, len(last.items) - most)
                if keep:
                    self._waiting.append(last._replace(items=last.items[:keep]))
                taken.append(range(last.first + keep, last.first + len(last.items)))
                most -= len(taken[-1])
                self._count -= len(taken[-1])
        return taken[::-1]

    def spans(self) -> list[range]:
        """Return the indexes of the items that wait."""
        with self._lock:
            return [range(one.first, one.first + len(one.items)) for one in self._waiting]


def validate_callable(function: object, form: str) -> None:
    """Raise InvalidType unless the first argument of a call like `form` can be called."""
    if not callable(function):
        raise InvalidType(
            f"the first argument of {form} is {function!r} of type {type(function).__name__}; "
            "expected a function, or something else that can be called"
        )


def takes_an_item(function: Callable[..., Any], besides: int) -> bool:
    """Return whether a function has a parameter for an item `besides` so many others."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = _parameters(function).values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return True
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in kinds and parameter.name != "use_gpu"
    ]
    return len(positional) > besides


def bind(
    function: Callable[..., Any],
    *,
    shared_data: Mapping[str, Any] | None = None,
    use_gpu: bool | None = None,
    spread: bool = False,
) -> Callable[..., Any]:
    """Bind a function to shared data, if given, and to `use_gpu`, if it has such a parameter.
    `spread` says that an item holds several arguments."""
    parameters = _parameters(function)
    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if shared_data is not None:
        if "shared_data" in parameters:
            keywords["shared_data"] = shared_data
        else:
            positional = (shared_data,)
    if use_gpu is not None and "use_gpu" in parameters:
        keywords["use_gpu"] = use_gpu
    if not positional and not keywords and not spread:
        return function
    return Bound(function, positional, keywords, spread)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        any_items = inspect.Parameter("item", inspect.Parameter.VAR_POSITIONAL)
        return {any_items.name: any_items}


@dataclass(frozen=True)
class Bound:
    """A user's function with what it gets besides the item."""

    function: Callable[..., Any]
    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    #: whether an item is a tuple of arguments
    spread: bool = False

    def __call__(self, *item: Any) -> Any:
        if self.spread:
            (item,) = item
        return self.function(*item, *self.positional, **self.keywords)


@dataclass(frozen=True)
class Unwrapping:
    """A user's function, called with what an item stands for: columns of an array, or nothing."""

    function: Callable[..., Any]

    def __call__(self, item: Any) -> Any:
        if item is NOTHING:
            return self.function()
        return self.function(item.view() if isinstance(item, ColumnSlice) else item)


def zipped(iterables: Sequence[Iterable[Any]]) -> Iterable[Any]:
    """Return tuples of one element of each iterable, up to the end of the shortest, as `zip` does;
    with a length, if each of them has one."""
    if all(isinstance(iterable, Sized) for iterable in iterables):
        return Zipped(iterables)
    return zip(*iterables, strict=False)


class Zipped:
    """Several iterables with lengths in step."""

    def __init__(self, iterables: Sequence[Any]) -> None:
        self.iterables = iterables

    def __len__(self) -> int:
        return min(len(iterable) for iterable in self.iterables)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return zip(*self.iterables, strict=False)


def at_hand(items: object) -> bool:
    """Return whether items can be drawn without waiting, and their length is what they say."""
    if isinstance(items, Zipped):
        return all(at_hand(iterable) for iterable in items.iterables)
    return isinstance(items, (list, tuple, range))


class Nothing(Enum):
    """An item that is not passed to the function. An Enum: unpickled, it is the same object."""

    NOTHING = 0


NOTHING = Nothing.NOTHING


@dataclass(frozen=True)
class ColumnSlice:
    """The columns `start` to `stop` of an array.

    In the driver `array` may be a handle from `Pool.put`; a worker gets the array in its place. A
    view has the strides of the whole array, so that what is computed from it has the same bits.
    """

    array: Array | Any
    start: int
    stop: int

    def view(self) -> Array:
        view: Array = self.array[..., self.start : self.stop]
        return view
