"""The workers of this process: started when needed, kept warm, lent to one call at a time.

A worker, as its driver sees it.

Waiting for several workers at once: for what they say, what they print, and their end.

How the loss of a worker is told.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import cast

from weft._core.schedule import UNKNOWN, Cost
from weft.engines.local.pool import interpreter
from weft.engines.local.pool.messages import (
    Answer,
    CacheFunction,
    Cancel,
    CancelAcknowledged,
    DropFunction,
    Frames,
    Settings,
    Work,
)
from weft.engines.local.pool.payload import Payload
from weft.engines.local.processes.channel import Channel, Closed, Ended, Start, Started
from weft.engines.local.processes.linux import end_as_text, readable, translate_os_error
from weft.engines.local.processes.output import Logged, OutputRelay, level_here, replay
from weft.errors import LaunchError, Loss, WorkerLost, format_bytes
from weft.resources import host_name

#: seconds between two looks at whether a job was cancelled
LOOK = 0.05

#: seconds for the fork server to load what workers need, and for one worker to start
_START = 60.0

#: seconds for the fork server to say how a worker ended
_LAST_WORDS = 2.0

#: functions of which it is known what they take
_COSTS = 256

#: raises when there is no use in waiting any longer
Look = Callable[[], None]


class Workers:
    """All workers of this process from one fork server: its own, or that behind a named pipe."""

    def __init__(self, pipe: str | None = None) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._server: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._idle: list[Worker] = []
        self._started = 0
        self._ends: dict[int, Ended] = {}
        #: of the workers that were given back last
        self._watch: Watch | None = None
        #: by digest of the function: what items took in the last job
        self._costs: dict[bytes, Cost] = {}

    def lend(
        self, wanted: Sequence[str | None], threads: int, look: Look = lambda: None
    ) -> tuple[list[Worker], Watch]:
        """Workers for one call, warm ones first: for each wanted GPU, or None, one that sees it.

        While they start `look` is called again and again; it raises when the call has to end."""
        lent: list[Worker] = []
        locked: list[bool] = []
        try:
            try:
                self._take_lock(locked, look)
                for gpu in wanted:
                    lent.append(self._take(gpu) or self._start(gpu, look))
                watch, self._watch = self._watch, None
            finally:
                if any(locked):
                    self._lock.release()
            self._send_settings(lent, threads)
        except BaseException:
            # warm ones stay so; without the lock, which somebody may have for long: it is one step
            self._idle += lent
            raise
        return lent, watch if watch is not None and watch.watches(lent) else Watch(lent)

    def replace(self, worker: Worker, look: Look) -> Worker:
        """A worker in the place of one that has ended."""
        locked: list[bool] = []
        try:
            self._take_lock(locked, look)
            fresh = self._start(worker.gpu, look)
        finally:
            if any(locked):
                self._lock.release()
        self._send_settings([fresh], worker.threads)
        return fresh

    def give_back(self, workers: Sequence[Worker], watch: Watch) -> None:
        """After a call, in the middle of nothing."""
        with self._lock:
            self._idle += workers
            self._watch = watch

    @staticmethod
    def _send_settings(workers: Sequence[Worker], threads: int) -> None:
        try:
            folder = os.getcwd()
        except FileNotFoundError as error:
            raise LaunchError(
                "the working folder of this process has been deleted, so no worker can enter it; "
                "change to one that exists:\n    os.chdir(folder)"
            ) from error
        settings = Settings(folder, sys.path[:], threads, level_here(), None)
        for worker in workers:
            with contextlib.suppress(Closed):  # who sends it work finds out
                worker.send_settings(settings)

    def expected_cost(self, digest: bytes) -> Cost:
        """What an item of a function takes, if it is as before."""
        return self._costs.get(digest, UNKNOWN)

    def note_cost(self, digest: bytes, cost: Cost) -> None:
        """Keep in mind what items of a function have taken, if that is known."""
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
        """End a worker, if it has not ended; how it did, or None if nobody saw it."""
        worker.kill()
        ended = self._last_words(worker)
        if ended is None:  # the fork server would have ended what it has started
            with contextlib.suppress(OSError):
                os.killpg(worker.pid, signal.SIGKILL)
            if worker.pidfd >= 0:  # what it may write to is used again
                readable(worker.pidfd, _LAST_WORDS)
        worker.close()
        return ended

    def shut_down(self) -> None:
        """End all workers and the fork server; behind a named pipe, those of everybody."""
        self.close()
        if self._pipe is not None:
            from weft.engines.local.pool import named_pipe

            named_pipe.close_pipe(self._pipe)

    def close(self) -> None:
        """End all workers of this process, and the fork server, if it is its own."""
        with self._lock:
            for worker in self._idle:
                worker.close()
            self._idle.clear()
            self._hang_up()

    def abandon(self) -> None:
        """In a forked child: these are the parent's workers. The child can start its own."""
        for worker in self._idle:
            worker.abandon()
        if self._server is not None:
            self._server.close()
        if self._process is not None:
            self._process.returncode = 0  # it is not this process's child
        self._server = self._process = self._watch = None
        self._idle, self._ends = [], {}
        self._lock = threading.Lock()

    def _take_lock(self, locked: list[bool], look: Look) -> None:
        """Take the lock, which another thread has for as long as it starts a worker. `locked` ends
        with whether it was taken, also if a signal handler raises: `extend` and `map` are one step
        (see frames.py)."""
        while not any(locked):
            locked.extend(map(self._lock.acquire, (True,), (LOOK,)))
            if not locked[-1]:
                look()

    # with the lock held

    def _take(self, gpu: str | None) -> Worker | None:
        """An idle worker. Whether it has ended since is seen when it is given work."""
        for place, worker in enumerate(self._idle):
            if worker.gpu == gpu:
                return self._idle.pop(place)
        return None

    def _start(self, gpu: str | None, look: Look) -> Worker:
        fresh = self._server is None
        try:
            return self._start_one(gpu, look)
        except Closed:
            self._hang_up()
        if not fresh:  # it was ended since it was last heard of
            with contextlib.suppress(Closed):
                return self._start_one(gpu, look)
            self._hang_up()
        raise self._server_ended()

    def _start_one(self, gpu: str | None, look: Look) -> Worker:
        """Raises Closed if the fork server has ended, or does not answer."""
        server = self._connect()
        number = self._started
        self._started += 1  # now: should this be interrupted, the answer is known as nobody's
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                connection, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                ours.callback(connection.close)
                theirs.callback(remote.close)
                out, err = _pipe(ours, theirs), _pipe(ours, theirs)
            except OSError as error:
                raise translate_os_error(error) from error
            server.send(Start(number), [remote.fileno(), out[1], err[1]])
            pid, pidfd = self._await_start(server, number, look)
            ours.callback(os.close, pidfd)
            connection.setblocking(False)
            echoes = [OutputRelay(out[0], "stdout"), OutputRelay(err[0], "stderr")]
            ours.pop_all()  # they are the worker's now
            worker = Worker(number, pid, pidfd=pidfd, frames=Frames(connection), echoes=echoes)
            worker.gpu, worker.server = gpu, server
            return worker

    def _server_ended(self) -> LaunchError:
        if self._pipe is not None:
            return LaunchError(
                f"the pipe {self._pipe!r} was closed; it is opened again by\n"
                f"    weft open --pipe {self._pipe}"
            )
        return LaunchError(
            "the process that starts workers has ended before it started one; what it printed "
            "says why"
        )

    def _await_start(self, server: Channel, number: int, look: Look) -> tuple[int, int]:
        deadline = time.monotonic() + _START
        while (now := time.monotonic()) < deadline:
            look()
            if not server.wait(min(deadline, now + LOOK)):
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
            self._hang_up()
        if self._server is None and self._pipe is not None:
            from weft.engines.local.pool import named_pipe  # which loads much, and is seldom needed

            self._server, _ = named_pipe.connect(self._pipe)
        elif self._server is None:
            connection, self._process = interpreter.take()
            self._server = Channel(connection)
        return self._server

    def _hang_up(self) -> None:
        server, self._server = self._server, None
        process, self._process = self._process, None
        self._started = 0
        self._ends.clear()
        if server is not None:
            server.close()
        if process is not None:
            with contextlib.suppress(OSError):
                if not _ends(process.pid, _LAST_WORDS):  # somebody has stopped it
                    process.kill()
            process.wait()

    def _last_words(self, worker: Worker) -> Ended | None:
        deadline = time.monotonic() + _LAST_WORDS
        with self._lock:
            try:
                while worker.number not in self._ends:
                    if self._server is not worker.server or not self._server.wait(deadline):
                        return None  # the one that started it is gone, or does not answer
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


