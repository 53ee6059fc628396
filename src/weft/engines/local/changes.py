"""Who is changing which rows of a table, so that readers can tell, and others if it dies.

who changes rows                     who reads without a lock
  says which                           all writes that were begun are done? else again
  write_begun += 1                     copies
  changes them                         write_begun is what it was? else again
  write_done = write_begun
"""

from __future__ import annotations

from collections.abc import Sequence

from weft._core.tables import Ids, Interrupted
from weft.engines.local.meeting import Meeting
from weft.engines.local.segment import Block
from weft.engines.local.table_memory import (
    COUNT,
    HIGHEST,
    INTERRUPTED,
    LOWEST,
    NAMED,
    WHOLE,
    TableMemory,
)


class Changes:
    """The changes of all ranks of a table, as one of them sees them."""

    def __init__(self, block: Block, memory: TableMemory, *, meeting: Meeting) -> None:
        self._memory, self._roster = memory, meeting.roster
        self._members, self._rank = tuple(meeting.members), meeting.rank
        self._generation = meeting.generation
        self._words, self._own_ids = block.words, memory.ids(meeting.rank)
        #: by rank
        self.write_begun = self._words[memory.write_begun_at : memory.write_begun_at + memory.size]
        self.write_done = self._words[memory.write_done_at : memory.write_done_at + memory.size]

    def begin(self, low: int, high: int, ids: Ids | None) -> None:
        """Say which rows are about to change. Who calls it says afterwards that they have:

            changes.write_done[rank] = changes.write_begun[rank]

        in a `finally`, and without a call, so that no signal handler keeps it from being said.
        """
        rank, words, word = self._rank, self._words, self._memory.word
        if ids is None:
            words[word(rank, LOWEST)], words[word(rank, HIGHEST)] = low, high
            words[word(rank, COUNT)] = WHOLE
        else:
            named = ids[:NAMED]
            self._own_ids[: named.size] = named
            words[word(rank, COUNT)] = ids.size
        self.write_begun[rank] += 1

    def interrupted(self) -> tuple[Interrupted, ...]:
        """List what ranks had begun and not done when they died."""
        words, word = self._words, self._memory.word
        found = []
        for rank in range(self._memory.size):
            if not words[word(rank, INTERRUPTED)] and not self._died_within(rank):
                continue
            count = words[word(rank, COUNT)]
            if count == WHOLE:
                ids: Sequence[int] = range(words[word(rank, LOWEST)], words[word(rank, HIGHEST)])
            else:
                ids = tuple(self._memory.ids(rank)[: min(count, NAMED)].tolist())
            found.append(Interrupted(rank, ids, self._generation))
        return tuple(found)

    def mark_dead_writers(self) -> None:
        """Note which ranks died within a change, so that readers stop waiting for its end.
        For the holder of the table's lock."""
        for rank in range(self._memory.size):
            if self._died_within(rank):
                self._words[self._memory.word(rank, INTERRUPTED)] = 1
                self.write_done[rank] = self.write_begun[rank]

    def _died_within(self, rank: int) -> bool:
        if rank == self._rank or self.write_begun[rank] == self.write_done[rank]:
            return False
        # it may have done its write, and then left: who is gone first, the words after
        gone = self._roster.gone([self._members[rank]])
        return bool(gone) and self.write_begun[rank] != self.write_done[rank]
