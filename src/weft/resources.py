"""The plan: how much of this machine each worker may use.

Cores are limited by affinity and by the tightest CPU quota among this process's cgroup and all its
ancestors; memory by MemAvailable and the tightest memory limit on the same path. Each worker gets
max(1, cores // workers) threads. A rank that is bound to cores divides them among the ranks that
may run on them too. A variable that the user has set wins over the plan.

GPUs are told apart by the user's own entries of CUDA_VISIBLE_DEVICES, which are handed on as they
are: numbers, UUIDs, the beginning of one, parts of a GPU. What may be seen is never widened.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias

from weft.errors import InvalidType, InvalidValue

#: not pathlib's: it would double the time that workers take to load this module
Path: TypeAlias = "str | os.PathLike[str]"

#: the variables that BLAS and OpenMP libraries read when they are loaded
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

#: those that are for one library, with threadpoolctl's name of it
_OWN_VARIABLES = {
    "OPENBLAS_NUM_THREADS": "openblas",
    "MKL_NUM_THREADS": "mkl",
    "BLIS_NUM_THREADS": "blis",
}

#: the variable by which joblib, and what scikit-learn uses of it, learns how many cores there are
_JOBLIB = "LOKY_MAX_CPU_COUNT"

#: the variable with the GPUs that CUDA lets a process see, and where the driver tells of its GPUs
_VISIBLE, _DRIVER = "CUDA_VISIBLE_DEVICES", "/proc/driver/nvidia/gpus"

#: the number of this process among the workers of its driver; 0 in other processes
worker_number = 0

#: the GPU that torch was told to use, by default its first
_preferred = 0

#: the variable with the number of cores that a worker may use of its driver's
CORES = "WEFT_CORES"


@dataclass(frozen=True)
class Plan:
    """Describe what each of `workers` processes on this host may use."""

    cores: int
    workers: int

    @property
    def threads(self) -> int:
        """Return the number of threads for BLAS, OpenMP and torch in each worker."""
        return max(1, self.cores // self.workers)

    @property
    def free_cores(self) -> bool:
        """Return whether every worker can have its own core, so that spinning harms nobody."""
        return self.workers <= self.cores

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the thread variables to add to a worker's environment."""
        return thread_variables(self.threads, environ)


def plan(workers: int, sharing: int | None = None) -> Plan:
    """Return the plan for `workers` processes on this host. All of them, or only `sharing` of them,
    run on the cores of this process."""
    quotas = [quota for quota, _ in _quotas_of(int(time.monotonic()))]
    return _tightest(Plan(count_cores()[0], sharing or workers), quotas, workers)


def _tightest(bound: Plan, quotas: Iterable[float], workers: int) -> Plan:
    """Return the plan with the least per worker. Quotas are for all workers, bound or not."""
    plans = [bound, *(Plan(max(1, int(quota)), workers) for quota in quotas)]
    return min(plans, key=lambda plan: plan.cores / plan.workers)


def count_sharing(pids: Iterable[int]) -> int:
    """Count those of these processes that may run on a core of this process."""
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
    """Return the variables that limit libraries to so many threads. A variable that the user has
    set stays as it is. Libraries fall back on OMP_NUM_THREADS, so of theirs none is added if the
    user has set that one."""
    names = () if "OMP_NUM_THREADS" in environ else THREAD_VARIABLES
    return {name: str(threads) for name in (*names, _JOBLIB) if name not in environ}


def limit_threads(threads: int) -> Callable[[], None]:
    """Limit this process to `threads` threads; return a function that undoes it. For ranks that
    another launcher started: variables limit the libraries that are loaded later, threadpoolctl
    those that are loaded already."""
    added = thread_variables(threads, os.environ)
    os.environ.update(added)
    undo = set_threads(threads) if "OMP_NUM_THREADS" in added else None

    def restore() -> None:
        for name in added:
            os.environ.pop(name, None)
        if undo is not None:
            undo()

    return restore


