"""CUDA in the fork server: weft does not initialise it, and workers can use it whoever did."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.gpus import require_any_names
from tests.support import run_python

#: what Python loads by itself in every process, because it is found as sitecustomize
TORCH = "import torch; torch.cuda.is_available()"
CONTEXT = "import torch; torch.ones(1, device='cuda')"
STAND_IN = "import ctypes; library = ctypes.CDLL({library!r})"

#: a worker's own command line says whether it was forked or began anew
HOW = """
import os, sys, weft
from pathlib import Path
from weft.engines.local.processes import cuda

def how(_):
    began_anew = b"go_on" in Path("/proc/self/cmdline").read_bytes()
    parent = Path(f"/proc/{os.getppid()}")
    environment = parent.joinpath("environ").read_bytes().split(b"\\0")
    nvml = b"PYTORCH_NVML_BASED_CUDA_CHECK=1" in environment
    loaded = "libcuda.so" in parent.joinpath("maps").read_text()
    return began_anew, nvml, loaded and cuda.is_initialized()
"""


def site(folder: Path, code: str) -> dict[str, str]:
    """The variables with which every Python process runs this code first."""
    folder.joinpath("sitecustomize.py").write_text(code)
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": paths, "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that answers as the driver does in a process that has initialised CUDA."""
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text("int cuDeviceGet(int *device, int i) { *device = i; return 0; }\n")
    name = "-Wl,-soname,libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", name, "-o", library, source], check=True, timeout=60)
    return library


def test_asking_torch_for_cuda_does_not_initialise_it_in_the_fork_server(tmp_path: Path) -> None:
    """A module that is loaded there asks for it; workers are forks all the same, whose driver
    answers that nothing was initialised, if its library is loaded at all. What the user has set of
    the variable is what workers have."""
    program = HOW + (
        "def own(_): return os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']\n"
        "print(weft.map(how, [0], n=1), weft.map(own, [0], n=1))"
    )
    outcome = run_python(program, env=site(tmp_path, TORCH))
    assert outcome.out == "[(False, True, False)] ['0']\n", outcome


def test_workers_of_a_fork_server_with_cuda_begin_anew(tmp_path: Path, library: Path) -> None:
    """They are interpreters of their own, as many as there are items, print and are reported as
    lost as others are. One that could not see the GPUs that it should says so."""
    require_any_names()
    program = HOW + (
        "def f(x):\n"
        "    if x == 3: os.kill(os.getpid(), 9)\n"
        "    print('item', x); return x * x, *how(x)[:2]\n"
        "print(weft.map(f, [1, 2], n=2))\n"
        "try: weft.map(f, [0, 1, 2, 3], n=2)\n"
        "except weft.WorkerLost as error: print(error.item, error.loss.code)\n"
        "with weft.Team(2) as team:\n"
        "    print(weft.function(sum, collect='sum', team=team)([1, 2, 3]))\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = 'GPU-a,GPU-b'\n"
        "try: weft.map(f, [0], gpus=1)\n"
        "except weft.DeviceUnavailable as error: print(error)\n"
        "try: weft.map(f, [0], n=1)\n"
        "except weft.DeviceUnavailable as error: print(error)\n"
        "del os.environ['CUDA_VISIBLE_DEVICES']\n"
        "print(weft.map(abs, [-1], n=1))\n"
    )
    outcome = run_python(program, env=site(tmp_path, STAND_IN.format(library=str(library))))
    lines = outcome.out.splitlines()
    assert "[(1, True, True), (4, True, True)]" in lines, outcome
    assert {"item 1", "item 2", "3 -9", "6"} <= set(lines), outcome
    refusal = "a worker is to see {}, but CUDA was initialised in it when it saw no GPU, and does"
    for seen in ("GPU-a", "GPU-a, GPU-b"):
        assert any(line.startswith(refusal.format(seen)) for line in lines), outcome
    assert lines[-1] == "[1]", outcome


@pytest.mark.gpu
@pytest.mark.parametrize(("code", "anew"), [(TORCH, False), (CONTEXT, True)], ids=["asks", "uses"])
def test_workers_use_cuda_whatever_the_fork_server_has_loaded(
    code: str, anew: bool, tmp_path: Path
) -> None:
    """Also workers of a driver that has used it before."""
    program = HOW + (
        "import torch\n"
        "def use(x): return torch.full((3,), x, device='cuda').sum().item(), how(x)[0]\n"
        "print(torch.ones(2, device='cuda').sum().item())\n"
        "print(weft.map(use, [1.0, 2.0, 3.0], n=2))\n"
        "with weft.Team(2) as team:\n"
        "    add = weft.function(lambda x: torch.tensor(x, device='cuda').sum().item(),\n"
        "        collect='sum', team=team, check=False)\n"
        "    print(add([1.0, 2.0, 3.0]))\n"
    )
    outcome = run_python(program, env=site(tmp_path, code))
    expected = [(3.0 * x, anew) for x in (1.0, 2.0, 3.0)]
    assert outcome.out.splitlines() == ["2.0", str(expected), "6.0"], outcome
