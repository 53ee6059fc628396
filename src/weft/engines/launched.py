"""This process's place among those that a launcher started, from its environment and /proc."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator

from weft._core.launch import (
    BEGAN,
    ENDED,
    FAILED,
    REPORT,
    Ancestor,
    Launched,
    Process,
    launched,
    mark,
)

#: the process that tells its launcher how it ends; 0 if nobody asked
_reporting = 0


def place() -> Launched | None:
    """Return this process's place, which it takes by that; None if no launcher started it."""
    global _reporting
    report = os.environ.pop(REPORT, "")
    own_place = launched(os.environ, ancestors)
    if report and own_place is not None:
        _reporting = os.getpid()
        _tell(BEGAN)
        atexit.register(_tell_failure)  # what was registered before it is called after it
    return own_place


def _tell_failure() -> None:
    if os.getpid() == _reporting and hasattr(sys, "last_type"):
        _tell(FAILED)


def _tell_end() -> None:
    if os.getpid() == _reporting and not hasattr(sys, "last_type"):
        _tell(ENDED)


def _tell(word: bytes) -> None:
    """Tell `weft run --hosts` something in the way that works on every host: in the output."""
    try:
        os.write(2, mark(word))
    except OSError:
        return  # nobody reads it, or the program has closed its stderr


def ancestors() -> Iterator[Ancestor]:
    """Yield this process's parent, grandparent and so on, as far as /proc shows them."""
    pid = os.getppid() if os.path.exists("/proc/self/stat") else 0
    while pid > 0:
        fields = stat_fields(pid)
        yield Ancestor(Process(pid, int(fields[19]) if fields else 0), _environment(pid))
        pid = int(fields[1]) if fields else 0


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, as the second is a name that may hold
    spaces. Return an empty list if there is no such process, or it is hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _environment(pid: int) -> dict[str, str] | None:
    """Return the environment that a process was started with; None if it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = os.fsdecode(file.read()).split("\0")
    except OSError:
        return None
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


# the first of all that is registered: what ends the session and the engines is called before it
atexit.register(_tell_end)
