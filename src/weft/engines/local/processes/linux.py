"""Linux as weft uses it: system calls and libc functions that Python does not offer, processes of
this machine, and the operating system's errors about memory and descriptors, as weft's."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import signal
import threading
import time
from functools import lru_cache
from typing import Any

from weft._core.launch import Process
from weft.engines.launched import stat_fields
from weft.errors import OutOfDescriptors, OutOfMemory, format_bytes

_FUTEX = 202  # on x86-64, the only processor on which the local engine runs
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_CLOCK_MONOTONIC = 1
#: CDLL lets other threads run during the call, PyDLL does not and is faster
_libc = ctypes.CDLL(None, use_errno=True)
_libc_holding_gil = ctypes.PyDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> _Timespec:
        whole = int(seconds)
        return cls(whole, int((seconds - whole) * 1e9))


_syscall: Any = _libc.syscall
_address, _number = ctypes.c_void_p, ctypes.c_uint32
_syscall.argtypes = [ctypes.c_long, _address, ctypes.c_int, _number, _address, _address, _number]


def futex_wait(address: int, value: int, seconds: float) -> None:
    """Sleep while the 32 bits at `address` are `value`, at most so long; a signal ends it early."""
    limit = _Timespec.of(seconds)
    _syscall(_FUTEX, address, _FUTEX_WAIT, value, ctypes.byref(limit), None, 0)


def futex_wake(address: int) -> None:
    """Wake all threads, of any process, that sleep on `address`."""
    _syscall(_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)


def end_with_parent(signal: int) -> None:
    """Make the kernel send this process `signal` when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0)


def become_subreaper() -> None:
    """Make what this process's descendants have started become its children when they end."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def return_free_memory() -> None:
    """Return to the system what malloc keeps for later."""
    _libc.malloc_trim(0)


# Mappings at a given address, and huge pages.

_PROT_READ_WRITE, _MAP_SHARED, _MAP_FIXED, _MAP_POPULATE = 0x3, 0x1, 0x10, 0x8000
_MADV_COLLAPSE = 25  # since Linux 6.1
_mmap: Any = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
_madvise: Any = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_over(address: int, descriptor: int, size: int, *, populate: bool = False) -> None:
    """Map a file in place of what is mapped at `address`, which must be a page boundary.
    `populate`: map its pages now, not when they are touched. Raises OSError."""
    flags = _MAP_SHARED | _MAP_FIXED | (_MAP_POPULATE if populate else 0)
    if _mmap(address, size, _PROT_READ_WRITE, flags, descriptor, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {size} bytes: {os.strerror(code)}")


def make_huge(address: int, size: int) -> bool:
    """Make the kernel collapse mapped small pages into huge ones. Return whether all of them were.
    Nothing else changes if it cannot."""
    failed: int = _madvise(address, size, _MADV_COLLAPSE)
    return not failed


# Another process's memory: one copy, straight from its pages into ours, without shared memory.


class _Range(ctypes.Structure):
    """The C library's `struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_RANGES = (ctypes.POINTER(_Range), ctypes.c_ulong)
_process_vm_readv: Any = _libc.process_vm_readv
_process_vm_writev: Any = _libc.process_vm_writev

for _function in (_process_vm_readv, _process_vm_writev):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = [ctypes.c_int, *_RANGES, *_RANGES, ctypes.c_ulong]


