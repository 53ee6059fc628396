"""One remote function in the workers' hands, from sending it to their answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft._core.failures import INTERRUPTED, restore
from weft._core.work import Answer, CancelAcknowledged, Done, Stopped, Unreadable, Work
from weft.engines.base import NO_COMMON
from weft.engines.interrupts import by_signal_handler
from weft.engines.local.channel import Closed
from weft.engines.local.guard import ComputationInterrupted
from weft.engines.local.losses import worker_lost_error
from weft.engines.local.member import Arguments, pack_once
from weft.engines.local.polling import readable
from weft.engines.local.processes import end_as_text
from weft.engines.local.remote_worker import Worker
from weft.engines.local.watching import Watch
from weft.engines.local.wire import Payload, load, pack
from weft.engines.local.workers import Workers
from weft.errors import Disagreement, PeerLost, SegmentGone, Stalled

#: seconds that workers have to end what they do after another has failed: one that imports a large
#: library hears nothing for several. And how many they have without being told to if they meet the
#: failure by themselves
_GRACE, _BY_THEMSELVES = 10.0, 0.5
#: seconds between two interrupts of one that has not ended
_AGAIN = 0.1


@dataclass
class TeamWorkers:
    """The workers of a team, rank 1 first, between two starts."""

    name: str
    workers: list[Worker]
    watch: Watch
    pool: Workers
    #: what the user writes to have the team started again
    restart_hint: str
    #: why it is of no use until the team starts again: a worker was lost
    broken: str | None = None

    def rank(self, worker: Worker) -> int:
        return self.workers.index(worker) + 1

    def end(self) -> None:
        """Those of a team that has lost one may be in the middle of anything: they are gone when
        this returns."""
        for worker in self.workers:
            if self.broken is not None and worker.pidfd >= 0:
                self.pool.end(worker)
            worker.close()

    def abandon(self) -> None:
        """In a forked child."""
        for worker in self.workers:
            if worker.pidfd >= 0:
                worker.abandon()

    def lose(self, worker: Worker) -> Exception:
        """A worker has ended, or has to; the error that says so."""
        self.watch.remove(worker)
        rank = self.rank(worker)
        # before it is waited for, which may be interrupted
        self.broken = f"it has lost a worker and what was registered there, rank {rank}"
        ended = self.pool.end(worker)
        how = "ended" if ended is None else end_as_text(ended.code)
        self.broken += f": {how}"
        return worker_lost_error(
            worker,
            ended,
            item=rank,
            doing=f"was rank {rank} of a team",
            advice=f"; to start the team again with the driver's values:\n    {self.restart_hint}",
        )


class TeamCall:
    """Used by one thread at a time: by the driver's, and by the guard's while that one computes."""

    def __init__(self, team_workers: TeamWorkers, run_remote: Payload) -> None:
        self._team_workers = team_workers
        self._run_remote = run_remote
        #: what several workers get, packed: of use to them while this lives
        self._common: Mapping[str, Any] = NO_COMMON
        self._values: list[Any] = [None] * len(team_workers.workers)
        #: the arguments of each that works
        self._busy: dict[Worker, Payload] = {}
        self._failures: list[Exception] = []
        #: those called off that have not said CancelAcknowledged; None before anybody is called off
        self._ending: set[Worker] | None = None
        self._lock = threading.Lock()

    def begin(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        common: Mapping[str, Any] = NO_COMMON,
    ) -> None:
        """Send it to those that have arguments of their own. What cannot be sent raises
        InvalidType, before anybody has begun."""
        busy = [(rank, mine) for rank, mine in enumerate(own, 1) if mine is not None]
        if len(busy) > 1:  # packed once for all
            self._common = common = {name: pack_once(one, name) for name, one in common.items()}
        packed: list[tuple[int, Payload]] = []
        try:
            for rank, mine in busy:
                work = (self._team_workers.name, function, mine, dict(common))
                packed.append((rank, pack([work], rank, "arguments of rank", Arguments())))
        except BaseException:
            for _, one in packed:
                one.release()
            raise
        for rank, one in packed:
            self._send(self._team_workers.workers[rank - 1], rank, one)

    def failed(self) -> bool:
        """Whether a worker has failed by now. For the guard's thread, while this one computes."""
        self._attend(0.0)
        return bool(self._failures)

    def finish(self, timeout: float) -> list[Any]:
        """The workers' results. Raises what one of them raised, WorkerLost, Stalled."""
        deadline = time.monotonic() + timeout
        while self._busy and not self._failures:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._stalled(timeout)
            self._attend(min(remaining, 1.0))
        if self._failures:
            raise self._failures[0]
        return self._values

    def abandon(self, error: BaseException) -> Exception | None:
        """After a failure: end what still runs; the failure of a worker that was behind it all."""
        met = isinstance(error, (Disagreement, PeerLost))  # the others have met it too, and end
        try:
            if met:
                self._await_all(self._busy, _BY_THEMSELVES)
            self._call_off()
        finally:  # also when the user is impatient, and interrupts this too
            with self._lock:
                late = list(self._busy if self._ending is None else self._ending)
                for worker in late:  # all at once: they may be using memory of this call
                    worker.kill()
                for worker in late:
                    self._lose(worker)
        causes = [one for one in self._failures if not isinstance(one, (Disagreement, PeerLost))]
        workers_own = any(error is one for one in self._failures)
        if met or workers_own or isinstance(error, ComputationInterrupted):
            return next(iter(causes or self._failures), None)
        return None

    def _call_off(self) -> None:
        """End what workers do, and have each of them say so: this process may have been interrupted
        anywhere, and not know what it has sent or received."""
        self._ending = {worker for worker in self._team_workers.workers if worker.pidfd >= 0}
        for worker in list(self._ending):
            try:
                worker.cancel()
                self._team_workers.watch.watch_writable(worker)
            except (Closed, FileNotFoundError):  # it is not watched: losing it was interrupted
                self._lose(worker)
        deadline = time.monotonic() + _GRACE
        while self._ending and time.monotonic() < deadline:
            self._await_all(self._ending, _AGAIN)
            for worker in self._ending:
                worker.interrupt()  # again and again: before it has begun it hears nothing

    def _await_all(self, workers: Collection[Worker], seconds: float) -> None:
        """Attend until this collection is empty, which `_take` and `_lose` see to; so many seconds
        at most."""
        deadline = time.monotonic() + seconds
        while workers and (remaining := deadline - time.monotonic()) > 0:
            self._attend(remaining)

    def _send(self, worker: Worker, rank: int, packed: Payload) -> None:
        function = self._run_remote
        self._busy[worker] = packed
        work = Work(function.digest, rank, packed.payload, None, keep_going=False)
        try:
            worker.give(function, work)
        except Closed:
            self._lose(worker)
            return
        if worker.frames.unsent:
            self._team_workers.watch.watch_writable(worker)

    def _attend(self, seconds: float) -> None:
        """Take what the workers say within so many seconds."""
        watch = self._team_workers.watch
        with self._lock:
            for worker, events in watch.wait(seconds).items():
                watch.echo(worker, events)
                try:
                    ended = not self._hear(worker, events) and worker.pidfd in events
                except Closed:
                    ended = True
                if ended:
                    self._lose(worker)

    def _hear(self, worker: Worker, events: set[int]) -> bool:
        """Take what a worker says; whether that is anything. Raises Closed."""
        if worker.frames.unsent and worker.frames.flush():
            self._team_workers.watch.watch_writable(worker)
        if worker.frames.fileno() not in events:
            return False
        message = worker.receive()  # also of one that is idle: its threads may log
        heard = message is not None
        while message is not None:
            self._take(worker, message)
            # an answer and CancelAcknowledged may have come together: no event tells of the second
            message = worker.receive() if self._ending else None
        return heard

    def _take(self, worker: Worker, message: Answer | CancelAcknowledged) -> None:
        rank = self._team_workers.rank(worker)
        where = f"rank {rank}, {worker}"
        if isinstance(message, Done):
            self._failures += [
                restore(failure, where, host=worker.host) for _, failure in message.failures
            ]
        elif isinstance(message, Unreadable):
            self._failures.append(restore(message.failure, where, host=worker.host))
        if self._ending is not None:  # nobody wants its results
            if isinstance(message, CancelAcknowledged):
                self._ending.discard(worker)
                self._release(worker)
            return
        self._release(worker)
        if isinstance(message, Stopped):
            self._failures.append(restore(INTERRUPTED, where, host=worker.host))
        elif isinstance(message, Done):
            self._load(worker, rank, message)

    def _load(self, worker: Worker, rank: int, message: Done) -> None:
        try:
            self._values[rank - 1] = load(message.values)[0]
        except Exception as error:  # a class's own unpickling may raise anything
            if by_signal_handler(error):
                raise
            if isinstance(error, SegmentGone) and readable(worker.pidfd, _BY_THEMSELVES):
                self._lose(worker)  # it ended before the memory of its results was here
            else:
                self._failures.append(error)

    def _lose(self, worker: Worker) -> None:
        self._failures.append(self._team_workers.lose(worker))
        if self._ending is not None:
            self._ending.discard(worker)
        self._release(worker)  # only now: until its end it may write there

    def _release(self, worker: Worker) -> None:
        """Give up the memory of its arguments."""
        packed = self._busy.pop(worker, None)
        if packed is not None:
            packed.release()

    def _stalled(self, timeout: float) -> Stalled:
        late = ", ".join(f"rank {self._team_workers.rank(one)} ({one})" for one in self._busy)
        return Stalled(
            f"{timeout} s have passed, and {late} has not answered; it is alive: give the team a "
            "longer timeout=, or find out what it does"
        )
