"""What ranks print, line by line and not mixed.

What workers log: each record goes to the driver, whose own handlers and levels decide.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

from weft.engines.interruption import by_signal_handler

#: a line longer than this is printed in pieces
_LONGEST = 1 << 16


class Lines:
    """Cuts a stream of bytes into lines. Pure."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, with their ends; a carriage return ends a line too."""
        lines = (self._rest + data).splitlines(keepends=True)
        self._rest = b""
        if lines and not lines[-1].endswith(b"\n") and len(lines[-1]) < _LONGEST:
            self._rest = lines.pop()
        return lines

    def finish(self) -> list[bytes]:
        """What is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return [rest + b"\n"] if rest else []


def clear_of_bars(stream: TextIO | None = None) -> contextlib.AbstractContextManager[None]:
    """While something is printed to a stream, the bars of tqdm that are shown make room for it."""
    bar: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if not getattr(bar, "_instances", None):
        return contextlib.nullcontext()
    shown: contextlib.AbstractContextManager[None] = bar.external_write_mode(file=stream)
    return shown


class Stream:
    """One rank's stdout or stderr on its way to the launcher's own."""

    def __init__(self, prefix: str, target: TextIO, last: deque[str]) -> None:
        self._prefix = prefix.encode()
        self._target = target
        self._last = last
        self._lines = Lines()

    def feed(self, data: bytes) -> None:
        """Print what is complete. Raises OSError when the launcher's own output is closed."""
        self._print(self._lines.feed(data))

    def finish(self) -> None:
        self._print(self._lines.finish())

    def _print(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._last.extend(
            line.decode(errors="replace").rstrip("\r\n") for line in lines if line.strip()
        )
        self._target.flush()
        _write_all(self._target.fileno(), b"".join(self._prefix + line for line in lines))


def _write_all(descriptor: int, data: bytes) -> None:
    """All of it, even where the terminal was made non-blocking by somebody who shares it."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


_PLAIN = (str, int, float, bool, type(None))


def level_here() -> int:
    """From which level on workers need to say anything."""
    loaded = sys.modules.get("logging")
    return logging.WARNING if loaded is None else logging.getLogger().level


class Logged(NamedTuple):
    """A log record on its way from a worker to its driver."""

    record: dict[str, Any]


class LogForwarder(logging.Handler):
    """In the worker: sends what is logged."""

    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(Logged(_as_values(record)))
        except Exception:
            self.handleError(record)


def _as_values(record: logging.LogRecord) -> dict[str, Any]:
    """A record without what cannot travel: its arguments and its traceback become text."""
    values = {name: value for name, value in vars(record).items() if isinstance(value, _PLAIN)}
    values |= {"msg": record.getMessage(), "args": None}
    if record.exc_info and not record.exc_text:
        values["exc_text"] = logging.Formatter().formatException(record.exc_info)
    return values


def replay(logged: Logged) -> None:
    """In the driver: as if it had been logged here."""
    record = logging.makeLogRecord(logged.record)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        with clear_of_bars(sys.stderr):
            logger.handle(record)


#: bytes of its output at once, as many as a pipe holds, and how often without a look at the others
_READ, _READS = 1 << 16, 16


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
