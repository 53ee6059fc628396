"""How many adds each rank has made to a table, and waiting until the others have made enough."""

from __future__ import annotations

import time

from weft._core import consistency
from weft._core.tables import TableSpec
from weft.engines.local.meeting import Meeting
from weft.engines.local.recorder import Recorder
from weft.engines.local.segment import Block
from weft.engines.local.table_memory import ADDS, TableMemory
from weft.engines.local.waiting import Waiter
from weft.errors import Stalled


class Clocks:
    """The counts of all ranks of a table, as one of them sees them."""

    def __init__(
        self, block: Block, memory: TableMemory, *, meeting: Meeting, recorder: Recorder
    ) -> None:
        self._spec: TableSpec = memory.spec
        self._recorder, self._roster = recorder, meeting.roster
        self._members, self._rank = tuple(meeting.members), meeting.rank
        self._words = block.words
        self._indexes = [memory.word(rank, ADDS) for rank in range(memory.size)]
        self._own = self._indexes[self._rank]
        self._others = [index for index in self._indexes if index != self._own]
        self._waiter = Waiter(
            block,
            flags_at=memory.flags_at,
            size=memory.size,
            place=self._rank,
            free_cores=False,
        )

    @property
    def own(self) -> int:
        """Return how many adds this rank has made."""
        count: int = self._words[self._own]
        return count

    def count(self, rank: int) -> int:
        count: int = self._words[self._indexes[rank]]
        return count

    def tick(self) -> None:
        """Count one more add of this rank."""
        self._waiter.publish(self._own, self.own + 1)

    def staleness(self) -> int:
        """Return how many adds the slowest of those who are here is behind this rank."""
        own, words = self.own, self._words
        for index in self._others:
            if words[index] < own:
                return consistency.staleness(own, self.present())
        return 0

    def present(self) -> dict[int, int]:
        """Return how many adds each other rank that is still here has made."""
        gone = self._roster.gone([one for one in self._members if one != self._roster.rank])
        return {
            rank: self.count(rank)
            for rank, member in enumerate(self._members)
            if rank != self._rank and member not in gone
        }

    def await_others(self, needed: int, deadline: float) -> None:
        """Wait until everybody who is still here has made so many adds. Raises Stalled."""
        for rank, index in enumerate(self._indexes):
            if index != self._own and self._words[index] < needed:
                self._await(rank, needed, deadline)

    def _await(self, rank: int, needed: int, deadline: float) -> None:
        def check() -> bool:
            if not self._roster.is_here:
                raise self._roster.unusable(f"table {self._spec.name!r}")
            if self._roster.gone([self._members[rank]]):
                return True
            if time.monotonic() >= deadline:
                counts = self.present()
                if late := consistency.behind(counts, needed):  # else it has come just now
                    raise self._stalled_error(needed, {rank: counts[rank] for rank in late})
            return False

        entry = self._recorder.enter(f"waiting at table {self._spec.name!r}")
        try:
            self._waiter.wait(self._indexes[rank], needed, deadline, check)
        finally:
            self._recorder.leave(entry)

    def _stalled_error(self, needed: int, late: dict[int, int]) -> Stalled:
        told = ", ".join(f"rank {rank} has made {count}" for rank, count in late.items())
        return Stalled(
            f"table {self._spec.name!r} ({self._spec.consistency}): rank {self._rank} has made "
            f"{self.own} adds and waits until every rank has made {needed}, but {told}. Ranks must "
            "add equally often; one that has finished calls weft.shutdown(), which releases the "
            "others",
            [*late],
            self._roster.states(self._members),
        )
