"""A pool: a driver and local workers that call one function on many items.

One job, from the first chunk to the last:

    driver                                               worker
    Schedule: the next chunk of items
    pack_items: chunk -> payload
        payload.data   ──── Work ───────────────────>    load the items, call the function on each
        large arrays   ──── blocks of shared memory ──>  arrays over the same blocks
                                                         pack the results -> payload
    load the results   <─── Done, Unreadable, Stopped ─  reply
    yield Finished                                       wait for the next message

One thread of the driver does all of this: it sends a chunk to each idle worker, then sleeps until a
worker replies, prints or ends. A worker has one chunk at a time.

`LocalPool` is the contract's pool, `Run` one job of it, `Limits` a job's deadline and cancellation.
`Feed` draws items in a thread of its own, so that an iterator that blocks does not keep the driver
from its workers:

    driver's thread                   items' thread
    draw: requests some      ──>      asks the iterator
    attends to the workers            (which may block for ever)
    draw: takes them         <──      writes to the wake-up descriptor

That thread draws no more items than were requested. When the job ends while the iterator blocks,
the thread stays until the iterator has returned: nobody can end it.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from weft._core.failures import INTERRUPTED, Failure, restore
from weft._core.items import Finished, Job
from weft._core.schedule import MOST_BYTES, UNKNOWN, Chunk, Draw, Schedule
from weft.engines import interruption
from weft.engines.base import Pool
from weft.engines.interruption import by_signal_handler
from weft.engines.local.pool.messages import (
    LOADING,
    Answer,
    CancelAcknowledged,
    Done,
    Stopped,
    Unreadable,
    Work,
)
from weft.engines.local.pool.payload import (
    Payload,
    PayloadTooLarge,
    load,
    pack_function,
    pack_items,
)
from weft.engines.local.pool.workers import (
    CHECK_INTERVAL,
    Lease,
    ReadyEvents,
    Watch,
    Worker,
    Workers,
    worker_lost_error,
)
from weft.engines.local.processes.channel import Closed, Ended
from weft.engines.local.processes.linux import readable, translate_os_error
from weft.errors import Cancelled, InvalidType, SegmentGone, Stalled

if TYPE_CHECKING:
    from weft._core.arithmetic import Array


class LocalPool(Pool):
    """A pool of processes of this host."""

    def __init__(
        self, size: int, workers: Workers, *, cores: int, gpus: Sequence[str] = ()
    ) -> None:
        """Use `size` workers that share so many cores, or one for each of `gpus`."""
        self._gpus: list[str | None] = list(gpus) or [None] * size
        self.size = len(self._gpus)
        self._threads = max(1, cores // self.size)
        self._cores = cores
        self._workers = workers

    def prepare(self, function: Callable[[Any], Any]) -> Payload:
        return pack_function(function)

    def forget(self, prepared: Payload) -> None:
        if prepared.has_references:  # a small one workers keep for the next call
            self._workers.forget(prepared.digest)
            prepared.release()

    def put(self, array: Array, *, readonly: bool = False) -> Any:
        from weft.engines.local.pool.payload_arrays import place

        return place(array, readonly=readonly)

    def close(self) -> None:
        self._workers.shut_down()

    def run(self, job: Job) -> Generator[Finished, None, None]:
        gpus = self._gpus
        if isinstance(job.items, (list, tuple, range)) and not job.one_each:
            gpus = gpus[: len(job.items)]  # more workers would have nothing to do
        limits = Limits(job)
        lease = self._workers.lease(gpus, self._threads, self._cores, limits.check)
        run = Run(job, limits, self._workers, lease)
        try:
            for finished in run.steps():
                lease.pause()
                yield finished
                lease.resume()
                if finished.failures and not job.keep_going:
                    return
        finally:
            run.end()


#: seconds that an interrupted function has to return
_GRACE = 0.3


class _Task(NamedTuple):
    """A chunk that a worker has, and the payload that holds its memory."""

    chunk: Chunk
    payload: Payload


class Run:
    """A job under way."""

    def __init__(self, job: Job, limits: Limits, workers: Workers, lease: Lease) -> None:
        self._process = os.getpid()
        self._job = job
        self._limits = limits
        self._workers = workers
        self._lease = lease
        self._watch = lease.watch
        #: draws the items where the job can be cancelled while their iterator blocks
        self._feed: Feed | None = None
        feed = self._draw_in_background if job.cancelled is not None else None
        expected = UNKNOWN if job.one_each else workers.expected_cost(job.function.digest)
        self._schedule = Schedule(
            job.items, lease.wanted.total(), retries=job.retries, expected=expected, feed=feed
        )
        self._idle = lease.idle
        self._busy: dict[Worker, _Task] = {}
        #: a chunk for which there was no worker any more when its items had come
        self._unsent: Chunk | None = None

    def _draw_in_background(self, items: Iterator[Any]) -> Draw:
        self._feed = Feed(items)
        self._watch.watch_wakeup(self._feed.wakeup)
        return self._feed.draw

    def steps(self) -> Generator[Finished, None, None]:
        """Yield each chunk when it is finished. Raises Stalled, Cancelled."""
        for worker in self._watch.ended():  # they ended while idle: no item is lost
            self._drop(worker)
        while True:
            yield from self._hand_out()
            if not self._busy and not self._schedule.waiting and self._unsent is None:
                return
            for worker, events in self._wait().items():
                yield from self._attend(worker, events)

    def end(self) -> None:
        """End what still runs, and give the workers back."""
        if os.getpid() != self._process:
            return  # in a forked child, which has no business with the parent's workers
        self._lease.resume()
        if self._feed is not None:
            self._watch.watch_wakeup(-1)
            self._feed.close()
        try:
            if self._busy:
                self._interrupt()
        finally:  # also after a second Ctrl-C
            for worker in self._busy:
                worker.kill()
            try:
                for worker in list(self._busy):
                    self._drop(worker)
                for worker, events in self._watch.wait(0).items():
                    self._watch.relay(worker, events)
                self._workers.note_cost(self._job.function.digest, self._schedule.cost)
            finally:  # also after a third: other calls may wait for the workers
                self._lease.end()

    def _interrupt(self) -> None:
        """Interrupt the busy workers, and wait for those that reply within the grace period."""
        for worker in self._busy:
            if worker.frames.unsent:  # it would get the rest of its items, and begin
                worker.kill()
                continue
            with contextlib.suppress(Closed):  # its pidfd reports its end too
                worker.cancel()
        watch = Watch(self._busy)
        deadline = time.monotonic() + _GRACE
        while self._busy and (remaining := deadline - time.monotonic()) > 0:
            for worker, events in watch.wait(remaining).items():
                watch.relay(worker, events)
                self._dismiss(worker, events)
                if worker not in self._busy:
                    watch.remove(worker)

    # sending

    def _hand_out(self) -> list[Finished]:
        """Send a chunk to every idle worker. Return the items that could not be packed."""
        failed = []
        while self._has_worker():
            chunk = self._next()
            if chunk is None:
                break
            try:
                payload = pack_items(chunk.items, chunk.first, most=MOST_BYTES)
            except PayloadTooLarge:
                self._schedule.resend_singly(chunk)
                continue
            except Exception as error:  # one of the items cannot be pickled
                if by_signal_handler(error):
                    raise
                if len(chunk.items) > 1:
                    self._schedule.resend_singly(chunk)
                else:
                    unsent = Finished(chunk.first, [None], {chunk.first: error}, worker=-1, pid=0)
                    failed.append(unsent)
                continue
            if not self._idle:  # another call has taken it while the items came
                payload.release()
                self._unsent = chunk
                continue
            self._give(self._idle.pop(), _Task(chunk, payload))
        return failed

    def _has_worker(self) -> bool:
        """Return whether there is a worker for the next chunk. Wait for one if none is at work."""
        if not self._idle and self._schedule.exhausted and self._unsent is None:
            self._lease.wants_no_more()
            return False
        if not self._idle and not self._lease.take(self._check) and not self._busy:
            self._lease.wait_for_one(self._limits.check)
        return bool(self._idle)

    def _next(self) -> Chunk | None:
        """Return the next chunk. Raises Stalled if the deadline passes before its items come."""
        if self._unsent is not None:
            chunk, self._unsent = self._unsent, None
            return chunk
        if self._schedule.at_hand or self._feed is not None:
            return self._schedule.next()
        self._lease.pause()
        try:
            return self._limits.run_until_deadline(self._schedule.next, self._where)
        finally:
            self._lease.resume()

    def _give(self, worker: Worker, task: _Task) -> None:
        job = self._job
        chunk, items = task.chunk, task.payload.data
        work = Work(job.function.digest, chunk.first, items, job.seed, job.keep_going)
        self._busy[worker] = task
        with contextlib.suppress(Closed):  # its pidfd reports its end too
            worker.give(job.function, work)
        if worker.frames.unsent:
            self._watch.watch_writable(worker)

    # waiting

    def _wait(self) -> ReadyEvents:
        """Return the workers with events, or none when items have come. Raises Stalled,
        Cancelled."""
        while True:
            self._check()
            self._lease.spare_idle()
            events = self._watch.wait(self._limits.pause)
            if events or self._watch.woken or self._may_send():
                return events

    def _may_send(self) -> bool:
        """Return whether another worker has become free for what is left."""
        return not self._idle and not self._schedule.exhausted and self._lease.take(self._check)

    def _check(self) -> None:
        self._limits.check(self._where)

    def _attend(self, worker: Worker, events: set[int]) -> Generator[Finished, None, None]:
        if worker not in self._lease.held:  # it was given to another call meanwhile
            return
        self._watch.relay(worker, events)
        message = None
        ended = worker.pidfd in events
        if worker.frames.fileno() in events:
            try:
                message = self._receive(worker)
            except Closed:  # it is ending, or its function has closed the connection
                ended = True
                readable(worker.pidfd, _GRACE)  # its own exit code says more than our SIGKILL
        if message is not None:
            yield from self._take_answer(worker, message)
        elif ended:
            yield from self._lose(worker)

    def _receive(self, worker: Worker) -> Answer | None:
        """Return a worker's answer, or None while it is incomplete. Raises Closed."""
        if worker.frames.unsent and worker.frames.flush():
            self._watch.watch_writable(worker)
        return cast("Answer | None", worker.receive())  # nothing was cancelled

    # answers and losses

    def _take_answer(self, worker: Worker, message: Answer) -> Generator[Finished, None, None]:
        task = self._busy[worker]
        chunk = task.chunk
        if isinstance(message, Stopped):
            message = Unreadable(INTERRUPTED, about_function=False)
        if isinstance(message, Unreadable):
            self._free(worker)
            if len(chunk.items) > 1 and not message.about_function:
                self._schedule.resend_singly(chunk)
                return
            indexes = range(chunk.first, chunk.first + len(chunk.items))
            errors = {index: self._item_error(worker, message.failure, index) for index in indexes}
            yield self._finished(worker, chunk, [None] * len(chunk.items), errors)
            return
        try:
            values = load(message.values, self._limits.remaining)
        except Exception as error:  # a class's own unpickling may raise anything
            yield from self._not_loaded(worker, message, error)
            return
        self._free(worker)
        errors = {
            chunk.first + position: self._item_error(worker, failure, chunk.first + position)
            for position, failure in message.failures
        }
        self._schedule.done(len(values), message.seconds, task.payload.shared + message.shared)
        yield self._finished(worker, chunk, values, errors)._replace(
            seconds=message.seconds,
            sent=len(task.payload.data) + task.payload.shared,
            received=len(message.values) + message.shared,
        )

    def _free(self, worker: Worker) -> None:
        """Take the chunk from a worker that is done with it."""
        task = self._busy.pop(worker)
        task.payload.release()
        if self._job.one_each:
            self._lease.served.add(worker)
            self._lease.give_back(worker)
        else:
            self._lease.rest(worker)

    def _not_loaded(
        self, worker: Worker, message: Done, error: Exception
    ) -> Generator[Finished, None, None]:
        """Handle results that could not be loaded: the worker ended before their memory was
        attached here, or they cannot be unpickled."""
        if by_signal_handler(error):
            raise error
        if isinstance(error, Stalled) and self._limits.over:
            raise self._limits.stalled_error(self._where()) from None
        if isinstance(error, SegmentGone) and readable(worker.pidfd, _GRACE):
            yield from self._lose(worker)
            return
        chunk = self._busy[worker].chunk
        if message.shared:  # the blocks of its other results stay in flight until it ends
            self._drop(worker)
        else:
            self._free(worker)
        if len(chunk.items) > 1:
            self._schedule.resend_singly(chunk)
            return
        failed = InvalidType(
            f"the result of item {chunk.first} has come and cannot be unpickled here: "
            f"{type(error).__name__}: {error}"
        )
        failed.__cause__ = error
        yield self._finished(worker, chunk, [None], {chunk.first: failed})

    @staticmethod
    def _finished(
        worker: Worker, chunk: Chunk, values: list[Any], errors: dict[int, Exception]
    ) -> Finished:
        return Finished(chunk.first, values, errors, worker.number, worker.pid, host=worker.host)

    @staticmethod
    def _item_error(worker: Worker, failure: Failure, item: int) -> Exception:
        return restore(failure, str(worker), item, host=worker.host)

    def _lose(self, worker: Worker) -> Generator[Finished, None, None]:
        """Forget a worker that has ended; run its items again, or yield the one that failed."""
        task = self._busy.get(worker)
        if task is None:
            self._drop(worker)
            return
        chunk = task.chunk
        delivered = not worker.frames.unsent
        ended = self._drop(worker)
        item = ended.item if ended is not None else chunk.first if delivered else -1
        if item == LOADING + chunk.first:  # it ended while unpickling: nobody knows which item
            item = chunk.first
            if len(chunk.items) > 1:
                self._schedule.resend_singly(chunk)
                return
        if not chunk.first <= item < chunk.first + len(chunk.items):
            item = chunk.first
            if self._schedule.resend(chunk):
                return
        if self._schedule.lost(chunk, item):
            return
        retries = self._job.retries
        error = worker_lost_error(
            worker,
            ended,
            item=item,
            doing=f"ran item {item}" + (f" for the {retries + 1}. time" if retries else ""),
            advice="" if retries else "; retries=1 runs such items again on a fresh worker",
        )
        yield self._finished(worker, Chunk(item, [None]), [None], {item: error})

    def _drop(self, worker: Worker) -> Ended | None:
        """End a worker, if it has not ended. Return how it did."""
        worker.kill()
        self._lease.discard(worker)
        ended = self._workers.end(worker)
        task = self._busy.pop(worker, None)
        if task is not None:
            task.payload.release()  # only now: until its end the worker may write there
        return ended

    def _dismiss(self, worker: Worker, events: set[int]) -> None:
        """Free a worker that has acknowledged Cancel, and drop one that has ended. An answer that
        comes before the acknowledgement is ignored."""
        try:
            while (message := worker.receive()) is not None:
                if isinstance(message, CancelAcknowledged):
                    self._free(worker)
                    return
            ended = worker.pidfd in events
        except Exception as error:  # the driver's log handlers may raise anything
            if by_signal_handler(error):
                raise
            ended = True
        if ended:
            self._drop(worker)

    def _where(self) -> str:
        """Return lines that say which worker has which items."""
        lines = [f"  {worker} has {task.chunk.span}" for worker, task in self._busy.items()]
        if self._idle and self._schedule.total is None:
            lines.append(f"  item {self._schedule.taken} has not come out of its iterator yet")
        return "\n".join(lines)


