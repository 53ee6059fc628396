"""How a table over hosts lies in each host's memory, and what becomes of its ranks; for ranks and
agents, of which only agents speak MPI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from weft._core import sharding
from weft._core.sharding import GONE, Sharding
from weft._core.tables import Interrupted, TableSpec
from weft.engines.local.memory.segment import Block
from weft.engines.local.tables.state import STATE, Ranks, TableMemory

if TYPE_CHECKING:
    from weft.engines.mpi.meeting import HostMeeting


class HostRanks(Ranks):
    """The ranks of a table over hosts, as seen from one host: its own are watched, what became of
    the others stands in the table's memory."""

    def __init__(self, meeting: HostMeeting, memory: TableMemory, block: Block) -> None:
        super().__init__(meeting)
        self.rank = meeting.group_rank
        self._meeting, self._memory, self._words = meeting, memory, block.words
        here = zip(meeting.local, meeting.members, strict=False)
        self._here = dict(here)
        self._agent = meeting.agent

    def gone(self, ranks: Any) -> list[int]:
        here = [rank for rank in ranks if rank in self._here]
        members = {self._here[rank] for rank in here}
        gone = set(self.roster.gone([*members, self._agent]))
        without_agent = self._agent in gone and self.roster.rank != self._agent
        return [
            rank
            for rank in ranks
            if (self._here[rank] in gone if rank in self._here else without_agent)
            or (rank not in self._here and self.state(rank) == GONE)
        ]

    def gone_here(self) -> list[int]:
        """Return the ranks of this host that have died or left."""
        gone = set(self.roster.gone([*self._here.values()]))
        return [rank for rank, member in self._here.items() if member in gone]

    def state(self, rank: int) -> int:
        """Return what is known of a rank: that it uses the table, has dropped it, or is gone."""
        return int(self._words[self._memory.word(rank, STATE)])

    def states(self) -> Any:
        return self._meeting.all_states()

    def waiter(self, block: Block, memory: TableMemory) -> Any:
        return self._meeting.waiter_of(block, memory.flags_at, memory.places, self.place)


@dataclass(frozen=True)
class Layout:
    """A table as its hosts keep it."""

    spec: TableSpec
    sharding: Sharding
    #: how many ranks have words
    ranks: int

    def part_spec(self, host: int) -> TableSpec:
        """Return the description of one host's rows. Hosts are numbered as the group's are."""
        low, high = self.sharding.part(host)
        return replace(self.spec, shape=(high - low, *self.spec.row_shape))

    def memory(self, host: int, places: int, block: Block | None = None) -> TableMemory:
        """Return the memory of one host's part, which so many processes map."""
        return TableMemory(
            self.part_spec(host),
            self.ranks,
            block,
            places=places,
            stripes=self.sharding.stripes(host),
        )


def layout_of(spec: TableSpec, meeting: HostMeeting) -> Layout:
    """Return how a table is kept by the hosts of a group."""
    placement = meeting.placement
    row_nbytes = prod(spec.row_shape) * spec.dtype.itemsize
    room = sharding.room_for(placement.most_on_a_host, row_nbytes)
    hosts = len(placement.order)
    return Layout(spec, Sharding(spec.n_rows, row_nbytes, hosts, room), len(placement.world))


def shifted(write: Interrupted, by: int) -> Interrupted:
    """Return an interrupted change of a part's rows as one of the table's."""
    rows = write.rows
    if isinstance(rows, range):
        return replace(write, rows=range(rows.start + by, rows.stop + by))
    return replace(write, rows=tuple(row + by for row in rows))


def encode_writes(writes: Sequence[Interrupted]) -> bytes:
    return json.dumps(
        [
            [w.rank, isinstance(w.rows, range), [*w.rows[:1], *w.rows[-1:]], [], w.generation]
            if isinstance(w.rows, range)
            else [w.rank, False, [], list(w.rows), w.generation]
            for w in writes
        ]
    ).encode()


def decode_writes(text: bytes) -> list[Interrupted]:
    found = []
    for rank, whole, ends, ids, generation in json.loads(text):
        rows: Sequence[int] = range(ends[0], ends[-1] + 1) if whole and ends else tuple(ids)
        found.append(Interrupted(rank, rows, generation))
    return found
