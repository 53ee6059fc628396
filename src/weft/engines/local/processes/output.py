"""Printed lines and log records, relayed to the launcher or the driver.

Printed: a rank's stdout and stderr reach the launcher's own by `Stream`, a worker's reach the
driver's by `OutputRelay`; both print whole lines (`Lines`), so that those of several processes are
not mixed.

Logged: a worker's `LogForwarder` sends each record to the driver, whose own handlers and levels
decide (`replay`).

Where the driver is on another host, this process passes both on to it (`pass_on`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TextIO

from weft.engines.interruption import by_signal_handler

#: a line longer than this is printed in pieces
_LONGEST = 1 << 16
#: bytes of output read at once, as many as a pipe holds, and how often before others get a turn
_READ, _READS = 1 << 16, 16
#: the types of a log record's values that are sent
_PLAIN = (str, int, float, bool, type(None))


class Stream:
    """One rank's stdout or stderr on its way to the launcher's own."""

    def __init__(self, prefix: str, target: TextIO, last: deque[str]) -> None:
        self._prefix = prefix.encode()
        self._target = target
        self._last = last
        self._lines = Lines()

    def feed(self, data: bytes) -> None:
        """Print the lines that are complete. Raises OSError if the launcher's output is closed."""
        self._print(self._lines.feed(data))

    def finish(self) -> None:
        """Print what is left at the end of the stream."""
        self._print(self._lines.finish())

    def _print(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._last.extend(
            line.decode(errors="replace").rstrip("\r\n") for line in lines if line.strip()
        )
        self._target.flush()
        write_all(self._target.fileno(), b"".join(self._prefix + line for line in lines))


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, even to a terminal that another process has made non-blocking."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


class Outlet(Protocol):
    """Takes what workers print and log, in the place of this process."""

    def print(self, stream: str, worker: int, text: str) -> None:
        """Take whole lines that a worker has printed to "stdout" or "stderr"."""

    def note(self, worker: int, message: Any) -> None:
        """Take a worker's log record or warning."""


#: where output goes instead of this process's own streams, handlers and rules
outlet: Outlet | None = None


def pass_on(to: Outlet | None) -> None:
    """Give `to` all that workers print and log from now on; None: print it in this process."""
    global outlet
    outlet = to


class OutputRelay:
    """A worker's stdout or stderr, line by line into this process's own."""

    def __init__(self, descriptor: int, name: str, worker: int) -> None:
        self.descriptor = descriptor
        self._name = name
        self._worker = worker
        self._lines = Lines()
        os.set_blocking(descriptor, False)

    def read(self) -> bool:
        """Print the lines that have come. Return whether there may be more to come. Returns after
        some reads even if the worker prints without a pause: others need a turn."""
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
        """Print what has come and close the descriptor. Does nothing twice."""
        if self.descriptor >= 0:
            self.read()
            self._print(self._lines.finish())
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def _print(self, lines: list[bytes]) -> None:
        if not lines:
            return
        text = b"".join(lines).decode(errors="backslashreplace")
        if outlet is not None:
            outlet.print(self._name, self._worker, text)
        else:
            print_to(self._name, text)


def print_to(name: str, text: str) -> None:
    """Print text to this process's "stdout" or "stderr", above progress bars."""
    stream: TextIO | None = getattr(sys, name)  # now: it may have been replaced
    if stream is not None:
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
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def clear_of_bars(stream: TextIO) -> contextlib.AbstractContextManager[None]:
    """Return a context in which tqdm hides its progress bars, so that text can be printed."""
    bar: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if not getattr(bar, "_instances", None):
        return contextlib.nullcontext()
    without_bars: contextlib.AbstractContextManager[None] = bar.external_write_mode(file=stream)
    return without_bars


class Lines:
    """Cuts a stream of bytes into lines. Pure."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, with their ends; a carriage return is one too."""
        lines = (self._rest + data).splitlines(keepends=True)
        self._rest = b""
        if lines and not lines[-1].endswith(b"\n") and len(lines[-1]) < _LONGEST:
            self._rest = lines.pop()
        return lines

    def finish(self) -> list[bytes]:
        """Return what is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return [rest + b"\n"] if rest else []


class Logged(NamedTuple):
    """A log record on its way from a worker to its driver."""

    record: dict[str, Any]


class LogForwarder(logging.Handler):
    """In the worker: sends what is logged."""

    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record."""
        try:
            self._send(Logged(_as_values(record)))
        except Exception:
            self.handleError(record)


def _as_values(record: logging.LogRecord) -> dict[str, Any]:
    """Return what can be sent of a record; its arguments and its traceback become text."""
    values = {name: value for name, value in vars(record).items() if isinstance(value, _PLAIN)}
    values |= {"msg": record.getMessage(), "args": None}
    if record.exc_info and not record.exc_text:
        values["exc_text"] = logging.Formatter().formatException(record.exc_info)
    return values


def replay(logged: Logged) -> None:
    """Handle a worker's record, in the driver, as if it had been logged here."""
    record = logging.makeLogRecord(logged.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        with clear_of_bars(sys.stderr):
            logger.handle(record)
