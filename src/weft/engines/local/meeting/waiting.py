"""Counters in shared memory, and waiting for them without hanging.

The memory model
----------------
Python has no atomic operations. What follows is all that the local engine
relies on, and it holds on x86-64, where `init(engine="local")` checks for it:

1.  A counter is one aligned 8-byte word with one writer. `words[i] = v` on a
    memoryview is a single store and `words[i]` a single load: readers see an
    old value or a new one, never a mixture. Counters only grow.
2.  Stores of one process become visible to the others in program order, and
    loads are made in program order (total store order). So data is written
    first and its counter after; whoever sees the counter sees the data.
3.  A store may still be on its way while a later load of the same process is
    answered. That matters in one place: a publisher stores its counter and
    then looks for sleepers, a sleeper stores its flag and then looks at the
    counter. Each side needs a full fence between the two. The publisher takes
    one by acquiring a lock (a locked instruction); the sleeper's is inside
    the kernel, which compares the counter again before it puts it to sleep.
4.  Everything that has several writers lies under a libc mutex (`locks.py`),
    which orders memory on every processor.

On processors with a weaker order rule 2 fails; there the engine refuses.

    publisher                          waiter
      data                               spin, if there are free cores
      words[i] = n                       flags[me] = 1
      fence                              while words[i] < n:
      any flag set? -> futex_wake            futex_wait, 20 ms at most
                                             peers gone? deadline?  -> error
                                         flags[me] = 0

Sleeping in slices bounds the time until a death is noticed and makes even a
lost wake-up a delay of 20 ms and not a hang. A slice costs some 0.2 ms of CPU:
a rank that waits uses under 1 % of a core. Nobody yields (sched_yield): Linux
counts each yield as a turn of some milliseconds that was used, and beside busy
processes a rank that had yielded 200 times was not run for half a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weft import faults
from weft.engines.local.memory.segment import Block
from weft.engines.local.processes.linux import futex_wait, futex_wake

#: seconds between two looks at peers and deadline
SLICE = 0.02

#: looks at a counter before sleeping: some 80 us, where every rank has a core
_SPINS = 2000


class Waiter:
    """One process's way to publish and await the counters of a block.

    `flags_at` is the byte where the sleepers' flags lie, one for each of `size` places; this
    process writes only the one of its own `place`. One thread waits at a time.
    """

    def __init__(
        self, block: Block, *, flags_at: int, size: int, place: int, free_cores: bool
    ) -> None:
        self._block = block
        self._words = block.words
        self._flags = memoryview(block.buffer).cast("B")[flags_at : flags_at + size]
        self._nobody = bytes(size)
        self._place = place
        self._spins = range(_SPINS if free_cores else 1)
        self._fence = threading.Lock()

    def publish(self, index: int, value: int) -> None:
        """Set a counter of which this process is the writer, and wake who sleeps on it."""
        self._words[index] = value
        self.wake_sleepers(index)

    def wake_sleepers(self, index: int) -> None:
        """Wake who sleeps on a counter that has just been stored."""
        with self._fence:
            pass
        if self._flags != self._nobody:
            self.wake(index)

    def wake(self, index: int) -> None:
        """Have everyone who sleeps on a counter look again."""
        futex_wake(self._block.address + 8 * index)

    def wait(self, index: int, target: int, deadline: float, check: Callable[[], bool]) -> bool:
        """Return True when the counter has reached `target`: spin first, then sleep.

        Between two sleeps `check` is called, which raises if the wait has become hopeless and
        returns True to end it (then False is returned). `deadline`, on the monotonic clock, only
        shortens the sleeps: `check` judges it.
        """
        return self.spin(index, target) or self.sleep(index, target, deadline, check)

    def spin(self, index: int, target: int) -> bool:
        """Whether the counter reaches `target` within a few looks."""
        words = self._words
        for _ in self._spins:  # noqa: SIM110  a generator takes three times as long
            if words[index] >= target:
                return True
        return False

    def sleep(self, index: int, target: int, deadline: float, check: Callable[[], bool]) -> bool:
        """The second half of `wait`."""
        words, address = self._words, self._block.address + 8 * index
        if faults.armed:
            faults.reach("wait.block")
        try:
            while True:
                self._flags[self._place] = 1
                value = words[index]
                if value >= target:
                    return True
                limit = min(SLICE, max(0.0, deadline - time.monotonic()))
                futex_wait(address, value & 0xFFFFFFFF, limit)
                # a peer may have arrived and then ended: `check` first, the counter after
                if words[index] < target and check() and words[index] < target:
                    return False
        finally:
            self._flags[self._place] = 0
