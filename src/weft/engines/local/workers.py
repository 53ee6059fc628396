"""The workers of this process: started when needed, kept warm, lent to one call at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from weft._core.messages import Ended, Start, Started
from weft._core.schedule import UNKNOWN, Cost
from weft._core.work import Settings
from weft.engines.local import interpreter
from weft.engines.local.channel import Channel, Closed
from weft.engines.local.frames import Frames
from weft.engines.local.limits import LOOK
from weft.engines.local.logs import level_here
from weft.engines.local.polling import readable
from weft.engines.local.remote_worker import OutputRelay, Worker
from weft.engines.local.translation import translated
from weft.engines.local.watching import Watch
from weft.errors import LaunchError

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
            from weft.engines.local import named

            named.close_pipe(self._pipe)

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
                raise translated(error) from error
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
            from weft.engines.local import named  # which loads much, and is seldom needed

            self._server, _ = named.connect(self._pipe)
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
