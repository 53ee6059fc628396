"""What the environment says about this process's place among others.

`weft run` gives each rank WEFT_RANK, WEFT_SIZE and WEFT_JOB, and the
descriptor of the job's memory. The variables are taken out of the environment
when they are read, so that programs which a rank starts do not believe that
they are that rank.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from weft.errors import InvalidValue

VARIABLES = ("WEFT_RANK", "WEFT_SIZE", "WEFT_JOB", "WEFT_MEMORY", "WEFT_LAUNCHER")


@dataclass(frozen=True)
class Launched:
    """This process's place, as its launcher said."""

    rank: int
    size: int
    #: unique to the launch
    job: str
    #: a descriptor of the job's memory, under `weft run`; else -1
    memory: int
    #: the pid of `weft run`; else 0
    launcher: int


def environment(*, rank: int, size: int, job: str, memory: int, launcher: int) -> dict[str, str]:
    """The variables that tell a rank its place. `launched` reads them."""
    values = (rank, size, job, memory, launcher)
    return dict(zip(VARIABLES, map(str, values), strict=True))


def launched(environ: MutableMapping[str, str]) -> Launched | None:
    """This process's place, or None where no launcher started it. Takes the variables out."""
    found = {name: environ.pop(name) for name in VARIABLES if name in environ}
    if not found:
        return None
    try:
        rank, size = int(found["WEFT_RANK"]), int(found["WEFT_SIZE"])
        job = found["WEFT_JOB"]
        memory = int(found.get("WEFT_MEMORY", -1))
        launcher = int(found.get("WEFT_LAUNCHER", 0))
    except (KeyError, ValueError) as error:
        raise InvalidValue(
            f"the environment has {found}, which is not what `weft run` sets ({error!r}); "
            "unset these variables or start the program with `weft run -n N`"
        ) from None
    if not 0 <= rank < size:
        raise InvalidValue(f"WEFT_RANK={rank} is not in 0 to {size - 1} (WEFT_SIZE={size})")
    return Launched(rank, size, job, memory, launcher)


def alone() -> Launched:
    """The place of a process that no launcher started: a job of one."""
    return Launched(0, 1, os.urandom(16).hex(), -1, 0)