def _ends(child: int, seconds: float) -> bool:
    """Whether a child of this process ends in time."""
    pidfd = os.pidfd_open(child)
    try:
        return readable(pidfd, seconds)
    finally:
        os.close(pidfd)


#: by the pipe behind which they are; None for this process's own. They stay: whoever has them may
#: use them again when they have been closed
_all: dict[str | None, Workers] = {}


def workers(pipe: str | None = None) -> Workers:
    """This process's own, or those it has from behind a named pipe."""
    return _all.get(pipe) or _all.setdefault(pipe, Workers(pipe))


def close_workers() -> None:
    """End this process's workers. New calls start new ones."""
    for one in list(_all.values()):
        one.close()


def _in_child() -> None:
    for inherited in _all.values():
        inherited.abandon()


os.register_at_fork(after_in_child=_in_child)

#: functions that a worker keeps
_FUNCTIONS = 64


class Worker:
    """Its connection, its outputs, and what it knows."""

    def __init__(
        self, number: int, pid: int, *, pidfd: int, frames: Frames, echoes: list[OutputRelay]
    ) -> None:
        self.number, self.pid, self.pidfd = number, pid, pidfd
        self.host = host_name()
        self.frames = frames
        self.echoes = echoes
        #: where it answers, where it ends, where it prints
        self.descriptors = (frames.fileno(), pidfd, *(echo.descriptor for echo in echoes))
        #: the one GPU that it sees; None for one that sees what the driver does
        self.gpu: str | None = None
        #: the fork server that started it
        self.server: Channel
        self._settings: Settings | None = None
        #: the digests of the functions that it has
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    @property
    def threads(self) -> int:
        """How many threads BLAS and the like may use in it."""
        return self._settings.threads if self._settings is not None else 1

    def send_settings(self, settings: Settings) -> None:
        """Have it see the world as this process does now. Raises Closed."""
        if settings == self._settings:
            return
        told = settings
        if self._settings is None:
            environment = dict(os.environ)
            if self.gpu is not None:
                environment["CUDA_VISIBLE_DEVICES"] = self.gpu
            told = settings._replace(environment=environment)
        self.frames.send(told)
        self._settings = settings

    def give(self, function: Payload, work: Work) -> None:
        """Send it work, and the function unless it knows that. Raises Closed."""
        missing = self.messages_to_know(function.digest, function)
        self.frames.send(*missing, work)
        self._known[function.digest] = None  # not before: an interrupt may keep it from being sent

    def messages_to_know(
        self, digest: bytes, function: Payload
    ) -> list[CacheFunction | DropFunction]:
        """What to send it so that it knows a function."""
        if digest in self._known:
            self._known.move_to_end(digest)
            return []
        forgotten = [self._known.popitem(last=False)[0]] if len(self._known) >= _FUNCTIONS else []
        return [*map(DropFunction, forgotten), CacheFunction(digest, function.payload)]

    def forget(self, digest: bytes) -> None:
        """Have it drop a function, if it knows it."""
        if digest in self._known:
            del self._known[digest]
            with contextlib.suppress(Closed):
                self.frames.send(DropFunction(digest))

    def cancel(self) -> None:
        """End what it does, and have it say when it has answered everything. Raises Closed."""
        self.interrupt()
        self.frames.send(Cancel())

    def receive(self) -> Answer | CancelAcknowledged | None:
        """What it says, other than what it logs; None if that is not here yet. Raises Closed."""
        while isinstance(message := self.frames.receive(), Logged):
            replay(message)
        return cast("Answer | CancelAcknowledged | None", message)

    def echo(self, ready: Container[int]) -> list[int]:
        """Print what it has printed by now, if anything is ready; the descriptors that are at
        their end."""
        asked = [echo for echo in self.echoes if echo.descriptor in ready]
        return [echo.descriptor for echo in asked if not echo.read()]

    def interrupt(self) -> None:
        """End the function that it runs."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Once or several times: an interrupt may have come in the middle."""
        self.frames.close()
        for echo in self.echoes:
            echo.close()
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def abandon(self) -> None:
        """In a forked child: it is the parent's."""
        self.frames.close()
        self.__del__()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """An interrupt may have come where nobody had it yet, or any longer. `close` is still there
        when Python ends and has taken the modules apart."""
        left = [self.pidfd, *(echo.descriptor for echo in self.echoes)]
        self.pidfd, self.echoes = -1, []
        for descriptor in left:
            if descriptor >= 0:
                close(descriptor)


