"""Probes of `weft doctor`. Each returns a value, None if unknown, and the reason for it.

Whether one process may read another's memory is tried between two children of this one:

    this process ──┬── holder   allows this process and its descendants to read it; waits
                   └── reader   reads the holder's memory; its exit code is the answer

Ranks are related in the same way: siblings, children of their launcher. The children are forked,
so that a buffer has the same address in both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from weft.engines.local.processes import linux

#: a value, None if unknown, and the reason for it
Answer = tuple[bool | None, str]
_BEFORE, _AFTER = b"weft before", b"weft after "
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_FAILED = 255  # no errno


def between_siblings() -> Answer:
    """Try whether one process may read another's memory. However this process ends, it leaves none
    behind."""
    memory = ctypes.create_string_buffer(_BEFORE)
    address, size = ctypes.addressof(memory), len(_BEFORE)
    here, there = socket.socketpair()

    def hold() -> int:
        here.close()
        memory.value = _AFTER
        linux.allow_ptrace_by(os.getppid())
        there.send(b"!")
        there.recv(1)  # ends when the parent closes its end, or dies
        return 0

    def read() -> int:
        linux.read_memory(holder, address, address, size)
        return 0 if memory.value == _AFTER else _FAILED

    with here:
        holder = _start(hold)
        there.close()
        here.recv(1)
        answer = _exit_code(_start(read))
    _exit_code(holder)
    return verdict(answer, seccomp=_seccomp())


def verdict(answer: int, *, seccomp: bool) -> Answer:
    """Interpret the reader's exit code: 0, an errno, or minus a signal. Pure."""
    if answer == 0:
        return True, "tried between two processes"
    if answer == -signal.SIGSYS:
        return False, "a seccomp filter kills the process that tries"
    if answer in _FORBIDDEN:
        by_whom = ", perhaps by a seccomp filter" if seccomp else ""
        return False, os.strerror(answer) + by_whom
    if answer < 0 or answer == _FAILED:
        return None, f"the process that tried ended with {answer}"
    return None, os.strerror(answer)


def _start(work: Callable[[], int]) -> int:
    """Fork a child that exits with what `work` returns, or with the errno that it raises."""
    pid = os.fork()
    return pid or _run(work)


def _run(work: Callable[[], int]) -> NoReturn:
    code = _FAILED
    try:
        code = work()
    except OSError as error:
        code = error.errno or _FAILED
    finally:  # whatever happens, a child must not return into its parent's program
        os._exit(code)


def _exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _seccomp() -> bool:
    """Return whether this process has a seccomp filter, as in most containers."""
    status = Path("/proc/self/status")
    return status.exists() and "\nSeccomp:\t2" in status.read_text()


def _opens(function: str, argument: str | int) -> Answer:
    """Try whether a function of `os` opens a descriptor."""
    try:
        os.close(getattr(os, function)(argument))
    except OSError as error:
        return False, f"{function}: {error.strerror}"
    return True, ""


PROBES: dict[str, Callable[[], tuple[Any, str]]] = {
    "memfd": lambda: _opens("memfd_create", "weft"),
    "pidfd": lambda: _opens("pidfd_open", os.getpid()),
    "reading": between_siblings,
}
