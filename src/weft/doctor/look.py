"""How the facts are gathered."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from weft import kernels
from weft._core import timeouts
from weft._version import __version__
from weft.doctor import programs, reading
from weft.doctor.machine import Fact, Machine, attempt, thread_number
from weft.resources import THREAD_VARIABLES, Plan, available_memory, count_cores

PACKAGES = ("numpy", "torch", "jax", "keras", "pytensor", "mpi4py", "ray")
VARIABLES = (
    *THREAD_VARIABLES,
    "CUDA_VISIBLE_DEVICES",
    timeouts.VARIABLE,
    "WEFT_KERNELS",
    "WEFT_FAULT",
)
_SCOPES = {
    "0": "Yama lets processes of one user read each other",
    "1": "Yama lets a process read its descendants, and whoever allows it",
    "2": "Yama lets only administrators read other processes",
    "3": "Yama lets nobody read other processes",
}


def look() -> Machine:
    """The machine and the environment of this process. Takes about a second."""
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    cores = attempt(lambda: Fact(*count_cores()))
    return Machine(
        weft=Fact(__version__),
        python=Fact(platform.python_version(), sys.executable or "no executable is known"),
        system=attempt(lambda: Fact(sys.platform, platform.release())),
        processor=attempt(_processor),
        cores=cores,
        threads=attempt(lambda: threads_per_rank(cores.value, environment)),
        memory=attempt(lambda: Fact(*available_memory())),
        memfd=attempt(_memfd),
        pidfd=attempt(_pidfd),
        ptrace_scope=attempt(_ptrace_scope),
        reading=attempt(reading.between_siblings),
        open_files=attempt(_open_files),
        gpus=attempt(programs.gpus),
        mpirun=attempt(programs.mpirun),
        kernels=Fact(not kernels.missing(), kernels.missing()),
        ranks=attempt(programs.two_ranks),
        packages={name: attempt(partial(_version, name)) for name in PACKAGES},
        environment=environment,
    )


def threads_per_rank(cores: int | None, environment: Mapping[str, str]) -> Fact[int]:
    """Threads of each rank, with one rank per core. Pure."""
    if "OMP_NUM_THREADS" in environment:
        number = thread_number(environment["OMP_NUM_THREADS"])
        return Fact(number, "OMP_NUM_THREADS" if number else "OMP_NUM_THREADS is no whole number")
    if cores is None:
        return Fact(None, "it is cores // ranks, and the number of cores is unknown")
    return Fact(Plan(cores, cores).threads, "with a rank per core; cores // ranks, at least 1")


def _processor(information: Path = Path("/proc/cpuinfo")) -> Fact[str]:
    model = ""
    if information.exists():
        lines = [line.partition(":") for line in information.read_text().splitlines()]
        model = next((value for name, _, value in lines if name.strip() == "model name"), "")
    return Fact(platform.machine(), model.strip())


def _memfd() -> Fact[bool]:
    if not hasattr(os, "memfd_create"):
        return Fact(False, "this system or Python has no memfd_create")
    try:
        os.close(os.memfd_create("weft"))
    except OSError as error:
        return Fact(False, f"memfd_create: {error.strerror}")
    return Fact(True)


def _pidfd() -> Fact[bool]:
    if not hasattr(os, "pidfd_open"):
        return Fact(False, "this system or Python has no pidfd_open")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Fact(False, f"pidfd_open: {error.strerror}")
    return Fact(True)


def _ptrace_scope(setting: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> Fact[str]:
    if not setting.exists():
        return Fact("", "this kernel has no Yama")
    scope = setting.read_text().strip()
    return Fact(scope, _SCOPES.get(scope, "a scope that weft does not know"))


def _open_files() -> Fact[int]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Fact(soft, f"the hard limit is {hard}")


def _version(package: str) -> Fact[str]:
    try:
        return Fact(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Fact("", "not installed")
