"""What the processes of benchmarks/tables.py do: one function per job.

    weft, mpi, rpc, ray    measure_all: make tables, check them, time each row
    updaters, model        weft and torch take turns in one process
    memory                 what a table adds to all its workers together

Each prints row -> peer -> number as one line of JSON, on rank 0.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import table_peers
from peers import Meeting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from table_peers import Table

    Array = npt.NDArray[np.floating[Any]]

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One operation; so many calls in one repetition at most, so many repetitions at most."""

    name: str
    shape: tuple[int, ...]
    calls: int
    repetitions: int


ELEMENTS = 10_000_000
MATRIX = (100_000, 64)
NAMED = 1_000  # rows in one call
ROW_SETS = 8  # which of them: 2 MB of rows, so that they are not all in the nearest cache
ROWS = (
    Row("get all", (ELEMENTS,), calls=3, repetitions=11),
    Row("add all", (ELEMENTS,), calls=3, repetitions=11),
    Row("get rows", MATRIX, calls=50, repetitions=41),
    Row("add rows", MATRIX, calls=50, repetitions=41),
)
#: seconds: one repetition is not to take much longer, nor all of one row and peer
LONGEST_REPETITION, LONGEST_ROW = 0.05, 1.2

UPDATERS = ("momentum", "adagrad", "adam")
MLP = (784, 800, 800, 10)
BATCH = 1024


# the jobs: what each process does, as one peer's worker


def weft_job(meet: str, *, quick: bool) -> None:
    import weft

    group = weft.init()
    meeting = Meeting(Path(meet), group.rank, group.size)
    make = {"weft": table_peers.Shared, "numpy": partial(table_peers.Private, rank=group.rank)}
    measure_all(meeting, make, quick)
    weft.shutdown()


def mpi_job(meet: str, *, quick: bool) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    meeting = Meeting(Path(meet), world.Get_rank(), world.Get_size())
    measure_all(meeting, {"mpi": table_peers.Window}, quick)


def rpc_job(rank: str, processes: str, meet: str, *, quick: bool) -> None:
    table_peers.joined_rpc(int(rank), int(processes), meet)
    workers = int(processes) - 1
    if int(rank) < workers:
        meeting = Meeting(Path(f"{meet}-workers"), int(rank), workers)
        measure_all(meeting, {"rpc": partial(table_peers.Remote, meeting=meeting)}, quick)
    table_peers.left_rpc()


def ray_job(rank: str, workers: str, meet: str, *, quick: bool) -> None:
    meeting = Meeting(Path(meet), int(rank), int(workers))
    table_peers.joined_ray(meeting, Path(meet).parent)
    measure_all(meeting, {"ray": partial(table_peers.Acted, meeting=meeting)}, quick)
    table_peers.left_ray(meeting)


def measure_all(
    meeting: Meeting, make: Mapping[str, Callable[[Array], Table]], quick: bool
) -> None:
    """Rank 0 prints the seconds of each row and peer as one line of JSON."""
    found = {}
    for shape, rows in itertools.groupby(ROWS, key=lambda row: row.shape):
        tables = {peer: made(pattern(shape)) for peer, made in make.items()}
        for peer, table in tables.items():
            check(table, peer, meeting, shape)
        for row in rows:
            repetitions = row.repetitions // (2 if quick else 1)
            # the same memory for the peers that take turns
            array = pattern(shape if len(shape) == 1 else (NAMED, *shape[1:]))
            sets = [random_rows(meeting.rank, number) for number in range(ROW_SETS)]
            calls = {peer: CALLS[row.name](table, array, sets) for peer, table in tables.items()}
            found[row.name] = measure(meeting, calls, row.calls, repetitions)
    if meeting.rank == 0:
        print(json.dumps(found), flush=True)


def measure(
    meeting: Meeting,
    calls: Mapping[str, Call],
    count: int,
    repetitions: int,
    *,
    longest_row: float = LONGEST_ROW,
) -> dict[str, float]:
    """Median seconds of the slowest worker, for each of the peers, which take turns."""
    longest = max(warmed_up(meeting, call) for call in calls.values())
    count = max(1, min(count, int(LONGEST_REPETITION / longest)))
    repetitions = max(3, min(repetitions, int(longest_row / (count * longest))))
    seconds: dict[str, list[float]] = {peer: [] for peer in calls}
    for _ in range(repetitions):
        for peer, call in calls.items():
            meeting.barrier()
            seconds[peer].append(timed(call, count))
    return {
        peer: statistics.median(map(max, zip(*meeting.gathered(own), strict=True)))
        for peer, own in seconds.items()
    }


def warmed_up(meeting: Meeting, call: Call) -> float:
    """Seconds of the slowest worker's third call."""
    call()
    call()
    meeting.barrier()
    return max(seconds for (seconds,) in meeting.gathered([timed(call)]))


