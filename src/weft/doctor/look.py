"""Gather the facts about this machine.

Some come from programs that are run: nvidia-smi, mpirun, two ranks. Each gets a few seconds, and is
killed if it takes longer. A probe that fails is a fact as well: unknown, and why.

`python -m weft.doctor.look` is what those two ranks run.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from weft import kernels
from weft._core import arguments
from weft._core import mpirun as mpi_words
from weft._version import __version__
from weft.doctor import gpus
from weft.doctor.ask import ANSWER, ask, complaint, reason
from weft.doctor.problems import Fact, Machine, Value, thread_number
from weft.engines import registry
from weft.errors import MissingPackage
from weft.resources import THREAD_VARIABLES, Plan, available_memory, count_cores

PACKAGES = ("numpy", "torch", "jax", "keras", "pytensor", "mpi4py", "ray")
VARIABLES = (
    *THREAD_VARIABLES,
    "CUDA_VISIBLE_DEVICES",
    gpus.PIPES,
    arguments.VARIABLE,
    "WEFT_KERNELS",
    "WEFT_FAULT",
)
_SCOPES = {
    "0": "Yama lets processes of one user read each other",
    "1": "Yama lets a process read its descendants, and whoever allows it",
    "2": "Yama lets only administrators read other processes",
    "3": "Yama lets nobody read other processes",
}

#: seconds for a process to load and start MPI
_ANSWER_OF_MPI = 20.0
#: seconds for two ranks to load NumPy and meet on a busy machine
_TRIAL = 30.0


def look(*, gpu: bool = False) -> Machine:
    """Return the facts about this machine and process. Takes about a second; with `gpu` some more,
    in which ranks use a GPU."""
    environment = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    cores = attempt(lambda: Fact(*count_cores()))
    try:
        mpi, mpi_threads = mpi_library()
    except Exception as error:  # as in `attempt`
        mpi = mpi_threads = Fact(None, reason(error))
    try:
        count, devices = gpus.look()
    except Exception as error:  # as in `attempt`
        count, devices = Fact(None, reason(error)), {}
    if gpu:
        devices |= gpus.measure()
    return Machine(
        weft=Fact(__version__),
        python=Fact(platform.python_version(), sys.executable or "no executable is known"),
        system=attempt(lambda: Fact(sys.platform, platform.release())),
        processor=attempt(_processor),
        cores=cores,
        threads=attempt(lambda: threads_per_rank(cores.value, environment)),
        memory=attempt(lambda: Fact(*available_memory())),
        memfd=attempt(partial(_by_engine, "memfd")),
        pidfd=attempt(partial(_by_engine, "pidfd")),
        ptrace_scope=attempt(_ptrace_scope),
        reading=attempt(partial(_by_engine, "reading")),
        open_files=attempt(_open_files),
        gpus=count,
        mpirun=attempt(mpirun),
        mpi=mpi,
        mpi_threads=mpi_threads,
        kernels=Fact(not kernels.missing(), kernels.missing()),
        ranks=attempt(two_ranks),
        packages={name: attempt(partial(_version, name)) for name in PACKAGES},
        environment=environment,
        devices=devices,
    )


def threads_per_rank(cores: int | None, environment: Mapping[str, str]) -> Fact[int]:
    """Return the threads of each rank, with one rank per core. Pure."""
    if "OMP_NUM_THREADS" in environment:
        number = thread_number(environment["OMP_NUM_THREADS"])
        return Fact(number, "OMP_NUM_THREADS" if number else "OMP_NUM_THREADS is no whole number")
    if cores is None:
        return Fact(None, "it is cores // ranks, and the number of cores is unknown")
    return Fact(Plan(cores, cores).threads, "with a rank per core; cores // ranks, at least 1")


def _processor() -> Fact[str]:
    information, model = Path("/proc/cpuinfo"), ""
    if information.exists():
        lines = [line.partition(":") for line in information.read_text().splitlines()]
        model = next((value for name, _, value in lines if name.strip() == "model name"), "")
    return Fact(platform.machine(), model.strip())


def _by_engine(name: str) -> Fact[bool]:
    """Run a probe of the engine that launches ranks. Raises EngineUnavailable if there is none."""
    return Fact(*registry.choose(None, "launch").load().probes()[name]())


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


def attempt(probe: Callable[[], Fact[Value]]) -> Fact[Value]:
    """Return the fact that a probe finds; if it fails, an unknown fact with the reason."""
    try:
        return probe()
    except Exception as error:
        return Fact(None, reason(error))


def mpirun() -> Fact[str]:
    """Return the version and the path of the mpirun that `weft run --hosts` uses."""
    try:
        program = registry.ENGINES["mpi"].load().find_mpirun()
    except MissingPackage:
        return Fact("", "neither beside Python nor in PATH")
    answer = ask([program, "--version"], ANSWER)
    return Fact(mpi_version(answer.stdout + answer.stderr), program)


def mpi_version(text: str) -> str:
    """Return `Open MPI 5.0.3` or `MPICH 4.2.0`, else the first line of the answer. Pure."""
    mpi = mpi_words.of_mpirun(text)
    return str(mpi or text.strip().split("\n")[0][:60]) or "it did not say which version"


def mpi_library() -> tuple[Fact[str], Fact[str]]:
    """Return the MPI library that mpi4py loads, and the thread level that weft gets of it."""
    if _version("mpi4py").value == "":
        return Fact("", "mpi4py is not installed"), Fact("", "mpi4py is not installed")
    with tempfile.TemporaryDirectory(prefix="weft-doctor-") as folder:
        question = [sys.executable, "-c", mpi_words.LIBRARY_QUESTION]
        # alone in its world, Open MPI leaves files there, and one in /dev/shm if it may talk to
        # processes of this host
        answer = ask(question, _ANSWER_OF_MPI, {"TMPDIR": folder, "OMPI_MCA_btl": "self"})
    lines, why = answer.stdout.splitlines(), complaint(answer.stderr) or "it said nothing"
    if not lines:
        return Fact(None, why), Fact(None, why)
    library = Fact(str(mpi_words.of_library(lines[0]) or lines[0][:60]), "as mpi4py loads it")
    return library, Fact(lines[1]) if len(lines) > 1 else Fact(None, why)


def two_ranks() -> Fact[bool]:
    """Try whether two ranks that `weft run` starts meet and share an array."""
    if registry.system_obstacle():
        return Fact(False, "not tried on this system")
    command = [sys.executable, "-m", "weft", "run", "-n", "2", "--no-prefix"]
    try:
        done = ask([*command, "-m", "weft.doctor.look"], _TRIAL)
    except OSError as error:
        return Fact(False, reason(error))
    if done.returncode == 0:
        return Fact(True, "two ranks were started, and met")
    return Fact(False, complaint(done.stderr) or f"weft run ended with {done.returncode}")


def trial() -> None:
    """Meet, share and add as one of two ranks: what programs need of an engine. Raises what goes
    wrong."""
    import numpy

    import weft

    group = weft.init()
    weft.share(numpy.zeros(1))
    weft.barrier()
    total = weft.all_reduce(numpy.ones(1))
    if total[0] != group.size:
        raise ArithmeticError(f"the sum of {group.size} ones came out as {total[0]}")
    weft.shutdown()


if __name__ == "__main__":
    trial()