Result = TypeVar("Result")


class Limits:
    """The deadline of a job, counted from now, and whether the job was cancelled."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._deadline = math.inf if job.timeout is None else time.monotonic() + job.timeout

    @property
    def over(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self._deadline

    @property
    def remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one."""
        if self._job.timeout is None:
            return None
        return max(0.0, self._deadline - time.monotonic())

    @property
    def pause(self) -> float:
        """Return the seconds until the next check."""
        if self._deadline == math.inf:
            return CHECK_INTERVAL
        return max(0.0, min(CHECK_INTERVAL, self._deadline - time.monotonic()))

    def check(self, where: Callable[[], str] = lambda: "  no worker has started yet") -> None:
        """Raise Stalled or Cancelled if the job has to end; `where` says which worker has what."""
        if self._deadline < math.inf and self.over:
            raise self.stalled_error(where())
        if self._job.cancelled is not None and self._job.cancelled():
            raise Cancelled("the map was cancelled")

    def run_until_deadline(self, action: Callable[[], Result], where: Callable[[], str]) -> Result:
        """Return the result of an action in this thread that may block. Raises Stalled if the
        deadline comes first."""
        if self._job.timeout is None:
            return action()
        from weft.engines.interruption import ComputationGuard, ComputationInterrupted

        guard = ComputationGuard(lambda: self.over)
        try:
            with guard:
                return action()
        except ComputationInterrupted:
            raise self.stalled_error(where()) from None
        finally:
            guard.close()

    def stalled_error(self, where: str) -> Stalled:
        return Stalled(
            f"map: {self._job.timeout} s have passed and items are not finished; pass a longer "
            f"timeout=, or find out why these take so long:\n{where}"
        )


