"""The facts that other programs tell. Each is given a few seconds, and ended if it takes longer."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from weft.doctor.machine import Fact, reason

#: seconds for a program that only has to say what it is
_ANSWER = 5.0
#: seconds for two ranks to meet, each of which loads NumPy, on a busy machine
_TRIAL = 30.0


def gpus() -> Fact[int]:
    """How many, by nvidia-smi, else by their device files."""
    program = shutil.which("nvidia-smi")
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if program is None:
        return Fact(len(devices), ", ".join(devices) or "no nvidia-smi and no /dev/nvidia*")
    try:
        told = ask([program, "--query-gpu=name,memory.total", "--format=csv,noheader"], _ANSWER)
    except OSError as error:
        return Fact(len(devices) or None, ", ".join([*devices, reason(error)]))
    return gpus_told(told.returncode, told.stdout, devices)


def gpus_told(code: int, text: str, devices: Sequence[str]) -> Fact[int]:
    """What nvidia-smi's answer means: a line for each GPU, or a complaint. Pure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code == 0:
        return Fact(len(lines), "; ".join(lines) or "nvidia-smi lists none")
    if "No devices were found" in text:
        return Fact(0, "nvidia-smi: no devices were found")
    complaint = f"nvidia-smi ended with code {code}: {' '.join(lines)[:200]}"
    return Fact(len(devices) or None, ", ".join([*devices, complaint]))


def mpirun() -> Fact[str]:
    """Its version, and where it is."""
    program = shutil.which("mpirun")
    if program is None:
        return Fact("", "not in PATH")
    told = ask([program, "--version"], _ANSWER)
    return Fact(mpi_version(told.stdout + told.stderr), program)


def mpi_version(text: str) -> str:
    """`Open MPI 5.0.3` or `MPICH 4.2.0`, else the first line of what it said. Pure."""
    if found := re.search(r"\(Open MPI\)\s+(\S+)", text):
        return f"Open MPI {found[1]}"
    if "HYDRA" in text and (found := re.search(r"Version:\s+(\S+)", text)):
        return f"MPICH {found[1]}"
    return text.strip().split("\n")[0][:60] or "it did not say which version"


def two_ranks() -> Fact[bool]:
    """Whether two ranks, started by `weft run`, meet and share an array."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return Fact(False, "not tried on this system")
    command = [sys.executable, "-m", "weft", "run", "-n", "2", "--no-prefix"]
    try:
        done = ask([*command, "-m", "weft.doctor.trial"], _TRIAL)
    except OSError as error:
        return Fact(False, reason(error))
    if done.returncode == 0:
        return Fact(True, "two ranks were started, and met")
    return Fact(False, complaint(done.stderr) or f"weft run ended with {done.returncode}")


def complaint(text: str) -> str:
    """The one line of `weft run`'s errors that says most. Pure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if last.startswith("weft run:"):  # the rank printed no error: how it ended is above
        last = next((line for line in lines if "failed first" in line), last)
    return last.removeprefix("weft: ").removeprefix("weft run: ")[:300]


def ask(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Raises OSError, TimeoutError.

    It gets a session of its own, so that what it has started can be ended with it.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_end_with_this_process(),  # noqa: PLW1509  this process has one thread
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                late = f"{command[0]} did not answer within {seconds:g} s"
                raise TimeoutError(late) from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end_with_this_process() -> Callable[[], None] | None:
    """What a child does first, where the kernel can end it when this process is killed."""
    if sys.platform != "linux":
        return None
    from weft.engines.local import libc

    return lambda: libc.end_with_parent(signal.SIGKILL)
