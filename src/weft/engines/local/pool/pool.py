"""A pool: a driver and its workers, over sockets and shared memory. `running.py` is one job.

One job, from the first chunk to the last.

    driver                                   worker
    schedule: which items next
    pack them         ──── Work ────>        load, run, pack
    load the results  <─── Done ─────
    yield them                               waits

One thread of the driver does all of it: it sends a chunk to each idle worker, then sleeps until a
worker answers, prints or ends. A worker has one chunk at a time.

How long a map may take, and whether it is still wanted.

Items that a thread of their own draws, so that who hands them out never waits for one.

    map's thread                      items' thread
    draw: some are wanted    ──>      asks the iterator
    attends to the workers            (which may take for ever)
    draw: here they are      <──      rings the bell

The thread asks for no more than is wanted, and only then. When the map ends while the iterator is
at work, the thread stays until that has given its next item: nobody can end it.
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
    LOOK,
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
    """Processes of this machine."""

    def __init__(
        self, size: int, workers: Workers, *, cores: int, gpus: Sequence[str] = ()
    ) -> None:
        """`size` workers that share so many cores; with `gpus` one for each of these."""
        self._wanted: list[str | None] = list(gpus) or [None] * size
        self.size = len(self._wanted)
        self._threads = max(1, cores // self.size)
        self._workers = workers

    def prepare(self, function: Callable[[Any], Any]) -> Payload:
        return pack_function(function)

    def forget(self, prepared: Payload) -> None:
        if prepared.has_references:  # others hold nothing, and are kept for the next call
            self._workers.forget(prepared.digest)
            prepared.release()

    def put(self, array: Array, *, readonly: bool = False) -> Any:
        from weft.engines.local.pool.payload_arrays import place

        return place(array, readonly=readonly)

    def close(self) -> None:
        self._workers.shut_down()

    def run(self, job: Job) -> Generator[Finished, None, None]:
        wanted = self._wanted
        if isinstance(job.items, (list, tuple, range)) and not job.one_each:
            wanted = wanted[: len(job.items)]  # more would have nothing to do
        limits = Limits(job)
        lent, watch = self._workers.lend(wanted, self._threads, limits.check)
        running = Run(job, limits, self._workers, lent, watch)
        try:
            for part in running.steps():
                yield part
                if part.failures and not job.keep_going:
                    return
        finally:
            running.end()


#: seconds that an interrupted function has to end
_GRACE = 0.3


class _Task(NamedTuple):
    """A chunk in a worker's hands."""

    chunk: Chunk
    packed: Payload


