"""The GPUs of this machine: what NVIDIA's driver tells of them, and on request what two processes
that use one measure.

`python -m weft.doctor.gpus` is what those two ranks run: a process that asks the GPU anything keeps
half a gigabyte of it, and `weft doctor` itself does not.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.doctor.ask import ANSWER, ask, complaint, reason
from weft.doctor.problems import Fact
from weft.engines import registry
from weft.resources import visible_gpus

#: what nvidia-smi is asked for of each GPU
_QUESTION = "name,memory.total,uuid,driver_version,compute_mode"
#: where a daemon of MPS can be reached, unless the variable says otherwise
PIPES, _USUAL_PIPES = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
_CONTROL = "nvidia-cuda-mps-control"
#: seconds for two ranks to load torch, use a GPU and measure
_TRIAL = 180.0
#: CU_DEVICE_ATTRIBUTE_MPS_ENABLED
_MPS_ENABLED = 133
#: bytes of the tensors that are added up, and how often each thing is measured
_SIZES, _TIMES = (1000, 1_000_000, 100_000_000), 30


def look() -> tuple[Fact[int], dict[str, Fact[Any]]]:
    """Return how many GPUs there are, by nvidia-smi, else by their device files, and facts about
    them by name."""
    program = shutil.which("nvidia-smi")
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if program is None:
        count = Fact(len(devices), ", ".join(devices) or "no nvidia-smi and no /dev/nvidia*")
        return count, about(count.value, [], os.environ)
    try:
        answer = ask([program, f"--query-gpu={_QUESTION}", "--format=csv,noheader"], ANSWER)
    except Exception as error:
        count = Fact(len(devices) or None, ", ".join([*devices, reason(error)]))
        return count, about(count.value, [], os.environ)
    count = parse_nvidia_smi(answer.returncode, answer.stdout, devices)
    return count, about(count.value, rows_of(answer.stdout), os.environ)


def parse_nvidia_smi(code: int, text: str, devices: Sequence[str]) -> Fact[int]:
    """Interpret nvidia-smi's answer: a line for each GPU, or an error message. Pure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code == 0:
        named = [", ".join(line.split(", ")[:2]) for line in lines]
        return Fact(len(lines), "; ".join(named) or "nvidia-smi lists none")
    if "No devices were found" in text:
        return Fact(0, "nvidia-smi: no devices were found")
    words = f"nvidia-smi ended with code {code}: {' '.join(lines)[:200]}"
    return Fact(len(devices) or None, ", ".join([*devices, words]))


def rows_of(text: str) -> list[list[str]]:
    """Return the answers of nvidia-smi, a list for each GPU; none where it did not answer. Pure."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == len(_QUESTION.split(","))]


def about(
    count: int | None, rows: Sequence[Sequence[str]], environ: Mapping[str, str]
) -> dict[str, Fact[Any]]:
    """Return what there is to know of GPUs without using them; nothing where there are none."""
    if not count:
        return {}
    found: dict[str, Fact[Any]] = {}
    for number, (name, memory, uuid, driver, mode) in enumerate(rows):
        found[f"GPU {number}"] = Fact(name, f"{memory}, {uuid}, compute mode {mode}")
        found["NVIDIA's driver"] = Fact(driver)
    visible = visible_gpus(environ)
    found["GPUs for ranks"] = Fact(len(visible), ", ".join(visible))
    found["CUDA's library"] = _library()
    found["MPS"] = mps(environ)
    return found


def _library() -> Fact[bool]:
    try:
        ctypes.CDLL("libcuda.so.1")  # loading it initialises nothing
    except OSError as error:
        return Fact(False, str(error))
    return Fact(True, "libcuda.so.1")


def mps(environ: Mapping[str, str]) -> Fact[bool]:
    """Return whether processes use GPUs at once, through a daemon of NVIDIA's MPS."""
    folder = environ.get(PIPES, _USUAL_PIPES)
    if os.path.exists(os.path.join(folder, "control")):
        return Fact(True, f"a daemon at {folder}")
    if shutil.which(_CONTROL) is None:
        return Fact(False, f"and no {_CONTROL} in PATH, which weft run --mps needs")
    return Fact(False, "weft run --mps starts a daemon for its ranks")


