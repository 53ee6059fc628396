"""All fault points x all ways to end there, with groups of 2 to 4 (inside collectives and tables:
of 3; there test_collectives.py and test_tables.py have the rest). Who is late or stopped there is
in test_points_and_deadlines.py.

Whatever happens to one rank, wherever: the others get the right error in time or finish, nobody
hangs, the exit code is right, and (by the fixture in conftest) nothing is left.

`make test` has every point with every action and every point with every size, but not every action
with every size; those are left to `make soak`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.locking import MAKE_LOCK
from tests.support import HANGS, command
from weft import faults

#: passes every fault point in every rank, and notes which error it got
PROGRAM = (
    MAKE_LOCK
    + """
import json, os, sys, time
import weft
from weft import faults
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import BlockHandle

folder, part = sys.argv[1:]
rank = int(os.environ["WEFT_RANK"])

def note(**what):
    with open(f"{folder}/rank{rank}", "w") as file:
        json.dump(what, file)

def act_and_tell(fault, act=faults._act):
    open(f"{folder}/reached", "w").close()
    act(fault)

faults._act = act_and_tell
try:
    group = weft.init()
    group.barrier()
    if part != "table":  # which makes memory in the same way
        lock = make_lock(group)
        with lock.shared():
            pass
        with lock.exclusive():
            pass
    block = blocks.allocate(4096)
    with open(f"{folder}/reference{rank}", "wb") as file:
        file.write(blocks.export(block.buffer).encode())
    group.barrier()
    with open(f"{folder}/reference{(rank + 1) % group.size}", "rb") as file:
        other = blocks.attach(BlockHandle.decode(file.read()))
    group.barrier()
    half = group.split(rank % 2)
    half.barrier()
    if part == "collective":
        import numpy as np
        from weft.engines.local.collectives.collective import transport as direct
        from weft.engines.local.collectives.collective import transport as slots
        direct.ALLOWED = "IN_ROUNDS" not in os.environ
        group.all_reduce(np.ones(10))
        group.all_reduce(np.ones(slots.ROOM // 8 + 1))
    if part == "table":
        table = weft.MatrixTable(8, 2)
        table.add([[1, 1]], rows=[rank])
        group.barrier()  # who finds others adding, again and again, takes a lock to copy
        table.get()
        clock = weft.ArrayTable(4, consistency="bsp")
        for turn in range(group.size):
            clock.add([1, 1, 1, 1])
            group.barrier()
            if turn == rank:  # each rank is once the first, who applies what all have added
                clock.get()
            group.barrier()
    while part == "wait" and rank < group.size - 1 and not os.path.exists(f"{folder}/reached"):
        time.sleep(0.005)  # the last rank waits for the others, and so sleeps in the kernel
    group.barrier()
    group.barrier()  # where it is missed if that was the last that it did
    note(done=True)
except weft.WeftError as error:
    note(error=type(error).__name__, ranks=list(getattr(error, "ranks", [])), text=str(error))
    raise
finally:
    weft.shutdown()
"""
)

#: after these points the victim is no longer needed by anybody
LATE = ("exit.begin", "exit.left")
#: for these the victim is hurt while the group is not yet complete
EARLY = ("join.start", "join.sent", "join.mapped")
CODES = {"kill": 137, "segv": 139, "exit": 7, "raise": 1}


#: what a rank passes
POINTS = [point for point in faults.POINTS if not point.startswith("work")]
#: what happens to it, by the test that has it happen
KINDS = (("kill", "segv"), ("exit=7", "raise"), ("delay=0.3",), ("stop",))


def sizes_of(point: str) -> tuple[int, ...]:
    return (3,) if point.startswith(("collective", "table")) else (2, 3, 4)


def size_in_make_test(point: str, kind: int) -> int:
    """From one kind to the next the sizes of a point take turns, and so they do from one point to
    the next."""
    sizes = sizes_of(point)
    return sizes[(POINTS.index(point) + kind) % len(sizes)]


def cases(*kinds: int) -> list[Any]:
    """Point, size and actions; marked if `make soak` has them."""
    return [
        pytest.param(
            point,
            size,
            KINDS[kind],
            marks=() if size == size_in_make_test(point, kind) else pytest.mark.soak,
            id=f"{point}-{size}-{' and '.join(KINDS[kind])}",
        )
        for point in POINTS
        for size in sizes_of(point)
        for kind in kinds
    ]


def test_every_point_has_every_size_in_make_test() -> None:
    """Every action it has, as each kind has one size of it; and each kind has every size."""
    kinds = range(len(KINDS))
    for point in POINTS:
        assert {size_in_make_test(point, kind) for kind in kinds} == set(sizes_of(point))
    for kind in kinds:
        assert {size_in_make_test(point, kind) for point in POINTS} == {2, 3, 4}
    assert {action.partition("=")[0] for kind in KINDS for action in kind} == set(faults.ACTIONS)


@pytest.mark.parametrize(("point", "size", "actions"), cases(0, 1))
def test_one_rank_ends(point: str, size: int, actions: tuple[str, ...], tmp_path: Path) -> None:
    """A rank that ends at any point, in any way, never hangs or confuses the others. They are told
    long before a deadline, or the launcher would end them; so two jobs may run side by side. The
    exit code also shows that the program has come to the point."""
    with contextlib.ExitStack() as stack:
        jobs = [Job(point, action, size, tmp_path / action, timeout=20) for action in actions]
        check([stack.enter_context(job) for job in jobs])


def check(jobs: list[Job]) -> None:
    """Wait for the end of all; those that went wrong are told by name."""
    failures = []
    for job in jobs:
        try:
            job.check()
        except AssertionError as error:
            failures.append(f"{job}: {error}")
    assert not failures, "\n\n".join(failures)


class Job:
    """A launch of the program in which one rank is hurt."""

    def __init__(self, point: str, action: str, size: int, folder: Path, *, timeout: float) -> None:
        self._point = point
        self._kind = action.partition("=")[0]
        self._size = size
        self._folder = folder
        self._victim = _victim(point, size)
        folder.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            _line(point, size, timeout, folder),
            env=_environment(point, f"{self._victim}:{action}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __str__(self) -> str:
        return f"{self._point} {self._kind} {self._size}"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__(None, None, None)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def check(self) -> None:
        """Wait for the end: everybody was told the right thing."""
        point, kind, size, victim = self._point, self._kind, self._size, self._victim
        out, err = self._process.communicate(timeout=HANGS)
        code = self._process.returncode
        notes = {
            rank: json.loads((self._folder / f"rank{rank}").read_text())
            for rank in range(size)
            if (self._folder / f"rank{rank}").exists()
        }
        survivors = {rank: note for rank, note in notes.items() if rank != victim}
        told = f"{notes}\n{out}\n{err}"
        assert (self._folder / "reached").exists(), told
        # the launcher may be first to end a rank that still looks for its group, or whose own
        # deadline began later than that of the rank that stalled first
        ended_by_launcher = (point in EARLY and kind in CODES) or (kind == "stop" and survivors)
        assert len(survivors) == size - 1 or ended_by_launcher, told
        if kind == "delay" or (kind == "stop" and point in LATE):
            assert code == 0, told
            assert all(note.get("done") for note in survivors.values()), told
        elif kind == "stop":
            assert code == 1, told
            expected = {"MissingRank"} if point in ("join.start",) else {"Stalled", "MissingRank"}
            _check_errors(survivors, expected | {"PeerLost"}, victim, told)
        else:
            assert code == CODES[kind], told
            assert f"rank {victim} " in err.partition("failed first")[0].splitlines()[-1], told
            if point in LATE:
                assert all(note.get("done") for note in survivors.values()), told
            else:
                early = {"MissingRank", "PeerLost"} if point in EARLY else {"PeerLost"}
                _check_errors(survivors, early | {"SegmentGone"}, victim, told)


def _victim(point: str, size: int) -> int:
    """Each rank gets its turn; only a leader makes memory, only rank 0 never sends a Hello."""
    if point.endswith(".made"):
        return 0
    if point == "wait.block" or point == "join.sent":
        return size - 1
    return {2: 0, 3: 1, 4: 3}[size]


def _line(point: str, size: int, timeout: float, folder: Path) -> list[str]:
    """The command line of a job that passes a point."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    options = command(size, "--timeout", str(timeout))
    return [*options, str(script), str(folder), point.partition(".")[0]]


def _environment(point: str, fault: str) -> dict[str, str]:
    """Where a rank can reach its peers' memory, or sums are made by a loop, nothing goes in
    rounds."""
    in_rounds = {"IN_ROUNDS": "1", "WEFT_KERNELS": "0"} if point == "collective.round" else {}
    return {**os.environ, **in_rounds, "WEFT_FAULT": f"{point}:{fault}"}


def _check_errors(
    survivors: dict[int, dict[str, object]], expected: set[str], victim: int, told: str
) -> None:
    for note in survivors.values():
        assert note.get("error") in expected, told
    assert not survivors or any(victim in note["ranks"] for note in survivors.values()), told


def test_every_point_stands_in_the_source() -> None:
    """A point that no line reaches is not a point."""
    source = Path(faults.__file__).parent
    paths = [path for path in source.rglob("*.py") if path.name != "faults.py"]
    lines = [line for path in paths for line in path.read_text().splitlines()]
    reached = [line for line in lines if "reach(" in line or "point=" in line]
    for point in faults.POINTS:
        assert any(f'"{point}"' in line for line in reached), point
