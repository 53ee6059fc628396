"""A worker, as its driver sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import TextIO, cast

from weft._core.work import (
    Answer,
    CacheFunction,
    Cancel,
    CancelAcknowledged,
    DropFunction,
    Logged,
    Settings,
    Work,
)
from weft.engines.interrupts import by_signal_handler
from weft.engines.local.channel import Channel, Closed
from weft.engines.local.frames import Frames
from weft.engines.local.logs import replay
from weft.engines.local.output import Lines, clear_of_bars
from weft.engines.local.wire import Payload
from weft.resources import host_name

#: functions that a worker keeps
_FUNCTIONS = 64
#: bytes of its output at once, as many as a pipe holds, and how often without a look at the others
_READ, _READS = 1 << 16, 16


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


class OutputRelay:
    """A worker's stdout or stderr, line by line into this process's own."""

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self._name = name
        self._lines = Lines()
        os.set_blocking(descriptor, False)

    def read(self) -> bool:
        """Print the lines that have come; whether there may be more to come.

        Not for as long as somebody prints without a pause: the others want to be heard too.
        """
        for _ in range(_READS):
            try:
                data = os.read(self.descriptor, _READ)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._print(self._lines.feed(data))
        return True

    def close(self) -> None:
        """Once or several times."""
        if self.descriptor >= 0:
            self.read()
            self._print(self._lines.finish())
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def _print(self, lines: list[bytes]) -> None:
        stream: TextIO | None = getattr(sys, self._name)  # now: it may have been replaced
        if lines and stream is not None:
            text = b"".join(lines).decode(errors="backslashreplace")
            try:
                _write(stream, text)
            except (OSError, ValueError) as error:  # nobody reads it
                if by_signal_handler(error):
                    raise


def _write(stream: TextIO, text: str) -> None:
    with clear_of_bars(stream):
        try:
            stream.write(text)
        except UnicodeEncodeError:  # a stream of another encoding
            known = stream.encoding or "ascii"
            stream.write(text.encode(known, "backslashreplace").decode(known))
        stream.flush()
