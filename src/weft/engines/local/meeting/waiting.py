"""Counters in shared memory, and waits for them that never hang.

The memory model
----------------
Python has no atomic operations. The local engine relies on the following only,
which holds on x86-64; `init(engine="local")` checks for that:

1.  A counter is one aligned 8-byte word with one writer. `words[i] = v` on a
    memoryview is a single store and `words[i]` a single load: readers see an
    old value or a new one, never a mixture. Counters only grow.
2.  Stores of one process become visible to the others in program order, and
    loads are made in program order (total store order). So data is written
    first and its counter after; whoever sees the counter sees the data.
3.  A load may complete before an earlier store of the same process is visible.
    That matters in one place: a publisher stores its counter and then reads
    the sleepers' flags, a sleeper stores its flag and then reads the counter.
    Each side needs a full fence in between. The publisher gets one by
    acquiring a lock (a locked instruction); the sleeper's is inside the
    futex call, which compares the counter again before it sleeps.
4.  Words with several writers are protected by a libc mutex (`locks.py`),
    which orders memory on every processor.

On processors with a weaker order rule 2 fails, and the engine refuses to start.

    publisher                          waiter
      data                               spin, if there are free cores
      words[i] = n                       flags[me] = 1
      fence                              while words[i] < n:
      any flag set? -> futex_wake            futex_wait, 20 ms at most
                                             peers gone? deadline?  -> error
                                         flags[me] = 0

Sleeping in slices bounds the time until a death is noticed, and makes even a
lost wake-up a delay of 20 ms and not a hang. A slice costs some 0.2 ms of CPU:
a waiting rank uses under 1 % of a core. No rank calls sched_yield: Linux charges
each yield as a time slice of some milliseconds, and beside busy processes a rank
that had yielded 200 times was not run for half a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weft import faults
from weft.engines.local.memory.segment import Block
from weft.engines.local.processes.linux import futex_wait, futex_wake

#: seconds between two checks of peers and deadline
SLICE = 0.02
#: spins on a counter before sleeping, where every rank has a core: some 80 us
_SPINS = 2000


class Waiter:
    """One process's access to the counters of a block: publish its own, wait for the others'.
    `flags_at` is the byte offset of the sleepers' flags, one for each of `size` places; this
    process writes only that of its own `place`. One thread waits at a time."""

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
        """Set a counter that this process owns, and wake its sleepers."""
        self._words[index] = value
        self.wake_sleepers(index)

    def wake_sleepers(self, index: int) -> None:
        """Wake the sleepers of a counter that has just been stored."""
        with self._fence:
            pass
        if self._flags != self._nobody:
            self.wake(index)

    def wake(self, index: int) -> None:
        """Wake everyone who sleeps on a counter, so that they check again."""
        futex_wake(self._block.address + 8 * index)

    def wait(self, index: int, target: int, deadline: float, check: Callable[[], bool]) -> bool:
        """Wait until the counter has reached `target`: spin first, then sleep. Return True.

        Between two sleeps `check` is called: it raises if the wait has become hopeless, and returns
        True to end it, in which case this returns False. `deadline`, on the monotonic clock, only
        shortens the sleeps; enforcing it is up to `check`.
        """
        return self.spin(index, target) or self.sleep(index, target, deadline, check)

    def spin(self, index: int, target: int) -> bool:
        """Return whether the counter reaches `target` while spinning."""
        words = self._words
        for _ in self._spins:  # noqa: SIM110  a generator takes three times as long
            if words[index] >= target:
                return True
        return False

    def sleep(self, index: int, target: int, deadline: float, check: Callable[[], bool]) -> bool:
        """Do the second half of `wait`: sleep until the counter has reached `target`."""
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
                # a peer may have arrived and then ended: call `check` first, read the counter after
                if words[index] < target and check() and words[index] < target:
                    return False
        finally:
            self._flags[self._place] = 0
