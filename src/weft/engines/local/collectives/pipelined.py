"""Pipelined sums and broadcasts of large arrays: in chunks through memory that all ranks map.

PipelinedMemory runs them on one rank, PipelinedWork is this rank's part of one. A kernel in C does
the work and spins while it has to wait for the others (kernels.c has the drawing). When it has spun
in vain, PipelinedMemory checks that the others are alive, and sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from weft import faults, kernels
from weft._core.arithmetic import Array, address
from weft._core.calls import LINE, Call, Reduce
from weft.engines.local.meeting.meeting import UNDER_WAY, Meeting, make_block
from weft.engines.local.meeting.waiting import SLICE
from weft.engines.local.memory.segment import Block

#: chunks that a kernel writes, sums or reads before it returns to Python, which handles signals
_STEPS = 64
#: spins without progress before sleeping, where every rank has a core: some 100 us
_SPINS = 2000
#: seconds of the first sleep; each further one without progress is twice as long
_NAP = 5e-5
#: broadcasts between 2 ranks that are left to the operating system, once their cores were found to
#: share no cache, before that is tried again
_LEFT_TO_SYSTEM = 15


class PipelinedMemory:
    """The pipelined sums and broadcasts of one group, on one rank. They read and write only this
    memory: no rank accesses another's arrays."""

    def __init__(self, meeting: Meeting, seconds: float) -> None:
        """Make the memory, with all ranks. Raises SetupError, on every rank, if one cannot."""
        rank, ranks = meeting.rank, len(meeting.members)
        self._meeting = meeting
        self._others = [other for other in range(ranks) if other != rank]
        self._spins = _SPINS if meeting.free_cores else 1
        #: how many chunks have gone through this memory
        self._chunks = 0
        #: how many of the next broadcasts between 2 ranks are left to the operating system
        self._left_to_system = 0
        self._block = make_block(
            meeting,
            UNDER_WAY,
            leader=meeting.members[0],
            size=bytes_for(ranks),
            seconds=seconds,
            prepare=Block.clear,
            point="collective.made",
        )
        self._memory = Memory(self._block.address, rank, ranks)

    def sum(self, source: Array, target: Array | None, *, mean: bool, deadline: float) -> None:
        """Sum the ranks' arrays, or take their mean."""
        source = source if source.flags.aligned else source.copy()
        work = PipelinedWork.sum(
            self._memory, self._chunks, source=source, target=target, mean=mean
        )
        self._carry_out(work, deadline)

    def broadcast(
        self, root: int, source: Array | None, target: Array | None, *, deadline: float
    ) -> None:
        """Copy the root's source to the others' targets."""
        work = PipelinedWork.broadcast(
            self._memory, self._chunks, root=root, source=source, target=target
        )
        self._carry_out(work, deadline)
        self._left_to_system = _LEFT_TO_SYSTEM if work.past_cache else 0

    def leave_to_system(self) -> bool:
        """Return whether the operating system is to copy this broadcast, which is quicker with 2
        ranks whose cores share no cache. All ranks ask once per broadcast, and get one answer."""
        if len(self._others) > 1 or not self._left_to_system:
            return False
        self._left_to_system -= 1
        if not self._left_to_system:
            kernels.pipelined_use_cache(self._memory.address, self._memory.rank)
        return True

    def _carry_out(self, work: PipelinedWork, deadline: float) -> None:
        self._chunks = work.after
        progress, nap = 0, 0.0
        while True:
            steps = _STEPS
            if faults.armed:
                faults.reach("collective.block")
                steps = 1  # so that the fault point lies between any two chunks
            if work.advance(steps, 1 if nap else self._spins):
                return
            if work.progress != progress:
                progress, nap = work.progress, 0.0
                continue
            self._check_others(work, deadline)
            nap = min(2 * nap or _NAP, SLICE)
            time.sleep(nap)

    def _check_others(self, work: PipelinedWork, deadline: float) -> None:
        """Raise if a rank that is waited for is gone, or if the deadline has passed."""
        self._meeting.validate_present()
        waited_for = [rank for rank in self._others if not work.is_done_by(rank)]
        for rank in waited_for:
            lost = self._meeting.lost_error(rank)
            # a rank may have finished and then ended: check again
            if lost is not None and not work.is_done_by(rank):
                raise lost
        if waited_for and time.monotonic() >= deadline:
            raise self._meeting.stalled_error(waited_for)


