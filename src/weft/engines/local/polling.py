"""Waiting for descriptors: asleep, or awake for as long as falling asleep would take."""

from __future__ import annotations

import os
import select
import time

from weft._core.work import Done

#: seconds in which a message comes sooner to who stays awake: to be put to sleep and woken takes
#: as long
BRIEF = 0.0002
#: after a call a worker stays awake for this part of the time that the call took, and at least and
#: at most so many seconds. At least: what the driver does between two short calls takes ten times
#: as long when its caches are cold, and a worker that sleeps by then makes the next one cold too
_PART, _SHORTEST, _LONGEST = 1 / 40, 0.0005, 0.001


def readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether there is something to read; of a pidfd: whether the process has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def awake_after(answer: object) -> float:
    """Seconds for which a worker looks for its next message awake after this answer: the next call
    often follows at once. After long calls a small part of their time."""
    if not isinstance(answer, Done):
        return 0.0
    return max(_SHORTEST, min(_PART * answer.seconds, _LONGEST))


def poll_awake(poll: select.poll, seconds: float = BRIEF) -> list[tuple[int, int]]:
    """What is ready within so many seconds, as `poll.poll` returns it."""
    until = time.perf_counter() + seconds
    while not (ready := poll.poll(0)) and time.perf_counter() < until:
        os.sched_yield()  # the one that is to answer may be waiting for this core
    return ready
