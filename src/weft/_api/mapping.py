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

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weft._core import arguments
from weft._core.arguments import validate_count, whole
from weft.engines import registry
from weft.errors import (
    Cancelled,
    InvalidType,
    InvalidValue,
    Stalled,
    UsedAfterFork,
)

if TYPE_CHECKING:
    from weft._core.items import Collected, Finished
    from weft.engines.base import Pool


#: an exception's class, or several, as `except` takes them
Exceptions = type[Exception] | Sequence[type[Exception]]


def map(  # what the built-in does, on all cores
    fun: Callable[..., Any],
    items: Iterable[Any],
    *more: Iterable[Any],
    n: int | None = None,
    gpus: int | None = None,
    engine: str | None = None,
    machines: Sequence[str] | None = None,
    port: int | None = None,
    shared_data: Mapping[str, Any] | None = None,
    seed: int | None = None,
    retries: int = 0,
    retry_on: Exceptions = (),
    on_error: str = "raise",
    progress: bool | str = False,
    timeout: float | None = None,
    timeout_each: float | None = None,
) -> list[Any]:
    """Return `[fun(item) for item in items]`, computed by worker processes.

    >>> import weft
    >>> weft.map(lambda x: x * x, [1, 2, 3])
    [1, 4, 9]
    >>> weft.map(pow, [2, 3], [5, 2])
    [32, 9]

    `fun` may be any function, also a lambda or one defined in a notebook. Large arrays travel
    through shared memory. Workers stay alive for the next call. `items` may be a generator: its
    next item is taken only when a worker is free. With several iterables `fun` gets an element of
    each, up to the end of the shortest.

    n             the number of workers; by default, and with -1, one for each core.
    gpus          the most GPUs to use, of all machines: one worker for each, which sees only this
                  one. Without GPUs the cores are used. A parameter `use_gpu` of `fun` says which it
                  is.
    engine        "local"; "serial": in this process, for debugging; "ray": on all hosts of a
                  cluster.
    machines      names of other machines that take part, after `weft open` there and here; port is
                  that of their cluster, 2718 by default.
    shared_data   a dict that every call gets: `fun(item, shared_data)`. Its arrays lie in read-only
                  shared memory, once for all workers.
    seed          seeds `random`, NumPy and torch before each item from (seed, index of the item),
                  so the results do not depend on the number of workers.
    retries       how often an item is run again, in a fresh worker, if its worker dies or it runs
                  for longer than `timeout_each`.
    retry_on      exceptions, as `except` takes them, after which an item is run again too, in any
                  worker; an item is run 1 + `retries` times in all.
    on_error      "raise": the first failure ends the map and is raised, with the worker's traceback
                  as its cause. "return": the exception takes the place of the result.
    progress      True, or a label: shows a progress bar.
    timeout       seconds that the whole map may take. With on_error="return" the results that are
                  finished then are returned; other items are Stalled if they had begun, else
                  Cancelled. If nobody knows how many items there are, the list ends with a Stalled
                  for those that had not come.
    timeout_each  seconds that one item may run. One that runs longer has failed with Stalled, and
                  its worker is replaced. Items are then sent one at a time.

    Short items are sent in chunks. If a worker dies, the other items of its chunk are run again.

    Raises what `fun` raises, WorkerLost if a worker dies, Stalled after `timeout`, and InvalidType
    for what cannot be pickled.
    """
    options = Options(
        n=n,
        gpus=gpus,
        engine=engine,
        machines=machines,
        port=port,
        shared_data=shared_data,
        seed=seed,
        retries=retries,
        retry_on=retry_on,
        on_error=on_error,
        progress=progress,
        timeout=timeout,
        timeout_each=timeout_each,
    )
    return make_map("map", fun, (items, *more), options).run()


def map_async(
    fun: Callable[..., Any],
    items: Iterable[Any],
    *more: Iterable[Any],
    n: int | None = None,
    gpus: int | None = None,
    engine: str | None = None,
    machines: Sequence[str] | None = None,
    port: int | None = None,
    shared_data: Mapping[str, Any] | None = None,
    seed: int | None = None,
    retries: int = 0,
    retry_on: Exceptions = (),
    on_error: str = "raise",
    progress: bool | str = False,
    timeout: float | None = None,
    timeout_each: float | None = None,
) -> MapHandle:
    """Start a `map` and return a handle at once; a thread of this process carries it out.

    The options are those of `map`. Invalid ones are refused at once; what else `map` raises is
    raised by `handle.wait()`. The handle keeps all results: for items without end there is `imap`.

    >>> import weft
    >>> handle = weft.map_async(abs, [-1, -2])
    >>> handle.wait()
    [1, 2]
    """
    options = Options(
        n=n,
        gpus=gpus,
        engine=engine,
        machines=machines,
        port=port,
        shared_data=shared_data,
        seed=seed,
        retries=retries,
        retry_on=retry_on,
        on_error=on_error,
        progress=progress,
        timeout=timeout,
        timeout_each=timeout_each,
    )
    return MapHandle(make_map("map_async", fun, (items, *more), options))


