"""Collectives of tensors on a device.

What moves between ranks is the same for every device, so ranks without a GPU take tensors of the
CPU for ones on a device, whose slots are then shared memory of the host.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import launch, run_ranks
from weft.engines.local.collectives.device import Facts, Path, Policy, choose_path

FEW = 1000
SIZES = (0, 1, FEW, 300_001, 3_000_000)
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "bool")
PATHS = ("device", "host", "staged")


def given(torch: Any, rank: int, size: int, dtype: str) -> Any:
    """What a rank gives: the same on every device."""
    torch.manual_seed(rank)
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        return (torch.randn(size) * 10).to(kind)
    return torch.randint(0, 2 if dtype == "bool" else 50, (size,)).to(kind)


def all_collectives(group: Any, device: str, path: str) -> str:
    """Every collective gives on a device what it gives on the CPU, to the bit."""
    import torch

    from weft.adapters import torch as adapter

    def here(tensor: Any) -> Any:
        return tensor.to(device)

    def bits(tensor: Any) -> Any:
        return tensor.contiguous().view(-1).view(torch.uint8)

    def same(found: Any, expected: Any) -> None:
        assert found.device.type == torch.device(device).type, found.device
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        if expected.numel():
            assert bits(found.cpu()).equal(bits(expected)), expected

    rank, size = group.rank, group.size
    if device == "cpu":
        adapter.DEVICES.add("cpu")
    for length in SIZES:
        for dtype in DTYPES if length == FEW else ("float32", "bfloat16"):
            parts = [given(torch, k, length, dtype) for k in range(size)]
            mine = here(parts[rank])
            for op in ("sum", "mean", "min", "max", "prod") if length == FEW else ("sum",):
                if dtype == "bool" and op == "mean":
                    continue
                adapter.DEVICES.discard("cpu")
                expected = group.all_reduce(parts[rank], op)
                if device == "cpu":
                    adapter.DEVICES.add("cpu")
                same(group.all_reduce(mine, op), expected)
            same(mine, parts[rank])  # which nothing has changed
            same(group.broadcast(mine, root=size - 1), parts[size - 1])
            got = group.broadcast(mine if rank == 0 else None)
            same(got, parts[0])
            same(group.all_gather(mine), torch.cat(parts))
    # containers, weights, in place, a view that is not contiguous, uneven rows, reduce, scatter
    matrix = torch.arange(12.0).reshape(3, 4) + rank
    tree = {"a": here(matrix), "b": [here(matrix).T, here(matrix[0])]}
    got = group.all_reduce(tree, "mean", weight=float(rank + 1))
    weights = sum(range(1, size + 1))
    mean = sum((torch.arange(12.0).reshape(3, 4) + k) * (k + 1) / weights for k in range(size))
    assert torch.allclose(got["a"].cpu(), mean)
    assert torch.allclose(got["b"][0].cpu(), mean.T)
    x = here(torch.arange(5.0) + rank)
    assert group.all_reduce(x, out=x) is x
    total = torch.arange(5.0) * size + sum(range(size))
    same(x, total)
    out = here(torch.empty(5))
    assert group.broadcast(x, out=out) is out
    same(out, total)
    on_host = torch.empty(5)
    group.all_reduce(x, "max", out=on_host)
    assert torch.equal(on_host, total)
    rows = here(torch.full((rank + 1, 2), float(rank)))
    gathered = torch.cat([torch.full((k + 1, 2), float(k)) for k in range(size)])
    same(group.all_gather(rows), gathered)
    got = group.gather(rows, root=size - 1)
    assert (got is None) == (rank < size - 1)
    part = group.scatter(here(torch.arange(size * 3.0)) if rank == 0 else None)
    same(part, torch.arange(size * 3.0)[3 * rank : 3 * rank + 3])
    got = group.reduce(x, root=size - 1)
    assert (got is None) == (rank < size - 1)
    # async: pending calls in order, and what was queued before them is seen
    handles = []
    for turn in range(5):
        y = here(torch.full((300_000,), float(turn)))
        y += rank
        handles.append((turn, group.all_reduce(y, async_op=True)))
    for turn, handle in handles:
        same(handle.wait(), torch.full((300_000,), float(turn * size + sum(range(size)))))
    # many in a row, while a slow rank is behind
    z = here(torch.ones(100_000))
    for _ in range(20):
        z = group.all_reduce(z, "mean")
    same(z, torch.ones(100_000))
    for turn in range(20):
        same(
            group.broadcast(z + turn if rank == turn % size else None, root=turn % size),
            (torch.ones(100_000) + turn),
        )
    adapter.DEVICES.discard("cpu")
    if size == 1:
        return path
    return str(group._collectives._devices._policy.path.value)


def test_all_collectives_with_slots_on_the_host() -> None:
    results = run_ranks(3, all_collectives, "cpu", "host", env={"WEFT_GPU_PATH": "host"})
    assert results == ["host"] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_collectives_on_a_gpu(ranks: int, path: str) -> None:
    results = run_ranks(ranks, all_collectives, "cuda", path, env={"WEFT_GPU_PATH": path})
    assert results == [path] * ranks


DISAGREEMENT = """
import numpy, torch, weft
from weft.adapters import torch as adapter
if DEVICE == "cpu":
    adapter.DEVICES.add("cpu")
