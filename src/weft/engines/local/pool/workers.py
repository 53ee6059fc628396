"""The workers of this process, and who uses them.

`Workers` are those of one fork server: started when needed, kept warm, lent to the calls of all
threads. `Lease` is one call's use of them.

Of all calls together no more workers compute than there are cores, or than one of them has asked
for. Who gets a worker:

    a call begins            takes what is free, and starts what may be started; waits if that is
                             none, for the first worker that another gives back
    a chunk ends             the call keeps the worker, unless another waits that has fewer: its
                             fair share it keeps for a while
    a call's loop comes by   it takes what has become free, if it wants more
    a call is paused         its caller has the turn, or its iterator is asked for items: others
                             take its idle workers. Those of its workers whose answers nobody reads
                             do not count, so that a call within a call never waits for it

Teams have workers of their own, which stay. Workers that nobody has used for a minute end.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Container, Sequence

from weft._core.schedule import UNKNOWN, Cost
from weft.engines.local.pool import interpreter
from weft.engines.local.pool.driver_state import capture
from weft.engines.local.pool.messages import Frames
from weft.engines.local.pool.remote_worker import Watch, Worker
from weft.engines.local.processes.channel import Channel, Closed, Ended, Start, Started
from weft.engines.local.processes.linux import readable, translate_os_error
from weft.engines.local.processes.output import OutputRelay
from weft.errors import LaunchError

#: seconds between two checks of whether a job was cancelled
CHECK_INTERVAL = 0.05

#: seconds for the fork server to load what workers need, and for one worker to start
_START = 60.0

#: seconds for the fork server to report how a worker ended, and to end itself
_END = 2.0

#: seconds after which a worker of the pool ends if nobody uses it, and after which it is not lent
#: any more, so that none ends when work is sent to it
IDLE, _LENDABLE = 60.0, 0.9

#: ends of workers that nobody has asked for
_ENDS = 4096

#: functions whose cost per item is remembered
_COSTS = 256

#: raises when the caller has to stop waiting
Check = Callable[[], None]

#: the same, for a caller that can say where it is
CheckWhere = Callable[[Callable[[], str]], None]


class Workers:
    """This process's workers from one fork server: its own, or that behind a named pipe."""

    def __init__(self, pipe: str | None) -> None:
        self._pipe = pipe
        #: held only while the fields below change, and those of leases
        self.lock = threading.Lock()
        self._idle: list[Worker] = []
        #: the calls under way. One that an interrupt has lost is garbage, and its workers with it
        self._leases: weakref.WeakSet[Lease] = weakref.WeakSet()
        #: all workers that have not ended: idle, lent, and of teams
        self._everyone: weakref.WeakSet[Worker] = weakref.WeakSet()
        #: watches the workers that were given back last
        self._watch: Watch | None = None
        #: what an item took in the last job, by the function's digest
        self._costs: dict[bytes, Cost] = {}
        #: held while the fork server answers
        self._server_lock = threading.Lock()
        self._server: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0
        self._ends: dict[int, Ended] = {}

    def lease(self, gpus: Sequence[str | None], threads: int, cores: int) -> Lease:
        """Return a call's lease, which has no workers yet: at most one for each GPU, or None, in
        `gpus`, with so many threads each. All calls together use so many cores."""
        lease = Lease(self, gpus, threads, cores)
        with self.lock:
            self._leases.add(lease)
        return lease

    def lend_for_good(
        self, gpus: Sequence[str | None], threads: int, *, fresh: bool = False
    ) -> tuple[list[Worker], Watch]:
        """Return workers that are not given back, warm ones first unless they have to be fresh: one
        for each of `gpus`. They belong to no lease. Raises LaunchError."""
        lent: list[Worker] = []
        try:
            for gpu in gpus:
                self._close_unlendable()
                with self.lock:
                    warm = None if fresh else self._pop_idle(gpu)
                    while warm is not None and readable(warm.pidfd):
                        warm = self._pop_idle(gpu)
                lent.append(warm or self.start(gpu, lambda: None))
                _keep(lent[-1], threads, None)  # now: to start the others may take long
        except BaseException:
            for worker in lent:
                _keep(worker, threads, IDLE)
            self._idle += lent  # warm ones stay warm; += is one step
            raise
        return lent, Watch(lent)

    def take(self, lease: Lease, most: int) -> list[Worker]:
        """Return at most so many idle workers for a lease. If there are none, `lease.starting` has
        the GPU of one that it may start."""
        taken: list[Worker] = []
        self._close_unlendable()
        with self.lock:
            others = self._others(lease)
            self._take_spare(others)
            for gpu in lease.lacking():
                idle = sum(worker.gpu == gpu for worker in self._idle)
                used = lease.count(gpu) + sum(other.count_in_use(gpu, lease) for other in others)
                room = self._limit(gpu, [lease, *others]) - used
                free = max(room, idle) - sum(other.comes_before(lease, gpu) for other in others)
                while min(free, most) > len(taken) and lease.count(gpu) < lease.wanted[gpu]:
                    worker = self._pop_idle(gpu, but=lease.served)
                    if worker is None:
                        break
                    lease.held.add(worker)
                    taken.append(worker)
                if not taken and min(free, room - idle) > 0:
                    lease.starting = (gpu,)
                if taken or lease.starting:
                    break
        return taken

    def give_back(self, lease: Lease, worker: Worker) -> None:
        """Take a worker back from a lease; it has no chunk."""
        with self.lock:
            self._rest(lease, [worker])
            self._wake(1, lease)

    def end_lease(self, lease: Lease, idle: Sequence[Worker], watch: Watch | None) -> None:
        """Forget a lease, and take its workers back; `watch` watches exactly these."""
        with self.lock:
            self._leases.discard(lease)
            self._rest(lease, idle)
            if watch is not None:
                self._watch = watch
            self._wake(len(idle) + 1, lease)

    def pop_watch(self, workers: Sequence[Worker]) -> Watch:
        """Return a watch of these workers: the last call's, if that had the same."""
        with self.lock:
            watch, self._watch = self._watch, None
        return watch if watch is not None and watch.watches(workers) else Watch(workers)

    @property
    def shared(self) -> bool:
        """Return whether several calls are under way."""
        return len(self._leases) > 1

    def is_wanted(self, worker: Worker, lease: Lease) -> bool:
        """Return whether a call waits for a worker of this lease that has fewer of them. Its fair
        share a lease may keep for a while: to change hands takes longer than a short chunk."""
        gpu = worker.gpu
        with self.lock:
            others = [other for other in self._others(lease) if other.wanted[gpu]]
            share = max(1, self._limit(gpu, [lease, *others]) // (1 + len(others)))
            mine = lease.count(gpu)
            if mine <= share and time.monotonic() - lease.since < CHECK_INTERVAL:
                return False
            return any(
                other.waits_for(gpu)
                and worker not in other.served
                and other.count(gpu) < min(share, mine)
                for other in others
            )

    def describe(self) -> str:
        """Return what a call that has no worker waits for."""
        with self.lock:
            busy = sum(len(lease.held) for lease in self._leases)
            others = len(self._leases) - 1
        if others < 1 or not busy:
            return "  no worker has started yet"
        return (
            f"  it waits for a worker: all {busy} are used by the calls of this process that are "
            f"under way, {others} besides this one"
        )

    def _close_unlendable(self) -> None:
        """Close the workers that have been idle for so long that they may be ending."""
        oldest = time.monotonic() - IDLE * _LENDABLE
        with self.lock:
            unlendable = [worker for worker in self._idle if worker.idle_since <= oldest]
            for worker in unlendable:
                self._idle.remove(worker)
        for worker in unlendable:  # not with the lock held: this prints what they have printed
            worker.close()

    # with the lock held

    def _others(self, lease: Lease) -> list[Lease]:
        alone = len(self._leases) == 1 and lease in self._leases  # most are, and sets are slow
        return [] if alone else [other for other in self._leases if other is not lease]

    @staticmethod
    def _limit(gpu: str | None, leases: Sequence[Lease]) -> int:
        """Return how many workers all calls may use: for a GPU, as many as one call has asked for,
        else at least as many as there are cores."""
        cores = [lease.cores for lease in leases] if gpu is None else []
        return max([*cores, *(lease.wanted[gpu] for lease in leases)])

    def _take_spare(self, leases: Sequence[Lease]) -> None:
        """Take the idle workers of calls that are paused: they do not look at them meanwhile."""
        for lease in leases:
            if lease.paused and lease.idle:
                idle, lease.idle[:] = lease.idle[:], []
                for worker in idle:
                    lease.watch.remove(worker)
                self._rest(lease, idle)

    def _rest(self, lease: Lease, workers: Sequence[Worker]) -> None:
        lease.held.difference_update(workers)
        self._idle += workers

    def _pop_idle(self, gpu: str | None, but: Container[Worker] = ()) -> Worker | None:
        """Return the idle worker that was used last, if there is one."""
        for worker in self._idle[::-1]:
            if worker.gpu == gpu and worker not in but:
                self._idle.remove(worker)
                return worker
        return None

    def _wake(self, count: int, lease: Lease) -> None:
        """Wake the first so many of the other calls that wait for a worker."""
        waiting = [other for other in self._others(lease) if other.waits_since < math.inf]
        for other in sorted(waiting, key=Lease.rank)[:count]:
            if other.turn.locked():
                other.turn.release()

    # settings

    def expected_cost(self, digest: bytes) -> Cost:
        """Return what an item of a function took in its last job."""
        return self._costs.get(digest, UNKNOWN)

    def note_cost(self, digest: bytes, cost: Cost) -> None:
        """Remember what an item of a function has taken, if that is known."""
        if not cost.is_known:
            return
        if len(self._costs) >= _COSTS and digest not in self._costs:
            self._costs.clear()
        self._costs[digest] = cost

    def forget(self, digest: bytes) -> None:
        """Make the workers drop a function: the idle ones now, the others with their next work."""
        with self.lock:
            for worker in list(self._everyone):
                worker.forget(digest)
            for worker in self._idle:
                worker.send_drops()

    def end(self, worker: Worker) -> Ended | None:
        """End a worker, if it has not ended. Return how it did, or None if nobody saw it."""
        worker.kill()
        ended = self._await_end(worker)
        if ended is None:  # the fork server would have killed the worker's group
            with contextlib.suppress(OSError):
                os.killpg(worker.pid, signal.SIGKILL)
            if worker.pidfd >= 0:  # the memory that it may write to will be reused
                readable(worker.pidfd, _END)
        worker.close()
        return ended

    def shut_down(self) -> None:
        """End all workers and the fork server; behind a named pipe, the workers of all drivers."""
        self.close()
        if self._pipe is not None:
            from weft.engines.local.pool import named_pipe

            named_pipe.close_pipe(self._pipe)

    def close(self) -> None:
        """End all workers of this process, and the fork server if it is its own."""
        with self._server_lock:
            with self.lock:
                idle, self._idle = self._idle, []
                self._watch = None
            for worker in idle:
                worker.close()
            self._disconnect()

    def abandon(self) -> None:
        """Close the parent's descriptors in a forked child, which can start workers of its own. The
        parent's end when it does only if no child has copies of them."""
        for worker in self._everyone:
            worker.abandon()
        if self._server is not None:
            self._server.close()
        if self._process is not None:
            self._process.returncode = 0  # it is not this process's child: do not wait for it
        self._server = self._process = self._watch = None
        self._idle, self._ends = [], {}
        self._leases.clear()
        self._everyone.clear()
        self.lock, self._server_lock = threading.Lock(), threading.Lock()

    def start(self, gpu: str | None, check: Check) -> Worker:
        """Start a worker. Raises LaunchError, and what `check` raises."""
        locked: list[bool] = []
        try:
            self._take_server_lock(locked, check)
            worker = self._start(gpu, check)
        finally:
            if any(locked):
                self._server_lock.release()
        with self.lock:
            self._everyone.add(worker)
        return worker

    def _take_server_lock(self, locked: list[bool], check: Check) -> None:
        """Take the lock, which another thread holds while it starts a worker. `locked` ends with
        whether it was taken, also if a signal handler raises: `extend` and `map` are one step (see
        `messages.Frames`)."""
        while not any(locked):
            locked.extend(map(self._server_lock.acquire, (True,), (CHECK_INTERVAL,)))
            if not locked[-1]:
                check()

    # with the server's lock held

    def _start(self, gpu: str | None, check: Check) -> Worker:
        fresh = self._server is None
        try:
            return self._start_one(gpu, check)
        except Closed:
            self._disconnect()
        if not fresh:  # the server has ended since its last message: try once with a new one
            with contextlib.suppress(Closed):
                return self._start_one(gpu, check)
            self._disconnect()
        raise self._server_ended_error()

    def _start_one(self, gpu: str | None, check: Check) -> Worker:
        """Make the fork server start a worker. Raises Closed if it has ended or does not answer."""
        server = self._connect()
        number = self._started
        self._started += 1  # first: after an interrupt, a late reply has a number nobody awaits
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                connection, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                ours.callback(connection.close)
                theirs.callback(remote.close)
                out, err = _pipe(ours, theirs), _pipe(ours, theirs)
            except OSError as error:
                raise translate_os_error(error) from error
            server.send(Start(number), [remote.fileno(), out[1], err[1]])
            pid, pidfd = self._await_start(server, number, check)
            ours.callback(os.close, pidfd)
            connection.setblocking(False)
            relays = [
                OutputRelay(out[0], "stdout", number),
                OutputRelay(err[0], "stderr", number),
            ]
            ours.pop_all()  # the worker owns these descriptors now
            worker = Worker(number, pid, pidfd=pidfd, frames=Frames(connection), relays=relays)
            worker.gpu, worker.server = gpu, server
            return worker

    def _server_ended_error(self) -> LaunchError:
        if self._pipe is not None:
            return LaunchError(
                f"the pipe {self._pipe!r} was closed; it is opened again by\n"
                f"    weft open --pipe {self._pipe}"
            )
        return LaunchError(
            "the process that starts workers has ended before it started one; what it printed "
            "says why"
        )

    def _await_start(self, server: Channel, number: int, check: Check) -> tuple[int, int]:
        deadline = time.monotonic() + _START
        while (now := time.monotonic()) < deadline:
            check()
            if not server.wait(min(deadline, now + CHECK_INTERVAL)):
                continue
            message, descriptors = server.receive(Started, Ended)
            if isinstance(message, Ended):
                self._note_end(message)
            elif message.worker == number:
                return message.pid, descriptors[0]
            else:
                _close(descriptors)
        raise Closed("the fork server does not answer")

    def _connect(self) -> Channel:
        if self._process is not None and self._process.poll() is not None:
            self._disconnect()
        if self._server is None and self._pipe is not None:
            from weft.engines.local.pool import named_pipe  # loads much, is seldom needed

            self._server, _ = named_pipe.connect(self._pipe)
        elif self._server is None:
            connection, self._process = interpreter.take()
            self._server = Channel(connection)
        return self._server

    def _disconnect(self) -> None:
        server, self._server = self._server, None
        process, self._process = self._process, None
        self._started = 0
        self._ends.clear()
        if server is not None:
            server.close()
        if process is not None:
            with contextlib.suppress(OSError):
                if not _ends_within(process.pid, _END):  # somebody has sent it SIGSTOP
                    process.kill()
            process.wait()

    def _await_end(self, worker: Worker) -> Ended | None:
        """Return the fork server's report of a worker's end; None if there is none in time."""
        deadline = time.monotonic() + _END
        with self._server_lock:
            try:
                while worker.number not in self._ends:
                    if self._server is not worker.server or not self._server.wait(deadline):
                        return None  # the server that started it is gone, or does not answer
                    message, descriptors = self._server.receive(Started, Ended)
                    _close(descriptors)
                    if isinstance(message, Ended):
                        self._note_end(message)
            except Closed:
                return None
            return self._ends.pop(worker.number)

    def _note_end(self, ended: Ended) -> None:
        """Keep the report of an end until somebody asks for it; of those that ended while they were
        idle nobody may."""
        self._ends[ended.worker] = ended
        if len(self._ends) > _ENDS:
            del self._ends[next(iter(self._ends))]


class Lease:
    """One call's use of the workers. Its thread alone calls its methods; what other threads read
    and change is guarded by the lock of `Workers`."""

    _numbers = itertools.count()

    def __init__(
        self, workers: Workers, gpus: Sequence[str | None], threads: int, cores: int
    ) -> None:
        self._workers = workers
        self._threads = threads
        #: how many workers it can use, by their GPU, and in all
        self.wanted, self._most = Counter(gpus), len(gpus)
        #: how many cores all calls may use
        self.cores = cores
        #: the workers that it has, and those of them without a chunk
        self.held: set[Worker] = set()
        self.idle: list[Worker] = []
        self.watch = Watch(())
        #: since when it has had workers without a pause
        self.since = 0.0
        #: the GPU of a worker that is being started for it
        self.starting: tuple[str | None, ...] = ()
        #: the workers that it has used and does not want again
        self.served: set[Worker] = set()
        #: since when it could use another worker, as a number that grows; infinite if it could not
        self.waits_since = math.inf
        #: released to wake it
        self.turn = threading.Lock()
        self.turn.acquire()
        self._thread = threading.get_ident()
        #: since when nobody attends to it; infinite if somebody does
        self._paused_at = math.inf

    def begin(self, check: CheckWhere) -> None:
        """Take as many workers as there are for it, where it has none; wait until there is one.

        While it waits or starts workers, `check` is called again and again with where the call is;
        it raises when the call has to end. Raises LaunchError.
        """
        self._wait_for_one(check, most=sys.maxsize)
        while self._take(lambda: check(self._workers.describe), most=sys.maxsize):
            pass
        self.wants_no_more()
        self.watch = self._workers.pop_watch(self.idle)

    def take(self, check: Check) -> bool:
        """Take a worker if there is one for it. Return whether there was. Raises as `begin`."""
        taken = self._take(check, most=1)
        if taken:
            self.watch.add(self.idle[-1])
        return taken

    def wants_no_more(self) -> None:
        """Let others have the workers that become free."""
        self.waits_since = math.inf

    def rest(self, worker: Worker) -> None:
        """Keep a worker whose chunk has ended, or give it back if another call waits for it."""
        if self._workers.shared and self._workers.is_wanted(worker, self):
            self.give_back(worker)
        else:
            self.idle.append(worker)

    def give_back(self, worker: Worker) -> None:
        """Give back a worker without a chunk."""
        self.watch.remove(worker)
        self._workers.give_back(self, worker)

    def give_back_idle(self) -> None:
        """Give back the idle workers, for which there is no chunk."""
        while self.idle:
            self.give_back(self.idle.pop())

    def spare_idle(self) -> None:
        """Give them back if there are other calls."""
        if self.idle and self._workers.shared:
            self.give_back_idle()

    def discard(self, worker: Worker) -> None:
        """Forget a worker that has ended."""
        self.watch.remove(worker)
        with self._workers.lock:
            self.held.discard(worker)
        if worker in self.idle:
            self.idle.remove(worker)

    def pause(self) -> None:
        """Let other calls take the idle workers, until `resume`."""
        self._paused_at = time.monotonic()

    def resume(self) -> None:
        """Attend to the workers again; there may be fewer of them."""
        with self._workers.lock:
            self._paused_at, self._thread = math.inf, threading.get_ident()

    def end(self) -> None:
        """Give all workers back; none of them has a chunk."""
        idle = list(self.idle)
        self.idle.clear()
        self._workers.end_lease(self, idle, self.watch if self.watch.watches(idle) else None)

    def _wait_for_one(self, check: CheckWhere, *, most: int) -> None:
        def check_here() -> None:
            check(self._workers.describe)

        while self.wanted and not self._take(check_here, most=most):
            self.turn.acquire(timeout=CHECK_INTERVAL)
            check_here()

    def _take(self, check: Check, *, most: int) -> bool:
        """Take workers that are idle, or one that can be started. Return whether there was one."""
        if len(self.held) == self._most:
            return False
        taken = self._workers.take(self, most)
        if self.starting:
            try:
                taken = [self._workers.start(self.starting[0], check)]
                with self._workers.lock:
                    self.held.update(taken)
            finally:
                self.starting = ()
        if not taken:
            self.waits_since = min(self.waits_since, next(self._numbers))
            return False
        self.waits_since = math.inf
        if len(self.held) == len(taken):
            self.since = time.monotonic()
        self.idle += taken
        for worker in taken:
            worker.threads, worker.idle_limit = self._threads, IDLE
        return True

    # read by other threads, with the lock held

    @property
    def paused(self) -> bool:
        return self._paused_at < math.inf

    def lacking(self) -> list[str | None]:
        """Return the GPUs of the workers that it could still use."""
        return [gpu for gpu, wanted in self.wanted.items() if self.count(gpu) < wanted]

    def count(self, gpu: str | None) -> int:
        """Return how many workers with this GPU it has."""
        if len(self.wanted) == 1:  # as most have: all of its workers are like that
            return len(self.held) + len(self.starting) if gpu in self.wanted else 0
        return sum(worker.gpu == gpu for worker in self.held) + self.starting.count(gpu)

    def count_in_use(self, gpu: str | None, asking: Lease) -> int:
        """Return how many of its workers are in use, as another call that asks sees it. If nobody
        attends to it, those that have answered are not."""
        late = time.monotonic() - self._paused_at > CHECK_INTERVAL
        if not late and self._thread != asking._thread:
            return self.count(gpu)
        return sum(worker.gpu == gpu and worker.computes for worker in self.held)

    def rank(self) -> tuple[int, float]:
        """Return its place among the calls that wait: who has fewer workers, or waits longer, is
        first."""
        return len(self.held), self.waits_since

    def comes_before(self, other: Lease, gpu: str | None) -> bool:
        """Return whether it gets the next worker with this GPU before another."""
        return self.waits_for(gpu) and self.rank() < other.rank()

    def waits_for(self, gpu: str | None) -> bool:
        """Return whether it would take a worker with this GPU now."""
        return self.waits_since < math.inf and not self.paused and gpu in self.lacking()


def _keep(worker: Worker, threads: int, seconds: float | None) -> None:
    """Tell a worker with how many threads it computes, and for how long it stays without a message;
    None: for ever."""
    worker.threads, worker.idle_limit = threads, seconds
    with contextlib.suppress(Closed):  # its pidfd reports its end too
        worker.bring_up_to_date(capture(), {})


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    ours.callback(os.close, read)
    theirs.callback(os.close, write)
    return read, write


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _ends_within(child: int, seconds: float) -> bool:
    """Return whether a child of this process ends within so many seconds."""
    pidfd = os.pidfd_open(child)
    try:
        return readable(pidfd, seconds)
    finally:
        os.close(pidfd)


#: by the name of their pipe, None for this process's own. They stay after `close`: whoever holds
#: them may use them again
_all: dict[str | None, Workers] = {}


def workers(pipe: str | None = None) -> Workers:
    """Return this process's own workers, or those from behind a named pipe."""
    return _all.get(pipe) or _all.setdefault(pipe, Workers(pipe))


def close_workers() -> None:
    """End this process's workers. New calls start new ones."""
    for workers_of_server in list(_all.values()):
        workers_of_server.close()


def _in_child() -> None:
    for inherited in _all.values():
        inherited.abandon()


os.register_at_fork(after_in_child=_in_child)
