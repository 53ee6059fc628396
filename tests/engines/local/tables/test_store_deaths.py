"""A rank dies at any line of an add or a get: what the others find, for every line.

One process plays all ranks. While one of them makes its calls, its memory is copied at every line
of the store; each copy is what it would have left behind had it died there. The others then go on
with that copy: the locks are free, as the kernel sees to, and the victim is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest

import weft
from weft._core import rows, updaters
from weft._core.tables import TableSpec, resolve
from weft.engines.local.meeting import waiting
from weft.engines.local.meeting.locks import Lock
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import Block
from weft.engines.local.tables import state, store
from weft.engines.local.tables.state import Ranks, TableMemory
from weft.engines.local.tables.store import LocalStore, SharedRows

ROWS, SIZE, VICTIM = 6, 3, 1
#: by file: what may change the memory of a table, and what is in its way
TRACED = {one.__file__: one.__name__ for one in (store, state, rows, waiting)}


class Roster:
    """Who is here, as one rank sees it."""

    def __init__(self, rank: int, dead: set[int]) -> None:
        self.rank, self.is_here, self._dead = rank, True, dead

    def gone(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank in self._dead]

    def watch(self, ranks: Sequence[int]) -> None:
        pass

    def states(self, ranks: Sequence[int]) -> tuple[()]:
        return ()


class Place:
    """What a store asks of a meeting."""

    def __init__(self, rank: int, dead: set[int]) -> None:
        self.roster, self.members = Roster(rank, dead), tuple(range(SIZE))
        self.rank, self.generation, self.free_cores = rank, 5, False


class Job:
    """A table of three ranks, each of which has a column: it adds 1 to it."""

    def __init__(self, consistency: str, *, exact: bool = True) -> None:
        group: Any = weft.init(engine="local")
        self.spec = TableSpec(
            "MatrixTable",
            (ROWS, SIZE),
            np.dtype(np.int64),
            updaters.add(),
            resolve(consistency),
            exact,
            "t",
        )
        self.block: Block = blocks.allocate(TableMemory(self.spec, SIZE).nbytes)
        self.memory = TableMemory(self.spec, SIZE, self.block)
        self.memory.format(None)
        self.dead: set[int] = set()
        #: the traced modules that work has passed through
        self.passed: set[str] = set()
        self.recorder = group._recorder
        self.stores = self.open()

    def open(self) -> list[LocalStore]:
        places: list[Any] = [Place(rank, self.dead) for rank in range(SIZE)]
        return [
            LocalStore(
                SharedRows(
                    TableMemory(self.spec, SIZE, self.block),
                    self.block,
                    ranks=Ranks(place),
                    recorder=self.recorder,
                    timeout=5,
                )
            )
            for place in places
        ]

    def add(self, rank: int, ids: list[int] | None = None) -> None:
        delta = np.zeros((ROWS if ids is None else len(ids), SIZE), np.int64)
        delta[:, rank] = 1
        self.stores[rank].add(delta, None if ids is None else np.array(ids))

    def get(self, rank: int, ids: list[int] | None = None) -> Any:
        out = np.empty((ROWS if ids is None else len(ids), SIZE), np.int64)
        self.stores[rank].get(None if ids is None else np.array(ids), out)
        return out

    def copies(self, work: Callable[[], None]) -> list[tuple[str, bytes]]:
        """The memory at every line of the store that this work comes to, and the line."""
        found: list[tuple[str, bytes]] = []

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            name = TRACED.get(frame.f_code.co_filename)
            if name is None:
                return None
            self.passed.add(name)
            memory = bytes(self.block.buffer)
            if not found or found[-1][1] != memory:
                found.append((f"{name}:{frame.f_lineno}", memory))
            return trace

        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)
        return found

    def die(self, memory: bytes) -> None:
        """Go on where the victim died."""
        memoryview(self.block.buffer).cast("B")[:] = memory
        for lock in self.memory.lock_blocks():
            Lock.format(lock)
        self.dead.add(VICTIM)
        self.stores = self.open()

    def interrupted_rows(self) -> set[int]:
        told = [self.stores[rank].interrupted() for rank in (0, 2)]
        assert told[0] == told[1]
        for one in told[0]:
            assert (one.rank, one.generation) == (VICTIM, 5)
        return {row for one in told[0] for row in one.rows}


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sleeps long before it sees who is gone."""
    monkeypatch.setattr(waiting, "SLICE", 0.0005)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stripes and parts of two rows."""
    monkeypatch.setattr(state, "_STRIPE", 2 * SIZE * 8)
    monkeypatch.setattr(state, "_PART", 2)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("stripes", [1, 3])
def test_whoever_dies_in_adds_holds_up_nobody(
    stripes: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever line it was: where nothing is told to be interrupted the victim's adds are there as
    a whole or not at all, else they are missing in the rows that are told only."""
    monkeypatch.setattr(state, "_STRIPE", ROWS * SIZE * 8 // stripes)
    job = Job("async", exact=exact)
    assert job.memory.stripes == stripes
    job.add(0)

    def work() -> None:
        job.add(VICTIM)
        job.add(VICTIM, [4, 1, 4])
        job.get(VICTIM, [2])

    told = 0
    copies = job.copies(work)
    assert job.passed == set(TRACED.values())
    for line, memory in copies:
        job.die(memory)
        job.add(0)
        job.add(2, [0, 1, 1])
        rows = job.get(0)
        assert (job.get(2, [5, 1]) == rows[[5, 1]]).all(), line
        assert rows[:, 0].tolist() == [2] * ROWS, line
        assert rows[:, 2].tolist() == [1, 2, 0, 0, 0, 0], line
        after = [[0] * ROWS, [1] * ROWS, [1, 2, 1, 1, 3, 1]]
        suspect = job.interrupted_rows()
        told += bool(suspect)
        kept = [row for row in range(ROWS) if row not in suspect]
        seen = rows[:, VICTIM].tolist()
        assert any(all(seen[row] == one[row] for row in kept) for one in after), (line, seen)
        assert suspect in (set(), set(range(ROWS)), {1, 4}), (line, suspect)
    assert 0 < told < len(copies)


@pytest.mark.parametrize("ids", [None, [5, 0, 3]])
def test_whoever_dies_in_a_bsp_clock_leaves_it_to_the_next(
    ids: list[int] | None, small_parts: None
) -> None:
    """Whatever line it was: the others' adds are there exactly once, and so are the victim's if it
    had counted them; unless it died in the middle of a part, and then that part is told."""
    job = Job("bsp")
    for rank in (0, 2):
        job.add(rank)

    def work() -> None:
        job.add(VICTIM, ids)
        job.get(VICTIM)

    named = range(ROWS) if ids is None else ids
    copies = job.copies(work)
    assert job.passed == set(TRACED.values())
    exact = 0
    for line, memory in copies:
        job.die(memory)
        first = job.get(2)
        assert (job.get(0) == first).all(), line
        suspect = job.interrupted_rows()
        kept = [row for row in range(ROWS) if row not in suspect]
        counted = job.stores[0]._rows.clocks.count(VICTIM)
        expected = np.ones((ROWS, SIZE), np.int64)
        expected[:, VICTIM] = [int(counted and row in named) for row in range(ROWS)]
        assert (first[kept] == expected[kept]).all(), (line, first)
        assert ((first >= 0) & (first <= expected)).all(), (line, first)
        assert job.stores[0].steps == SIZE, line
        exact += bool((first == expected).all())
        for rank in (0, 2):
            job.add(rank)
        second = job.get(0)
        assert (second[:, [0, 2]] == first[:, [0, 2]] + 1).all(), line
        assert (second[:, VICTIM] == first[:, VICTIM]).all(), line
        assert job.stores[2].steps == 2 * SIZE
    assert exact > len(copies) // 2