def set_threads(threads: int) -> Callable[[], None]:
    """Limit the loaded libraries to `threads` threads; return a function that undoes it."""
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
    """Limit loaded libraries to numbers of their own, given by their variables' names."""
    if numbers:
        from threadpoolctl import ThreadpoolController

        for name, number in numbers.items():
            ThreadpoolController().select(internal_api=_OWN_VARIABLES[name]).limit(limits=number)


def own_threads(environ: Mapping[str, str]) -> dict[str, int]:
    """Return those variables for one library that are set to a number."""
    return {
        name: int(environ[name]) for name in _OWN_VARIABLES if environ.get(name, "").isdecimal()
    }


@lru_cache(maxsize=1)
def host_name() -> str:
    """Return this host's name, which tells the hosts of processes apart."""
    if hasattr(os, "uname"):
        return os.uname().nodename
    import platform

    return platform.node()


def count_cores() -> tuple[int, str]:
    """Return how many cores this process may use, and which limit decided."""
    try:
        cores, reason = len(os.sched_getaffinity(0)), "CPU affinity"
    except AttributeError:  # systems without affinity
        cores, reason = os.cpu_count() or 1, "CPU count"
    for quota, where in _quotas_of(int(time.monotonic())):
        if quota < cores:
            cores, reason = max(1, int(quota)), f"CPU quota in {where}"
    share = os.environ.get(CORES, "")
    if share.isdecimal() and 0 < int(share) < cores:
        cores, reason = int(share), CORES
    return cores, reason


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return how many NVIDIA GPUs this process may use."""
    return len(visible_gpus(environ))


def own_choice(environ: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names; None where it is not set."""
    return visible_gpus(environ) if _VISIBLE in environ else None


def visible_gpus(
    environ: Mapping[str, str], devices: Path = "/dev", driver: Path = _DRIVER
) -> list[str]:
    """Return the NVIDIA GPUs that this process may use, as CUDA reads CUDA_VISIBLE_DEVICES: the
    entries before the first that names no GPU, and none if two name the same; if it is not set, the
    numbers of all that have a device file."""
    visible = environ.get(_VISIBLE)
    files = os.listdir(devices) if os.path.isdir(devices) else []
    present = sum(name.startswith("nvidia") and name[6:7].isdigit() for name in files)
    if visible is None:
        return [str(number) for number in range(present)]
    known = _known_gpus(driver)
    named: dict[str, str] = {}
    for entry in (text.strip() for text in visible.split(",")):
        gpu = _identify(entry, present, known)
        if gpu is None:
            break
        if gpu in named:
            return []
        named[gpu] = entry
    return list(named.values())


def _known_gpus(driver: Path) -> list[str]:
    """Return the UUIDs of the driver's GPUs; none where it does not tell them."""
    found = []
    for folder in os.listdir(driver) if os.path.isdir(driver) else []:
        for line in _read(driver, folder, "information").splitlines():
            label, _, value = line.partition(":")
            if label.strip() == "GPU UUID":
                found.append(value.strip())
    return found


