"""The facts about a machine, and the problems that follow from them, in words. Pure: facts in,
sentences out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from weft._core import arguments, mpirun, ray_versions
from weft.errors import InvalidValue, format_bytes
from weft.resources import THREAD_VARIABLES

Value = TypeVar("Value")


@dataclass(frozen=True)
class Fact(Generic[Value]):
    """A value and its reason. None: unknown. An empty text: there is no such thing here."""

    value: Value | None
    why: str = ""


@dataclass(frozen=True)
class Machine:
    """All facts about a machine. Sizes are in bytes."""

    weft: Fact[str]
    python: Fact[str]
    #: as sys.platform has it: linux
    system: Fact[str]
    #: as the kernel has it: x86_64
    processor: Fact[str]
    cores: Fact[int]
    #: threads of each rank, with one rank per core
    threads: Fact[int]
    #: bytes that can be allocated now
    memory: Fact[int]
    memfd: Fact[bool]
    pidfd: Fact[bool]
    ptrace_scope: Fact[str]
    #: whether one child of this process could read another's memory
    reading: Fact[bool]
    open_files: Fact[int]
    gpus: Fact[int]
    mpirun: Fact[str]
    #: the MPI library that mpi4py loads, and the thread level that weft gets of it
    mpi: Fact[str]
    mpi_threads: Fact[str]
    #: whether the kernels in C were compiled
    kernels: Fact[bool]
    #: whether two ranks, started as a trial, met
    ranks: Fact[bool]
    #: name -> version
    packages: Mapping[str, Fact[str]]
    #: the variables that change what ranks do, if they are set
    environment: Mapping[str, str]
    #: facts about GPUs by name; none where there are no GPUs
    devices: Mapping[str, Fact[Any]] = field(default_factory=dict)


#: bytes; less is filled by a few arrays
_LITTLE = 10**9
#: descriptors; the usual limit
_USUAL_FILES = 1024
#: descriptors that the launcher needs for each rank, and for itself
_FILES_PER_RANK, _FILES_BESIDES = 3, 16


def thread_number(text: str) -> int | None:
    """Parse a variable such as OMP_NUM_THREADS: `4`, or `4,2` for nested regions."""
    first = text.partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def problems(machine: Machine) -> list[str]:
    """Return all problems, the worst first; none if nothing would go wrong."""
    return [*obstacles(machine), *drawbacks(machine)]


def obstacles(machine: Machine) -> list[str]:
    """Return why ranks cannot run here; nothing if they can."""
    system, processor = machine.system.value, machine.processor.value
    if (system, processor) != ("linux", "x86_64"):
        return [
            f"this is {system} on {processor}, not Linux on x86-64: the local engine refuses; "
            "use engine='serial'"
        ]
    if machine.ranks.value:
        return []
    unexplained = f"two ranks, started as a trial, did not meet: {machine.ranks.why}"
    return list(_causes(machine)) or [unexplained]


def drawbacks(machine: Machine) -> list[str]:
    """Return what would be slower, scarcer or otherwise than expected while ranks run."""
    return [
        *_about_cores(machine),
        *_about_limits(machine),
        *_about_gpus(machine),
        *_about_setup(machine),
    ]


def _causes(machine: Machine) -> Iterator[str]:
    """Yield what explains that ranks do not meet."""
    try:
        arguments.from_environment(machine.environment)
    except InvalidValue as error:
        yield str(error)
    if machine.memfd.value is False:
        yield (
            f"no memory that lives without a name ({machine.memfd.why}): the local engine needs "
            "memfd_create, and no filter on it; use engine='serial'"
        )
    if machine.pidfd.value is False:
        yield (
            f"ranks cannot watch each other ({machine.pidfd.why}): the local engine needs "
            "Linux 5.3 or later, and no filter on pidfd_open; use engine='serial'"
        )
    if machine.reading.value is False and "kills" in machine.reading.why:
        yield (
            f"process_vm_readv cannot even be tried ({machine.reading.why}): the local engine "
            "needs a filter that allows or refuses it; use engine='serial'"
        )
    if machine.packages["numpy"].value == "":
        yield "NumPy is not installed, and weft shares arrays of it: pip install numpy"


def _about_cores(machine: Machine) -> Iterator[str]:
    if machine.cores.value == 1:
        yield f"only 1 core ({machine.cores.why}): ranks take turns on it, more are no faster"
    cores = machine.cores.value or 1
    ranks = max(2, cores)
    for name in THREAD_VARIABLES:
        text = machine.environment.get(name)
        threads = None if text is None else thread_number(text)
        if text is not None and threads is None:
            yield (
                f"{name}={text!r} is set and is no whole number of threads: libraries may start "
                f"one for each core in each rank; unset it, or set {name}=1"
            )
        elif threads is not None and threads > 1:
            yield (
                f"{name}={text} is set and wins over the plan: {ranks} ranks on "
                f"{_some(cores, 'core')} would run {ranks * threads} threads; unset it, or start "
                f"at most {_some(max(1, cores // threads), 'rank')}"
            )


def _about_limits(machine: Machine) -> Iterator[str]:
    free = machine.memory.value
    if free is not None and free < _LITTLE:
        yield (
            f"only {format_bytes(free)} of memory can be had ({machine.memory.why}): sharing more "
            "raises OutOfMemory"
        )
    if machine.reading.value is False:
        cause = f"process_vm_readv is forbidden ({machine.reading.why})"
        if machine.ptrace_scope.value in ("1", "2", "3"):
            cause = f"ptrace_scope is {machine.ptrace_scope.value}"
        yield (
            f"{cause}: large arrays are copied twice through shared memory instead of once: "
            "slower, still right"
        )
    limit = machine.open_files.value
    if limit is not None and 0 <= limit < _USUAL_FILES:
        most = max(0, limit - _FILES_BESIDES) // _FILES_PER_RANK
        yield (
            f"the limit on open files is {limit}: `weft run` can start about "
            f"{_some(most, 'rank')}, and each has so much less for its own files; raise it with "
            f"`ulimit -n {_USUAL_FILES}`"
        )


def _about_gpus(machine: Machine) -> Iterator[str]:
    count = machine.gpus.value
    if count is None:
        yield f"whether there are GPUs is unknown ({machine.gpus.why}): CUDA may fail or hang too"
    if not count:
        return
    nothing: Fact[Any] = Fact(None)
    devices = machine.devices
    if (library := devices.get("CUDA's library", nothing)).value is False:
        yield (
            f"CUDA's driver cannot be loaded ({library.why}): nothing can use the GPUs; install "
            "NVIDIA's driver for them"
        )
    variable = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if devices.get("GPUs for ranks", nothing).value == 0:
        yield (
            f"CUDA_VISIBLE_DEVICES={variable!r} lets nothing see a GPU: CUDA takes the entries up "
            "to the first that names none, and none at all if two name the same"
        )
    if devices.get("MPS", nothing).value:
        yield (
            "MPS is on: processes use a GPU at once, and one that is killed inside a long kernel, "
            "of some 50 ms, takes the CUDA contexts of all others with it"
        )
        return
    here = "a GPU is here" if count == 1 else f"{count} GPUs are here"
    yield (
        f"{here}: ranks that share one use it by turns, and a turn costs small work about 0.14 ms "
        "(weft doctor --gpu measures it); weft run --mps has them use it at once, but then a rank "
        "that is killed inside a long kernel takes the CUDA contexts of all others with it"
    )
    if any("Exclusive" in fact.why or "Prohibited" in fact.why for fact in devices.values()):
        yield (
            "the compute mode of a GPU lets one process use it, or none: ranks cannot share it; "
            "nvidia-smi -c DEFAULT changes that"
        )


def _about_setup(machine: Machine) -> Iterator[str]:
    yield from _about_mpi(machine)
    ray = machine.packages["ray"].value
    if ray and ray_versions.is_too_old(ray):
        yield (
            f"Ray {ray} is installed, and weft open --port needs {ray_versions.OLDEST} or later on "
            "all machines: pip install 'weft[ray]'"
        )
    if machine.kernels.value is False:
        yield (
            f"adding to tables is slower than it could be, still right: weft's loops in C are not "
            f"used, because {machine.kernels.why}"
        )
    if faults := machine.environment.get("WEFT_FAULT"):
        yield (
            f"WEFT_FAULT={faults} is set: ranks are killed, stopped or delayed on purpose; "
            "unset it outside of tests"
        )


def _about_mpi(machine: Machine) -> Iterator[str]:
    installed = machine.packages["mpi4py"].value
    hint = "fine on one host, several need both (pip install 'weft[mpi]')"
    if machine.mpirun.value and installed == "":
        yield f"mpirun is found but mpi4py is not: {hint}"
    if installed and machine.mpirun.value == "":
        yield f"mpi4py is found but mpirun is not: {hint}"
    if installed and machine.mpi.value is None:
        yield (
            f"mpi4py is installed but does not work ({machine.mpi.why}): fine on one host, not on "
            "several; Open MPI comes with pip install 'weft[mpi]'"
        )
    if machine.mpi_threads.value in ("single", "funneled"):
        yield (
            f"the MPI library serves one thread only ({machine.mpi_threads.value}), weft needs "
            "MPI_THREAD_SERIALIZED on several hosts; use one that was built for threads"
        )
    started_by = mpirun.of_text(machine.mpirun.value or "")
    loaded = mpirun.of_text(machine.mpi.value or "")
    if wrong := mpirun.misfit(started_by, loaded):
        yield wrong


def _some(count: int, thing: str) -> str:
    return f"1 {thing}" if count == 1 else f"{count} {thing}s"
