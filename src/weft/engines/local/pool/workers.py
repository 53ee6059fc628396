"""The driver's side of workers: start them, lend them, watch them, lose them.

`Workers` are those of one fork server: started when needed, kept warm, lent to one call at a time.
`Worker` is one of them: its connection, its outputs, and the functions that it has cached. `Watch`
waits for several at once: for their replies, their output and their end. `worker_lost_error` tells
how one was lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import cast

from weft._core.modules import Picture
from weft._core.schedule import UNKNOWN, Cost
from weft.engines.local.pool import interpreter
from weft.engines.local.pool.driver_state import Captured, reissue
from weft.engines.local.pool.messages import (
    Answer,
    CacheFunction,
    Cancel,
    CancelAcknowledged,
    DropFunction,
    Frames,
    Modules,
    Outdated,
    Settings,
    Unreadable,
    Update,
    Warned,
    Work,
)
from weft.engines.local.pool.modules import SentModules
from weft.engines.local.pool.payload import Payload
from weft.engines.local.processes.channel import Channel, Closed, Ended, Start, Started
from weft.engines.local.processes.linux import end_as_text, readable, translate_os_error
from weft.engines.local.processes.output import Logged, OutputRelay, replay
from weft.errors import LaunchError, Loss, WorkerLost, format_bytes
from weft.resources import host_name

#: seconds between two checks of whether a job was cancelled
CHECK_INTERVAL = 0.05

#: seconds for the fork server to load what workers need, and for one worker to start
_START = 60.0

#: seconds for the fork server to report how a worker ended, and to end itself
_END = 2.0

#: functions whose cost per item is remembered
_COSTS = 256

#: raises when the caller has to stop waiting
Check = Callable[[], None]


class Workers:
    """This process's workers from one fork server: its own, or that behind a named pipe."""

    def __init__(self, pipe: str | None) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._server: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._idle: list[Worker] = []
        self._started = 0
        self._ends: dict[int, Ended] = {}
        #: watches the workers that were given back last
        self._watch: Watch | None = None
        #: what an item took in the last job, by the function's digest
        self._costs: dict[bytes, Cost] = {}

    def lend(
        self, gpus: Sequence[str | None], threads: int, check: Check = lambda: None
    ) -> tuple[list[Worker], Watch]:
        """Return workers for one call, warm ones first: one for each GPU, or None, in `gpus`.

        While they start, `check` is called again and again; it raises when the call has to end.
        Raises LaunchError.
        """
        lent: list[Worker] = []
        locked: list[bool] = []
        try:
            try:
                self._take_lock(locked, check)
                for gpu in gpus:
                    lent.append(self._take(gpu) or self._start(gpu, check))
                watch, self._watch = self._watch, None
            finally:
                if any(locked):
                    self._lock.release()
            for worker in lent:
                worker.threads = threads
        except BaseException:
            # warm ones stay warm; without the lock, which another thread may hold for long: += is
            # one step
            self._idle += lent
            raise
        return lent, watch if watch is not None and watch.watches(lent) else Watch(lent)

    def replace(self, worker: Worker, check: Check) -> Worker:
        """Return a fresh worker in the place of one that has ended. Raises LaunchError."""
        locked: list[bool] = []
        try:
            self._take_lock(locked, check)
            fresh = self._start(worker.gpu, check)
        finally:
            if any(locked):
                self._lock.release()
        fresh.threads = worker.threads
        return fresh

    def give_back(self, workers: Sequence[Worker], watch: Watch) -> None:
        """Take workers back after a call; none of them has a chunk."""
        with self._lock:
            self._idle += workers
            self._watch = watch

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
        """Have the idle workers drop a function."""
        with self._lock:
            for worker in list(self._idle):
                worker.forget(digest)

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
        with self._lock:
            for worker in self._idle:
                worker.close()
            self._idle.clear()
            self._disconnect()

    def abandon(self) -> None:
        """Close the parent's descriptors in a forked child, which can start workers of its own."""
        for worker in self._idle:
            worker.abandon()
        if self._server is not None:
            self._server.close()
        if self._process is not None:
            self._process.returncode = 0  # it is not this process's child: do not wait for it
        self._server = self._process = self._watch = None
        self._idle, self._ends = [], {}
        self._lock = threading.Lock()

    def _take_lock(self, locked: list[bool], check: Check) -> None:
        """Take the lock, which another thread holds while it starts a worker. `locked` ends with
        whether it was taken, also if a signal handler raises: `extend` and `map` are one step (see
        `messages.Frames`)."""
        while not any(locked):
            locked.extend(map(self._lock.acquire, (True,), (CHECK_INTERVAL,)))
            if not locked[-1]:
                check()

    # with the lock held

    def _take(self, gpu: str | None) -> Worker | None:
        """Return an idle worker, if there is one. It may have ended: sending it work will tell."""
        for index, worker in enumerate(self._idle):
            if worker.gpu == gpu:
                return self._idle.pop(index)
        return None

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
        """Have the fork server start a worker. Raises Closed if it has ended or does not answer."""
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
            relays = [OutputRelay(out[0], "stdout"), OutputRelay(err[0], "stderr")]
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
                self._ends[message.worker] = message
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
        with self._lock:
            try:
                while worker.number not in self._ends:
                    if self._server is not worker.server or not self._server.wait(deadline):
                        return None  # the server that started it is gone, or does not answer
                    message, descriptors = self._server.receive(Started, Ended)
                    _close(descriptors)
                    if isinstance(message, Ended):
                        self._ends[message.worker] = message
            except Closed:
                return None
            return self._ends.pop(worker.number)


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

