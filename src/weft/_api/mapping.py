"""`map` and `map_async`: one function, many items, all cores, the same answer.

What they do is in `maps.py`, which is loaded while the first workers start.

One map, from its options to its results, waited for or not.

A bar that shows how far a map is.

Which team does the work, and what all its workers see.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from weft._api import session
from weft._core import arguments
from weft._core.arguments import validate_count, whole
from weft._core.items import Collected, Finished, Job, bind, validate_callable
from weft.engines import interruption, registry
from weft.engines.base import PoolOptions
from weft.errors import Cancelled, InvalidType, InvalidValue, Stalled, UsedAfterFork
from weft.resources import visible_gpus

if TYPE_CHECKING:
    from weft.engines.base import Pool


def map(  # what the built-in does, on all cores
    fun: Callable[..., Any],
    items: Iterable[Any],
    *,
    n: int | None = None,
    gpus: int | None = None,
    engine: str | None = None,
    shared_data: Mapping[str, Any] | None = None,
    seed: int | None = None,
    retries: int = 0,
    on_error: str = "raise",
    progress: bool | str = False,
    timeout: float | None = None,
) -> list[Any]:
    """`[fun(item) for item in items]`, computed by `n` worker processes: by default one per core.

    >>> import weft
    >>> weft.map(lambda x: x * x, [1, 2, 3])
    [1, 4, 9]

    Functions of any kind travel, also lambdas and those of a notebook. Large arrays go through
    shared memory. Workers stay alive for the next call. `items` may be a generator: it is asked
    for more only when a worker is free.

    gpus         how many GPUs to use at most: one worker for each, which sees only this one. Where
                 there are none the cores are used. A function with a parameter `use_gpu` is told.
    shared_data  a dict that every call gets: `fun(item, shared_data)`. Its arrays lie in
                 read-only shared memory, once for all workers.
    seed         seeds `random`, NumPy and torch before each item from (seed, index of the item):
                 the results do not depend on the number of workers.
    retries      how often an item whose worker died is run again, on a fresh one.
    on_error     "raise": the first failure ends the others and is raised, with the worker's
                 traceback as its cause. "return": the exception is in the place of its result.
    progress     True, or a label: shows a bar.
    timeout      seconds for all of it.
    engine       "local", or "serial": in this process, for debugging.

    Items that are short are sent several at a time. If a worker dies, those that it had together
    with the lost one are run again.

    Raises what `fun` raises, WorkerLost, Stalled, InvalidType for what cannot be pickled.
    """
    registry.prestart(engine)
    # REMOVED IMPORT

    options = Options(n, gpus, engine, shared_data, seed, retries, on_error, progress, timeout)
    return make_map("map", fun, items, options).run()


def map_async(
    fun: Callable[..., Any],
    items: Iterable[Any],
    *,
    n: int | None = None,
    gpus: int | None = None,
    engine: str | None = None,
    shared_data: Mapping[str, Any] | None = None,
    seed: int | None = None,
    retries: int = 0,
    on_error: str = "raise",
    progress: bool | str = False,
    timeout: float | None = None,
) -> MapHandle:
    """`map` that returns at once, with a handle. A thread of this process looks after the workers.

    >>> import weft
    >>> handle = weft.map_async(abs, [-1, -2])
    >>> handle.wait()
    [1, 2]
    """
    registry.prestart(engine)
    # REMOVED IMPORT

    options = Options(n, gpus, engine, shared_data, seed, retries, on_error, progress, timeout)
    return MapHandle(make_map("map_async", fun, items, options))


#: seconds that maps have to end at shutdown
_PATIENCE = 2.0


class Options(NamedTuple):
    """What `map`, `map_async` and `distribute` can be told."""

    n: int | None = None
    gpus: int | None = None
    engine: str | None = None
    shared_data: Mapping[str, Any] | None = None
    seed: int | None = None
    retries: int = 0
    on_error: str = "raise"
    progress: bool | str = False
    timeout: float | None = None

    def validate(self, where: str) -> Options:
        """Return these with whole numbers as Python's own. Raises InvalidType, InvalidValue."""
        retries = validate_count(self.retries, where, "retries", least=0)
        counts: dict[str, Any] = {"retries": retries}
        if self.gpus is not None:
            counts["gpus"] = validate_count(self.gpus, where, "gpus", least=0)
        if self.seed is not None:
            counts["seed"] = validate_count(self.seed, where, "seed")
        if self.on_error not in ("raise", "return"):
            raise InvalidValue(f"{where}(on_error={self.on_error!r}): expected 'raise' or 'return'")
        validate_progress(self.progress)
        validate_shared_data(self.shared_data)
        seconds = None if self.timeout is None else arguments.validate_seconds(self.timeout)
        same = seconds == self.timeout and all(
            getattr(self, name) is count for name, count in counts.items()
        )
        return self if same else self._replace(timeout=seconds, **counts)


