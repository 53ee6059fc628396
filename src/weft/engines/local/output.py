"""What ranks print, line by line and not mixed."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections import deque
from typing import Any, TextIO

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
        _write(self._target.fileno(), b"".join(self._prefix + line for line in lines))


def _write(descriptor: int, data: bytes) -> None:
    """All of it, even where the terminal was made non-blocking by somebody who shares it."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
