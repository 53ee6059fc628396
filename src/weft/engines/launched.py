"""Where this process stands among those that a launcher started, by what /proc and its
environment say."""

from __future__ import annotations

import os
from collections.abc import Iterator

from weft._core.launch import Ancestor, Launched, Process, launched


def place() -> Launched | None:
    """Take and return this process's place, or None where no launcher started it."""
    return launched(os.environ, ancestors)


def ancestors() -> Iterator[Ancestor]:
    """Yield this process's parent, the parent's parent, and so on as far as they can be seen:
    none where there is no /proc."""
    pid = os.getppid() if os.path.exists("/proc/self/stat") else 0
    while pid > 0:
        fields = stat_fields(pid)
        yield Ancestor(Process(pid, int(fields[19]) if fields else 0), _environment(pid))
        pid = int(fields[1]) if fields else 0


def stat_fields(pid: int) -> list[str]:
    """Return /proc/PID/stat from the third field on: the second is a name that may hold anything.
    Empty where there is no such process, or it is hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def _environment(pid: int) -> dict[str, str] | None:
    """Return what a process was started with, or None where this process may not see it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = os.fsdecode(file.read()).split("\0")
    except OSError:
        return None
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