def validate_shared_data(shared_data: object) -> None:
    if shared_data is not None and not isinstance(shared_data, Mapping):
        raise InvalidType(
            f"shared_data is a {type(shared_data).__name__}; expected a dict, for example "
            "shared_data={'table': array}"
        )


def make_map(where: str, fun: Callable[..., Any], items: Iterable[Any], options: Options) -> Map:
    """Return what `weft.map` or `weft.map_async`, which `where` names, was asked for. Raises for
    what is wrong."""
    validate_callable(fun, f"{where}(fun, items)")
    return Map(fun, items, options.validate(where))


class Map:
    """One map: what is asked for, and what has come of it."""

    def __init__(self, fun: Callable[..., Any], items: Iterable[Any], options: Options) -> None:
        try:
            iter(items)
        except TypeError:
            raise InvalidType(
                f"map got items of type {type(items).__name__}, which cannot be gone through; "
                "expected a list, an array, a generator, ..."
            ) from None
        gpus = visible_gpus(os.environ)[: options.gpus] if options.gpus else []
        self.team = make_pool(options.engine, options.n, gpus=gpus)
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._progress = options.progress
        data = put_all(self.team, options.shared_data)
        plain = data is None and options.gpus is None
        bound = fun if plain else bind(fun, shared_data=data, use_gpu=bool(gpus))
        self.job = Job(
            self.team.prepare(bound),
            items,
            seed=options.seed,
            retries=options.retries,
            keep_going=options.on_error == "return",
            timeout=options.timeout,
        )
        total = len(items) if isinstance(items, Sized) else None
        self.collected = Collected(total, keep_failures=options.on_error == "return")

    def run(self, tell: Callable[[Finished], None] = lambda part: None) -> list[Any]:
        """Carry it out; tells whenever something has been collected."""
        # no generator: a function's StopIteration would not come out of one
        with Bar(self._progress, self.collected.total, self._name) as bar:
            try:
                with closing(self.team.run(self.job)) as parts:
                    for part in parts:
                        self.collected.add(part)
                        bar.show(self.collected)
                        tell(part)
            finally:
                self.team.forget(self.job.function)
        self.collected.total = self.collected.finished
        del self.collected.results[self.collected.finished :]  # their number was said wrongly
        return self.collected.results


class MapHandle:
    """A map that is under way."""

    def __init__(self, underway: Map) -> None:
        self._map = underway
        cancelled = self._cancelled = threading.Event()
        self._map.job = underway.job._replace(cancelled=cancelled.is_set)
        self._news = threading.Condition()
        self._order: list[int] = []
        self._error: BaseException | None = None
        self._ended = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="weft map", daemon=True)
        from weft._api import session

        session.at_shutdown("maps", _cancel_all)
        interruption.start(self._thread)
        _handles.add(self)

    @property
    def status(self) -> str:
        """ "running", "finished", "failed" or "cancelled"."""
        if not self._ended:
            return "running"
        if isinstance(self._error, Cancelled):
            return "cancelled"
        return "finished" if self._error is None else "failed"

    @property
    def progress(self) -> tuple[int, int | None]:
        """How many items have ended, and how many there are; None while nobody knows."""
        collected = self._map.collected
        return collected.finished, collected.total

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended

    def wait(self, timeout: float | None = None) -> list[Any]:
        """The results in order, once all are there; raises what failed.

        Raises Stalled when `timeout` seconds have passed; the map goes on.
        """
        self._check_process()
        seconds = None if timeout is None else arguments.validate_seconds(timeout)
        with self._news:
            longest = None if seconds is None else min(seconds, threading.TIMEOUT_MAX)
            if not self._news.wait_for(lambda: self._ended, longest):
                finished, total = self.progress
                raise Stalled(
                    f"{seconds} s have passed, and {finished} of {total} items are finished; wait "
                    "again, or cancel()"
                )
        if self._error is not None:
            raise self._error
        return self._map.collected.results

    def results(self) -> Iterator[tuple[int, Any]]:
        """Each item's index and result, in the order in which they come. Raises what failed."""
        self._check_process()
        seen = 0
        while new := self._after(seen):
            for index in new:
                yield index, self._map.collected.results[index]
            seen += len(new)
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """End it, and what still runs. Returns when it has ended; `wait` then raises Cancelled."""
        self._check_process()
        self._cancelled.set()
        self._thread.join()

    def end(self, deadline: float) -> None:
        """At shutdown: cancel it, and wait for its end until the deadline. Not longer: it may be
        waiting for its next item, which may never come."""
        if self._process == os.getpid():
            self._cancelled.set()
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise UsedAfterFork(
                f"this map is carried out by process {self._process}, from which this process "
                f"{os.getpid()} was forked; wait for it there, or start one here:\n"
                "    handle = weft.map_async(fun, items)"
            )

    def _after(self, seen: int) -> list[int]:
        """The items that have ended after so many others; none: all have."""
        with self._news:
            self._news.wait_for(lambda: self._ended or len(self._order) > seen)
            return self._order[seen:]

    def _take(self, part: Finished) -> None:
        with self._news:
            self._order += range(part.first, part.first + len(part.values))
            self._news.notify_all()

    def _run(self) -> None:
        try:
            self._map.run(self._take)
        except BaseException as error:  # it is raised in whoever waits
            self._error = error
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()


