"""The plan: how much of this machine each worker may use.

Cores are counted by affinity and by the tightest CPU quota among this
process's cgroup and all its ancestors; memory by MemAvailable and the tightest
memory limit on the same path. Threads per worker are max(1, cores // workers).
Where ranks are bound to cores, a rank divides its own among those that may run
on them too. A variable that the user has set wins over the plan.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

#: pathlib takes as long to load as all of this; workers are waited for
Path: TypeAlias = "str | os.PathLike[str]"

#: what BLAS and OpenMP libraries read when they are loaded
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

#: of these, the libraries that are told by a variable of their own, as threadpoolctl names them
_OWN_VARIABLES = {
    "OPENBLAS_NUM_THREADS": "openblas",
    "MKL_NUM_THREADS": "mkl",
    "BLIS_NUM_THREADS": "blis",
}

#: the cores that this process may use, if somebody has said so: a worker's share of its driver's
CORES = "WEFT_CORES"


@dataclass(frozen=True)
class Plan:
    """What each of `workers` processes on this host may use."""

    cores: int
    workers: int

    @property
    def threads(self) -> int:
        """Threads for BLAS, OpenMP and torch in each worker."""
        return max(1, self.cores // self.workers)

    @property
    def free_cores(self) -> bool:
        """Whether every worker can have a core to itself, so that spinning harms nobody."""
        return self.workers <= self.cores

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The thread variables to add to a worker's environment."""
        return thread_variables(self.threads, environ)


def plan(workers: int, sharing: int | None = None) -> Plan:
    """Return the plan for `workers` processes on this host, all of which use the same cores, or
    only `sharing` of them those of this process."""
    quotas = [quota for quota, _ in _quotas_of(int(time.monotonic()))]
    return _tightest(Plan(count_cores()[0], sharing or workers), quotas, workers)


def _tightest(bound: Plan, quotas: Iterable[float], workers: int) -> Plan:
    """Return the plan that gives least: quotas are for all workers, wherever they are bound."""
    plans = [bound, *(Plan(max(1, int(quota)), workers) for quota in quotas)]
    return min(plans, key=lambda plan: plan.cores / plan.workers)


def count_sharing(pids: Iterable[int]) -> int:
    """Count which of these processes of this host may run on a core that this one may use."""
    if not hasattr(os, "sched_getaffinity"):
        return len(list(pids))
    own = os.sched_getaffinity(0)
    return sum(not own.isdisjoint(_affinity(pid)) for pid in pids)


def _affinity(pid: int) -> set[int]:
    try:
        return os.sched_getaffinity(pid)
    except ProcessLookupError:  # it has just ended
        return set()