def allow_ptrace_by(pid: int) -> None:
    """Let that process and its descendants read and write this process's memory. Where Yama
    restricts ptrace (scope 1), ranks could otherwise not read their siblings. Elsewhere, and when
    that process has ended, it changes nothing; `read_memory` raises where it is forbidden."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


def read_memory(pid: int, remote: int, local: int, size: int) -> int:
    """Copy `size` bytes from the address `remote` of a process to the address `local` of this one.

    Returns how many were copied: at most 2 GB a call, and fewer where either mapping ends. Other
    threads run meanwhile. Raises PermissionError where the kernel forbids it, ProcessLookupError,
    or another OSError, such as EFAULT for an address that is not mapped.
    """
    # the ranges are made for each call, as several threads may call at a time
    copied = _process_vm_readv(pid, _Range(local, size), 1, _Range(remote, size), 1, 0)
    return _validate_copied(copied, f"read the memory of process {pid}")


def write_memory(pid: int, remote: int, local: int, size: int) -> int:
    """Copy as `read_memory` does, but from `local` to `remote`."""
    copied = _process_vm_writev(pid, _Range(local, size), 1, _Range(remote, size), 1, 0)
    return _validate_copied(copied, f"write the memory of process {pid}")


def _validate_copied(copied: int, attempt: str) -> int:
    if copied < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot {attempt}: {os.strerror(code)}")
    return copied


# Robust mutexes. Of type "error check": to lock twice in one thread, or to unlock a mutex that one
# does not hold, is an error and no deadlock, so that unlocking to clean up is always safe.

_ROBUST, _PROCESS_SHARED, _ERROR_CHECK = 1, 1, 2
_OWNER_BITS = 0x3FFFFFFF
#: 0 (taken), EOWNERDEAD (taken, the last holder died), EBUSY, or another error
raw_try: Any = _libc_holding_gil.pthread_mutex_trylock
#: 0, or EPERM when this thread does not hold it. "Raw": one C call, so that no signal handler can
#: run between the caller's last statement and the unlocking
raw_unlock: Any = _libc_holding_gil.pthread_mutex_unlock
#: declares consistent the state that a dead holder left; for the thread that holds the mutex
mutex_consistent: Any = _libc_holding_gil.pthread_mutex_consistent
_timed: Any = getattr(_libc, "pthread_mutex_clocklock", None)

for _function in (raw_try, raw_unlock, mutex_consistent):
    _function.argtypes = [ctypes.c_void_p]

if _timed is not None:
    _timed.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]


def mutex_init(address: int) -> None:
    """Initialise a robust, process-shared mutex in the 64 zero bytes at `address`."""
    attributes = (ctypes.c_char * 64)()
    _libc.pthread_mutexattr_init(attributes)
    _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
    _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
    _libc.pthread_mutexattr_settype(attributes, _ERROR_CHECK)
    code = _libc.pthread_mutex_init(ctypes.c_void_p(address), attributes)
    _libc.pthread_mutexattr_destroy(attributes)
    if code:
        raise OSError(code, f"pthread_mutex_init: {os.strerror(code)}")


def mutex_wait(address: int, until: float) -> int:
    """Lock as `raw_try` does, but sleep until the monotonic time `until`, then return ETIMEDOUT."""
    if _timed is None:  # C libraries without it: musl, glibc before 2.30
        time.sleep(0.001)
        code = int(raw_try(address))
        return errno.ETIMEDOUT if code == errno.EBUSY else code
    return int(_timed(address, _CLOCK_MONOTONIC, ctypes.byref(_Timespec.of(until))))


def mutex_is_mine(address: int) -> bool:
    """Return whether this thread holds the mutex. Robust mutexes contain their holder's thread id,
    because the kernel must find it."""
    return ctypes.c_uint32.from_address(address).value & _OWNER_BITS == threading.get_native_id()


# Processes of this machine.


def this_process() -> Process:
    """Return the pid and the start time of this process."""
    pid = os.getpid()
    return Process(pid, _own_start(pid))


@lru_cache(maxsize=1)  # a forked child has another pid
def _own_start(pid: int) -> int:
    return process_start(pid)


def process_start(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if there is no such process."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else 0


def state_letter(pid: int) -> str:
    """Return the state of a process as the kernel writes it: R, S, T, ...; X if it has ended."""
    fields = _stat_fields(pid)
    return fields[0] if fields else "X"


def open_pidfd(process: Process) -> int:
    """Return a descriptor that is readable once the process ends; -1 if it has ended already."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return -1
    except OSError as error:
        raise translate_os_error(error) from error
    if process_start(process.pid) != process.start:  # another process got the number
        os.close(pidfd)
        return -1
    return pidfd


def peek_end(pid: int) -> int:
    """Return how a process ended, without reaping it: an exit code, or a negative signal."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if result is None:
        return 0
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since it started."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def end_as_text(code: int, *, out_of_memory: bool = False) -> str:
    """Return an exit code, or a negative signal, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"killed by {name}{', likely out of memory' if out_of_memory else ''}"


def _stat_fields(pid: int) -> list[str]:
    try:
        return stat_fields(pid)
    except OSError as error:
        raise translate_os_error(error) from error


# Errors and descriptors.


def translate_os_error(error: OSError, size: int = 0) -> Exception:
    """Return what to raise in place of an OSError; `size` is how much memory was asked for."""
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        return OutOfMemory(
            f"shared memory of {format_bytes(size)} was asked for and refused: {error.strerror}; "
            "share less, or make room"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return OutOfDescriptors(
            error.errno,
            f"no file descriptor is left: this process may have {soft} (hard limit {hard}); "
            "close files, or raise the limit with `ulimit -n`",
        )
    return error


def readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Return whether a descriptor is readable, a pidfd: whether its process has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
