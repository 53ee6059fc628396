"""A worker, as its driver sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import TextIO, cast

from weft._core.work import (
    Answer,
    CalledOff,
    CallOff,
    Done,
    Forget,
    Learn,
    Logged,
    MayUse,
    Settings,
    Work,
)
from weft.engines.interrupts import by_signal_handler
from weft.engines.local.channel import Channel, Closed
from weft.engines.local.frames import Frames
from weft.engines.local.libc import current_core
from weft.engines.local.logs import replay
from weft.engines.local.output import Lines, clear_of_bars
from weft.engines.local.placing import FEW_CORES, cores_of, use
from weft.engines.local.polling import awake_after, readable
from weft.engines.local.wire import Packed
from weft.resources import host_name

#: functions that a worker keeps
_FUNCTIONS = 64
#: bytes of its output at once, as many as a pipe holds, and how often without a look at the others
_READ, _READS = 1 << 16, 16


class Worker:
    """Its connection, its outputs, and what it knows."""

    def __init__(
        self,
        number: int,
        pid: int,
        *,
        pidfd: int,
        semaphore: int,
        frames: Frames,
        echoes: list[Echo],
    ) -> None:
        self.number, self.pid, self.pidfd = number, pid, pidfd
        self.host = host_name()
        #: an eventfd that counts permits: it takes one for each stretch of a batch but the first
        self._semaphore = semaphore
        self.frames = frames
        self.echoes = echoes
        #: where it answers, where it ends, where it prints
        self.descriptors = (frames.fileno(), pidfd, *(echo.descriptor for echo in echoes))
        #: the one GPU that it sees; None for one that sees what the driver does
        self.gpu: str | None = None
        #: the fork server that started it
        self.server: Channel
        self._settings: Settings | None = None
        #: which it may use, while it is kept off one of them: an interrupt may have come in between
        self._cores: set[int] = set()
        #: on the monotonic clock; later it sleeps if it has nothing to do
        self._awake_until = 0.0
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

    def give(self, function: Packed, work: Work, *, elsewhere: bool) -> None:
        """Send it work, and the function unless it knows that. Raises Closed.

        `elsewhere`: if it sleeps, it wakes on another core than this process's, which is not going
        to sleep.
        """
        lesson = self.messages_to_know(function.digest, function)
        if FEW_CORES and elsewhere and time.monotonic() > self._awake_until:
            self._keep_off_this_core()
        again = [MayUse(sorted(self._cores))] if self._cores else []
        self.frames.send(*again, *lesson, work)
        self._known[function.digest] = None  # not before: an interrupt may keep it from being sent
        self._cores = set()

    def _keep_off_this_core(self) -> None:
        if readable(self.pidfd):
            return  # after its end its pid may be another's
        cores = self._cores or cores_of(self.pid)
        others = cores - {current_core()}
        if others:
            self._cores = cores
            use(others, self.pid)

    def messages_to_know(self, digest: bytes, function: Packed) -> list[Learn | Forget]:
        """What to send it so that it knows a function."""
        if digest in self._known:
            self._known.move_to_end(digest)
            return []
        forgotten = [self._known.popitem(last=False)[0]] if len(self._known) >= _FUNCTIONS else []
        return [*map(Forget, forgotten), Learn(digest, function.payload)]

    def permit(self, number: int) -> None:
        """Let it run so many stretches of its next batch after the first."""
        os.eventfd_write(self._semaphore, number)

    def revoke(self) -> int:
        """Take back the permits that it has not used by now; how many they are."""
        number = 0
        with contextlib.suppress(BlockingIOError):
            while os.eventfd_read(self._semaphore):
                number += 1
        return number

    def forget(self, digest: bytes) -> None:
        """Have it drop a function, if it knows it."""
        if digest in self._known:
            del self._known[digest]
            with contextlib.suppress(Closed):
                self.frames.send(Forget(digest))

    def call_off(self) -> None:
        """End what it does, and have it say when it has answered everything. Raises Closed."""
        self.interrupt()
        self.frames.send(CallOff())

    def receive(self) -> Answer | CalledOff | None:
        """What it says, other than what it logs; None if that is not here yet. Raises Closed."""
        while isinstance(message := self.frames.receive(), Logged):
            replay(message)
        if isinstance(message, Done):
            # where it shares this core, it is moved for its next work as one that sleeps is
            apart = not FEW_CORES or message.core != current_core()
            self._awake_until = time.monotonic() + awake_after(message) if apart else 0.0
        return cast("Answer | CalledOff | None", message)

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
        for descriptor in self._give_up_descriptors():
            os.close(descriptor)

    def abandon(self) -> None:
        """In a forked child: it is the parent's."""
        self.frames.close()
        self.__del__()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """An interrupt may have come where nobody had it yet, or any longer. `close` is still there
        when Python ends and has taken the modules apart."""
        left = [echo.descriptor for echo in self.echoes if echo.descriptor >= 0]
        self.echoes = []
        for descriptor in (*left, *self._give_up_descriptors()):
            close(descriptor)

    def _give_up_descriptors(self) -> list[int]:
        """What is still open of its own: whoever asks for it closes it."""
        both, self.pidfd, self._semaphore = (self.pidfd, self._semaphore), -1, -1
        return [descriptor for descriptor in both if descriptor >= 0]


class Echo:
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
