"""The rank and size of this process, from the variables of the launcher that started it.

`weft run` gives each rank WEFT_RANK, WEFT_SIZE and WEFT_JOB, and the descriptor of the job's
memory. The variables of other launchers are in the table `_LAUNCHERS`:

    environment, ancestors ->  which launcher  ->  rank, size, job, ranks of this host  ->  Launched

If several launchers have left variables, the nearest one counts: the one whose launching process is
the closest ancestor. `weft run` goes first.

A place (a rank of a launch) is taken once, and not by the programs that a rank starts. weft's own
variables are removed from the environment when they are read. Those of others have more readers
(mpi4py) and stay; WEFT_TAKEN, set beside them, says that these values have been taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.errors import EngineUnavailable, InvalidValue


class Process(NamedTuple):
    """A process; its start time distinguishes it from a later one with the same pid."""

    pid: int
    start: int


class Ancestor(NamedTuple):
    """An ancestor of this process, and the environment that it was started with."""

    process: Process
    #: None if this process may not read it
    environ: dict[str, str] | None


VARIABLES = ("WEFT_RANK", "WEFT_SIZE", "WEFT_JOB", "WEFT_MEMORY", "WEFT_LAUNCHER")
TAKEN = "WEFT_TAKEN"
#: set by `weft run --hosts`: a rank tells in its stderr that it began, ended, or failed
REPORT = "WEFT_REPORT"
BEGAN, ENDED, FAILED = b"began", b"ended", b"failed"
MARK = re.compile(rb"\x1eweft rank (\w+)\n")


@dataclass(frozen=True)
class Launched:
    """This process's place in a launch."""

    rank: int
    size: int
    #: unique to the launch; empty if the ranks cannot all see the process that started them
    job: str
    #: a descriptor of the job's memory, under `weft run`; else -1
    memory: int = -1
    #: the pid of `weft run`; else 0
    launcher: int = 0
    #: its number among the ranks of this host, and how many these are
    local_rank: int = field(kw_only=True)
    local_size: int = field(kw_only=True)
    #: the variables with the sizes, for error messages
    variables: tuple[str, ...] = ()
    #: whether the launcher starts programs that speak MPI
    speaks_mpi: bool = False


@dataclass(frozen=True)
class _Launcher:
    """A launcher other than `weft run`: the names of the variables that it gives to each rank."""

    name: str
    rank: str
    size: str
    #: the number among the ranks of this host, and how many these are; not every launcher sets them
    local_rank: str
    local_size: str
    #: the number of this host, if `local_size` lists all hosts
    host: str = ""
    #: variables whose values together are the same in all ranks of a launch
    job: tuple[str, ...] = ()
    #: further variables that a launch inside a launch sets anew
    own: tuple[str, ...] = ()
    #: variables that this launcher always sets, and the patterns that they match
    needs: Mapping[str, str] = field(default_factory=dict, hash=False)
    #: whether it starts programs that speak MPI
    speaks_mpi: bool = True

    def place(self, environ: Mapping[str, str]) -> str:
        """Return its variables with their values, or "" if it did not start the process."""
        if self.rank not in environ or self.size not in environ:
            return ""
        needs = self.needs.items()
        if any(not re.fullmatch(pattern, environ.get(name, "")) for name, pattern in needs):
            return ""
        names = (self.rank, self.size, self.local_size, *self.job, *self.own)
        return " ".join(f"{name}={environ[name]}" for name in names if name in environ)


#: of two launchers that are equally near the first one counts
_LAUNCHERS = (
    _Launcher(
        "torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        job=("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
        needs={"TORCHELASTIC_RUN_ID": ".+"},  # many programs have a variable called RANK
        speaks_mpi=False,
    ),
    _Launcher(
        "Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job=("PMIX_NAMESPACE",),  # made of its host and pid, so it may repeat
    ),
    _Launcher(
        "srun",
        rank="SLURM_PROCID",
        size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_size="SLURM_STEP_TASKS_PER_NODE",  # of every host, like 2(x3),1
        host="SLURM_NODEID",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        # a step that srun started; batch scripts and interactive shells count from 4294967280
        needs={"SLURM_JOB_ID": ".+", "SLURM_STEP_ID": "[0-9]{1,9}"},
    ),
    _Launcher(  # also Intel MPI; and srun where it speaks PMI
        "MPICH",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
        own=("PMI_FD",),
    ),
)


def environment(*, rank: int, size: int, job: str, memory: int, launcher: int) -> dict[str, str]:
    """Return the variables that `weft run` sets for a rank, which `launched` reads."""
    values = (rank, size, job, memory, launcher)
    return dict(zip(VARIABLES, map(str, values), strict=True))


def launched(
    environ: MutableMapping[str, str], ancestors: Callable[[], Iterable[Ancestor]]
) -> Launched | None:
    """Take this process's place. Return it, or None if no launcher started this process.
    `ancestors` returns the ancestors of this process, the parent first."""
    places = {
        launcher: place for launcher in _LAUNCHERS if (place := launcher.place(environ)) != ""
    }
    taken = environ.get(TAKEN, "").split("\n")
    free = {launcher: place for launcher, place in places.items() if place not in taken}
    ours = {name: environ.pop(name) for name in VARIABLES if name in environ}
    own_place = None
    if ours:
        own_place = _by_weft_run(ours)
    elif free:
        own_place = _by_another(free, environ, list(ancestors()))
    if places:
        environ[TAKEN] = "\n".join(places.values())
    return own_place


