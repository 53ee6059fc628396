"""One GPU each, on a real one: what weft says that may be used is what CUDA lets a process use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import weft
from tests.support import HANGS, launch, run_python, run_ranks
from weft.engines.base import Group
from weft.resources import visible_gpus

pytestmark = pytest.mark.gpu

COUNT = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
print(0 if failed else count.value)
"""


def uuid_of_the_first() -> str:
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=True,
    )
    return listed.stdout.split()[0]


def test_gpus_are_counted_as_cuda_counts_them() -> None:
    """For each way of writing CUDA_VISIBLE_DEVICES."""
    uuid = uuid_of_the_first()
    prefix = uuid[:12]
    written = [
        *("0", " 0", "0,", "0,0", "0,-1", "-1", "", "nonsense", "nonsense,0", "99", "0,99"),
        *(uuid, prefix, uuid[4:], f"{uuid},{prefix}", "GPU-ffffffff-0000", f"0,{uuid[4:]}"),
    ]
    found, expected = {}, {}
    for text in written:
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": text}
        program = [sys.executable, "-c", COUNT]
        done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=HANGS)
        found[text] = int(done.stdout)
        expected[text] = len(visible_gpus(environ))
    assert found == expected


def test_ranks_use_the_gpus_that_are_named() -> None:
    """By number, by UUID, by its beginning; what there is not is refused."""

    def body(group: Group) -> tuple[str, str | None, int, float]:
        import torch

        total = torch.full((10,), 2.0, device=weft.device()).sum().item()
        count = torch.cuda.device_count()
        return weft.device(), os.environ.get("CUDA_VISIBLE_DEVICES"), count, total

    uuid = uuid_of_the_first()
    for name in ("0", uuid, uuid[:12]):
        found = run_ranks(2, body, options=("--gpus", name))
        assert found == [("cuda:0", name, 1, 20.0)] * 2
    refused = launch("print('ran')", 2, options=("--gpus", "99"))
    assert refused.code == 2, refused
    assert "--gpus 99: '99' is none of the GPUs that may be used here: 0" in refused.err
    assert "ran" not in refused.out


def test_workers_of_a_driver_that_has_used_cuda() -> None:
    """Of a map, of one with a GPU each, and of a team; with the driver's default device."""
    program = """
import os, torch, weft

def use(x):
    on = torch.full((3,), float(x))
    return on.device.type, on.sum().item(), os.environ.get("CUDA_VISIBLE_DEVICES"), weft.device()

torch.set_default_device("cuda")
print(torch.ones(2).sum().item())
print(set(weft.map(use, [2] * 4, n=2)))
print(set(weft.map(use, [2] * 4, gpus=1)))
with weft.Team(2, gpus=[0]) as team:
    print(team.backend.call(lambda member: use(member.rank), [()] * 2))
"""
    outcome = run_python(program, env={"CUDA_VISIBLE_DEVICES": "0"})
    each = str({("cuda", 6.0, "0", "cuda:0")})
    both = str([("cuda", 3.0 * rank, "0", "cuda:0") for rank in range(2)])
    assert outcome.out.splitlines() == ["2.0", each, each, both], outcome


def test_other_gpus_than_those_with_which_a_worker_began() -> None:
    """CUDA does not look again, so the worker says that it cannot; fresh ones can."""
    program = """
import os, sys, torch, weft

def use(x): return torch.full((3,), float(x), device="cuda").sum().item()

print(weft.map(use, [1], n=1))
os.environ["CUDA_VISIBLE_DEVICES"] = sys.argv[1]
try: weft.map(use, [2], n=1)
except weft.DeviceUnavailable as error: print(error)
weft.shutdown()
print(weft.map(use, [2], n=1))
"""
    uuid = uuid_of_the_first()
    outcome = run_python(program, uuid, env={"CUDA_VISIBLE_DEVICES": "0"})
    first, refusal, *_, last = outcome.out.splitlines()
    assert (first, last) == ("[3.0]", "[6.0]"), outcome
    assert refusal.startswith(f"a worker is to see {uuid}, but CUDA was initialised in it when it")