def timed(call: Call, count: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def check(table: Table, peer: str, meeting: Meeting, shape: tuple[int, ...]) -> None:
    """Get, have everybody add once, and get again; exit if anything is not as it should be."""
    import numpy as np

    whole, given = len(shape) == 1, table.given
    out = np.zeros(shape if whole else (NAMED, *shape[1:]), np.float32)
    delta, mine, expected = np.full_like(out, 2), random_rows(meeting.rank, 0), pattern(shape)
    wanted = slice(None) if whole else mine

    def got() -> Array:
        found = table.get(given(out)) if whole else table.get_rows(given(mine), given(out))
        return np.asarray(found)

    right = [np.array_equal(got(), expected[wanted])]
    meeting.barrier()
    if whole:
        table.add(given(delta))
    else:
        table.add_rows(given(delta), given(mine))
    for adder in table.adders:
        expected[slice(None) if whole else random_rows(adder, 0)] += 2
    meeting.barrier()
    right.append(np.array_equal(got(), expected[wanted]))
    everyones = meeting.gathered(right)
    if not np.all(everyones):
        sys.exit(f"{peer}, {shape}: get, add, get is right on ranks {everyones}")


# each operation, made ready for the peer and its arrays


def get_all(table: Table, out: Array, _: object) -> Call:
    given = table.given(out)
    return lambda: table.get(given)


def add_all(table: Table, delta: Array, _: object) -> Call:
    given = table.given(delta)
    return lambda: table.add(given)


def get_rows(table: Table, out: Array, sets: list[Any]) -> Call:
    given, rows = table.given(out), itertools.cycle(map(table.given, sets))
    return lambda: table.get_rows(next(rows), given)


def add_rows(table: Table, delta: Array, sets: list[Any]) -> Call:
    given, rows = table.given(delta), itertools.cycle(map(table.given, sets))
    return lambda: table.add_rows(given, next(rows))


def random_rows(rank: int, number: int) -> Any:
    """Distinct ones: of a row named twice `M[rows] += d` would keep one delta only."""
    import numpy as np

    return np.random.default_rng([rank, number]).choice(MATRIX[0], NAMED, replace=False)


def pattern(shape: tuple[int, ...]) -> Array:
    """Small whole numbers, whose sums are exact, in a rhythm that no block of bytes shares."""
    import numpy as np

    return np.resize(np.arange(1021, dtype=np.float32), shape)


CALLS: dict[str, Callable[[Table, Array, list[Any]], Call]] = {
    "get all": get_all,
    "add all": add_all,
    "get rows": get_rows,
    "add rows": add_rows,
}


# the jobs that compare something else than peers' tables


def updaters_job(meet: str, *, quick: bool) -> None:
    """A table's add beside the optimizer's step, taking turns in one process."""
    import torch

    import weft

    torch.set_num_threads(1)
    weft.init()
    meeting = Meeting(Path(meet), 0, 1)
    optimizers = {
        "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
    }
    found = {}
    for name in UPDATERS:
        start, gradient = pattern((ELEMENTS,)) / 1021, 1 - pattern((ELEMENTS,)) / 1021
        table = weft.ArrayTable(start, updater=name)
        parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
        parameter.grad = torch.from_numpy(gradient.copy())
        step = optimizers[name]([parameter], foreach=True).step
        add = partial(table.add, gradient)
        for _ in range(3):
            add()
            step()
        check_close(f"{name} after 3 steps", table.get(), parameter.detach().numpy())
        found[name] = measure(meeting, {"weft": add, "optim": step}, 1, 5 if quick else 11)
    print(json.dumps(found), flush=True)
    weft.shutdown()


def model_job(meet: str, *, quick: bool) -> None:
    """Two models that start alike and see the same batches; one is a table too."""
    import torch

    import weft

    torch.set_num_threads(1)
    weft.init()
    meeting = Meeting(Path(meet), 0, 1)
    plain, tabled = mlp(), mlp()
    table = weft.ModelTable(tabled)
    train, train_tabled = trainer(plain), trainer(tabled)

    def train_and_sync() -> None:
        train_tabled()
        table.sync()

    for _ in range(3):
        train()
        train_and_sync()
    for ours, theirs in zip(tabled.parameters(), plain.parameters(), strict=True):
        check_close("MLP after 3 steps", ours.detach().numpy(), theirs.detach().numpy())
    calls = {"weft": train_and_sync, "without": train}
    # its own length: what is asked is a difference of 2 %, and single steps vary by more
    found = measure(meeting, calls, 1, 12 if quick else 40, longest_row=8.0)
    print(json.dumps({"MLP with sync": found}), flush=True)
    weft.shutdown()


def mlp() -> Any:
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(before, after) for before, after in itertools.pairwise(MLP)]
    between = [torch.nn.ReLU() for _ in layers[1:]]
    return torch.nn.Sequential(layers[0], *itertools.chain(*zip(between, layers[1:], strict=True)))


def trainer(model: Any) -> Call:
    import torch

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, MLP[0], generator=generator)
    labels = torch.randint(MLP[-1], (BATCH,), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion = torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        optimizer.step()

    return step


def check_close(what: str, ours: Array, theirs: Array) -> None:
    import numpy as np

    if not np.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
        sys.exit(f"{what}: up to {np.abs(ours - theirs).max()} apart from torch")


def memory_job(meet: str, *, quick: bool) -> None:
    """What a table adds to the memory of all its workers, each of which reads and updates it."""
    import weft

    group = weft.init()
    meeting = Meeting(Path(meet), group.rank, group.size)
    delta, out = pattern((ELEMENTS,)), pattern((ELEMENTS,))
    used_table(delta[:1000], out[:1000])  # everything is imported
    before = memory(meeting)
    kept = used_table(delta, out)
    after = memory(meeting)
    workers = f"{group.size} worker{'s' * (group.size > 1)}"
    if group.rank == 0:
        once = (1 + 2) * delta.nbytes  # the rows, and of adam's state two numbers for each
        print(json.dumps({f"adam, {workers}": {"weft": after - before, "once": once}}), flush=True)
    del kept
    weft.shutdown()


def used_table(delta: Array, out: Array) -> Any:
    import weft

    table = weft.ArrayTable(len(delta), updater="adam")
    table.add(delta)
    table.get(out=out)
    return table


def memory(meeting: Meeting) -> float:
    """The proportional set sizes of all workers and their launcher: a shared page counts once."""
    meeting.barrier()
    mine = proportional_set_size(os.getpid())
    if meeting.rank == 0:
        mine += proportional_set_size(os.getppid())
    return sum(size for (size,) in meeting.gathered([mine]))


def proportional_set_size(process: int) -> int:
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
