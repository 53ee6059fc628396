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
worker replies, prints or ends. A worker has one chunk at a time. While no worker has one, because
no item has come yet or the consumer of a stream is behind, the job has no workers: others may use
them.

`LocalPool` is the contract's pool, `Run` one job of it, `Limits` a job's deadline and cancellation.
`Feed` draws items in a thread of its own, so that an iterator that blocks does not keep the driver
from its workers:

    driver's thread                   items' thread
    draw: requests some      ──>      asks the iterator
    attends to the workers            (which may block for ever)
    draw: takes them         <──      wakes it (Wakeup)

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
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from weft._core.drawn import draw
from weft._core.failures import INTERRUPTED, Failure, restore
from weft._core.items import (
    Finished,
    Job,
    Supply,
    add_note_of_runs,
    at_hand,
    not_begun,
    not_drawn,
)
from weft._core.schedule import MOST_BYTES, UNKNOWN, Chunk, Draw, Schedule, draw_some
from weft.engines import interruption
from weft.engines.base import Pool
from weft.engines.interruption import ComputationInterrupted, Result, by_signal_handler
from weft.engines.local.pool import modules
from weft.engines.local.pool.driver_state import capture
from weft.engines.local.pool.messages import (
    LOADING,
    Answer,
    Begun,
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
from weft.engines.local.pool.remote_worker import (
    ReadyEvents,
    Watch,
    Worker,
    worker_lost_error,
)
from weft.engines.local.pool.workers import CHECK_INTERVAL, Lease, Workers
from weft.engines.local.processes.channel import Closed, Ended
from weft.engines.local.processes.linux import readable, translate_os_error
from weft.engines.refusals import forked_error
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
        self.uses_gpus = bool(gpus)
        self.size = len(self._gpus)
        self._cores = cores
        self._threads = max(1, cores // self.size)
        self._workers = workers

    def prepare(self, function: Callable[[Any], Any]) -> Payload:
        prepared = pack_function(function)
        prepared.state = capture()
        return prepared

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
        if at_hand(job.items) and not job.one_each:
            gpus = gpus[: len(cast("Sized", job.items))]  # more would have nothing to do
        lease = self._workers.lease(gpus, self._threads, self._cores)
        run = Run(job, self._workers, lease)
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

    def __init__(self, job: Job, workers: Workers, lease: Lease) -> None:
        self._process = os.getpid()
        self._job = job
        #: the caller's: a job that can be cancelled is carried out by a thread of weft's
        self._state = capture() if job.cancelled is None else job.function.state
        self._modules = modules.look(job.function.modules)
        self._limits = Limits(job)
        self._workers, self._lease = workers, lease
        #: the workers without a chunk
        self._idle = lease.idle
        #: wakes this thread when items have come or may be drawn, where `_feed` draws them
        self._wakeup = wakeup = Wakeup() if _ends_while_items_block(job) else None
        #: draws the items where the job may have to end while their iterator blocks
        self._feed: Feed | None = None
        if wakeup is not None:
            feed: Callable[[Iterator[Any]], Draw] = partial(self._draw_in_background, wakeup.set)
        else:
            feed = self._draw_until_deadline
        expected = UNKNOWN if job.one_each else workers.expected_cost(job.function.digest)
        self._schedule = Schedule(
            job.items,
            max(1, lease.wanted.total()),
            retries=job.retries,
            expected=expected,
            singly=job.timeout_each is not None,
            window=job.window,
            feed=feed,
        )
        if wakeup is not None:
            if job.window is not None:
                job.window.wake = wakeup.set
            if isinstance(job.items, Supply):
                job.items.wake = wakeup.set
        self._watch_wakeup()
        self._busy: dict[Worker, _Task] = {}
        #: until when their items may run, where these are timed
        self._due: dict[Worker, float] = {}
        #: whether the job's deadline has passed: nothing more begins
        self._over = False

    def _draw_in_background(self, wake: Callable[[], None], items: Iterator[Any]) -> Draw:
        self._feed = Feed(items, wake)
        return self._feed.draw

    def _draw_until_deadline(self, items: Iterator[Any]) -> Draw:
        def draw(size: int) -> list[Any]:
            self._lease.pause()
            try:
                return self._limits.run_until_deadline(lambda: draw_some(items, size), self._where)
            finally:
                self._lease.resume()

        return draw

    @property
    def _watch(self) -> Watch:
        return self._lease.watch

    def _watch_wakeup(self) -> None:
        if self._wakeup is not None:
            self._watch.watch_wakeup(self._wakeup.descriptor)

    def steps(self) -> Generator[Finished, None, None]:
        """Yield each chunk when it is finished. Raises Stalled, Cancelled. If the job keeps going,
        its deadline raises nothing: items that are not finished then are failures."""
        try:
            yield from self._work()
        except Stalled as error:
            if error is not self._limits.stalled or not self._job.keep_going:
                raise
            yield from self._end_at_deadline()

    def _work(self) -> Generator[Finished, None, None]:
        while True:
            yield from self._hand_out()
            if not self._busy and not self._schedule.waiting:
                return
            for worker, events in self._wait().items():
                yield from self._attend(worker, events)
            for worker in self._overdue():
                yield from self._expire(worker)

    def end(self) -> None:
        """End what still runs, and give the workers back."""
        if os.getpid() != self._process:
            return  # in a forked child, which has no business with the parent's workers
        self._lease.resume()
        if self._feed is not None:
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
                self._watch.watch_wakeup(-1)  # first: `wait` would take one that is not for it
                for worker, events in self._watch.wait(0).items():
                    self._watch.relay(worker, events)
                self._workers.note_cost(self._job.function.digest, self._schedule.cost)
            finally:  # also after a third: other calls may wait for the workers
                self._lease.end()
                if self._wakeup is not None:
                    self._wakeup.close()

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

    def _hand_out(self) -> Generator[Finished, None, None]:
        """Send a chunk to every idle worker. Yield the items that could not be packed. Raises
        Stalled if the deadline passes before items come."""
        while self._idle or not self._busy or self._takes_another():
            chunk = self._schedule.next()
            if chunk is None:
                return
            if not self._idle:  # it has none yet, or other calls took them while the items came
                self._schedule.put_back(chunk)
                if self._busy:
                    return
                self._begin()
                continue
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
                    yield Finished(chunk.first, [None], {chunk.first: error}, worker=-1, pid=0)
                continue
            self._give(self._idle.pop(), _Task(chunk, payload))

    def _takes_another(self) -> bool:
        """Take another worker, if there is one, and something may be left for it."""
        if self._schedule.exhausted:
            self._lease.wants_no_more()
            return False
        return self._lease.take(self._check)

    def _begin(self) -> None:
        """Wait for workers: none are held before the first chunk. Raises Stalled, Cancelled,
        LaunchError."""
        self._lease.begin(self._limits.check)
        self._watch_wakeup()
        for worker in self._watch.ended():  # they ended while idle: no item is lost
            self._drop(worker)

    def _give(self, worker: Worker, task: _Task) -> None:
        job = self._job
        chunk, items = task.chunk, task.payload.data
        work = Work(
            job.function.digest,
            chunk.first,
            items,
            job.seed,
            # an item that is run again is no reason not to run those after it
            keep_going=job.keep_going or bool(job.retry_on),
            timed=job.timeout_each is not None,
            rescued=job.keep_going and job.timeout is not None,
        )
        self._busy[worker] = task
        used = self._modules
        if not task.payload.modules <= used.keys():
            used = used | modules.look(task.payload.modules)
        with contextlib.suppress(Closed):  # its pidfd reports its end too
            worker.bring_up_to_date(self._state, used)
            worker.give(job.function, work)
        if worker.frames.unsent:
            self._watch.watch_writable(worker)

    # waiting

    def _wait(self) -> ReadyEvents:
        """Return the workers with events, or none when items have come or one has run for too
        long. Raises Stalled, Cancelled."""
        if self._schedule.waiting:  # until there are items others have the workers
            self._lease.wants_no_more()
            if not self._busy:
                self._lease.give_back_idle()
        while True:
            self._check()
            self._lease.spare_idle()
            pause = self._limits.pause
            if self._due:
                pause = max(0.0, min(pause, min(self._due.values()) - time.monotonic()))
            events = self._watch.wait(pause)
            if events or self._watch.woken or self._overdue() or self._may_send():
                return events

    def _may_send(self) -> bool:
        """Return whether another worker has become free for what is left."""
        return not self._idle and not self._schedule.waiting and self._takes_another()

    def _overdue(self) -> list[Worker]:
        """Return the workers whose items have run for too long."""
        if not self._due:
            return []
        now = time.monotonic()
        return [worker for worker, due in self._due.items() if due <= now]

    def _check(self) -> None:
        if os.getpid() != self._process:  # its iterator has forked, and the child goes on with it
            raise forked_error("this map", self._process)
        self._limits.check(self._where)

    def _attend(self, worker: Worker, events: set[int]) -> Generator[Finished, None, None]:
        if worker not in self._lease.held:  # it was given to another call meanwhile
            return
        message = None
        ended = worker.pidfd in events
        answered = worker.frames.fileno() in events
        if len(events) > answered:  # first what it has printed
            self._watch.relay(worker, events)
        if answered:
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
        message: object = worker.receive()
        if isinstance(message, Begun) and self._job.timeout_each is not None:
            self._due[worker] = message.at + self._job.timeout_each
            message = worker.receive()
        if worker.frames.unsent:  # it has asked for something
            self._watch.watch_writable(worker)
        return cast("Answer | None", message)  # nothing was cancelled

    # answers and losses

    def _take_answer(self, worker: Worker, message: Answer) -> Generator[Finished, None, None]:
        task = self._busy[worker]
        chunk = task.chunk
        if isinstance(message, Unreadable):
            self._free(worker)
            yield from self._not_run(worker, chunk, message)
            return
        try:
            values = load(message.values, self._limits.remaining)
        except Exception as error:  # a class's own unpickling may raise anything
            yield from self._not_loaded(worker, message, error)
            return
        if isinstance(message, Stopped) and message.stuck:
            self._drop(worker)
        else:
            self._free(worker)
        errors = {
            chunk.first + position: self._item_error(worker, failure, chunk.first + position)
            for position, failure in message.failures
        }
        sent = len(task.payload.data) + task.payload.shared
        received = len(message.values) + message.shared
        if values:
            self._schedule.done(len(values), message.seconds, sent + received)
        transport = message.seconds, sent, received
        finished = self._finished(worker, chunk, values, errors, transport)
        if again := self._run_again(chunk, errors):
            yield from finished.without(again)
        elif values:
            self._schedule.forget(chunk)
            yield finished
        rest = Chunk(chunk.first + len(values), chunk.items[len(values) :])
        if isinstance(message, Stopped):
            yield from self._not_run(worker, rest, Unreadable(INTERRUPTED, about_function=False))
        elif rest.items:
            self._schedule.given_back(rest)

    def _not_run(
        self, worker: Worker, chunk: Chunk, reason: Unreadable
    ) -> Generator[Finished, None, None]:
        """Handle items that a worker has not run to their end. Several are run again one by one."""
        if self._over:
            yield from self._unfinished(worker, chunk, chunk.first)
        elif len(chunk.items) > 1 and not reason.about_function:
            self._schedule.resend_singly(chunk)
        elif chunk.items:
            indexes = range(chunk.first, chunk.first + len(chunk.items))
            errors = {index: self._item_error(worker, reason.failure, index) for index in indexes}
            yield self._finished(worker, chunk, [None] * len(chunk.items), errors)

    def _run_again(self, chunk: Chunk, errors: dict[int, Exception]) -> list[int]:
        """Return the failed items that are run again, because the user has named the exception."""
        again = []
        for index, error in errors.items():
            if isinstance(error, self._job.retry_on) and not self._over:
                if self._schedule.failed(chunk, index):
                    again.append(index)
                else:
                    add_note_of_runs(error, index, self._job.retries)
        return again

    def _free(self, worker: Worker) -> None:
        """Take the chunk from a worker that is done with it."""
        self._due.pop(worker, None)
        self._busy.pop(worker).payload.release()
        if self._job.one_each:
            self._lease.served.add(worker)
            self._lease.give_back(worker)
        else:
            self._lease.rest(worker)

    def _not_loaded(
        self, worker: Worker, message: Done | Stopped, error: Exception
    ) -> Generator[Finished, None, None]:
        """Handle results that could not be loaded: the worker ended before their memory was
        attached here, or they cannot be unpickled."""
        if by_signal_handler(error):
            raise error
        if isinstance(error, Stalled) and self._limits.over and not self._over:
            raise self._limits.stalled_error(self._where()) from None
        if isinstance(error, SegmentGone) and readable(worker.pidfd, _GRACE):
            yield from self._lose(worker)
            return
        chunk = self._busy[worker].chunk
        if message.shared:  # the blocks of its other results stay in flight until it ends
            self._drop(worker)
        else:
            self._free(worker)
        if len(chunk.items) > 1 and not self._over:
            self._schedule.resend_singly(chunk)
        else:
            indexes = range(chunk.first, chunk.first + len(chunk.items))
            errors: dict[int, Exception] = {i: _not_loaded_error(i, error) for i in indexes}
            yield self._finished(worker, chunk, [None] * len(indexes), errors)

    @staticmethod
    def _finished(
        worker: Worker,
        chunk: Chunk,
        values: list[Any],
        errors: dict[int, Exception],
        transport: tuple[float, int, int] = (0.0, 0, 0),
    ) -> Finished:
        number, pid, host = worker.number, worker.pid, worker.host
        return Finished(chunk.first, values, errors, number, pid, *transport, host)

    @staticmethod
    def _item_error(worker: Worker, failure: Failure, item: int) -> Exception:
        return restore(failure, str(worker), item, host=worker.host)

    def _lose(self, worker: Worker) -> Generator[Finished, None, None]:
        """Forget a worker that has ended; run its items again, or yield the one that failed."""
        task = self._busy.get(worker)
        if task is None:
            self._drop(worker)
            return
        delivered = not worker.frames.unsent
        ended = self._drop(worker)
        item = ended.item if ended is not None else task.chunk.first if delivered else -1
        if self._over:
            yield from self._unfinished(worker, task.chunk, item)
        elif not self._runs_again(task.chunk, item):
            chunk = task.chunk
            item = item if chunk.first <= item < chunk.first + len(chunk.items) else chunk.first
            retries = self._job.retries
            error = worker_lost_error(
                worker,
                ended,
                item=item,
                doing=f"ran item {item}" + (f" for the {retries + 1}. time" if retries else ""),
                advice="" if retries else "; retries=1 runs such items again on a fresh worker",
            )
            yield self._finished(worker, Chunk(item, [None]), [None], {item: error})

    def _runs_again(self, chunk: Chunk, item: int) -> bool:
        """Put back a chunk whose worker has ended, as far as it is to be run again. Return
        whether the item that it ran, or seems to have run, is among them."""
        if item == LOADING + chunk.first:  # it ended while unpickling: nobody knows which item
            item = chunk.first
            if len(chunk.items) > 1:
                self._schedule.resend_singly(chunk)
                return True
        if not chunk.first <= item < chunk.first + len(chunk.items):
            item = chunk.first
            if self._schedule.resend(chunk):
                return True
        return self._schedule.lost(chunk, item)

    def _expire(self, worker: Worker) -> Generator[Finished, None, None]:
        """End a worker whose item has run for too long. The item is run again, or has failed."""
        chunk = self._busy[worker].chunk
        self._drop(worker)
        item, retries = chunk.first, self._job.retries
        if not self._schedule.lost(chunk, item):
            again = f", for the {retries + 1}. time" if retries else ""
            error = Stalled(
                f"item {item} has run for more than {self._job.timeout_each} s{again}; {worker}, "
                "which ran it, was ended. Pass a longer timeout_each=, or retries= to run such "
                "items again"
            )
            yield self._finished(worker, chunk, [None], {item: error})

    # at the deadline of a job that keeps going

    def _end_at_deadline(self) -> Generator[Finished, None, None]:
        """Yield what is left of the job: results that are ready, and items that are not."""
        self._over = True
        self._limits.extend(_GRACE)
        for worker in self._busy:
            if worker.frames.unsent:  # it would get the rest of its items, and begin
                worker.kill()
            else:
                worker.interrupt()
        while self._busy and not self._limits.over:
            for worker, events in self._watch.wait(self._limits.pause).items():
                yield from self._attend(worker, events)
        for worker in list(self._busy):
            yield from self._lose(worker)
        yield from not_begun(self._schedule.left(), self._job.timeout)
        if self._schedule.ends_unknown:
            yield not_drawn(self._schedule.taken, self._job.timeout)

    def _unfinished(
        self, worker: Worker, chunk: Chunk, item: int
    ) -> Generator[Finished, None, None]:
        """Yield items that a worker had at the deadline, and of which it was running this one."""
        first, end, timeout = chunk.first, chunk.first + len(chunk.items), self._job.timeout
        begun = range(first, item + 1 if first <= item < end else first)
        if begun:
            running = begun[-1]
            errors: dict[int, Exception] = {
                index: Stalled(
                    f"item {index} was finished, and its result is lost with {worker}, which ran "
                    f"item {running} and could not answer when {timeout} s had passed"
                )
                for index in begun
            }
            errors[running] = Stalled(
                f"item {running} had no result when {timeout} s had passed; {worker} ran it. "
                "Pass a longer timeout=, or find out why it takes so long"
            )
            yield self._finished(worker, chunk, [None] * len(begun), errors)
        yield from not_begun([range(begun.stop, end)], timeout)

    def _drop(self, worker: Worker) -> Ended | None:
        """End a worker, if it has not ended. Return how it did."""
        worker.kill()
        self._lease.discard(worker)
        ended = self._workers.end(worker)
        self._due.pop(worker, None)
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
        if (self._idle or not self._busy) and self._schedule.ends_unknown:
            lines.append(f"  item {self._schedule.taken} has not come out of its iterator yet")
        return "\n".join(lines)


def _ends_while_items_block(job: Job) -> bool:
    """Return whether a job may have to end while no items come: it can be cancelled, others add
    items, or it has a deadline, which interrupts a system call in the main thread only."""
    if isinstance(job.items, Supply):
        return True
    in_main = threading.current_thread() is threading.main_thread()
    return job.cancelled is not None or (job.timeout is not None and not in_main)


def _not_loaded_error(index: int, error: Exception) -> InvalidType:
    failed = InvalidType(
        f"the result of item {index} has come and cannot be unpickled here: "
        f"{type(error).__name__}: {error}"
    )
    failed.__cause__ = error
    return failed


class Limits:
    """The deadline of a job, counted from now, and whether the job was cancelled."""

    def __init__(self, job: Job) -> None:
        self._job = job
        left = math.inf if job.timeout is None else job.timeout - job.elapsed
        self._deadline = time.monotonic() + left
        #: what was raised when the deadline had passed
        self.stalled: Stalled | None = None

    def extend(self, seconds: float) -> None:
        """Set the deadline to so many seconds from now."""
        self._deadline = time.monotonic() + seconds

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
        try:
            return interruption.run_until(self._deadline, action)
        except ComputationInterrupted:
            if not self.over:
                raise  # it is about an outer computation
            raise self.stalled_error(where()) from None

    def stalled_error(self, where: str) -> Stalled:
        self.stalled = Stalled(
            f"map: {self._job.timeout} s have passed and items are not finished; pass a longer "
            'timeout=, on_error="return" to get the results of the others, or find out why these '
            f"take so long:\n{where}"
        )
        return self.stalled


class Wakeup:
    """An eventfd by which other threads wake the one that carries out a job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        try:
            #: readable when it is set; who waits for it reads it
            self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise translate_os_error(error) from error

    def set(self) -> None:
        """Wake the thread; do nothing when it has ended."""
        with self._lock:
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        """Close the descriptor. May be called several times."""
        with self._lock:
            self.__del__()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        descriptor, self.descriptor = getattr(self, "descriptor", -1), -1
        if descriptor >= 0:
            close(descriptor)


#: seconds for all requested items to come; later they are taken as they come
_AT_ONCE = 0.002


class Feed:
    """An iterator's items, drawn in a thread, some at a time."""

    def __init__(self, items: Iterator[Any], wake: Callable[[], None]) -> None:
        """Prepare to draw items; `wake` is called when some have come."""
        self._items = items
        self._wake_driver = wake
        self._changed = threading.Condition()
        self._requested = 0
        self._drawn: deque[Any] = deque()
        #: whether the next item may be drawn before the last one is taken
        self._safe = True
        self._ended = self._closed = False
        self._error: BaseException | None = None
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
                self._requested, self._safe = 0, True
                return [self._drawn.popleft() for _ in range(min(size, len(self._drawn)))]
            if self._error is not None:
                raise self._error
            return [] if self._ended else None

    def close(self) -> None:
        """Request no more items. May be called several times."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # the items' thread

    def _run(self) -> None:
        while not self._closed and not self._ended:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_requested())
            try:
                while self._is_requested():
                    item, self._safe = draw(self._items)
                    self._drawn.append(item)
                    del item
                    if len(self._drawn) == 1:
                        self._wake()  # now: the next item may be slow to come
            except StopIteration:
                self._ended = True
            except BaseException as error:  # `draw` raises it
                self._error, self._ended = error, True
            self._wake()

    def _is_requested(self) -> bool:
        wanted = self._safe and len(self._drawn) < self._requested
        return wanted and not self._ended and not self._closed

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._wake_driver()