#: bytes of a chunk: several of them fit a cache of a few megabytes. Measured (docs/performance.md).
_CHUNK = 512 << 10
#: bytes of one chunk of every rank together, where there are many ranks
_ALL_CHUNKS = 32 << 20
#: cores share a cache if writing a chunk takes at most so many times as long as reading one: about
#: as long if they do, 5 to 10 times as long if they do not
_SLOW = 4
_MEANS = ("float32", "float64")


def has_kernels() -> bool:
    """Return whether this process has the kernels. All ranks of a group must have them."""
    return not kernels.missing()


def can_pipeline(call: Call) -> bool:
    """Return whether a call is a reduction that the kernels can carry out."""
    return (
        isinstance(call, Reduce)
        and not call.own
        and kernels_apply(call.op, call.source, call.elements)
    )


def kernels_apply(op: str, arrays: Sequence[Array], elements: Sequence[str]) -> bool:
    """Return whether there are kernels for `op` on these arrays, whose numbers are `elements`."""
    if op not in ("sum", "mean"):
        return False
    return all(
        array.dtype.isnative
        and array.dtype.name == element
        and (op == "sum" or element in _MEANS)
        and kernels.pipelined_sum_kernel(element) is not None
        for array, element in zip(arrays, elements, strict=True)
    )


def bytes_for(ranks: int) -> int:
    """Return the bytes of the memory of so many ranks."""
    return kernels.pipelined_bytes(ranks, _chunk_for(ranks))


def _chunk_for(ranks: int) -> int:
    """Return the bytes of a chunk: the same number of cache lines for each rank."""
    lines = min(_CHUNK, _ALL_CHUNKS // ranks) // LINE
    return max(1, lines // ranks) * ranks * LINE


class Memory(NamedTuple):
    """The shared memory, as one rank sees it."""

    #: where this rank maps it; zeroed before its first use
    address: int
    rank: int
    ranks: int


class PipelinedWork:
    """One rank's part in one sum or broadcast. `before` is the `after` of the previous work in the
    same memory. Arrays are flat."""

    def __init__(
        self,
        memory: Memory,
        before: int,
        kernel: kernels.Advance | None,
        *,
        source: Array | None,
        target: Array | None,
        **how: float,
    ) -> None:
        if kernel is None:
            raise TypeError(f"there is no kernel for {'any' if source is None else source.dtype}")
        size = source.nbytes if source is not None else 0 if target is None else target.nbytes
        chunk = _chunk_for(memory.ranks)
        chunks = -(-size // chunk)
        self.after = before + chunks
        self._kernel = kernel
        self._arrays = source, target  # the kernel has their addresses: keep them alive
        self._work = kernels.PipelinedState(
            rank=memory.rank,
            ranks=memory.ranks,
            source=None if source is None else address(source),
            target=None if target is None else address(target),
            size=size,
            memory=memory.address,
            chunk=chunk,
            chunks=chunks,
            before=before,
            slow=_SLOW,
            **how,
        )

    @classmethod
    def sum(
        cls, memory: Memory, before: int, *, source: Array, target: Array | None, mean: bool = False
    ) -> PipelinedWork:
        """Return the work of a sum, or a mean, of all ranks' sources. Arrays are aligned; source
        and target are the same or do not overlap; a rank without a target gets no result."""
        kernel = kernels.pipelined_sum_kernel(source.dtype.name)
        divisor = memory.ranks if mean else 1
        return cls(memory, before, kernel, source=source, target=target, divisor=divisor)

    @classmethod
    def broadcast(
        cls, memory: Memory, before: int, *, root: int, source: Array | None, target: Array | None
    ) -> PipelinedWork:
        """Return the work of copying the root's source to the others' targets."""
        kernel = kernels.pipelined_broadcast_kernel()
        return cls(memory, before, kernel, source=source, target=target, root=root)

    def advance(self, steps: int, spins: int) -> bool:
        """Write, sum or read up to `steps` chunks; stop after `spins` spins in a row without
        progress. Return whether all is done."""
        return bool(self._kernel(self._work, steps, spins))

    @property
    def progress(self) -> int:
        """Return a count that grows with every chunk that is written, summed or read."""
        return int(self._work.given + self._work.added + self._work.taken)

    @property
    def past_cache(self) -> bool:
        """Return, when all is done, whether cores were found to share no cache and non-temporal
        stores are used. The same on all ranks, if asked before their next meeting."""
        return kernels.pipelined_past_cache(self._work)

    def is_done_by(self, rank: int) -> bool:
        """Return whether a rank has finished its part."""
        return kernels.pipelined_is_done(self._work, rank)