group = weft.init()
mine = torch.zeros(3, device=DEVICE) if group.rank else numpy.zeros(3, "float32")
try:
    weft.all_reduce(mine)
except weft.Disagreement as error:
    assert f"rank 0 called all_reduce(float32[3], op='sum')" in str(error), error
    assert f"rank 1 called all_reduce(float32[3] on {DEVICE}, op='sum')" in str(error), error
x = torch.zeros(3, device=DEVICE)
try:
    weft.all_reduce(torch.zeros(3 + group.rank, device=DEVICE))
except weft.Disagreement as error:
    assert "float32[4]" in str(error), error
if DEVICE != "cpu":
    for wrong in [x, torch.zeros(3)], {"a": torch.zeros(3), "b": x}:
        try:
            weft.all_reduce(wrong)
        except weft.InvalidValue as error:
            assert "arrays on different devices in one call" in str(error), error
        else:
            raise SystemExit("nothing was refused")
    for wrong in torch.zeros(3, device=DEVICE).to_sparse(), :
        try:
            weft.all_reduce(wrong)
        except weft.InvalidType as error:
            assert "to_dense" in str(error), error
assert weft.all_reduce(x + 1).tolist() == [group.size] * 3
print("agreed")
"""


def test_disagreements() -> None:
    outcome = launch(f"DEVICE = 'cpu'\n{DISAGREEMENT}", 2, env={"WEFT_GPU_PATH": "host"})
    assert outcome.code == 0, outcome
    assert outcome.out.count("agreed") == 2, outcome


@pytest.mark.gpu
def test_disagreements_on_a_gpu() -> None:
    outcome = launch(f"DEVICE = 'cuda'\n{DISAGREEMENT}", 2)
    assert outcome.code == 0, outcome
    assert outcome.out.count("agreed") == 2, outcome


KILLED = """
import faulthandler, sys, time
import torch, weft
faulthandler.dump_traceback_later(100, exit=True)
from weft.adapters import torch as adapter
device, milliseconds = sys.argv[1], float(sys.argv[2])
if device == "cpu":
    adapter.DEVICES.add("cpu")
group = weft.init(timeout=60)
x = torch.ones(1_000_000, device=device)
group.all_reduce(x)
if device == "cuda":
    cycles = int(milliseconds * 1.5e6)
    torch.cuda._sleep(cycles)
try:
    while True:
        if group.rank == 1 and milliseconds and device == "cuda":
            torch.cuda._sleep(cycles)
        group.all_reduce(x)
except weft.PeerLost as lost:
    assert list(lost.ranks) == [1], lost
    assert "SIGKILL" in str(lost), lost