def mark(word: bytes) -> bytes:
    """Return the line by which a rank tells the launcher BEGAN, ENDED or FAILED."""
    return b"\x1eweft rank %b\n" % word


def alone() -> Launched:
    """Return the place of a process that no launcher started: a job of one rank."""
    return Launched(0, 1, os.urandom(16).hex(), local_rank=0, local_size=1)


def spans_hosts(place: Launched) -> bool:
    """Return whether the ranks cannot meet through the memory of one host: they are on several, or
    do not see each other, as if each had a container of its own."""
    return place.local_size < place.size or not place.job


def one_host_error(place: Launched) -> EngineUnavailable | None:
    """Return the error if the ranks cannot meet through the memory of one host, else None."""
    if place.local_size < place.size:
        return EngineUnavailable(
            f"this job's {place.size} ranks span hosts ({', '.join(place.variables)}), and meet "
            "there by MPI; start them by mpirun, srun or `weft run --hosts`, all on one host, or "
            "let each work alone with engine='serial'"
        )
    if not place.job:
        return EngineUnavailable(
            f"the process that started this job's {place.size} ranks ({place.variables[-1]}) "
            "cannot be seen from this one, as if each rank had a container of its own: ranks meet "
            "where they see each other, or by MPI; start them inside one container, for example "
            f"with `weft run -n {place.size}`, or let each work alone with engine='serial'"
        )
    return None


def _by_weft_run(variables: Mapping[str, str]) -> Launched:
    try:
        rank, size = int(variables["WEFT_RANK"]), int(variables["WEFT_SIZE"])
        job = variables["WEFT_JOB"]
        memory = int(variables.get("WEFT_MEMORY", -1))
        launcher = int(variables.get("WEFT_LAUNCHER", 0))
    except (KeyError, ValueError) as error:
        raise InvalidValue(
            f"the environment has {variables}, which is not what `weft run` sets ({error!r}); "
            "unset these variables or start the program with `weft run -n N`"
        ) from None
    if not 0 <= rank < size:
        raise InvalidValue(f"WEFT_RANK={rank} is not in 0 to {size - 1} (WEFT_SIZE={size})")
    return Launched(rank, size, job, memory, launcher, local_rank=rank, local_size=size)


def _by_another(
    places: Mapping[_Launcher, str], environ: Mapping[str, str], above: Sequence[Ancestor]
) -> Launched:
    depths = {launcher: _depth(launcher, place, above) for launcher, place in places.items()}
    launcher = min(depths, key=depths.__getitem__)
    rank, size = _rank_and_size(launcher, environ)
    if size == 1:
        return alone()
    local_size = _local_size(launcher, environ, size)
    met = local_size == size and depths[launcher] < len(above)
    names = (name for name in (launcher.local_size, launcher.size) if name in environ)
    return Launched(
        rank,
        size,
        _job(launcher, environ, above[depths[launcher]].process) if met else "",
        local_rank=_number(environ.get(launcher.local_rank, ""), rank),
        local_size=local_size,
        variables=tuple(f"{name}={environ[name]}" for name in names),
        speaks_mpi=launcher.speaks_mpi,
    )


def _depth(launcher: _Launcher, place: str, above: Sequence[Ancestor]) -> int:
    """Return which ancestor started the ranks, by its index; len(above) if none can be seen.

    It is the nearest one that does not have this place itself: those in between, such as a shell or
    `env`, have inherited it. Environments of system processes (srun's) cannot be read; if there are
    no others, the last of them is used, which is the same one for all ranks.
    """
    for depth, ancestor in enumerate(above):
        if ancestor.environ is not None and launcher.place(ancestor.environ) != place:
            return depth
    hidden = bool(above) and above[-1].environ is None
    return len(above) - 1 if hidden else len(above)


def _rank_and_size(launcher: _Launcher, environ: Mapping[str, str]) -> tuple[int, int]:
    try:
        rank, size = int(environ[launcher.rank]), int(environ[launcher.size])
        if 0 <= rank < size:
            return rank, size
    except ValueError:
        pass
    raise InvalidValue(
        f"{launcher.rank}={environ[launcher.rank]!r} and {launcher.size}="
        f"{environ[launcher.size]!r}: expected a rank from 0 to size - 1, as {launcher.name} "
        "sets them; unset both, or start the program with `weft run -n N`"
    )


def _local_size(launcher: _Launcher, environ: Mapping[str, str], size: int) -> int:
    """Return how many ranks are on this host: all of them if the launcher does not say."""
    counts: list[int] = []
    for part in environ.get(launcher.local_size, "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    host = _number(environ.get(launcher.host, ""), 0)
    return counts[host] if host < len(counts) else size


def _number(text: str, otherwise: int) -> int:
    return int(text) if text.isdecimal() else otherwise


def _job(launcher: _Launcher, environ: Mapping[str, str], above: Process) -> str:
    """Return a name that is the same in all ranks of a launch, and unique to it."""
    parts = [launcher.name, *(environ.get(name, "") for name in launcher.job)]
    text = "\n".join([*parts, f"{above.pid} {above.start}"])
    import hashlib

    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
