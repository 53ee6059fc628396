"""What the processes of benchmarks/gpu.py do: one function per job.

    facts         what GPU there is, if it can be used
    collectives   ranks: weft, gloo and torch alone take turns, row by row
    tables        ranks: a table on the device, and torch on memory of each rank's own
    alone         one process: the plain loop, train_step, the loop with ModelTable.sync
    team          a driver: train_step, and one process with the whole batch
    ranks         ranks: the loop with ModelTable.sync and without, DDP, one process as above

Each prints row -> party -> seconds as one line of JSON, on rank 0. A call is done when the device
is: every party waits for that. What only one process does, the others wait for without the GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import collectives
from collectives import GB, KB, MB, Row
from peers import Meeting
from table_jobs import Call, measure

if TYPE_CHECKING:
    from torch import Tensor

sys.path.append(str(Path(__file__).parent.parent / "examples"))

#: what a job prints instead, with the reason, where it cannot measure anything
NOT_AVAILABLE = "not available"
#: the variable that forces a path, in whose jobs fewer rows are measured
PATH = "WEFT_GPU_PATH"
#: seconds: all of one row and party is not to take much longer, unless 3 repetitions do
LONGEST_ROW = 0.5
LONGEST_TRAINING = 1.2

#: bytes -> how many calls in one repetition at most, how many repetitions at most
SIZES = {
    1 * KB: (20, 15),
    64 * KB: (20, 15),
    1 * MB: (10, 15),
    16 * MB: (3, 15),
    100 * MB: (1, 15),
    1 * GB: (1, 3),
}
FORCED = (1 * KB, 1 * MB, 100 * MB)
ROWS = tuple(
    Row(operation, size, *numbers)
    for operation in ("all_reduce", "broadcast")
    for size, numbers in SIZES.items()
)

#: of tables: elements (100 MB), a matrix of as much, and how many of its rows one call has
ELEMENTS, MATRIX, NAMED = 25_000_000, (100_000, 256), 10_000
ROW_SETS = 4

#: images in a step, of all ranks together, and how many steps one call has
BATCHES = {128: 4, 1024: 1}
RATE = 1e-3

Found = dict[str, dict[str, float]]


def facts_job(*, device: str, quick: bool) -> None:
    """In a process of its own: one that has used CUDA keeps half a gigabyte of the GPU."""
    import torch

    try:
        torch.ones(2, device=device).sum().item()
    except Exception as error:  # torch has several for it
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        told({NOT_AVAILABLE: f"no GPU that PyTorch can use: {reason}"})
        return
    if device == "cpu":
        told({"gpu": "no GPU: everything on the CPU"})
        return
    version = Path("/proc/driver/nvidia/version")
    words = version.read_text().split() if version.exists() else []
    driver = next((word for word in words if word[:1].isdigit() and "." in word), "not known")
    name = torch.cuda.get_device_name()
    told({"gpu": f"{name} (driver {driver}, CUDA {torch.version.cuda})"})


def told(found: Mapping[str, Any]) -> None:
    print(json.dumps(found), flush=True)


class Place:
    """This process's device, and what it does there."""

    def __init__(self, device: str) -> None:
        import torch

        import weft

        self.is_gpu = device == "cuda"
        self.device = weft.device() if self.is_gpu else "cpu"
        self._finish = torch.cuda.synchronize if self.is_gpu else lambda: None
        torch.backends.cudnn.benchmark = True

    def finished(self, call: Call, times: int = 1) -> Call:
        """So many calls, after which the device has nothing left to do."""

        def calls() -> None:
            for _ in range(times):
                call()
            self._finish()

        return calls


def nothing() -> None:
    """What ranks do while another computes alone."""


# collectives


def collectives_job(meet: str, *, device: str, quick: bool) -> None:
    place, weft = Place(device), collectives.Weft()
    meeting = Meeting(Path(meet), weft.rank, weft.size)
    parties: dict[str, Any] = {"weft": weft}
    if weft.size > 1:
        parties["gloo"] = gloo(weft.rank, weft.size, meet)
    found = {}
    for row in rows_for(place, quick):
        calls = prepared(row, parties, place, meeting)
        found[row.name] = measure(
            meeting, calls, row.calls, row.repetitions, longest_row=LONGEST_ROW
        )
    if weft.rank == 0:
        told(found)
    for party in reversed(parties.values()):
        party.close()


