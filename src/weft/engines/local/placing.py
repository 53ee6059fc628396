"""On which core a process wakes.

A kernel that knows little of its processor, as in many virtual machines, wakes a sleeper on the
core of whoever wakes it. For one that is to work at the same time, or whom the other waits for
awake, that is the wrong one: on one core the two of them take turns, by the slices of the
scheduler, while another core is idle, and a call of 90 us takes 240. So the sleeper may not use
this core at the moment when it is woken. It is soon said, as it runs nowhere yet, and once it runs
it stays where it is.

A process that has just been started is on the core of its parent too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from weft.engines.local.libc import current_core


class Placing:
    """Where one process, whose own affairs this is not, is woken."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        #: what it may use, while it may not use all of it: an interrupt may come in between
        self._cores: set[int] | None = None

    def wake_elsewhere(self, wake: Callable[[], None]) -> None:
        """Call `wake`, which wakes the process, with this core barred to it if it has another."""
        try:
            self._bar_this_core()
            wake()
        finally:
            self._unbar()

    def move(self) -> None:
        """Have the process, which runs, go on on another core than this thread's."""
        self.wake_elsewhere(lambda: None)

    def _bar_this_core(self) -> None:
        with contextlib.suppress(OSError):  # it has ended, or nobody may do this here
            cores = self._cores or os.sched_getaffinity(self._pid)
            others = cores - {current_core()}
            if others and others != cores:
                self._cores = cores
                os.sched_setaffinity(self._pid, others)

    def _unbar(self) -> None:
        if self._cores is not None:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._pid, self._cores)
            self._cores = None
