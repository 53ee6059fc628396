"""Processes of this machine: who they are, and whether they have ended."""

from __future__ import annotations

import os
import signal
from functools import lru_cache

from weft._core.messages import Process
from weft.engines.launched import stat_fields
from weft.engines.local.translation import translated


def this_process() -> Process:
    pid = os.getpid()
    return Process(pid, _own_start(pid))


@lru_cache(maxsize=1)  # a forked child has another pid
def _own_start(pid: int) -> int:
    return process_start(pid)


def process_start(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else 0


def state_letter(pid: int) -> str:
    """How the kernel describes what a process is doing: R, S, T, ..."""
    fields = _stat_fields(pid)
    return fields[0] if fields else "X"


def open_pidfd(process: Process) -> int:
    """A descriptor that turns readable when the process ends, or -1 if it has ended already."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return -1
    except OSError as error:
        raise translated(error) from error
    if process_start(process.pid) != process.start:  # another process got the number
        os.close(pidfd)
        return -1
    return pidfd


def peek_end(pid: int) -> int:
    """How a process ended, without reaping it: an exit code, or minus a signal."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if result is None:
        return 0
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it started."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def end_as_text(code: int, *, out_of_memory: bool = False) -> str:
    """An exit code, or minus a signal, in words."""
    if code >= 0:
        return f"exit code {code}"
    likely = ", likely out of memory" if out_of_memory else ""
    return f"killed by {_signal_name(-code)}{likely}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _stat_fields(pid: int) -> list[str]:
    try:
        return stat_fields(pid)
    except OSError as error:
        raise translated(error) from error