def measure() -> dict[str, Fact[Any]]:
    """Return what two ranks that use a GPU measure. Takes some seconds, and half a gigabyte of the
    GPU for each."""
    obstacle = "" if visible_gpus(os.environ) else "no GPU may be used here"
    if obstacle := registry.system_obstacle() or obstacle:
        return {"a trial on the GPU": Fact(None, obstacle)}
    program = [sys.executable, "-m", "weft", "run", "-n", "2", "--no-prefix", "-m", __name__]
    try:
        done = ask(program, _TRIAL)
    except Exception as error:
        return {"a trial on the GPU": Fact(None, reason(error))}
    if done.returncode:
        why = complaint(done.stderr) or f"weft run ended with {done.returncode}"
        return {"a trial on the GPU": Fact(None, why)}
    found = measured(json.loads(done.stdout.splitlines()[-1]))
    if len(visible_gpus(os.environ)) > 1:
        found["peer access"] = _peers()
    return found


def _peers() -> Fact[bool]:
    """Return whether each GPU reaches the memory of every other."""
    done = ask([sys.executable, "-m", __name__, "peers"], _TRIAL)
    if done.returncode:
        return Fact(None, complaint(done.stderr))
    pairs = json.loads(done.stdout)
    return Fact(not pairs, f"not between {', '.join(pairs)}" if pairs else "between all")


def measured(trial: Mapping[str, Any]) -> dict[str, Fact[Any]]:
    """Return what the ranks told, as facts. Pure."""
    how = "at once, under MPS" if trial["mps"] else "by turns"
    one = trial["uuids"][0] == trial["uuids"][-1]
    where = f"two ranks on one GPU, which use it {how}" if one else "two ranks, a GPU each"
    found = {
        "small work, alone": Fact(_time(trial["alone"]), "one rank, a kernel and its end"),
        "small work, both": Fact(_time(trial["together"]), where),
    }
    for size, seconds, on_device in trial["all_reduce"]:
        path = "added up on the GPU" if on_device else "added up on the host"
        found[f"all_reduce, {_size(size)}"] = Fact(_time(seconds), path)
    return found


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _size(size: int) -> str:
    return f"{size // 1000} kB" if size < 1_000_000 else f"{size // 1_000_000} MB"


# what the two ranks run


def trial() -> None:
    """Measure as one of two ranks; rank 0 prints what both found. Raises what goes wrong."""
    import numpy
    import torch

    import weft
    from weft.engines.base import make_call

    group = weft.init()
    device = torch.device(weft.device())
    word = torch.zeros(64, device=device)

    def work() -> None:
        word.add_(1)
        torch.cuda.synchronize(device)

    work()
    weft.barrier()
    alone = _median(work) if group.rank == 0 else 0.0
    weft.barrier()
    together = _median(work)
    sums = []
    for size in _SIZES:
        values = torch.zeros(size // 4, device=device)

        def add(values: Any = values) -> None:
            weft.all_reduce(values)
            torch.cuda.synchronize(device)

        seconds = _median(add)
        call = make_call(group, "all_reduce", values, {"op": "sum", "weight": None, "out": None})
        sums.append((size, seconds, call.placed is not None))  # as the calls before were
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    characters = weft.all_gather(numpy.frombuffer(uuid.encode(), numpy.uint8))
    both = characters.reshape(group.size, -1)
    told = {
        "uuids": [bytes(one).decode() for one in both],
        "mps": _is_shared_by_mps(device.index),
        "alone": alone,
        "together": together,
        "all_reduce": sums,
    }
    if group.rank == 0:
        print(json.dumps(told))
    weft.shutdown()


def _median(work: Callable[[], None]) -> float:
    times = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[_TIMES // 2]


def _is_shared_by_mps(device: int) -> bool:
    value = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(value), _MPS_ENABLED, device)
    return bool(value.value)


def peers() -> None:
    """Print the pairs of GPUs of which one does not reach the other's memory."""
    import torch

    numbers = range(torch.cuda.device_count())
    pairs = [(i, j) for i in numbers for j in numbers if i != j]
    access = torch.cuda.can_device_access_peer
    print(json.dumps([f"{i} and {j}" for i, j in pairs if not access(i, j)]))


if __name__ == "__main__":
    peers() if sys.argv[1:] == ["peers"] else trial()