class Run:
    """A job under way."""

    def __init__(
        self, job: Job, limits: Limits, workers: Workers, lent: list[Worker], watch: Watch
    ) -> None:
        self._process = os.getpid()
        self._job = job
        self._limits = limits
        self._workers = workers
        self._watch = watch
        #: of items that may be slow to come, where somebody may cancel the job meanwhile
        self._feed: Feed | None = None
        feed = self._draw_in_background if job.cancelled is not None else None
        expected = UNKNOWN if job.one_each else workers.expected_cost(job.function.digest)
        self._schedule = Schedule(
            job.items, len(lent), retries=job.retries, expected=expected, feed=feed
        )
        self._idle = lent
        self._busy: dict[Worker, _Task] = {}
        #: workers that have had their one item
        self._served: list[Worker] = []

    def _draw_in_background(self, items: Iterator[Any]) -> Draw:
        # REMOVED IMPORT

        self._feed = Feed(items)
        self._watch.listen(self._feed.bell)
        return self._feed.draw

    def steps(self) -> Generator[Finished, None, None]:
        for worker in self._watch.ended():  # while it was idle: nothing is lost
            self._replace(worker)
        while True:
            yield from self._hand_out()
            if not self._busy and not self._schedule.waiting:
                return
            for worker, events in self._wait().items():
                yield from self._attend(worker, events)

    def end(self) -> None:
        """Give the workers back; end what still runs."""
        if os.getpid() != self._process:
            return  # a forked child leaves the parent's function: these are the parent's workers
        if self._feed is not None:
            self._watch.listen(-1)
            self._feed.close()
        try:
            if self._busy:
                self._interrupt()
        finally:  # also when the user is impatient, and interrupts this too
            for worker in self._busy:
                worker.kill()
            for worker in list(self._busy):
                self._drop(worker)
            rested = [*self._idle, *self._served]
            for worker, events in self._watch.wait(0).items():
                self._watch.echo(worker, events)
            self._workers.note_cost(self._job.function.digest, self._schedule.cost)
            self._workers.give_back(rested, self._watch)

    def _interrupt(self) -> None:
        """Have those functions end that do so in time."""
        for worker in self._busy:
            if worker.frames.unsent:  # it would get the rest of its items, and begin
                worker.kill()
                continue
            with contextlib.suppress(Closed):  # its pidfd says so too
                worker.cancel()
        watch = Watch(self._busy)
        deadline = time.monotonic() + _GRACE
        while self._busy and (remaining := deadline - time.monotonic()) > 0:
            for worker, events in watch.wait(remaining).items():
                watch.echo(worker, events)
                self._dismiss(worker, events)
                if worker not in self._busy:
                    watch.remove(worker)

    # giving out

    def _hand_out(self) -> list[Finished]:
        """Give every idle worker a chunk; returns what failed on the way."""
        failed = []
        while self._idle:
            chunk = self._next()
            if chunk is None:
                break
            try:
                packed = pack_items(chunk.items, chunk.first, most=MOST_BYTES)
            except PayloadTooLarge:
                self._schedule.resend_singly(chunk)
                continue
            except Exception as error:  # it is one of the items'
                if by_signal_handler(error):
                    raise
                if len(chunk.items) > 1:
                    self._schedule.resend_singly(chunk)
                else:
                    unsent = Finished(chunk.first, [None], {chunk.first: error}, worker=-1, pid=0)
                    failed.append(unsent)
                continue
            self._give(self._idle.pop(), _Task(chunk, packed))
        return failed

    def _next(self) -> Chunk | None:
        """The next chunk. Raises Stalled when the deadline comes before its items do."""
        if self._schedule.at_hand or self._feed is not None:
            return self._schedule.next()
        return self._limits.run_until_deadline(self._schedule.next, self._where)

    def _give(self, worker: Worker, task: _Task) -> None:
        job = self._job
        chunk, payload = task.chunk, task.packed.payload
        work = Work(job.function.digest, chunk.first, payload, job.seed, job.keep_going)
        self._busy[worker] = task
        with contextlib.suppress(Closed):  # its pidfd says so too
            worker.give(job.function, work)
        if worker.frames.unsent:
            self._watch.watch_writable(worker)

    # waiting

    def _wait(self) -> ReadyEvents:
        """The workers that want something. Raises Stalled, Cancelled."""
        while True:
            self._look()
            wants = self._watch.wait(self._limits.pause)
            if wants or self._watch.rang:
                return wants

    def _look(self) -> None:
        self._limits.check(self._where)

    def _attend(self, worker: Worker, events: set[int]) -> Generator[Finished, None, None]:
        self._watch.echo(worker, events)
        message = None
        ended = worker.pidfd in events
        if worker.frames.fileno() in events:
            try:
                message = self._receive(worker)
            except Closed:  # it is ending, or its function has closed what it could answer by
                ended = True
                readable(worker.pidfd, _GRACE)  # how it ends by itself says more than a kill
        if message is not None:
            yield from self._take_answer(worker, message)
        elif ended:
            yield from self._lose(worker)

    def _receive(self, worker: Worker) -> Answer | None:
        """What a worker says, if all of it is there. Raises Closed."""
        if worker.frames.unsent and worker.frames.flush():
            self._watch.watch_writable(worker)
        return cast("Answer | None", worker.receive())  # nothing has been called off

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
            which = range(chunk.first, chunk.first + len(chunk.items))
            errors = {item: self._restored(worker, message.failure, item) for item in which}
            yield self._finished(worker, chunk, [None] * len(chunk.items), errors)
            return
        try:
            values = load(message.values, self._limits.remaining)
        except Exception as error:  # a class's own unpickling may raise anything
            yield from self._not_loaded(worker, message, error)
            return
        self._free(worker)
        errors = {
            chunk.first + position: self._restored(worker, failure, chunk.first + position)
            for position, failure in message.failures
        }
        self._schedule.done(len(values), message.seconds, task.packed.shared + message.shared)
        yield self._finished(worker, chunk, values, errors)._replace(
            seconds=message.seconds,
            sent=len(task.packed.payload) + task.packed.shared,
            received=len(message.values) + message.shared,
        )

    def _free(self, worker: Worker) -> None:
        """It has nothing left to do of its chunk."""
        task = self._busy.pop(worker)
        (self._served if self._job.one_each else self._idle).append(worker)
        task.packed.release()

    def _not_loaded(
        self, worker: Worker, message: Done, error: Exception
    ) -> Generator[Finished, None, None]:
        """Its results cannot be loaded: it ended before their memory was here, or they cannot."""
        if by_signal_handler(error):
            raise error
        if isinstance(error, Stalled) and self._limits.over:
            raise self._limits.stalled(self._where()) from None
        if isinstance(error, SegmentGone) and readable(worker.pidfd, _GRACE):
            yield from self._lose(worker)
            return
        chunk = self._busy[worker].chunk
        if message.shared:  # what else it has sent stays pinned there
            self._replace(worker)
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
        ran = worker.number, worker.pid
        return Finished(chunk.first, values, errors, *ran, host=worker.host)

    @staticmethod
    def _restored(worker: Worker, failure: Failure, item: int) -> Exception:
        return restore(failure, str(worker), item, host=worker.host)

    def _lose(self, worker: Worker) -> Generator[Finished, None, None]:
        """A worker has ended: have its items run again, or failed."""
        task = self._busy.get(worker)
        if task is None:
            self._drop(worker)
            return
        chunk = task.chunk
        came = not worker.frames.unsent
        ended = self._replace(worker)
        item = ended.item if ended is not None else chunk.first if came else -1
        if item == LOADING + chunk.first:  # its unpickling did it: nobody knows which one's
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
        one = Chunk(item, [None])
        yield self._finished(worker, one, [None], {item: error})

    def _replace(self, worker: Worker) -> Ended | None:
        """Have a fresh worker in the place of one that has ended; how that was."""
        ended = self._drop(worker)
        fresh = self._workers.replace(worker, self._look)
        self._idle.append(fresh)
        self._watch.add(fresh)
        return ended

    def _drop(self, worker: Worker) -> Ended | None:
        """End a worker, if it has not ended; how it did."""
        worker.kill()
        self._watch.remove(worker)
        for rested in (self._idle, self._served):
            if worker in rested:
                rested.remove(worker)
        ended = self._workers.end(worker)
        task = self._busy.pop(worker, None)
        if task is not None:
            task.packed.release()  # only now: until its end it may write there
        return ended

    def _dismiss(self, worker: Worker, events: set[int]) -> None:
        """After Cancel: it has said that it is done, or it has ended; its answer, if one comes
        first, nobody wants."""
        try:
            while (message := worker.receive()) is not None:
                if isinstance(message, CancelAcknowledged):
                    self._free(worker)
                    return
            ended = worker.pidfd in events
        except Exception as error:  # a handler of what it logged may raise anything
            if by_signal_handler(error):
                raise
            ended = True
        if ended:
            self._drop(worker)

    def _where(self) -> str:
        """Who has what."""
        found = [f"  {worker} has {task.chunk.span}" for worker, task in self._busy.items()]
        waits = bool(self._idle) and self._schedule.total is None
        if waits:
            found.append(f"  item {self._schedule.taken} has not come out of its iterator yet")
        return "\n".join(found)


