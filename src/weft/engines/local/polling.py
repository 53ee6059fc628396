"""Waiting for descriptors: asleep, or awake for as long as falling asleep would take."""

from __future__ import annotations

import os
import select
import time

from weft._core.work import Done

#: seconds in which a message comes sooner to who stays awake: to be put to sleep and woken takes
#: as long
BRIEF = 0.0002


def readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether there is something to read; of a pidfd: whether the process has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def stays_awake(answer: object) -> bool:
    """Whether a worker that has given this answer looks for its next message awake: after a short
    call there often comes another."""
    return isinstance(answer, Done) and answer.seconds < BRIEF


def poll_awake(poll: select.poll) -> list[tuple[int, int]]:
    """What is ready within BRIEF, as `poll.poll` returns it."""
    until = time.perf_counter() + BRIEF
    while not (ready := poll.poll(0)) and time.perf_counter() < until:
        os.sched_yield()  # the one that is to answer may be waiting for this core
    return ready
