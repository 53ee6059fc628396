"""`imap`: a map whose results are taken one by one, of items that may be without end.

imap      what users call
Stream    the iterator over the results
Ahead     the thread that computes them, no further ahead than a Window allows
Input     the items, and what their iterator raised
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from weft._api.mapping import (
    Bar,
    Exceptions,
    Map,
    Options,
    cancel_all,
    make_map,
    underway_maps,
    validate_process,
)
from weft._core.arguments import validate_count
from weft.errors import InvalidType, RemoteError

if TYPE_CHECKING:
    from weft._core.items import Finished, Window


def imap(
    fun: Callable[..., Any],
    items: Iterable[Any],
    *more: Iterable[Any],
    ordered: bool = True,
    ahead: int | None = None,
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
    timeout_each: float | None = None,
) -> Stream:
    """Return an iterator over the results of a `map`, which are computed as they are taken.

    Items and results may be without end: only those that are ahead of the program are kept.

    >>> import itertools, weft
    >>> squares = weft.imap(lambda x: x * x, itertools.count())
    >>> next(squares), next(squares), next(squares)
    (0, 1, 4)
    >>> squares.close()

    ordered  True: results come in the order of the items. False: as they are finished.
    ahead    the most items that are drawn and whose results are not taken yet; by default some
             chunks for each worker, which is less than a second's work and some megabytes, unless
             single items are longer or larger.

    The other options are those of `map`. It begins when the first result is asked for. A thread of
    this process draws the items and keeps the workers busy while the program does something else;
    with engine="serial" each item is drawn and run here when its result is asked for.

    An exception of `fun` is raised when it is its item's turn, and ends the iterator; with
    on_error="return" it takes the place of the result. What the items' iterator raises is raised
    after the results of the items before. The iterator ends with `close()`, at the end of a `with`
    block, or when nobody refers to it: calls that still run are ended then.
    """
    if not isinstance(ordered, bool):
        raise InvalidType(
            f"imap(ordered={ordered!r}): expected True or False, got {type(ordered).__name__}"
        )
    if ahead is not None:
        ahead = validate_count(ahead, "imap", "ahead", least=1)
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
        timeout_each=timeout_each,
    )
    underway = make_map("imap", fun, (items, *more), options)
    return Stream(underway, ordered=ordered, ahead=ahead)


class Stream(Iterator[Any]):
    """Results one at a time: what `imap` returns. Several threads may take from one."""

    def __init__(self, underway: Map, *, ordered: bool, ahead: int | None) -> None:
        from weft._core.items import Delivery, Window

        self._window = window = Window(ahead)
        self._input = Input(underway.job.items)
        self._keep_failures = underway.job.keep_going
        underway.job = underway.job._replace(
            items=self._input.items,
            keep_going=True,  # results before one that failed are wanted
            cancelled=lambda: window.closed,
            window=window,
        )
        self._map = underway
        self._delivery = Delivery(ordered=ordered)
        self._chunks: Generator[Finished, None, None] | Ahead | None = None
        self._bar: Bar | None = None
        self._taken = self._failed = 0
        self._ended = False
        self._turn = threading.RLock()
        self._process = os.getpid()

    def __next__(self) -> Any:
        validate_process(self._process, "results = weft.imap(fun, items)")
        with self._turn:
            try:
                index, value, error = self._next_outcome()
                self._show(error)
                if error is None or self._keep_failures:
                    return value if error is None else error
                if isinstance(error, StopIteration):  # it would end the caller's loop quietly
                    raise RemoteError(f"StopIteration: {error}, raised by item {index}") from error
                raise error
            except BaseException:  # StopIteration at the end too
                self._end()
                raise

    def _next_outcome(self) -> tuple[int, Any, Exception | None]:
        """Return the next item's index, result and exception. Raises StopIteration at the end, and
        what ends the map."""
        while not self._ended:
            outcome = self._delivery.take()
            if outcome is not None:
                self._window.consume()
                return outcome
            chunk = next(self._begun(), None)
            if chunk is not None:
                self._delivery.add(chunk)
            elif self._input.error is not None:
                raise self._input.error
            else:
                break
        raise StopIteration

    def _begun(self) -> Iterator[Finished]:
        """Return the chunks; begin to compute them, if that has not been done."""
        if self._chunks is None:
            here = self._map.pool.computes_here
            self._bar = Bar(self._map.progress, self._map.total, self._map.name)
            self._chunks = self._map.chunks() if here else Ahead(self._map, self._window)
        return self._chunks

    def _show(self, error: Exception | None) -> None:
        self._taken += 1
        self._failed += error is not None
        if self._bar is not None:
            self._bar.show(self._taken, self._failed)

    def close(self) -> None:
        """End the calls that still run, and return when they have ended. There are no more results
        then; closing twice does nothing more."""
        self._window.closed = True
        if self._process == os.getpid():
            if isinstance(self._chunks, Ahead):
                self._chunks.close()  # also while another thread waits for a result
            with self._turn:
                self._end()

    def _end(self) -> None:
        self._ended = self._window.closed = True
        if self._bar is not None:
            self._bar.close()
        if self._chunks is not None:
            self._chunks.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # a finalizer may run anywhere, and waits for nobody: the thread sees this within a moment
        if hasattr(self, "_window"):  # else a signal handler raised in `__init__`
            self._window.closed = True


class Input:
    """The items of a stream. An exception of their iterator is kept for the end: the items before
    it have results."""

    def __init__(self, items: Iterable[Any]) -> None:
        from weft._core.items import at_hand

        #: what the pool is to draw from
        self.items = items if at_hand(items) else self._drawn(iter(items))
        self.error: Exception | None = None

    def _drawn(self, items: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from items
        except Exception as error:
            self.error = error


class Ahead(Iterator["Finished"]):
    """The chunks of a stream, computed by a thread ahead of who takes them."""

    def __init__(self, underway: Map, window: Window) -> None:
        from weft._api import session
        from weft.engines import interruption

        self._window = window
        #: chunks; at the end an exception, or None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(underway,), name="weft imap", daemon=True
        )
        self._closed = False
        self._process = os.getpid()
        session.at_shutdown("maps", cancel_all)
        underway_maps.add(self)
        interruption.start(self._thread)

    def __next__(self) -> Finished:
        chunk = self._queue.get()
        if chunk is None or isinstance(chunk, BaseException):
            raise StopIteration if chunk is None or self._closed else chunk
        finished: Finished = chunk
        return finished

    def close(self) -> None:
        """End what the thread does, and wait for its end."""
        self._closed = self._window.closed = True
        self._window.wake()
        self._thread.join()

    def end(self, deadline: float) -> None:
        """Do the same at shutdown, but not past the deadline."""
        if self._process == os.getpid() and self._thread.is_alive():
            self._window.closed = True
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, underway: Map) -> None:
        last: BaseException | None = None
        try:
            with closing(underway.chunks()) as chunks:
                for chunk in chunks:
                    self._queue.put(chunk)
        except BaseException as error:  # raised where the results are taken
            last = error
        finally:
            underway_maps.discard(self)
            self._queue.put(last)