group = group.survivors()
assert group.all_reduce(x).tolist()[0] == group.size
print("went on")
"""


@pytest.mark.parametrize("point", ["collective.filled", "collective.met", "collective.round"])
def test_a_rank_is_killed(point: str) -> None:
    env = {"WEFT_GPU_PATH": "host", "WEFT_FAULT": f"{point}@3:1:kill"}
    if point == "collective.round":
        env["WEFT_FAULT"] = "collective.filled@2:1:kill"
    outcome = launch(KILLED, 3, "cpu", "0", options=("--keep-going",), env=env)
    assert outcome.out.count("went on") == 2, outcome


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("path", "point"),
    [
        *((path, "collective.met") for path in PATHS),
        ("device", "collective.filled"),
        ("host", "collective.filled"),
    ],
)
@pytest.mark.parametrize("milliseconds", [1, 5, 50])
def test_a_rank_is_killed_on_a_gpu(path: str, point: str, milliseconds: int) -> None:
    env = {"WEFT_GPU_PATH": path, "WEFT_FAULT": f"{point}@9:1:kill"}
    outcome = launch(KILLED, 3, "cuda", str(milliseconds), options=("--keep-going",), env=env)
    assert outcome.out.count("went on") == 2, outcome


FULL = """
import sys
import torch, weft
group = weft.init(timeout=60)
x = torch.ones(25_000_000, device="cuda")
total = torch.cuda.mem_get_info()[1]
if group.rank == 0:  # torch's cache holds nearly all, and gives it back when it is asked for
    free = torch.cuda.mem_get_info()[0]
    del (big := [torch.empty(free - (400 << 20), dtype=torch.uint8, device="cuda")])[:]
group.barrier()
assert group.all_reduce(x)[0] == group.size
# now it is in use: what does not fit goes in more rounds
if group.rank == 0:
    torch.cuda.empty_cache()
group.barrier()
if group.rank == 0:
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(free - (700 << 20), dtype=torch.uint8, device="cuda")
group.barrier()
y = torch.ones(30_000_000, device="cuda")
assert group.all_reduce(y, out=y) is y and y[-1] == group.size
try:
    weft.all_reduce([torch.empty(3, device="cuda"), torch.empty(1 << 38, device="cuda")])
except torch.OutOfMemoryError:
    group.all_reduce(1)
print("went on")
"""


@pytest.mark.gpu
def test_a_full_gpu() -> None:
    outcome = launch(FULL, 2, env={"WEFT_GPU_PATH": "device"})
    assert outcome.code == 0, outcome
    assert outcome.out.count("went on") == 2, outcome


WAITING = """
import os, time
import torch, weft
group = weft.init()
x = torch.ones(1000, device="cuda")
group.all_reduce(x)
torch.cuda.synchronize()
group.barrier()
if group.rank:
    time.sleep(2)
began, used = time.monotonic(), time.process_time()
group.all_reduce(x)
print("used", (time.process_time() - used) / max(2, time.monotonic() - began))
# and while the device computes for two seconds
torch.cuda._sleep(int(3.5e9))
began, used = time.monotonic(), time.process_time()
group.all_reduce(x)
torch.cuda.synchronize()
print("used", (time.process_time() - used) / (time.monotonic() - began))
"""


@pytest.mark.gpu
def test_waiting_takes_no_processor() -> None:
    outcome = launch(WAITING, 2)
    shares = [float(line.split("used")[1]) for line in outcome.out.splitlines() if "used" in line]
    assert len(shares) == 4, outcome
    assert max(shares) < 0.02, outcome


# the choice


def test_choice() -> None:
    one, other = Facts("GPU-1", False), Facts("GPU-2", False)
    assert choose_path([one, other], mapped=True) == Policy(Path.DEVICE)
    assert choose_path([one, other], mapped=False) == Policy(Path.HOST)
    assert choose_path([one, Facts("", False)], mapped=True) == Policy(Path.STAGED)
    assert choose_path([one, one], mapped=True, forced="host") == Policy(Path.HOST)
    shared = [Facts("GPU-1", True)] * 2
    assert choose_path(shared, mapped=True, turn=300e-6) == Policy(Path.DEVICE)
    by_turns = choose_path([one, one], mapped=True, turn=300e-6)
    assert by_turns.of(2 << 20) is Path.DEVICE
    assert by_turns.of(1_000_000) is Path.STAGED
    assert choose_path([one, one], mapped=True, turn=1e-6).of(8) is Path.DEVICE


def test_a_path_that_is_none_is_refused_by_all() -> None:
    script = (
        "import torch, weft\nfrom weft.adapters import torch as adapter\n"
        "adapter.DEVICES.add('cpu')\nweft.init()\n"
        "try:\n    weft.all_reduce(torch.ones(3))\n"
        "except weft.InvalidValue as error:\n    print(error)\n"
    )
    outcome = launch(script, 2, env={"WEFT_GPU_PATH": "quick"})
    assert outcome.code == 0, outcome
    assert outcome.out.count("WEFT_GPU_PATH=quick: expected one of device, host, staged") == 2
