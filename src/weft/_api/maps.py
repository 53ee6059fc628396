"""One map, from its options to its results, waited for or not."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import closing
from typing import Any, NamedTuple

from weft._api.progress import Bar, validate_progress
from weft._api.teams import make_pool, put_all
from weft._core import timeouts
from weft._core.calling import bind, validate_callable
from weft._core.collect import Collected
from weft._core.counts import checked
from weft._core.jobs import Finished, Job
from weft.engines import threads
from weft.errors import Cancelled, InvalidType, InvalidValue, Stalled, UsedAfterFork
from weft.resources import visible_gpus

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
        counts: dict[str, Any] = {"retries": checked(self.retries, where, "retries", least=0)}
        if self.gpus is not None:
            counts["gpus"] = checked(self.gpus, where, "gpus", least=0)
        if self.seed is not None:
            counts["seed"] = checked(self.seed, where, "seed")
        if self.on_error not in ("raise", "return"):
            raise InvalidValue(f"{where}(on_error={self.on_error!r}): expected 'raise' or 'return'")
        validate_progress(self.progress)
        validate_shared_data(self.shared_data)
        seconds = None if self.timeout is None else timeouts.checked(self.timeout)
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
        threads.start(self._thread)
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
        seconds = None if timeout is None else timeouts.checked(timeout)
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