def make_map(
    where: str, fun: Callable[..., Any], iterables: Sequence[Iterable[Any]], options: Options
) -> Map:
    """Start the workers' interpreter, and return the map that `where`, the public function, was
    asked for. Raises for invalid arguments."""
    registry.prestart(options.engine)
    from weft._core.items import validate_callable, zipped

    validate_callable(fun, f"{where}(fun, items)")
    for iterable in iterables:
        validate_items(iterable, where)
    options = options.validate(where)
    if len(iterables) == 1:
        return Map(fun, iterables[0], options)
    return Map(fun, zipped(iterables), options, spread=True)


def validate_items(items: object, where: str) -> None:
    try:
        iter(items)  # type: ignore[call-overload]  # that is the question
    except TypeError:
        raise InvalidType(
            f"{where} got items of type {type(items).__name__}, which cannot be gone through; "
            "expected a list, an array, a generator, ..."
        ) from None


class Options(NamedTuple):
    """The options of `map`, `map_async`, `imap` and `distribute`."""

    n: int | None = None
    gpus: int | None = None
    engine: str | None = None
    machines: Sequence[str] | None = None
    port: int | None = None
    #: the most workers of this machine, beside others
    max_cpu: int | None = None
    shared_data: Mapping[str, Any] | None = None
    seed: int | None = None
    retries: int = 0
    retry_on: Exceptions = ()
    on_error: str = "raise"
    progress: bool | str = False
    timeout: float | None = None
    timeout_each: float | None = None

    def validate(self, where: str) -> Options:
        """Return the options, numbers as Python's int and float, `retry_on` as a tuple. Raises
        InvalidType, InvalidValue."""
        valid: dict[str, Any] = {
            "retries": validate_count(self.retries, where, "retries", least=0),
            "retry_on": validate_exceptions(self.retry_on, where),
        }
        if valid["retry_on"] and not valid["retries"]:
            names = ", ".join(kind.__name__ for kind in valid["retry_on"])
            raise InvalidValue(
                f"{where}(retry_on=...) without retries=: nothing would be run again; say how "
                f"often at most:\n    {where}(fun, items, retries=3, retry_on=({names},))"
            )
        if self.gpus is not None:
            valid["gpus"] = validate_count(self.gpus, where, "gpus", least=0)
        if self.seed is not None:
            valid["seed"] = validate_count(self.seed, where, "seed")
        if self.on_error not in ("raise", "return"):
            raise InvalidValue(f"{where}(on_error={self.on_error!r}): expected 'raise' or 'return'")
        validate_progress(self.progress)
        validate_shared_data(self.shared_data)
        if self.timeout is not None:
            valid["timeout"] = arguments.validate_seconds(self.timeout)
        if self.timeout_each is not None:
            valid["timeout_each"] = arguments.validate_seconds(self.timeout_each, "timeout_each")
        return self._replace(**valid)