#: seconds for all requested items to come; later they are taken as they come
_AT_ONCE = 0.002


class Feed:
    """An iterator's items, drawn in a thread, some at a time."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._changed = threading.Condition()
        self._requested = 0
        self._drawn: deque[Any] = deque()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        try:
            #: an eventfd: readable when items have come; who waits for it reads it
            self.wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise translate_os_error(error) from error
        interruption.start(threading.Thread(target=self._run, name="weft items", daemon=True))

    def draw(self, size: int) -> list[Any] | None:
        """Return at most so many items: an empty list at the end, None if none has come yet. Raises
        what the iterator raised."""
        with self._changed:
            if not self._requested:
                self._requested = size
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._is_requested(), _AT_ONCE)
            if self._drawn:
                self._requested = 0
                return [self._drawn.popleft() for _ in range(min(size, len(self._drawn)))]
            if self._error is not None:
                raise self._error
            return [] if self._ended else None

    def close(self) -> None:
        """Request no more items. May be called several times."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._changed.notify_all()
                os.close(self.wakeup)

    # the items' thread

    def _run(self) -> None:
        while not self._closed and not self._ended:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_requested())
            try:
                while self._is_requested():
                    self._drawn.append(next(self._items))
                    if len(self._drawn) == 1:
                        self._wake()  # now: the next item may be slow to come
            except StopIteration:
                self._ended = True
            except BaseException as error:  # `draw` raises it
                self._error, self._ended = error, True
            self._wake()

    def _is_requested(self) -> bool:
        return len(self._drawn) < self._requested and not self._ended and not self._closed

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            if not self._closed:
                os.eventfd_write(self.wakeup, 1)