Result = TypeVar("Result")


class Limits:
    """The deadline of one job, counted from now, and whether it was cancelled."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._deadline = math.inf if job.timeout is None else time.monotonic() + job.timeout

    @property
    def over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self._deadline

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline, if there is one."""
        if self._job.timeout is None:
            return None
        return max(0.0, self._deadline - time.monotonic())

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        if self._deadline == math.inf:
            return LOOK
        return max(0.0, min(LOOK, self._deadline - time.monotonic()))

    def check(self, where: Callable[[], str] = lambda: "  no worker has started yet") -> None:
        """Raise Stalled or Cancelled if it has to end; `where` says who has what."""
        if self._deadline < math.inf and self.over:
            raise self.stalled(where())
        if self._job.cancelled is not None and self._job.cancelled():
            raise Cancelled("the map was cancelled")

    def run_until_deadline(self, action: Callable[[], Result], where: Callable[[], str]) -> Result:
        """What an action of this thread returns, which may wait for anything. Raises Stalled when
        the deadline comes first."""
        if self._job.timeout is None:
            return action()
        from weft.engines.interruption import ComputationGuard, ComputationInterrupted

        guard = ComputationGuard(lambda: self.over)
        try:
            with guard:
                return action()
        except ComputationInterrupted:
            raise self.stalled(where()) from None
        finally:
            guard.close()

    def stalled(self, where: str) -> Stalled:
        return Stalled(
            f"map: {self._job.timeout} s have passed and items are not finished; pass a longer "
            f"timeout=, or find out why these take so long:\n{where}"
        )


#: seconds for all that is wanted to come; later it is taken as it comes
_AT_ONCE = 0.002


class Feed:
    """An iterator's items, some at a time."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._news = threading.Condition()
        self._wanted = 0
        self._here: deque[Any] = deque()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        try:
            #: readable when something has come; who waits for it reads it
            self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise translate_os_error(error) from error
        interruption.start(threading.Thread(target=self._run, name="weft items", daemon=True))

    def draw(self, size: int) -> list[Any] | None:
        """At most so many items, none at the end; None if none is here yet. Raises what the
        iterator raised."""
        with self._news:
            if not self._wanted:
                self._wanted = size
                self._news.notify_all()
                self._news.wait_for(lambda: not self._is_asked(), _AT_ONCE)
            if self._here:
                self._wanted = 0
                return [self._here.popleft() for _ in range(min(size, len(self._here)))]
            if self._error is not None:
                raise self._error
            return [] if self._ended else None

    def close(self) -> None:
        """No more are wanted. Once or several times."""
        with self._news:
            if not self._closed:
                self._closed = True
                self._news.notify_all()
                os.close(self.bell)

    # the items' thread

    def _run(self) -> None:
        while not self._closed and not self._ended:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._is_asked())
            try:
                while self._is_asked():
                    self._here.append(next(self._items))
                    if len(self._here) == 1:
                        self._ring()  # the next may be slow to come
            except StopIteration:
                self._ended = True
            except BaseException as error:  # it is raised in who draws
                self._error, self._ended = error, True
            self._ring()

    def _is_asked(self) -> bool:
        return len(self._here) < self._wanted and not self._ended and not self._closed

    def _ring(self) -> None:
        with self._news:
            self._news.notify_all()
            if not self._closed:
                os.eventfd_write(self.bell, 1)
