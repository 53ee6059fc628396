"""The mpi engine's functions, as the registry lists them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.errors import EngineUnavailable

if TYPE_CHECKING:
    from weft._core.launch import Launched
    from weft._core.survey import Answer
    from weft.engines.base import Command, Group
    from weft.engines.mpi.speaker import Speaker

#: what stands for this process in MPI, from its first session on
_speaker: Speaker | None = None


def join(place: Launched | None, *, timeout: float, start_timeout: float) -> Group:
    """Join the ranks of a launch over hosts; without a place, or with one rank, a group of one.
    Raises MissingRank, PeerLost, Refused, EngineUnavailable."""
    global _speaker
    if place is None or place.size == 1:
        from weft.engines.local import engine

        return engine.join(place, timeout=timeout, start_timeout=start_timeout)
    if not place.speaks_mpi:
        raise EngineUnavailable(
            f"this job's {place.size} ranks were not started by an MPI launcher "
            f"({', '.join(place.variables)}); start them by mpirun, srun or weft run --hosts"
        )
    from weft import faults
    from weft.engines.mpi import group
    from weft.engines.mpi.speaker import Speaker

    faults.set_rank(place.rank)
    if _speaker is None:
        _speaker = Speaker(place)
    placed = _speaker.join(place, start_timeout)
    return group.join(placed, timeout=timeout, start_timeout=start_timeout)


def close() -> None:
    """End nothing: this engine has no workers."""


def end() -> None:
    """End this process's place in MPI. The interpreter ends, and the group was left."""
    global _speaker
    speaker, _speaker = _speaker, None
    if speaker is not None:
        speaker.end(failed=hasattr(sys, "last_type"))


def launch(command: Command) -> int:
    """Carry out `weft run --hosts`; return its exit code. Raises LaunchError, MissingPackage,
    EngineUnavailable."""
    from weft.engines.mpi import launcher

    return launcher.run(command)


def survey(hosts: Sequence[str]) -> list[Answer]:
    """Ask hosts, over ssh, for what `weft doctor --hosts` compares."""
    from weft.engines.mpi import survey

    return survey.ask(hosts, full=True)


def find_mpirun() -> str:
    """Return the path of the mpirun that `launch` uses. Raises MissingPackage."""
    from weft.engines.mpi import programs

    return programs.find_mpirun()
