"""Which rank gets what: rows, and bytes in blocks. Functions of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from weft._core.elements import Array

#: where arrays of one call begin in their common buffer; every item size divides it
LINE = 64


def part_of(length: int, size: int, rank: int) -> tuple[int, int]:
    """The rows `start` to `stop` that one of `size` ranks gets of `length`.

    Parts are contiguous and in rank order; they differ by one row at most, the first ones are
    the longer.

    >>> [part_of(7, 3, rank) for rank in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    >>> part_of(1, 3, 2)
    (1, 1)
    """
    each, more = divmod(length, size)
    return each * rank + min(rank, more), each * (rank + 1) + min(rank + 1, more)


class Piece(NamedTuple):
    """A part of one array: its bytes `start` to `stop`, which lie at `at` in some window."""

    array: int
    start: int
    stop: int
    at: int


class Layout:
    """Several arrays as one flat buffer: each begins on a line of its own.

    >>> layout = Layout([100, 8])
    >>> layout.starts, layout.size
    ((0, 128), 136)
    >>> layout.window(64, 192)
    [Piece(array=0, start=64, stop=100, at=0), Piece(array=1, start=0, stop=8, at=64)]
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        starts, end = [], 0
        for size in self.sizes:
            start = -(-end // LINE) * LINE
            starts.append(start)
            end = start + size
        self.starts = tuple(starts)
        #: bytes from the beginning of the first array to the end of the last
        self.size = end
        #: all of it
        self.pieces = self.window(0, end)

    def window(self, first: int, last: int) -> list[Piece]:
        """What lies between two places of the buffer; `at` counts from the first."""
        pieces = []
        for index, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            low, high = max(first, start), min(last, start + size)
            if low < high:
                pieces.append(Piece(index, low - start, high - start, low - first))
        return pieces

    def blocks_of(self, rank: int, size: int, block: int) -> Iterator[Piece]:
        """The blocks that one of `size` ranks works on: every byte is in one block of one rank.

        Blocks are cut on lines, so that no element is in two of them; a block is of one array.
        """
        lines = -(-self.size // LINE)
        first, last = part_of(lines, size, rank)
        for index, start, stop, _ in self.window(first * LINE, last * LINE):
            for begin in range(start, stop, block):
                yield Piece(index, begin, min(begin + block, stop), 0)


def elements(arrays: Sequence[Array], piece: Piece) -> Array:
    """The elements of a piece, as a view."""
    array = arrays[piece.array]
    if piece.stop - piece.start == array.nbytes:
        return array
    width = array.dtype.itemsize
    return array[piece.start // width : piece.stop // width]


@lru_cache(maxsize=256)
def layout_of(sizes: tuple[int, ...]) -> Layout:
    """The layout of arrays of these sizes; calls are often alike."""
    return Layout(sizes)
