"""`map` and `map_async`: one function, many items, all cores, the same answer.

    map, map_async    what users call
    Options           what can be asked for, validated
    Map               one map, from its options to its results
    MapHandle         a map that a thread carries out
    Bar               a progress bar
    make_pool         the workers, and the shared data that all of them see

This module loads little. The first map starts its workers' interpreter (`registry.prestart`), and
only then, while that starts, loads what a map needs: hence the imports within functions.
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

from weft._core import arguments
from weft._core.arguments import validate_count, whole
from weft.engines import registry
from weft.errors import Cancelled, InvalidType, InvalidValue, Stalled, UsedAfterFork

if TYPE_CHECKING:
    from weft._core.items import Collected, Finished
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
    """Return `[fun(item) for item in items]`, computed by worker processes.

    >>> import weft
    >>> weft.map(lambda x: x * x, [1, 2, 3])
    [1, 4, 9]

    `fun` may be any function, also a lambda or one defined in a notebook. Large arrays travel
    through shared memory. Workers stay alive for the next call. `items` may be a generator: its
    next item is taken only when a worker is free.

    n            the number of workers; by default one for each core.
    gpus         the most GPUs to use: one worker for each, which sees only this one. Without GPUs
                 the cores are used. A parameter `use_gpu` of `fun` says which it is.
    engine       "local", or "serial": in this process, for debugging.
    shared_data  a dict that every call gets: `fun(item, shared_data)`. Its arrays lie in
                 read-only shared memory, once for all workers.
    seed         seeds `random`, NumPy and torch before each item from (seed, index of the item),
                 so the results do not depend on the number of workers.
    retries      how often an item is run again, in a fresh worker, if its worker dies.
    on_error     "raise": the first failure ends the map and is raised, with the worker's
                 traceback as its cause. "return": the exception takes the place of the result.
    progress     True, or a label: shows a progress bar.
    timeout      seconds that the whole map may take.

    Short items are sent in chunks. If a worker dies, the other items of its chunk are run again.

    Raises what `fun` raises, WorkerLost if a worker dies, Stalled after `timeout`, and InvalidType
    for what cannot be pickled.
    """
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
    """Start a `map` and return a handle at once; a thread of this process carries it out.

    The options are those of `map`. Invalid ones are refused at once; what else `map` raises is
    raised by `handle.wait()`.

    >>> import weft
    >>> handle = weft.map_async(abs, [-1, -2])
    >>> handle.wait()
    [1, 2]
    """
    options = Options(n, gpus, engine, shared_data, seed, retries, on_error, progress, timeout)
    return MapHandle(make_map("map_async", fun, items, options))


def make_map(where: str, fun: Callable[..., Any], items: Iterable[Any], options: Options) -> Map:
    """Start the workers' interpreter, and return the map that `where`, the public function, was
    asked for. Raises for invalid arguments."""
    registry.prestart(options.engine)
    from weft._core.items import validate_callable

    validate_callable(fun, f"{where}(fun, items)")
    return Map(fun, items, options.validate(where))


class Options(NamedTuple):
    """The options of `map`, `map_async` and `distribute`."""

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
        """Return the options, whole numbers as Python's int. Raises InvalidType, InvalidValue."""
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


def validate_progress(progress: object) -> None:
    if not isinstance(progress, (bool, str)):
        raise InvalidType(
            f"progress={progress!r}: expected True, False, or a label to show, got "
            f"{type(progress).__name__}"
        )


def validate_shared_data(shared_data: object) -> None:
    if shared_data is not None and not isinstance(shared_data, Mapping):
        raise InvalidType(
            f"shared_data is a {type(shared_data).__name__}; expected a dict, for example "
            "shared_data={'table': array}"
        )


class Map:
    """One map: its pool, its job and the results collected so far."""

    def __init__(self, fun: Callable[..., Any], items: Iterable[Any], options: Options) -> None:
        from weft._core.items import Collected, Job, bind
        from weft.resources import visible_gpus

        try:
            iter(items)
        except TypeError:
            raise InvalidType(
                f"map got items of type {type(items).__name__}, which cannot be gone through; "
                "expected a list, an array, a generator, ..."
            ) from None
        gpus = visible_gpus(os.environ)[: options.gpus] if options.gpus else []
        self.pool = make_pool(options.engine, options.n, gpus=gpus)
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._progress = options.progress
        data = put_all(self.pool, options.shared_data)
        plain = data is None and options.gpus is None
        bound = fun if plain else bind(fun, shared_data=data, use_gpu=bool(gpus))
        self.job = Job(
            self.pool.prepare(bound),
            items,
            seed=options.seed,
            retries=options.retries,
            keep_going=options.on_error == "return",
            timeout=options.timeout,
        )
        total = len(items) if isinstance(items, Sized) else None
        self.collected = Collected(total, keep_failures=options.on_error == "return")

    def run(self, on_chunk: Callable[[Finished], None] = lambda chunk: None) -> list[Any]:
        """Carry it out and return the results. Calls `on_chunk` after each chunk is collected."""
        # not a generator, which would turn a StopIteration of the function into a RuntimeError
        with Bar(self._progress, self.collected.total, self._name) as bar:
            try:
                with closing(self.pool.run(self.job)) as chunks:
                    for chunk in chunks:
                        self.collected.add(chunk)
                        bar.show(self.collected)
                        on_chunk(chunk)
            finally:
                self.pool.forget(self.job.function)
        self.collected.total = self.collected.finished
        del self.collected.results[self.collected.finished :]  # len(items) was too large
        return self.collected.results


