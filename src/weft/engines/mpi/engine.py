"""The mpi engine's functions, as the registry lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft._core.mpirun import Mpi
    from weft._core.survey import Answer
    from weft.engines.base import Command
    from weft.engines.mpi.programs import Library


def close() -> None:
    """End nothing: this engine has no workers."""


def launch(command: Command) -> int:
    """Carry out `weft run --hosts`; return its exit code."""
    from weft.engines.mpi.launcher import run

    return run(command)


def mpirun() -> tuple[str, Mpi | None, str]:
    """Return the path of the mpirun that `launch` would use, whose it is, and its own words. Raises
    MissingPackage."""
    from weft.engines.mpi import programs

    return programs.find_mpirun()


def library() -> Library:
    """Return the MPI library that mpi4py uses here. Raises MissingPackage, EngineUnavailable."""
    from weft.engines.mpi import programs

    return programs.library()


def survey(hosts: Sequence[str]) -> list[Answer]:
    """Ask hosts, over ssh, for what `weft doctor --hosts` compares."""
    from weft.engines.mpi import survey

    return survey.ask(hosts, full=True)
