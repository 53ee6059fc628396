"""How a table's rows are divided over hosts, what a call sends to which host, and when. Pure.

Each host keeps consecutive rows, its part. A part is cut into stripes: runs of rows of a lock each,
which are also the pieces in which all rows travel. What is sent for some rows is cut so that ids
and rows of a piece fit into one message:

    rows      0 ................ 500 ................ 1000      part_of: the first hosts have more
    hosts     [       0        ] [        1         ]
    stripes   [   ][   ][   ][ ] [   ][   ][   ][  ]            `room` bytes each, or one row
    some      [3 17 499 ...]     [501 502 ...]                  in the order in which they are named

An add has taken effect on every host before its rank counts it, on its own host. What each rank of
a host has counted is told to the other hosts, in one message for all that is new: at once where
others may wait for it, and at most so often else. So whoever sees a count may rely on what was
added, wherever it is.

A copy of rows knows up to which clock it has everybody's adds: the smallest count when the rows
were read. A rank that has made `own` adds accepts it by ssp(k) if that is `own - k` or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from weft._core.partition import part_of
from weft._core.tables import Consistency, Ids

#: messages of one rank that are under way at a time
WINDOW = 4
#: bytes of rows in a message: at most, at least, and of all messages that a host's ranks have room
#: for
_LARGEST, _SMALLEST, _ALL = 4 << 20, 256 << 10, 256 << 20
#: bytes of a row's id
ID_BYTES = 8
#: seconds between two messages that tell of adds for which nobody waits
TELLING_SECONDS = 0.002


def room_for(ranks: int, row_nbytes: int = 1) -> int:
    """Return the bytes of rows and ids in one message, where so many ranks of a host send and
    receive: if one row is larger, the next power of two, so that few sizes are ever needed."""
    each = max(_SMALLEST, min(_LARGEST, _ALL // (WINDOW * ranks) // 4096 * 4096))
    row = row_nbytes + ID_BYTES
    return each if row <= each else 1 << (row - 1).bit_length()


class Piece(NamedTuple):
    """Consecutive rows of one host's part, numbered from the first of the part."""

    host: int
    low: int
    high: int


class Share(NamedTuple):
    """Name those of some rows that are on one host."""

    host: int
    #: where they are among all that were named; None for all
    positions: Ids | None
    #: numbered from the first of the host's part
    ids: Ids


@dataclass(frozen=True)
class Sharding:
    """Tell which host has which rows of a table. Hosts are numbered in the group's order."""

    n_rows: int
    row_nbytes: int
    hosts: int
    #: bytes of a message
    room: int

    def part(self, host: int) -> tuple[int, int]:
        """Return the first row of a host, and the row behind its last."""
        return part_of(self.n_rows, self.hosts, host)

    @cached_property
    def ends(self) -> Ids:
        """Return the row behind the last of each host."""
        return np.array([self.part(host)[1] for host in range(self.hosts)], np.intp)

    def stripes(self, host: int) -> int:
        """Return how many stripes a host's part has, at least one."""
        low, high = self.part(host)
        return max(1, -(-(high - low) // self._rows_of(self.row_nbytes)))

    def pieces(self, host: int) -> Iterator[Piece]:
        """Yield the stripes of a host that have rows."""
        low, high = self.part(host)
        stripes = self.stripes(host)
        for number in range(stripes):
            first, last = part_of(high - low, stripes, number)
            if first < last:
                yield Piece(host, first, last)

    def cut(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the pieces, of a message each, that make up the rows from `start` to `stop`."""
        step = self._rows_of(self.row_nbytes)
        for host in range(self.hosts):
            low, high = self.part(host)
            first, last = max(start, low), min(stop, high)
            for at in range(first, last, step):
                yield Piece(host, at - low, min(at + step, last) - low)

    def shares(self, ids: Ids) -> list[Share]:
        """Divide rows among their hosts; each keeps the order in which they were named."""
        owners = self.ends.searchsorted(ids, "right")
        found = []
        for host in range(self.hosts):
            positions = (owners == host).nonzero()[0]
            if positions.size == ids.size and ids.size:
                return [Share(host, None, ids - self.part(host)[0])]
            if positions.size:
                found.append(Share(host, positions, ids[positions] - self.part(host)[0]))
        return found

    def cut_share(self, share: Share) -> Iterator[slice]:
        """Yield the parts of a share that fit into a message each, with their ids."""
        step = self._rows_of(self.row_nbytes + ID_BYTES)
        for start in range(0, share.ids.size, step):
            yield slice(start, min(start + step, share.ids.size))

    def _rows_of(self, nbytes: int) -> int:
        return max(1, self.room // max(1, nbytes))


# clocks


class News(NamedTuple):
    """Describe what a host tells of one of its ranks."""

    rank: int
    adds: int
    #: whether it uses the table, has dropped it, or is gone
    state: int
    #: how many adds to some rows it has begun
    counted: int = 0


USES, DROPPED, GONE = range(3)


def news(now: Iterable[News], told: Mapping[int, News]) -> list[News]:
    """Return what of a host's ranks has changed since it was told."""
    return [entry for entry in now if told.get(entry.rank) != entry]


def is_due(rule: Consistency, since_told: float) -> bool:
    """Return whether to tell of adds now, so many seconds after the last message about them."""
    return rule.name != "async" or since_told >= TELLING_SECONDS


def version(counts: Sequence[int]) -> int:
    """Return up to which clock rows that are read now have the adds of all: the smallest count of
    the ranks that are here."""
    return min(counts, default=0)


def needed_version(own: int, slack: int) -> int:
    """Return the version from which on a rank that has made `own` adds accepts rows."""
    return own - slack