ReadyEvents = dict[Worker, set[int]]


class Watch:
    """Some workers and their descriptors. Kept from call to call: registering them takes longer
    than a short call."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._poll = select.poll()
        self._owners: dict[int, Worker] = {}
        #: what rings when there is something to do for another reason
        self._bell = -1
        self.rang = False
        for worker in workers:
            self.add(worker)

    def add(self, worker: Worker) -> None:
        # answers first: with an answer is seen what was printed before it
        for descriptor in worker.descriptors:
            self._poll.register(descriptor, select.POLLIN)
            self._owners[descriptor] = worker

    def remove(self, worker: Worker) -> None:
        for descriptor in worker.descriptors:
            if descriptor in self._owners:
                self._forget(descriptor)

    def listen(self, bell: int) -> None:
        """Return from `wait` also for this bell, an eventfd; for -1 no longer."""
        if self._bell >= 0:
            self._poll.unregister(self._bell)
        self._bell = bell
        if bell >= 0:
            self._poll.register(bell, select.POLLIN)

    def echo(self, worker: Worker, ready: set[int]) -> None:
        """Print what it has printed by now, if anything is ready."""
        for descriptor in worker.echo(ready):  # its function has closed it: it would always be
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._owners[descriptor]

    def watch_writable(self, worker: Worker) -> None:
        """Look also for when it takes more, if not everything was sent."""
        more = select.POLLOUT if worker.frames.unsent else 0
        self._poll.modify(worker.frames, select.POLLIN | more)

    def wait(self, seconds: float) -> ReadyEvents:
        """The workers that want something, each with the descriptors on which it does."""
        found: ReadyEvents = {}
        self.rang = False
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._bell:
                self.rang = True
                os.eventfd_read(descriptor)
                continue
            found.setdefault(self._owners[descriptor], set()).add(descriptor)
        return found

    def ended(self) -> list[Worker]:
        """The workers that have ended by now."""
        return [worker for worker, wants in self.wait(0).items() if worker.pidfd in wants]

    def watches(self, workers: Iterable[Worker]) -> bool:
        """Whether it is exactly these that it watches."""
        return set(self._owners.values()) == set(workers)


def worker_lost_error(
    worker: Worker, ended: Ended | None, *, item: int, doing: str, advice: str
) -> WorkerLost:
    """The error for a worker that has ended; None where nobody saw how."""
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