#: functions that a worker caches
_FUNCTIONS = 64


class Worker:
    """A worker as its driver sees it: its connection, its outputs, its cached functions."""

    def __init__(
        self, number: int, pid: int, *, pidfd: int, frames: Frames, relays: list[OutputRelay]
    ) -> None:
        self.number, self.pid, self.pidfd = number, pid, pidfd
        self.host = host_name()
        self.frames = frames
        self.relays = relays
        #: readable when it replies, when it has ended, when it has printed
        self.descriptors = (frames.fileno(), pidfd, *(relay.descriptor for relay in relays))
        #: the one GPU that it sees; None: those that the driver sees
        self.gpu: str | None = None
        #: the fork server that started it
        self.server: Channel
        #: how many threads BLAS and the like may use in it
        self.threads = 1
        #: the driver's state, and the threads, that it has
        self._settings: tuple[Captured, int] | None = None
        self._modules = SentModules()
        #: the modules that it was last brought up to date with: the same for all chunks of a call
        self._latest: Mapping[str, Picture] | None = None
        #: the digests of the functions that it has cached, the least recently used first
        self._cached: OrderedDict[bytes, None] = OrderedDict()

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    def bring_up_to_date(self, state: Captured, modules: Mapping[str, Picture]) -> None:
        """Send it the driver's state and what has changed of these modules, if it does not have
        them. Raises Closed."""
        same_settings = self._settings == (state, self.threads)
        if same_settings and self._latest is modules:
            return
        messages: list[Settings | Modules | Update | DropFunction] = []
        if not same_settings:
            messages.append(Settings(state.data, self.threads, self.gpu))
        messages += self._modules.messages(modules)
        if any(isinstance(message, Update) for message in messages):
            messages += map(DropFunction, self._cached)  # they may be those from before
            self._cached.clear()
        if messages:
            self.frames.send(*messages)
            self._settings = state, self.threads
            self._modules.note(modules)
        self._latest = modules

    def note_own_changes(self, modules: Mapping[str, Picture]) -> None:
        """Note that a function has changed these modules itself, there as here."""
        self._modules.note_own_changes(modules)

    def give(self, function: Payload, work: Work) -> None:
        """Send it work, and before it the function unless it is cached there. Raises Closed."""
        missing = self.function_messages(function.digest, function)
        self.frames.send(*missing, work)
        self._cached[function.digest] = None  # after: an interrupt may come before it is sent

    def function_messages(
        self, digest: bytes, function: Payload
    ) -> list[CacheFunction | DropFunction]:
        """Return the messages after which it has a function cached."""
        if digest in self._cached:
            self._cached.move_to_end(digest)
            return []
        oldest = [self._cached.popitem(last=False)[0]] if len(self._cached) >= _FUNCTIONS else []
        return [*map(DropFunction, oldest), CacheFunction(digest, function.data)]

    def forget(self, digest: bytes) -> None:
        """Have it drop a function, if it is cached there."""
        if digest in self._cached:
            del self._cached[digest]
            with contextlib.suppress(Closed):
                self.frames.send(DropFunction(digest))

    def cancel(self) -> None:
        """Interrupt its function, and have it acknowledge when all is answered. Raises Closed."""
        self.interrupt()
        self.frames.send(Cancel())

    def receive(self) -> Answer | CancelAcknowledged | None:
        """Replay what it has logged and warned of, and send what it asks for. Return its next other
        message; None if that is not here yet. Raises Closed."""
        while isinstance(message := self.frames.receive(), (Logged, Warned, Outdated)):
            if isinstance(message, Logged):
                replay(message)
            elif isinstance(message, Warned):
                reissue(message)
            else:
                self.frames.send(self._modules.answer(message))
        if isinstance(message, Unreadable) and message.about_function:  # the next try begins anew
            self._modules.forget()
            self._latest = None
            for digest in list(self._cached):
                self.forget(digest)
        return cast("Answer | CancelAcknowledged | None", message)

    def relay(self, ready: Container[int]) -> list[int]:
        """Print what it has printed, where descriptors are ready. Return those at end of file."""
        readable_relays = [relay for relay in self.relays if relay.descriptor in ready]
        return [relay.descriptor for relay in readable_relays if not relay.read()]

    def interrupt(self) -> None:
        """Send it SIGINT, which ends the function that it runs."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Close its descriptors. May be called again: an interrupt may have come in between."""
        self.frames.close()
        for relay in self.relays:
            relay.close()
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def abandon(self) -> None:
        """Close its descriptors in a forked child."""
        self.frames.close()
        self.__del__()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close what is still open: an interrupt may have come while nobody held this object. The
        default keeps `os.close` within reach when Python ends and clears the modules."""
        descriptors = [self.pidfd, *(relay.descriptor for relay in self.relays)]
        self.pidfd, self.relays = -1, []
        for descriptor in descriptors:
            if descriptor >= 0:
                close(descriptor)


#: the workers with events, each with its ready descriptors
ReadyEvents = dict[Worker, set[int]]


class Watch:
    """Some workers and their descriptors, for poll. Kept from call to call: registering them takes
    longer than a short call."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._poll = select.poll()
        self._owners: dict[int, Worker] = {}
        #: an eventfd that wakes the caller of `wait` for another reason; -1: none
        self._wakeup = -1
        #: whether it did so in the last `wait`
        self.woken = False
        for worker in workers:
            self.add(worker)

    def add(self, worker: Worker) -> None:
        # the connection first: output that came before an answer is then reported with it
        for descriptor in worker.descriptors:
            self._poll.register(descriptor, select.POLLIN)
            self._owners[descriptor] = worker

    def remove(self, worker: Worker) -> None:
        for descriptor in worker.descriptors:
            if descriptor in self._owners:
                self._forget(descriptor)

    def watch_wakeup(self, wakeup: int) -> None:
        """Return from `wait` also when this eventfd is readable; -1: no longer."""
        if self._wakeup >= 0:
            self._poll.unregister(self._wakeup)
        self._wakeup = wakeup
        if wakeup >= 0:
            self._poll.register(wakeup, select.POLLIN)

    def relay(self, worker: Worker, ready: set[int]) -> None:
        """Print what a worker has printed, where descriptors are ready."""
        for descriptor in worker.relay(ready):  # closed by its function: it would be ready always
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._owners[descriptor]

    def watch_writable(self, worker: Worker) -> None:
        """Report also when its connection takes more, as long as not everything is sent."""
        more = select.POLLOUT if worker.frames.unsent else 0
        self._poll.modify(worker.frames, select.POLLIN | more)

    def wait(self, seconds: float) -> ReadyEvents:
        """Wait for events, so many seconds at most. Return the workers that have some."""
        events: ReadyEvents = {}
        self.woken = False
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._wakeup:
                self.woken = True
                os.eventfd_read(descriptor)
                continue
            events.setdefault(self._owners[descriptor], set()).add(descriptor)
        return events

    def ended(self) -> list[Worker]:
        """Return the workers that have ended by now."""
        return [worker for worker, events in self.wait(0).items() if worker.pidfd in events]

    def watches(self, workers: Iterable[Worker]) -> bool:
        """Return whether it watches exactly these."""
        return set(self._owners.values()) == set(workers)


def worker_lost_error(
    worker: Worker, ended: Ended | None, *, item: int, doing: str, advice: str
) -> WorkerLost:
    """Return the error for a worker that has ended; `ended` is None where nobody saw how."""
    if ended is None:
        loss = Loss(item, worker.number, worker.pid, None, 0, False, worker.host)
    else:
        how = ended.code, ended.memory, bool(ended.out_of_memory)
        loss = Loss(item, worker.number, worker.pid, *how, host=worker.host)
    return WorkerLost(f"{worker} {_how(loss)} while it {doing}{_memory(loss)}{advice}", loss=loss)


def _how(loss: Loss) -> str:
    if loss.code is None:
        return "ended, cause unknown (the process that starts workers was ended too),"
    return ("was " if loss.code < 0 else "ended with ") + end_as_text(loss.code)


def _memory(loss: Loss) -> str:
    if loss.out_of_memory:
        what = "and the kernel killed it for want of memory: smaller items, or fewer workers"
        return f"; it had at most {format_bytes(loss.memory)} of memory, {what}"
    return f"; it had at most {format_bytes(loss.memory)} of memory" if loss.memory else ""
