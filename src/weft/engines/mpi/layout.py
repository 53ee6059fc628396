"""How a table over hosts lies in each host's memory, and what becomes of its ranks; for ranks and
agents, of which only agents speak MPI.

A host's memory is that of a table of one host (engines/local/tables/state.py). Its places are the
group's ranks on this host, then all speakers of the host: whoever of them is the agent has a place
of its own in locks, so that nobody takes it for one that has died. Of each rank it has four words
more, which are written by that rank on its own host, and by the agents elsewhere:

    serial     the number, among the rank's requests, of its last change of rows here
    reached    the number of the add that this change belongs to: if the rank dies before it has
               counted this add, it is interrupted
    begun      on its own host: how many adds to some rows it has begun
    counted    how many of them the updater has counted here: once the rank is gone, all
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from weft._core import sharding
from weft._core.sharding import GONE, Sharding
from weft._core.tables import Ids, Interrupted, TableSpec
from weft.engines.local.memory.segment import Block
from weft.engines.local.tables.state import STATE, Changes, Ranks, TableMemory
from weft.engines.local.tables.store import SharedRows
from weft.engines.mpi.meeting import speakers_of
from weft.engines.mpi.memory import Bell, RingingWaiter

if TYPE_CHECKING:
    from weft.engines.local.meeting.roster import Roster
    from weft.engines.mpi.meeting import HostMeeting
    from weft.engines.mpi.placement import Placement
    from weft.errors import RankState


@dataclass(frozen=True)
class HostGroup:
    """A generation of a group, as the processes of one host know it that use or keep its tables."""

    name: str
    generation: int
    placement: Placement
    #: the number of the host in the job
    host: int
    #: the places in the launch of the group's ranks on this host
    members: tuple[int, ...]

    @classmethod
    def of(cls, meeting: HostMeeting) -> HostGroup:
        members = tuple(meeting.members[: len(meeting.local)])
        return cls(meeting.name, meeting.generation, meeting.placement, meeting.host, members)

    @property
    def local(self) -> list[int]:
        """Return the group's ranks on this host."""
        return self.placement.ranks_on(self.host)

    @property
    def at(self) -> int:
        """Return which of the group's hosts this is."""
        return self.placement.order.index(self.host)


class HostRanks(Ranks):
    """The ranks of a table over hosts, as seen from one host: its own are watched, what became of
    the others stands in the table's memory."""

    def __init__(
        self,
        group: HostGroup,
        roster: Roster,
        memory: TableMemory,
        block: Block,
        *,
        bell: Bell,
        states: Callable[[], Sequence[RankState]],
    ) -> None:
        self.roster, self.generation, self.free_cores = roster, group.generation, False
        self._speakers = speakers_of(roster)
        self.members = places_of(group, roster)
        self.place = self.members.index(roster.rank)
        self._here = dict(zip(group.local, group.members, strict=True))
        self.rank = next((r for r, member in self._here.items() if member == roster.rank), -1)
        self._memory, self._words = memory, block.words
        self._bell, self._states = bell, states
        roster.watch(self.members)

    def gone(self, ranks: Any) -> list[int]:
        here = {self._here[rank] for rank in ranks if rank in self._here}
        gone = set(self.roster.gone([*here, *self._speakers]))
        # without any speaker nobody tells what becomes of the ranks of other hosts
        mute = gone.issuperset(self._speakers)
        return [
            rank
            for rank in ranks
            if (self._here[rank] in gone if rank in self._here else mute)
            or (rank not in self._here and self.state(rank) == GONE)
        ]

    def gone_here(self) -> list[int]:
        """Return the ranks of this host that have died or left."""
        gone = set(self.roster.gone([*self._here.values()]))
        return [rank for rank, member in self._here.items() if member in gone]

    def state(self, rank: int) -> int:
        """Return what is known of a rank: that it uses the table, has dropped it, or is gone."""
        return int(self._words[self._memory.word(rank, STATE)])

    def states(self) -> Sequence[RankState]:
        return self._states()

    def waiter(self, block: Block, memory: TableMemory) -> RingingWaiter:
        waiter = RingingWaiter(
            block,
            flags_at=memory.flags_at,
            size=memory.places,
            place=self.place,
            free_cores=False,
        )
        waiter.bell = self._bell
        return waiter


class Marks:
    """The words serial, begun and counted of all ranks, on one host."""

    def __init__(self, memory: TableMemory, block: Block) -> None:
        words, size = block.words, memory.size
        starts = memory.serial_at, memory.begun_at, memory.counted_at
        self.serial, self.begun, self.counted = (words[at : at + size] for at in starts)

    def count(self, rank: int, adds: int) -> None:
        """Count as many adds to some rows, unless more were counted."""
        self.counted[rank] = max(self.counted[rank], adds)


class HostChanges(Changes):
    """The changes of all ranks, as seen by an agent that makes those of a rank of another host."""

    def __init__(self, block: Block, memory: TableMemory, *, ranks: Ranks, rank: int) -> None:
        super().__init__(block, memory, ranks=ranks, rank=rank)
        self._marks = Marks(memory, block)
        #: the number of the request that is carried out; 0 under bsp, where it only stages
        self.serial = 0

    def begin(self, low: int, high: int, ids: Ids | None) -> None:
        # the serial last: what was begun and not done is seen
        super().begin(low, high, ids)
        if self.serial:
            self._marks.serial[self.rank] = self.serial


class HostRows(SharedRows):
    """A host's rows of a table over hosts."""

    def __init__(self, memory: TableMemory, block: Block, **more: Any) -> None:
        super().__init__(memory, block, **more)
        self.marks = Marks(memory, block)

    def count_step(self) -> None:
        """Count the add that this rank has begun. Only for the holder of the table's lock."""
        rank = self.ranks.rank
        self.marks.count(rank, self.marks.begun[rank])


def places_of(group: HostGroup, roster: Roster) -> tuple[int, ...]:
    """Return the places in the launch of the processes that may map a table's memory."""
    return (*group.members, *speakers_of(roster))


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


def layout_of(spec: TableSpec, placement: Placement) -> Layout:
    """Return how a table is kept by the hosts of a group."""
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
