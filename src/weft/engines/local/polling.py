"""Looking whether a descriptor has something to read."""

from __future__ import annotations

import select


def readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether there is something to read; of a pidfd: whether the process has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
