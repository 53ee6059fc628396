"""The keeper thread's sockets, and the bell that wakes it."""

from __future__ import annotations

import os
import select
import time

from weft.engines.local.channel import Channel, Listener
from weft.engines.local.processes import this_process
from weft.engines.local.references import Source
from weft.engines.local.translation import translated
from weft.errors import WeftError

#: seconds between two tries of something that is impossible just now
PAUSE = 0.02


class Sockets:
    """Where others ask for blocks, and those who have asked."""

    def __init__(self, bell: int) -> None:
        process = this_process()
        self.source = Source(f"{os.geteuid()}/{os.urandom(8).hex()}", process.pid, process.start)
        self._listener = Listener(self.source.address)
        self._bell = bell
        self.channels: dict[int, Channel] = {}

    def wait(self, seconds: float | None, watched: list[int]) -> list[Channel]:
        """Channels with something to read. Returns early for the bell and the watched."""
        poll = select.poll()
        for descriptor in (self._listener.fileno(), self._bell, *watched, *self.channels):
            poll.register(descriptor, select.POLLIN)
        longest = None if seconds is None else max(0.0, seconds) * 1000 + 1
        ready = [fd for fd, _ in poll.poll(longest)]
        if self._bell in ready:
            os.eventfd_read(self._bell)
        if self._listener.fileno() in ready:
            try:
                channel = self._listener.accept()
            except (WeftError, OSError):  # no descriptor is left: the caller waits until one is
                time.sleep(PAUSE)
                channel = None
            if channel is not None:
                self.channels[channel.fileno()] = channel
        return [self.channels[fd] for fd in ready if fd in self.channels]

    def forget(self, channel: Channel) -> None:
        self.channels.pop(channel.fileno(), None)
        channel.close()

    def close(self) -> None:
        self._listener.close()
        for channel in list(self.channels.values()):
            self.forget(channel)


def open_bell() -> int:
    """An eventfd: whoever adds to it wakes the thread."""
    try:
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError as error:
        raise translated(error) from error