def thread_variables(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold libraries to so many threads.

    A variable the user has set is left alone. The libraries fall back on OMP_NUM_THREADS, so
    where the user has set that one, nothing is added.
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    return {name: str(threads) for name in THREAD_VARIABLES if name not in environ}


def limit_threads(
    threads: int, environ: MutableMapping[str, str] = os.environ
) -> Callable[[], None]:
    """Hold this process to `threads` threads; returns the function that undoes it.

    For ranks that another launcher started: variables for libraries still to be
    loaded, threadpoolctl for those already here.
    """
    added = thread_variables(threads, environ)
    environ.update(added)
    undo = set_threads(threads) if "OMP_NUM_THREADS" in added else None

    def restore() -> None:
        for name in added:
            environ.pop(name, None)
        if undo is not None:
            undo()

    return restore


def set_threads(threads: int) -> Callable[[], None]:
    """Hold the libraries that are loaded to `threads` threads; returns what undoes it."""
    undo: list[Callable[[], None]] = []
    if "numpy" in sys.modules or "torch" in sys.modules:
        from threadpoolctl import threadpool_limits

        if "torch" in sys.modules:
            torch = sys.modules["torch"]
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            undo.append(lambda: torch.set_num_threads(before))
        undo.append(threadpool_limits(threads).restore_original_limits)

    def restore() -> None:
        for step in reversed(undo):
            step()

    return restore


def set_own_threads(numbers: Mapping[str, int]) -> None:
    """Hold some of the libraries that are loaded to numbers of their own, by their variables."""
    if numbers:
        from threadpoolctl import ThreadpoolController

        for name, number in numbers.items():
            ThreadpoolController().select(internal_api=_OWN_VARIABLES[name]).limit(limits=number)


def own_threads(environ: Mapping[str, str]) -> dict[str, int]:
    """The variables of single libraries, where they say a number."""
    return {
        name: int(environ[name]) for name in _OWN_VARIABLES if environ.get(name, "").isdecimal()
    }


@lru_cache(maxsize=1)
def host_name() -> str:
    """Return this host's name, by which records of processes tell hosts apart."""
    if hasattr(os, "uname"):
        return os.uname().nodename
    import platform

    return platform.node()


def count_cores() -> tuple[int, str]:
    """Cores this process may use, and which limit decided."""
    try:
        found, reason = len(os.sched_getaffinity(0)), "CPU affinity"
    except AttributeError:  # systems without affinity
        found, reason = os.cpu_count() or 1, "CPU count"
    for quota, where in _quotas_of(int(time.monotonic())):
        if quota < found:
            found, reason = max(1, int(quota)), f"CPU quota in {where}"
    said = os.environ.get(CORES, "")
    if said.isdecimal() and 0 < int(said) < found:
        found, reason = int(said), CORES
    return found, reason


def count_gpus(environ: Mapping[str, str], devices: Path = "/dev") -> int:
    """How many GPUs of NVIDIA's this process may use."""
    return len(visible_gpus(environ, devices))


def visible_gpus(environ: Mapping[str, str], devices: Path = "/dev") -> list[str]:
    """The GPUs of NVIDIA's that this process may use: those that CUDA_VISIBLE_DEVICES names up to
    the first that cannot be, as CUDA reads it; if it is not set, all that have a device file."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    files = os.listdir(devices) if os.path.isdir(devices) else []
    present = sum(name.startswith("nvidia") and name[6:7].isdigit() for name in files)
    if visible is None:
        return [str(number) for number in range(present)]
    named = [one.strip() for one in visible.split(",")]
    wrong = [
        not one or (one.lstrip("-").isdigit() and not 0 <= int(one) < present) for one in named
    ]
    return named[: wrong.index(True)] if True in wrong else named


def available_memory() -> tuple[int, str]:
    """Bytes that can be allocated now without swapping or an OOM kill, and which limit decided."""
    best, reason = _mem_available(), "MemAvailable"
    for free, where in _memory_headrooms(_cgroups("memory")):
        if free < best:
            best, reason = max(0, free), f"memory limit in {where}"
    return best, reason


def _mem_available(meminfo: Path = "/proc/meminfo") -> int:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # not Linux: the free pages, on macOS all; Windows does not say, and nothing is refused there
    names = getattr(os, "sysconf_names", {})
    pages = next((one for one in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if one in names), None)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages) if pages else sys.maxsize


def _cgroups(
    controller: str,
    membership: Path = "/proc/self/cgroup",
    mount: Path = "/sys/fs/cgroup",
) -> Iterator[str]:
    """This process's cgroup and its ancestors, in version 2 and version 1 hierarchies."""
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [mount, os.path.join(mount, "unified")]
        elif controller in controllers.split(","):
            roots = [os.path.join(mount, controllers), os.path.join(mount, controller)]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for root in dict.fromkeys(roots):
            for depth in range(len(parts), -1, -1):
                folder = os.path.join(root, *parts[:depth])
                if os.path.isdir(folder):
                    yield folder


@lru_cache(maxsize=1)
def _quotas_of(second: int) -> list[tuple[float, str]]:
    """The quotas, read once a second at most: a dozen files, for every call of `weft.map`."""
    return list(_cpu_quotas(_cgroups("cpu")))


def _cpu_quotas(folders: Iterator[str]) -> Iterator[tuple[float, str]]:
    for folder in folders:
        both = _read(folder, "cpu.max").split()  # version 2: "200000 100000" or "max 100000"
        quota = both[0] if both else _read(folder, "cpu.cfs_quota_us")
        period = both[1] if len(both) == 2 else _read(folder, "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            yield int(quota) / int(period), folder


def _memory_headrooms(folders: Iterator[str]) -> Iterator[tuple[int, str]]:
    for folder in folders:
        for limit_file, usage_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _read(folder, limit_file), _read(folder, usage_file)
            if limit.isdigit() and usage.isdigit():
                yield int(limit) - int(usage) + _stat(folder, cache), folder


def _stat(folder: str, key: str) -> int:
    for line in _read(folder, "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _read(*path: Path) -> str:
    try:
        with open(os.path.join(*path)) as file:
            return file.read().strip()
    except OSError:
        return ""