class MapHandle:
    """A map that runs in the background: what `map_async` returns."""

    def __init__(self, underway: Map) -> None:
        from weft._api import session
        from weft.engines import interruption

        self._map = underway
        cancelled = self._cancelled = threading.Event()
        self._map.job = underway.job._replace(cancelled=cancelled.is_set)
        self._news = threading.Condition()
        self._order: list[int] = []
        self._error: BaseException | None = None
        self._ended = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="weft map", daemon=True)
        session.at_shutdown("maps", _cancel_all)
        interruption.start(self._thread)
        _handles.add(self)

    def __repr__(self) -> str:
        finished, total = self.progress
        return f"<MapHandle, {self.status}, {finished} of {total} items>"

    @property
    def status(self) -> str:
        """Return "running", "finished", "failed" or "cancelled"."""
        if not self._ended:
            return "running"
        if isinstance(self._error, Cancelled):
            return "cancelled"
        return "finished" if self._error is None else "failed"

    @property
    def progress(self) -> tuple[int, int | None]:
        """Return how many items have ended and how many there are, None while that is unknown."""
        collected = self._map.collected
        return collected.finished, collected.total

    def done(self) -> bool:
        """Return whether the map has ended, successfully or not."""
        return self._ended

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait until the map has ended, and return its results in order.

        Raises what `map` raises, Cancelled after `cancel()`, and Stalled if the map has not ended
        after `timeout` seconds; it goes on.
        """
        self._validate_process()
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
        """Yield each item's index and result as soon as it has ended. Raises what `wait` raises."""
        self._validate_process()
        seen = 0
        while new := self._after(seen):
            for index in new:
                yield index, self._map.collected.results[index]
            seen += len(new)
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """End the map and what still runs, and return when it has ended; `wait` then raises
        Cancelled."""
        self._validate_process()
        self._cancelled.set()
        self._thread.join()

    def end(self, deadline: float) -> None:
        """Cancel the map at shutdown, and wait for its end, but not past the deadline: a generator
        may never return its next item."""
        if self._process == os.getpid():
            self._cancelled.set()
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _validate_process(self) -> None:
        if self._process != os.getpid():
            raise UsedAfterFork(
                f"this map is carried out by process {self._process}, from which this process "
                f"{os.getpid()} was forked; wait for it there, or start one here:\n"
                "    handle = weft.map_async(fun, items)"
            )

    def _after(self, seen: int) -> list[int]:
        """Wait for more than `seen` ended items and return the indexes of the new ones; an empty
        list at the end."""
        with self._news:
            self._news.wait_for(lambda: self._ended or len(self._order) > seen)
            return self._order[seen:]

    def _on_chunk(self, chunk: Finished) -> None:
        with self._news:
            self._order += range(chunk.first, chunk.first + len(chunk.values))
            self._news.notify_all()

    def _run(self) -> None:
        try:
            self._map.run(self._on_chunk)
        except BaseException as error:  # raised by wait()
            self._error = error
        finally:
            with self._news:
                self._ended = True
                self._news.notify_all()


#: seconds that maps have to end at shutdown
_END_TIMEOUT = 2.0
_handles: weakref.WeakSet[MapHandle] = weakref.WeakSet()


def _cancel_all() -> None:
    deadline = time.monotonic() + _END_TIMEOUT
    for handle in list(_handles):
        handle.end(deadline)


class Bar:
    """A tqdm progress bar, in a notebook its widget; nothing if `progress` is False."""

    def __init__(self, progress: bool | str, total: int | None, name: str) -> None:
        self._bar: Any = None
        if progress:
            from tqdm.auto import tqdm  # slow to load

            class Unwatched(tqdm):  # type: ignore[misc]  # it has no types
                """A bar without tqdm's monitor thread, which would run until the program ends."""

                monitor_interval = 0

            label = progress if isinstance(progress, str) else name
            self._bar = Unwatched(total=total, desc=label, miniters=1)

    def show(self, collected: Collected) -> None:
        """Update the bar."""
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


def make_pool(
    engine: str | None,
    size: int | None,
    *,
    gpus: Sequence[str] = (),
    named_pipe: bool | str | None = None,
) -> Pool:
    """Return a pool of `size` workers, by default one for each core; with `gpus` one for each."""
    from weft.engines.base import PoolOptions

    # only an engine that launches has named pipes
    offer = "pool" if named_pipe is None or named_pipe is False else "launch"
    row = registry.choose(engine, offer)
    options = PoolOptions(validate_size(size), share_of_cores(), gpus, named_pipe)
    pool: Pool = row.load().make_pool(options)
    return pool


def validate_size(size: object) -> int | None:
    """Return the number of workers as Python's int, or None. Raises InvalidType, InvalidValue."""
    if size is None:
        return None
    number = whole(size)
    if number is None:
        raise InvalidType(f"n={size!r}: expected a whole number of workers, or None")
    if number < 1:
        raise InvalidValue(f"n={size}: expected one worker or more, or None for one per core")
    return number


def share_of_cores() -> int:
    """Return how many cores the workers of this process may use, beside the host's other ranks."""
    from weft._api import session

    return session.plan_here().threads


def put_all(pool: Pool, shared_data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the shared data with its arrays stored once for all workers, read-only."""
    if shared_data is None:
        return None
    return {key: _put(pool, value) for key, value in shared_data.items()}


def _put(pool: Pool, value: Any) -> Any:
    import numpy as np

    return pool.put(value, readonly=True) if isinstance(value, np.ndarray) else value
