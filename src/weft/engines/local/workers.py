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
from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import TextIO

from weft._core.messages import Ended, Start, Started
from weft._core.work import Done, Forget, Learn, Logged, Settings, Stopped, Unreadable
from weft.engines.local.channel import Channel, Closed
from weft.engines.local.frames import Frames
from weft.engines.local.logs import level_here, replay
from weft.engines.local.output import Lines
from weft.engines.local.processes import readable
from weft.engines.local.translation import translated
from weft.engines.local.wire import Packed
from weft.errors import LaunchError
from weft.resources import THREAD_VARIABLES, plan

#: functions that a worker keeps
_FUNCTIONS = 64
#: seconds for the fork server to load what workers need, and for one worker to start
_START = 60.0
#: seconds for the fork server to say how a worker ended
_LAST_WORDS = 2.0
#: what the fork server's interpreter runs
_PROGRAM = """\
import sys
sys.path[:] = sys.argv[3:]
from weft.engines.local.fork_server import main
main(int(sys.argv[1]), numpy=sys.argv[2] == "numpy")
"""


class Worker:
    """A worker, as its driver sees it."""

    def __init__(self, number: int, pid: int, pidfd: int, frames: Frames, echoes: list[Echo]):
        self.number, self.pid, self.pidfd = number, pid, pidfd
        self.frames = frames
        self.echoes = echoes
        #: the one GPU that it sees; None for one that sees what the driver does
        self.gpu: str | None = None
        self._settings: Settings | None = None
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def __str__(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    @property
    def ended(self) -> bool:
        return readable(self.pidfd)

    def settle(self, settings: Settings) -> None:
        """Have it see the world as this process does now."""
        if self._settings is None:
            environment = dict(os.environ)
            if self.gpu is not None:
                environment["CUDA_VISIBLE_DEVICES"] = self.gpu
            self.frames.send(settings._replace(environment=environment))
        elif settings != self._settings:
            self.frames.send(settings)
        self._settings = settings

    def lesson(self, digest: bytes, function: Packed) -> list[Learn | Forget]:
        """What to send it so that it knows a function."""
        if digest in self._known:
            self._known.move_to_end(digest)
            return []
        self._known[digest] = None
        forgotten = [self._known.popitem(last=False)[0]] if len(self._known) > _FUNCTIONS else []
        return [*map(Forget, forgotten), Learn(digest, function.payload)]

    def forget(self, digest: bytes) -> None:
        """Have it drop a function, if it knows it."""
        if digest in self._known:
            del self._known[digest]
            with contextlib.suppress(Closed):
                self.frames.send(Forget(digest))

    def receive(self) -> Done | Unreadable | Stopped | None:
        """Its answer; None if that is not here yet. Raises Closed."""
        while isinstance(message := self.frames.receive(), Logged):
            replay(message)
        answer: Done | Unreadable | Stopped | None = message
        return answer

    def echo(self, ready: Container[int] | None = None) -> None:
        """Print what it has printed by now, if anything is ready."""
        for echo in self.echoes:
            if ready is None or echo.descriptor in ready:
                echo.read()

    def interrupt(self) -> None:
        """End the function that it runs."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        self.frames.close()
        for echo in self.echoes:
            echo.close()
        os.close(self.pidfd)


class Echo:
    """A worker's stdout or stderr, line by line into this process's own."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self._name = name
        self._lines = Lines()
        os.set_blocking(descriptor, False)

    def read(self) -> None:
        """Print the lines that have come."""
        while True:
            try:
                data = os.read(self.descriptor, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                return
            self._print(self._lines.feed(data))

    def close(self) -> None:
        self.read()
        self._print(self._lines.finish())
        os.close(self.descriptor)

    def _print(self, lines: list[bytes]) -> None:
        stream: TextIO | None = getattr(sys, self._name)  # now: it may have been replaced
        if lines and stream is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it
                stream.write(b"".join(lines).decode(errors="backslashreplace"))
                stream.flush()


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

    def lend(self, count: int, *, gpus: Sequence[str] = ()) -> list[Worker]:
        """Workers for one call, warm ones first; with `gpus` one for each of these GPUs."""
        wanted: list[str | None] = list(gpus) or [None] * count
        lent: list[Worker] = []
        try:
            for gpu in wanted:
                lent.append(self.lend_one(gpu))
            threads = plan(len(wanted)).threads
            settings = Settings(os.getcwd(), sys.path[:], threads, level_here(), None)
            for worker in lent:
                with contextlib.suppress(Closed):  # who sends it work finds out
                    worker.settle(settings)
        except BaseException:
            for worker in lent:
                self.end(worker)
            raise
        return lent

    def lend_one(self, gpu: str | None) -> Worker:
        with self._lock:
            for worker in [one for one in self._idle if one.gpu == gpu]:
                self._idle.remove(worker)
                if not worker.ended:
                    return worker
                worker.close()
            return self._start(gpu)

    def give_back(self, worker: Worker) -> None:
        """After a call, in the middle of nothing."""
        with self._lock:
            self._idle.append(worker)

    def forget(self, digest: bytes) -> None:
        """Have the idle workers drop a function."""
        with self._lock:
            for worker in self._idle:
                worker.forget(digest)

    def end(self, worker: Worker) -> Ended | None:
        """End a worker, if it has not ended; how it did, or None if nobody saw it."""
        worker.kill()
        ended = self._last_words(worker)
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
        """In a forked child: these are the parent's workers."""
        for worker in self._idle:
            worker.frames.close()
        if self._server is not None:
            self._server.close()

    # with the lock held

    def _start(self, gpu: str | None) -> Worker:
        server = self._connect()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        out, err = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        number = self._started
        try:
            server.send(Start(number), [theirs.fileno(), out[1], err[1]])
            pid, pidfd = self._await_start(server, number)
        except Closed:
            self._hang_up()
            ours.close()
            raise self._server_ended() from None
        finally:
            for descriptor in (out[1], err[1]):
                os.close(descriptor)
            theirs.close()
        self._started += 1
        ours.setblocking(False)
        echoes = [Echo(out[0], "stdout"), Echo(err[0], "stderr")]
        worker = Worker(number, pid, pidfd, Frames(ours), echoes)
        worker.gpu = gpu
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

    def _await_start(self, server: Channel, number: int) -> tuple[int, int]:
        deadline = time.monotonic() + _START
        while server.wait(deadline):
            message, descriptors = server.receive(Started, Ended)
            if isinstance(message, Ended):
                self._ends[message.worker] = message
            elif message.worker == number:
                return message.pid, descriptors[0]
        raise Closed("the fork server does not answer")

    def _connect(self) -> Channel:
        if self._process is not None and self._process.poll() is not None:
            self._hang_up()
        if self._server is None and self._pipe is not None:
            from weft.engines.local import named  # which loads much, and is seldom needed

            self._server, _ = named.connect(self._pipe)
        elif self._server is None:
            self._server, self._process = start_server()
        return self._server

    def _hang_up(self) -> None:
        server, self._server = self._server, None
        process, self._process = self._process, None
        if server is not None:
            server.close()
        if process is not None:
            process.wait()

    def _last_words(self, worker: Worker) -> Ended | None:
        deadline = time.monotonic() + _LAST_WORDS
        with self._lock:
            try:
                while worker.number not in self._ends:
                    if self._server is None or not self._server.wait(deadline):
                        return None
                    message, descriptors = self._server.receive(Started, Ended)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    if isinstance(message, Ended):
                        self._ends[message.worker] = message
            except Closed:
                return None
            return self._ends.pop(worker.number)


def start_server() -> tuple[Channel, subprocess.Popen[bytes]]:
    """A fork server of this process's own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # with more threads than one it could not fork; workers set their own number
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}
    numpy = "numpy" if "numpy" in sys.modules else ""
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), numpy, *map(str, sys.path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise translated(error) from error
    finally:
        theirs.close()
    return Channel(ours), process


#: by the pipe behind which they are; None for this process's own
_all: dict[str | None, Workers] = {}


def workers(pipe: str | None = None) -> Workers:
    """This process's own, or those it has from behind a named pipe."""
    if pipe not in _all:
        _all[pipe] = Workers(pipe)
    return _all[pipe]


def close_workers() -> None:
    """End this process's workers. New calls start new ones."""
    while _all:
        _all.popitem()[1].close()


def _in_child() -> None:
    for inherited in _all.values():
        inherited.abandon()
    _all.clear()


os.register_at_fork(after_in_child=_in_child)
