"""A sum that several processes make together, by a loop in C (kernels.c draws it)."""

from __future__ import annotations

from collections.abc import Sequence

from weft import kernels
from weft._core.elements import Array
from weft._core.split import LINE
from weft._core.values import address

#: bytes of a chunk: few enough for some of them to stay in a cache of a few megabytes. Measured
#: (docs/performance.md).
_CHUNK = 512 << 10
#: bytes of one chunk of all ranks together, where there are many
_ALL_CHUNKS = 32 << 20
#: Nanoseconds for a kilobyte that a cache which the cores share takes in less: 25 to 60, and 80 to
#: 110 for a first chunk. Where they share none it takes 150 to 500.
_SLOW = 140

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
    return kernels.joint_sum_bytes(ranks, _chunk_for(ranks))


def _chunk_for(ranks: int) -> int:
    """The bytes of a chunk: as many lines for each rank."""
    lines = min(_CHUNK, _ALL_CHUNKS // ranks) // LINE
    return max(1, lines // ranks) * ranks * LINE


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
        chunk = _chunk_for(ranks)
        chunks = -(-source.nbytes // chunk)
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
            chunk=chunk,
            chunks=chunks,
            before=before,
            slow=_SLOW,
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