def _identify(entry: str, present: int, known: Sequence[str]) -> str | None:
    """Return what tells an entry's GPU from others; None if it names none. Names that cannot be
    looked up are taken. Of a number CUDA reads the digits that it begins with."""
    digits = entry[: len(entry) - len(entry.lstrip("0123456789"))]
    if digits:
        return str(int(digits)) if int(digits) < present else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    if not known or entry.startswith("MIG-"):
        return entry
    fitting = [uuid for uuid in known if uuid.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None


def choose_gpus(
    wanted: object,
    environ: Mapping[str, str],
    where: str,
    devices: Path = "/dev",
    driver: Path = _DRIVER,
) -> list[str]:
    """Return the GPUs that a user names, "0,1" or [0, 1], each as the entry of
    CUDA_VISIBLE_DEVICES that is to be handed on. `where` says where they were named. Raises
    InvalidValue, InvalidType."""
    names = _names_of_gpus(wanted, where)
    visible = visible_gpus(environ, devices, driver)
    if not visible:
        set_to = f"; {_VISIBLE}={environ[_VISIBLE]!r}" if _VISIBLE in environ else ""
        raise InvalidValue(f"{where}: no GPU may be used here{set_to}")
    known = _known_gpus(driver) if _VISIBLE not in environ else []
    return [_choose(name, visible, known, where) for name in names]


def _names_of_gpus(wanted: object, where: str) -> list[str]:
    if isinstance(wanted, str):
        names = [name.strip() for name in wanted.split(",")]
    else:
        parts = list(wanted) if isinstance(wanted, Iterable) else [None]
        if not all(isinstance(part, str) or hasattr(part, "__index__") for part in parts):
            raise InvalidType(f'{where}: expected names of GPUs, for example "0,1" or [0, 1]')
        names = [str(part).strip() for part in parts]
    if not all(names) or not names:
        raise InvalidValue(f'{where}: expected names of GPUs, for example "0,1" or [0, 1]')
    return names


def _choose(name: str, visible: Sequence[str], known: Sequence[str], where: str) -> str:
    """Return the visible GPU that this names: its own entry, or the beginning of one UUID."""
    if name in visible:
        return name
    if name.startswith("GPU-"):
        fitting = [gpu for gpu in visible if gpu.startswith(name) or name.startswith(gpu)]
        if len(fitting) == 1:
            return fitting[0]
        if sum(uuid.startswith(name) for uuid in known) == 1:
            return name  # all GPUs may be used
    raise InvalidValue(
        f"{where}: {name!r} is none of the GPUs that may be used here: {', '.join(visible)}"
    )


def share_gpus(gpus: Sequence[str], processes: int) -> list[str | None]:
    """Return what each of several processes of this host sees: the GPUs in turn; None, if there are
    none to share: what it would see anyway."""
    return [gpus[i % len(gpus)] if gpus else None for i in range(processes)]


def narrow(gpus: Sequence[str], rank: int, ranks: int) -> dict[str, str]:
    """Return the variable by which one of `ranks` ranks of this host sees one of several GPUs. A
    rank that is alone sees all of these."""
    if not gpus:
        return {}
    return {_VISIBLE: ",".join(gpus) if ranks == 1 else gpus[rank % len(gpus)]}


def prefer_own_gpu() -> None:
    """Make torch, if it is loaded, use this worker's GPU of those that it sees."""
    prefer_gpu(worker_number % (count_gpus(os.environ) or 1))


def prefer_gpu(index: int) -> None:
    """Make torch, if it is loaded, use this GPU where the program names none. Nothing is
    initialised for it: torch is told now, or does it when it initialises CUDA."""
    global _preferred
    call = getattr(getattr(sys.modules.get("torch"), "cuda", None), "_lazy_call", None)
    if call is not None and index != _preferred:
        _preferred = index
        call(partial(sys.modules["torch"].cuda.set_device, index))


def available_memory() -> tuple[int, str]:
    """Return how many bytes can be allocated now without swapping or an out-of-memory kill, and
    which limit decided."""
    best, reason = _mem_available(), "MemAvailable"
    for free, where in _memory_headrooms(_cgroups("memory")):
        if free < best:
            best, reason = max(0, free), f"memory limit in {where}"
    return best, reason


def _mem_available() -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # not Linux: the free pages, on macOS all pages; Windows has no sysconf, so there is no limit
    names = getattr(os, "sysconf_names", {})
    pages = next((name for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if name in names), None)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages) if pages else sys.maxsize


def _cgroups(
    controller: str, membership: Path = "/proc/self/cgroup", mount: Path = "/sys/fs/cgroup"
) -> Iterator[str]:
    """Yield the folders of this process's cgroup and its ancestors, of versions 2 and 1."""
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
    """Return the CPU quotas. Cached for a second: they are in a dozen files, and every `weft.map`
    asks for them."""
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