def validate_exceptions(retry_on: object, where: str) -> tuple[type[Exception], ...]:
    """Return what `retry_on` names as a tuple of classes. Raises InvalidType."""
    kinds = tuple(retry_on) if isinstance(retry_on, (tuple, list, set, frozenset)) else (retry_on,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise InvalidType(
                f"{where}(retry_on={retry_on!r}): expected a class of exceptions, or several, for "
                "example retry_on=(ConnectionError, TimeoutError)"
            )
    return kinds


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

    def __init__(
        self,
        fun: Callable[..., Any],
        items: Iterable[Any],
        options: Options,
        *,
        spread: bool = False,
    ) -> None:
        """Prepare a map; `spread` says that an item is a tuple of arguments."""
        from weft._core.items import Job, bind

        self.pool = make_pool(
            options.engine,
            options.n,
            machines=options.machines,
            port=options.port,
            gpu_policy="prefer_gpu" if options.gpus else "no_gpu",
            max_cpu=options.max_cpu,
            most_gpus=options.gpus,
        )
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.progress = options.progress
        data = put_all(self.pool, options.shared_data)
        plain = data is None and options.gpus is None and not spread
        use_gpu = self.pool.uses_gpus
        bound = fun if plain else bind(fun, shared_data=data, use_gpu=use_gpu, spread=spread)
        self.job = Job(
            self.pool.prepare(bound),
            items,
            seed=options.seed,
            retries=options.retries,
            retry_on=options.retry_on,  # type: ignore[arg-type]  # a tuple, once validated
            keep_going=options.on_error == "return",
            timeout=options.timeout,
            timeout_each=options.timeout_each,
        )
        self.total = len(items) if isinstance(items, Sized) else None

    @cached_property
    def collected(self) -> Collected:
        """Return the results so far; of a stream nobody asks for them."""
        from weft._core.items import Collected

        return Collected(self.total, keep_failures=self.job.keep_going)

    def run(self, on_chunk: Callable[[Finished], None] = lambda chunk: None) -> list[Any]:
        """Carry it out and return the results. Calls `on_chunk` after each chunk is collected."""
        # not a generator, which would turn a StopIteration of the function into a RuntimeError
        with (
            Bar(self.progress, self.total, self.name) as bar,
            closing(self.chunks()) as chunks,
        ):
            for chunk in chunks:
                self.collected.add(chunk)
                bar.show(self.collected.finished, self.collected.failed)
                on_chunk(chunk)
        self.collected.total = self.collected.finished
        del self.collected.results[self.collected.finished :]  # len(items) was too large
        return self.collected.results

    def chunks(self) -> Generator[Finished, None, None]:
        """Carry it out; yield its chunks as they end."""
        try:
            yield from self.pool.run(self.job)
        finally:
            self.pool.forget(self.job.function)


#: seconds after which those who wait for a map look again
_SLICE = 1.0


class MapHandle:
    """A map that runs in the background: what `map_async` returns."""

    def __init__(self, underway: Map) -> None:
        from weft._api import session
        from weft.engines import interruption

        self._map = underway
        cancelled = self._cancelled = threading.Event()
        self._map.job = underway.job._replace(cancelled=cancelled.is_set)
        #: a lock for each thread that waits, which wakes it
        self._waiting: set[threading.Lock] = set()
        self._order: list[int] = []
        self._error: BaseException | None = None
        self._ended = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="weft map", daemon=True)
        session.at_shutdown("maps", cancel_all)
        underway_maps.add(self)
        interruption.start(self._thread)

    def __repr__(self) -> str:
        finished, total = self.progress
        return f"<{type(self).__name__}, {self.status}, {finished} of {total} items>"

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
        if not self._wait_for(lambda: self._ended, math.inf if seconds is None else seconds):
            finished, total = self.progress
            raise Stalled(
                f"{seconds} s have passed, and {finished} of {total} items are finished; wait "
                "again, or cancel()"
            )
        if self._error is not None:
            raise self._error
        return self._map.collected.results

    def results(self) -> Iterator[tuple[int, Any]]:
        """Yield each item's index and result as soon as it has ended. Raises what `wait` raises.

        The map does not wait for who takes them, and keeps all: for items without end see `imap`.
        """
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
        if self._process == os.getpid() and self._thread.is_alive():
            self._cancelled.set()
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _validate_process(self) -> None:
        validate_process(self._process, "handle = weft.map_async(fun, items)")

    def _after(self, seen: int) -> list[int]:
        """Wait for more than `seen` ended items and return the indexes of the new ones; an empty
        list at the end."""
        self._wait_for(lambda: self._ended or len(self._order) > seen)
        return self._order[seen:]

    def _wait_for(self, condition: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait for the thread to make a condition true, so many seconds at most; return whether it
        has. A signal handler may raise at any step, which it may not in `threading.Condition`."""
        deadline = time.monotonic() + seconds
        news = threading.Lock()
        try:
            self._waiting.add(news)
            while not condition():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                news.acquire(timeout=min(remaining, _SLICE))
            return True
        finally:
            self._waiting.discard(news)

    def _wake(self) -> None:
        for news in self._waiting.copy():
            with contextlib.suppress(RuntimeError):  # it is awake already
                news.release()

    def _on_chunk(self, chunk: Finished) -> None:
        self._order += range(chunk.first, chunk.first + len(chunk.values))
        self._wake()

    def _run(self) -> None:
        try:
            self._map.run(self._on_chunk)
        except BaseException as error:  # raised by wait()
            self._error = error
        finally:
            underway_maps.discard(self)
            self._ended = True
            self._wake()


def validate_process(process: int, line: str) -> None:
    """Raise UsedAfterFork, with the line that starts a map, unless this is the process of one."""
    if process != os.getpid():
        raise UsedAfterFork(
            f"this map is carried out by process {process}, from which this process {os.getpid()} "
            f"was forked; wait for it there, or start one here:\n    {line}"
        )


#: seconds that maps have to end at shutdown
_END_TIMEOUT = 2.0


class InThread(Protocol):
    """A map that a thread carries out."""

    def end(self, deadline: float) -> None:
        """End it at shutdown, and wait for its end until the deadline."""


#: what threads carry out; each leaves when its thread ends
underway_maps: set[InThread] = set()


def cancel_all() -> None:
    """End all maps that threads carry out."""
    deadline = time.monotonic() + _END_TIMEOUT
    for one in list(underway_maps):
        one.end(deadline)


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

    def show(self, finished: int, failed: int) -> None:
        """Update the bar."""
        if self._bar is None:
            return
        if failed:
            self._bar.set_postfix(failed=failed, refresh=False)
        self._bar.update(finished - self._bar.n)

    def say(self, text: str) -> None:
        """Print a line on stderr, above the bar if there is one."""
        if self._bar is None:
            print(text, file=sys.stderr)
        else:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_pool(
    engine: str | None,
    size: int | None,
    *,
    machines: Sequence[str] | None = None,
    port: int | None = None,
    gpu_policy: str = "no_gpu",
    max_cpu: int | None = None,
    max_gpu: int | None = None,
    most_gpus: int | None = None,
    named_pipe: bool | str | None = None,
) -> Pool:
    """Return a pool of `size` workers, by default one for each core; if GPUs are used, one for
    each, at most `most_gpus`. `max_cpu` and `max_gpu` are caps for this machine.

    Raises InvalidType, InvalidValue, and what the engine raises."""
    from weft.engines.base import PoolOptions

    size = validate_size(size)
    names = validate_machines(machines, port, engine, named_pipe)
    # only an engine that launches has named pipes
    offer = "pool" if named_pipe is None or named_pipe is False else "launch"
    row = registry.choose("ray" if names else engine, offer)
    over_hosts = "machines" in row.offers
    gpus: Sequence[str] = ()
    visible = None
    if gpu_policy != "no_gpu":
        from weft.resources import own_choice, visible_gpus

        visible = own_choice(os.environ)
        gpus = () if over_hosts else visible_gpus(os.environ)[:max_gpu][:most_gpus]
    cores = share_of_cores()
    if not over_hosts and max_cpu is not None:
        size = min(max_cpu, cores)
    pool: Pool = row.load().make_pool(
        PoolOptions(
            size,
            cores,
            gpus,
            named_pipe,
            machines=names,
            port=port,
            max_cpu=max_cpu,
            max_gpu=max_gpu,
            visible=visible,
            most_gpus=most_gpus,
            gpu_policy=gpu_policy,
        )
    )
    return pool


def validate_machines(
    machines: object, port: object, engine: str | None, named_pipe: object = None
) -> tuple[str, ...]:
    """Return the names of machines. Raises InvalidType, InvalidValue."""
    names = () if machines is None else machines
    if not isinstance(names, (list, tuple)) or not all(isinstance(one, str) for one in names):
        raise InvalidType(
            f"machines={machines!r}: expected a list of names, for example machines=['bob', 'jim']"
        )
    if any(not name.strip() for name in names):
        raise InvalidValue(f"machines={machines!r}: expected names of machines, got an empty one")
    if with_port := [name for name in names if ":" in name]:
        raise InvalidValue(
            f"machines={machines!r}: expected names without a port, as port= is for all of them:\n"
            f"    machines=[{with_port[0].partition(':')[0]!r}, ...], "
            f"port={with_port[0].partition(':')[2] or 2718}"
        )
    if names and engine not in (None, "ray"):
        raise InvalidValue(
            f"machines={machines!r} with engine={engine!r}: other machines are used by the engine "
            "'ray'; leave engine= away"
        )
    if names and named_pipe is not None and named_pipe is not False:
        raise InvalidValue(
            f"machines={machines!r} with named_pipe={named_pipe!r}: a pipe serves this machine "
            "alone; pass one of them"
        )
    if port is not None:
        validate_count(port, "machines", "port", least=1)
        if not names and engine != "ray":
            raise InvalidValue(
                f"port={port!r} without machines=: nothing of this machine listens on a port; name "
                f"the machines:\n    machines=['bob', 'jim'], port={port!r}"
            )
    return tuple(names)


#: the number of workers that means one for each core, as None does
ALL_CORES = -1


def validate_size(size: object) -> int | None:
    """Return the number of workers as Python's int, or None for one per core. Raises InvalidType,
    InvalidValue."""
    if size is None:
        return None
    number = whole(size)
    if number is None:
        raise InvalidType(f"n={size!r}: expected a whole number of workers, or None")
    if number < 1 and number != ALL_CORES:
        raise InvalidValue(f"n={size}: expected one worker or more, or -1 or None for one per core")
    return None if number == ALL_CORES else number


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