_handles: weakref.WeakSet[MapHandle] = weakref.WeakSet()


def _cancel_all() -> None:
    deadline = time.monotonic() + _PATIENCE
    for handle in list(_handles):
        handle.end(deadline)


class Bar:
    """A tqdm bar, in notebooks their kind of it; or nothing."""

    def __init__(self, progress: bool | str, total: int | None, name: str) -> None:
        self._bar: Any = None
        if progress:
            from tqdm.auto import tqdm  # only now: it takes long to load

            class Unwatched(tqdm):  # type: ignore[misc]  # it has no types
                """Without the thread that tqdm keeps for all bars, until the program ends."""

                monitor_interval = 0

            label = progress if isinstance(progress, str) else name
            self._bar = Unwatched(total=total, desc=label, miniters=1)

    def show(self, collected: Collected) -> None:
        if self._bar is None:
            return
        if collected.failed:
            self._bar.set_postfix(failed=collected.failed, refresh=False)
        self._bar.update(collected.finished - self._bar.n)

    def say(self, text: str) -> None:
        """Print a line on stderr, above the bar if there is one."""
        if self._bar is None:
            print(text, file=sys.stderr)
        else:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def validate_progress(progress: object) -> None:
    if not isinstance(progress, (bool, str)):
        raise InvalidType(
            f"progress={progress!r}: expected True, False, or a label to show, got "
            f"{type(progress).__name__}"
        )


def make_pool(
    engine: str | None,
    size: int | None,
    *,
    gpus: Sequence[str] = (),
    named_pipe: bool | str | None = None,
) -> Pool:
    """A team of so many workers, by default one per core; with `gpus` one for each of them."""
    # workers behind a pipe come from who launches, or not at all
    offer = "pool" if named_pipe is None or named_pipe is False else "launch"
    row = registry.choose(engine, offer)
    options = PoolOptions(validate_size(size), share_of_cores(), gpus, named_pipe)
    made: Pool = row.load().make_pool(options)
    return made


def validate_size(size: object) -> int | None:
    """A number of workers, if one is given."""
    if size is None:
        return None
    number = whole(size)
    if number is None:
        raise InvalidType(f"n={size!r}: expected a whole number of workers, or None")
    if number < 1:
        raise InvalidValue(f"n={size}: expected one worker or more, or None for one per core")
    return number


def share_of_cores() -> int:
    """The cores for the workers of this process: it shares the machine with the other ranks."""
    return session.plan_here().threads


def put_all(pool: Pool, shared_data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return shared data with its arrays stored once for all workers, read-only."""
    if shared_data is None:
        return None
    return {key: _put(pool, value) for key, value in shared_data.items()}


def _put(pool: Pool, value: Any) -> Any:
    import numpy as np

    return pool.put(value, readonly=True) if isinstance(value, np.ndarray) else value