def gloo(rank: int, size: int, meet: str) -> collectives.Gloo:
    """gloo, which leaves the other parties their threads."""
    import torch

    threads = torch.get_num_threads()
    joined = collectives.Gloo(str(rank), str(size), f"{meet}-gloo")
    torch.set_num_threads(threads)
    return joined


def rows_for(place: Place, quick: bool) -> list[Row]:
    sizes = FORCED if PATH in os.environ else tuple(SIZES)
    largest = 1 * MB if not place.is_gpu else 100 * MB if quick else 1 * GB
    return [row for row in ROWS if row.bytes in sizes and row.bytes <= largest]


def prepared(
    row: Row, parties: Mapping[str, Any], place: Place, meeting: Meeting
) -> dict[str, Call]:
    """Each party's call, whose first result was right; from then on everything is zero, so that a
    sum in place stays what it is."""
    import torch

    rank, size = meeting.rank, meeting.size
    start = torch.arange(row.bytes // 4, device=place.device).remainder_(1021).float()
    calls, right = {}, []
    for name, party in parties.items():
        mine = start + rank
        result = torch.zeros_like(mine) if party.separate_output else mine
        if row.operation == "broadcast":
            result, expected = mine, start
            call = party.broadcast(mine)
        else:
            call, expected = party.all_reduce(mine, result), start * size + sum(range(size))
        calls[name] = place.finished(call)
        calls[name]()
        right.append(torch.equal(result, expected))
        del expected
        for tensor in (mine, result):
            tensor.zero_()
    everyones = meeting.gathered(right)
    if not all(map(all, everyones)):
        sys.exit(f"{row.name}: {', '.join(parties)} are right on ranks {everyones}")
    bare = bare_operation(row.operation, start, size)
    calls["torch"] = nothing if rank else place.finished(bare)
    return calls


def bare_operation(operation: str, x: Tensor, size: int) -> Call:
    """What torch needs for the result where nobody else is: to add two tensors, or a copy."""
    import torch

    other, out = torch.zeros_like(x), torch.empty_like(x)
    if operation == "broadcast" or size == 1:
        return lambda: out.copy_(x)
    return lambda: torch.add(x, other, out=out)


# tables


def tables_job(meet: str, *, device: str, quick: bool) -> None:
    import torch

    import weft

    group, place = weft.init(), Place(device)
    meeting = Meeting(Path(meet), group.rank, group.size)
    shapes = ((ELEMENTS,), MATRIX) if place.is_gpu else ((ELEMENTS // 100,), (20_000, 8))
    try:
        whole, matrix = (table_on(place, shape) for shape in shapes)
    except (TypeError, weft.WeftError) as error:
        if group.rank == 0:
            told({NOT_AVAILABLE: str(error).splitlines()[0]})
        weft.shutdown()
        return
    own_whole, own_matrix = (torch.zeros(shape, device=place.device) for shape in shapes)
    all_out, all_delta = torch.zeros_like(own_whole), torch.ones_like(own_whole)
    rows_out = torch.zeros((NAMED, own_matrix.shape[1]), device=place.device)
    rows_delta = torch.ones_like(rows_out)
    generator = torch.Generator().manual_seed(group.rank)
    drawn = [torch.randperm(shapes[1][0], generator=generator)[:NAMED] for _ in range(ROW_SETS)]
    ids = itertools.cycle([rows.to(place.device) for rows in drawn])
    ids_on_host = itertools.cycle([rows.numpy() for rows in drawn])
    g = (lambda tensor: tensor) if place.is_gpu else (lambda tensor: tensor.numpy())
    calls: dict[str, dict[str, Call]] = {
        "get all": {
            "weft": lambda: whole.get(out=g(all_out)),
            "own": lambda: all_out.copy_(own_whole),
        },
        "add all": {
            "weft": lambda: whole.add(g(all_delta)),
            "own": lambda: own_whole.add_(all_delta),
        },
    }
    for name, given, sent in (
        ("rows", lambda: g(next(ids)), lambda: next(ids)),
        (
            "rows, ids on the host",
            lambda: next(ids_on_host),
            lambda: torch.from_numpy(next(ids_on_host)).to(place.device),
        ),
    ):
        calls[f"get {name}"] = {
            "weft": lambda given=given: matrix.get(given(), out=g(rows_out)),
            "own": lambda sent=sent: torch.index_select(own_matrix, 0, sent(), out=rows_out),
        }
        calls[f"add {name}"] = {
            "weft": lambda given=given: matrix.add(g(rows_delta), given()),
            "own": lambda sent=sent: own_matrix.index_add_(0, sent(), rows_delta),
        }
    check_tables(whole, matrix, place, meeting)
    found = {}
    for name, row in calls.items():
        ready = {party: place.finished(call) for party, call in row.items()}
        number, repetitions = (5, 21) if "all" in name else (20, 21)
        found[name] = measure(meeting, ready, number, repetitions // (2 if quick else 1))
    if group.rank == 0:
        told(found)
    weft.shutdown()


def table_on(place: Place, shape: tuple[int, ...]) -> Any:
    import weft

    where = {"device": place.device} if place.is_gpu else {}
    return (
        weft.ArrayTable(*shape, **where) if len(shape) == 1 else weft.MatrixTable(*shape, **where)
    )


def check_tables(whole: Any, matrix: Any, place: Place, meeting: Meeting) -> None:
    """Everybody adds 2 to all elements, and to some rows; exit if that is not what is there."""
    import numpy as np
    import torch

    rows, width = torch.arange(3, device=place.device), matrix.get([0]).shape[1]
    ones = torch.ones(whole.get().shape[0], device=place.device)
    few = torch.ones((3, width), device=place.device)
    meeting.barrier()
    for table, given in ((whole, (ones * 2,)), (matrix, (few * 2, rows))):
        table.add(*(given if place.is_gpu else [tensor.numpy() for tensor in given]))
    meeting.barrier()
    got = [torch.as_tensor(x).cpu().numpy() for x in (whole.get(), matrix.get([0, 2, 3]))]
    sums = [2 * meeting.size, [[2 * meeting.size]] * 2 + [[0]]]
    right = [bool(np.all(one == expected)) for one, expected in zip(got, sums, strict=True)]
    everyones = meeting.gathered(right)
    if not all(map(all, everyones)):
        sys.exit(f"tables on {place.device}: add and get are right on ranks {everyones}")


# training


def loss(model: Any, x: Any, y: Any) -> Tensor:
    """The same for all parties, wherever the images lie."""
    import torch

    torch.backends.cudnn.benchmark = True  # also in a team's workers
    device = next(model.parameters()).device
    logits = model(torch.as_tensor(x, device=device))
    return torch.nn.functional.cross_entropy(logits, torch.as_tensor(y, device=device))


def network(place: Place) -> tuple[Any, Any]:
    """ResNet-32 on the device, and its optimizer."""
    import torch
    from resnet32 import resnet32  # type: ignore[import-not-found]

    model = resnet32().to(place.device)
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def batch_of(place: Place, count: int) -> tuple[Tensor, Tensor]:
    import torch

    generator = torch.Generator().manual_seed(1)
    side = 32 if place.is_gpu else 8
    x = torch.randn(count, 3, side, side, generator=generator)
    return x.to(place.device), torch.randint(10, (count,), generator=generator).to(place.device)


def trainer(
    place: Place, x: Any, y: Any, *, wrapped: Callable[[Any], Any] = lambda model: model
) -> Callable[[], Tensor]:
    """A step of the plain loop; it returns the loss, which nobody has read."""
    model, optimizer = network(place)
    used = wrapped(model)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss(used, x, y)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def syncing(place: Place, x: Any, y: Any) -> Call:
    """A step of the plain loop, and a sync."""
    import weft

    made: list[Any] = []

    def tabled(model: Any) -> Any:
        made.append(weft.ModelTable(model))
        return model

    step = trainer(place, x, y, wrapped=tabled)
    (table,) = made

    def step_and_sync() -> None:
        step()
        table.sync()

    return step_and_sync


def reading(step: Callable[[], Tensor]) -> Call:
    return lambda: step().item()


def batches(place: Place, ranks: int, quick: bool) -> dict[int, int]:
    """How many images, and how many steps one call has."""
    if not place.is_gpu:
        return {16: 1}
    only_large = ranks > 2 or (quick and ranks > 1)
    return {count: steps for count, steps in BATCHES.items() if count > 128 or not only_large}


def trained(
    place: Place, meeting: Meeting, calls: Mapping[str, Call], steps: int, quick: bool
) -> dict[str, float]:
    """Seconds of a step, of which a repetition has some."""
    ready = {
        party: call if call is nothing else place.finished(call, steps)
        for party, call in calls.items()
    }
    longest = LONGEST_TRAINING / (2 if quick else 1)
    found = measure(meeting, ready, 1, 41, longest_row=longest)
    return {party: seconds / steps for party, seconds in found.items()}


def alone_job(*, device: str, quick: bool) -> None:
    import weft

    weft.init()
    place = Place(device)
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder, weft.Team(1) as team:
        meeting = Meeting(Path(folder) / "meet", 0, 1)
        for count, steps in batches(place, 1, quick).items():
            x, y = batch_of(place, count)
            step = weft.train_step(loss, *network(place), team=team)
            calls = {
                "read": reading(trainer(place, x, y)),
                "unread": trainer(place, x, y),
                "step": partial(step, x, y),
                "sync": syncing(place, x, y),
            }
            seconds = trained(place, meeting, calls, steps, quick)
            plain = {party: seconds[party] for party in ("read", "unread")}
            found[step_of(count)] = {"weft": seconds["step"], **plain}
            found[sync_of(count)] = {"weft": seconds["sync"], "unread": seconds["unread"]}
    told(found)
    weft.shutdown()


def team_job(ranks: str, how: str, *, device: str, quick: bool) -> None:
    import warnings

    import weft

    found: Found = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        weft.Team(int(ranks), mps=how == "mps") as team,
    ):
        place, meeting = Place(device), Meeting(Path(folder) / "meet", 0, 1)
        warnings.simplefilter("ignore")  # each rank normalises its own rows, as DDP does
        for count, steps in batches(place, team.size, quick).items():
            on_device = batch_of(place, count)
            on_host = [weft.share(tensor.cpu().numpy()) for tensor in on_device]
            for name, given in ((step_of(count), on_device), (from_host(count), on_host)):
                step = weft.train_step(loss, *network(place), team=team)
                calls = {"weft": partial(step, *given), "one": reading(trainer(place, *given))}
                found[name] = trained(place, meeting, calls, steps, quick)
    told(found)


def ranks_job(meet: str, *, device: str, quick: bool) -> None:
    import weft

    group, place = weft.init(), Place(device)
    meeting = Meeting(Path(meet), group.rank, group.size)
    peer = gloo(group.rank, group.size, meet)
    from torch.nn.parallel import DistributedDataParallel

    found: Found = {}
    for count, steps in batches(place, group.size, quick).items():
        whole = batch_of(place, count)
        mine = [part.chunk(group.size)[group.rank].clone() for part in whole]
        calls = {
            "weft": syncing(place, *mine),
            "without": trainer(place, *mine),
            "ddp": reading(trainer(place, *mine, wrapped=DistributedDataParallel)),
            "one": nothing if group.rank else trainer(place, *whole),
        }
        seconds = trained(place, meeting, calls, steps, quick)
        found[sync_of(count)] = seconds
        for name in (step_of(count), from_host(count)):
            found[name] = {"ddp": seconds["ddp"]}
    if group.rank == 0:
        told(found)
    peer.close()
    weft.shutdown()


def step_of(count: int) -> str:
    return f"train_step, batch {count:,}"


def from_host(count: int) -> str:
    return f"train_step, batch {count:,} on the host"


def sync_of(count: int) -> str:
    return f"ModelTable.sync, batch {count:,}"
