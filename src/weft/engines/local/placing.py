"""Keeping two processes from sharing a core while another is idle.

On a machine of few cores Linux wakes a sleeper on the core of whoever wakes it, and starts a
process on that of its parent. For one that is to work at the same time, or that the other waits
for awake, that is the wrong one: on one core the two take turns, by the slices of the scheduler,
and a call of 90 us takes 240.

    driver                                worker
                                          sleeps
    notes which cores it may use
    use: all but this one
    sends: use these ────────────────>    wakes elsewhere; use: these

What was woken stays where it is. For one that sleeps it is cheap, as it runs nowhere yet. The
worker itself takes it back, before it does anything else: so nothing that a user's function starts
or chooses is changed. One that has come to the driver's core all the same says so with its answer,
and is moved by its next work, also if it is awake.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from weft.engines.interrupts import by_signal_handler
from weft.engines.local.libc import current_core

#: With two cores a sleeper always woke on the core of who woke it, with 16 never, and there it
#: takes 45 us to keep it off.
FEW_CORES = (os.cpu_count() or 1) <= 4


def cores_of(pid: int) -> set[int]:
    """Which cores a process may use; none if it has ended."""
    try:
        return os.sched_getaffinity(pid)
    except OSError as error:
        if by_signal_handler(error):
            raise
        return set()


def use(cores: Iterable[int], pid: int = 0) -> None:
    """Have a process, or this one, use these cores, if there are any of them and it may."""
    try:
        if cores:
            os.sched_setaffinity(pid, cores)
    except OSError as error:  # it has ended, or they were taken away from it
        if by_signal_handler(error):
            raise


def move_off_this_core(pid: int) -> None:
    """Have a process that has just been started go on on another core than this thread's."""
    if FEW_CORES:
        cores = cores_of(pid)
        use(cores - {current_core()}, pid)
        use(cores, pid)
