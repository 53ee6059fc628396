"""What differs between the mpiruns of Open MPI, MPICH and Intel MPI: what they are told, how they
mark lines of output, and what they say of failures. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from weft._core.hosts import Host

OPEN_MPI, MPICH, INTEL_MPI = "Open MPI", "MPICH", "Intel MPI"

_VERSIONS = {
    OPEN_MPI: re.compile(r"\(Open MPI\)\s+(\S+)"),
    INTEL_MPI: re.compile(r"Intel\(R\) MPI Library.*?Version\s+(\S+)", re.DOTALL),
    MPICH: re.compile(r"HYDRA.*?Version:\s+(\S+)", re.DOTALL),
}
#: how libraries begin what MPI_Get_library_version returns
_LIBRARIES = {
    OPEN_MPI: re.compile(r"Open MPI v?([^\s,]+)"),
    INTEL_MPI: re.compile(r"Intel\(R\) MPI Library (\S+)"),
    MPICH: re.compile(r"MPICH Version:\s+(\S+)"),
}
#: the rank that a line of output is of, and the rest of the line
_TAGS = {
    OPEN_MPI: re.compile(rb"\[[^\]\s]*,(\d+)\](?:\[[^\]\s]*\])?<std(?:out|err)>: ?(.*)", re.DOTALL),
    MPICH: re.compile(rb"\[(\d+)\] ?(.*)", re.DOTALL),
    INTEL_MPI: re.compile(rb"\[(\d+)\] ?(.*)", re.DOTALL),
}
#: what they say when they end a job because something in it failed
_FAILURE = re.compile(
    rb"(prterun|mpirun) (noticed|detected|has exited)|exited on signal|MPI_ABORT was invoked"
    rb"|has lost communication|BAD TERMINATION|application called MPI_Abort"
)
#: a race of Open MPI's with the ssh that it starts, which does no harm
_NOISE = re.compile(rb"plm:ssh: Warning: setpgid")

#: the variables of the launching script's environment that all ranks get
_PASSED_ON = re.compile(r"WEFT_\w+|PYTHON\w+|\w+_NUM_THREADS")

#: for Open MPI: a rank that waits lets others compute; a host that is cut off is noticed in 4 s
_OPEN_MPI_SETTINGS = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_MCA_oob_tcp_keepalive_time": "2",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "1",
    "PRTE_MCA_oob_tcp_keepalive_probes": "2",
}
_AS_ROOT = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)


#: a program that prints the MPI library that mpi4py loads, and the thread level that it gets
LIBRARY_QUESTION = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version().strip("\\0\\n ").splitlines()[0], flush=True)
level = MPI.Init_thread(MPI.THREAD_SERIALIZED)
names = ("single", "funneled", "serialized", "multiple")
levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
print(names[levels.index(level)], flush=True)
MPI.Finalize()
"""


class Mpi(NamedTuple):
    """An implementation of MPI: a library, or the one that an mpirun is of."""

    #: OPEN_MPI, MPICH, INTEL_MPI
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def abi(self) -> str:
        """Return the family whose programs its mpirun can start."""
        return OPEN_MPI if self.name == OPEN_MPI else MPICH


def of_mpirun(text: str) -> Mpi | None:
    """Return whose mpirun prints this as its version; None for one that is not known."""
    return _identify(_VERSIONS, text)


def of_library(text: str) -> Mpi | None:
    """Return of which implementation a library with this MPI_Get_library_version is."""
    return _identify(_LIBRARIES, text)


def of_text(text: str) -> Mpi | None:
    """Return an implementation from its `str`, None for anything else."""
    name = next((name for name in _LIBRARIES if text.startswith(f"{name} ")), None)
    return None if name is None else Mpi(name, text.removeprefix(f"{name} "))


def misfit(started_by: Mpi | None, loaded: Mpi | None) -> str:
    """Return why an mpirun cannot start programs of a library, or "" if it can, or who knows."""
    if started_by is None or loaded is None or started_by.abi == loaded.abi:
        return ""
    return (
        f"mpirun is of {started_by}, but mpi4py loads {loaded}: each rank would be alone; use the "
        f"mpirun of {loaded.name}, or have mpi4py load another MPI by MPI4PY_MPIABI"
    )


def _identify(patterns: Mapping[str, re.Pattern[str]], text: str) -> Mpi | None:
    for name, pattern in patterns.items():
        if match := pattern.search(text):
            return Mpi(name, match[1].rstrip(",;"))
    return None


def arguments(
    mpi: Mpi,
    hosts: Sequence[Host],
    machine_file: str,
    names: Iterable[str],
    *,
    keep_going: bool = False,
    has_stdin: bool = True,
) -> list[str]:
    """Return what follows `mpirun` and precedes the program: ranks fill one host after the other,
    are bound to no cores, and get the variables of these names."""
    ranks = str(sum(host.ranks for host in hosts))
    if mpi.name != OPEN_MPI:  # passes all variables on, and binds nothing
        options = ["-machinefile", machine_file, "-n", ranks, "-prepend-rank"]
        return options + (["-disable-auto-cleanup"] if keep_going else [])
    listed = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
    tagged = ["--tag-output"] if mpi.version.startswith(("3.", "4.")) else ["--output", "tag"]
    options = ["--host", listed, "-np", ranks, "--map-by", "slot", "--bind-to", "none", *tagged]
    options += ["--with-ft", "ulfm"] if keep_going else []
    options += [] if has_stdin else ["--stdin", "none"]  # rank 0 would wait for its end for ever
    return options + [word for name in names for word in ("-x", name)]


def machine_file(hosts: Iterable[Host]) -> str:
    """Return the hosts as MPICH and Intel MPI read them."""
    return "".join(f"{host.name}:{host.ranks}\n" for host in hosts)


def passed_on(environ: Iterable[str], private: Iterable[str]) -> list[str]:
    """Return the names of the variables that ranks on other hosts get, without the private ones."""
    names = (name for name in environ if _PASSED_ON.fullmatch(name))
    return sorted(set(names) - set(private))


def settings(mpi: Mpi, environ: Mapping[str, str], *, root: bool) -> dict[str, str]:
    """Return the variables that mpirun itself needs, unless they are set already."""
    if mpi.name != OPEN_MPI:
        return {}
    wanted = {**_OPEN_MPI_SETTINGS, **(dict.fromkeys(_AS_ROOT, "1") if root else {})}
    return {name: text for name, text in wanted.items() if name not in environ}


def split_tag(mpi: Mpi, line: bytes) -> tuple[int | None, bytes]:
    """Return the rank that a line of mpirun's output is of, None for mpirun itself, and the line
    without the mark."""
    if match := _TAGS[mpi.name].match(line):
        return int(match[1]), match[2]
    return None, line


def is_noise(line: bytes) -> bool:
    """Return whether a line of mpirun's own means nothing."""
    return _NOISE.search(line) is not None


def tells_failure(line: bytes) -> bool:
    """Return whether mpirun says by this line that it ends the job because of a failure."""
    return _FAILURE.search(line) is not None
