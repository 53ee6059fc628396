"""A sum that several processes make together, by a loop in C (kernels.c draws it)."""

from __future__ import annotations

from collections.abc import Sequence

from weft import kernels
from weft._core.elements import Array
from weft._core.split import LINE
from weft._core.values import address

#: bytes of the first chunk, of each rank: enough to be timed
_FIRST = 64 << 10
#: bytes of the others: few enough for some of them to stay in a cache of a few megabytes. Measured
#: (docs/performance.md).
_CHUNK = 512 << 10
#: bytes of one chunk of all ranks together, where there are many
_ALL_CHUNKS = 32 << 20
#: Nanoseconds that adding a kilobyte of one other rank's may take where cores share a cache. It
#: takes 30 to 100 there, and 250 to 1,000 where they do not.
_SLOWEST = 240

_MEANS = ("float32", "float64")


def has_loops() -> bool:
    """Whether this process can take part in joint sums: all of a group's must."""
    return not kernels.missing()


def can_join(op: str, arrays: Sequence[Array], elements: Sequence[str]) -> bool:
    """Whether arrays like these can be summed jointly; `elements` are what their numbers are."""
    if op not in ("sum", "mean"):
        return False
    return all(
        array.dtype.isnative
        and array.dtype.name == element
        and (op == "sum" or element in _MEANS)
        and kernels.joint_sum_loop(element) is not None
        for array, element in zip(arrays, elements, strict=True)
    )


def bytes_for(ranks: int) -> int:
    """The bytes of the memory that ranks sum in."""
    return kernels.joint_sum_bytes(ranks, *_chunks_for(ranks))


def _chunks_for(ranks: int) -> tuple[int, int]:
    """The bytes of the first chunk and of the others: as many lines for each rank."""
    most = _ALL_CHUNKS // ranks
    first, chunk = (
        max(1, min(size, most) // LINE // ranks) * ranks * LINE for size in (_FIRST, _CHUNK)
    )
    return first, chunk


class JointSum:
    """One rank's part in one sum.

    `memory` is seen by all ranks, and was zero before their first sum there. `before` is the
    `after` of the sum before; the ranks have met since.
    """

    def __init__(
        self,
        memory: int,
        before: int,
        *,
        rank: int,
        ranks: int,
        source: Array,
        target: Array | None,
        mean: bool = False,
    ) -> None:
        """Source and target are flat and aligned, and the same or apart; a rank without a target
        gets no result. It can be the mean instead of the sum."""
        loop = kernels.joint_sum_loop(source.dtype.name)
        if loop is None:
            raise TypeError(f"there is no loop that sums arrays of {source.dtype}")
        first, chunk = _chunks_for(ranks)
        chunks = 1 + max(0, -(-(source.nbytes - first) // chunk))
        self.after = before + chunks
        self._loop = loop
        self._arrays = source, target  # which must live as long
        self._sum = kernels.JointSum(
            rank=rank,
            ranks=ranks,
            source=address(source),
            target=None if target is None else address(target),
            size=source.nbytes,
            divisor=ranks if mean else 1,
            memory=memory,
            first=first,
            chunk=chunk,
            chunks=chunks,
            before=before,
            slowest=_SLOWEST,
        )

    def go_on(self, steps: int, looks: int, awake: int) -> bool:
        """Do what can be done: give, add up or take over `steps` chunks, or until at `looks` looks
        in a row there was nothing; after the first `awake` of these leave the core to others.
        Whether all is done."""
        return bool(self._loop(self._sum, steps, looks, awake))

    @property
    def progress(self) -> int:
        """What grows with whatever is done."""
        done: int = self._sum.given + self._sum.added + self._sum.taken
        return done

    def is_done_by(self, rank: int) -> bool:
        """Whether a rank needs nobody any more, nor is needed."""
        return kernels.joint_sum_is_done(self._sum, rank)
