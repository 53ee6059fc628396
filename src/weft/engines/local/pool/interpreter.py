"""The fork server's interpreter, which can be started before the rest of weft is loaded.

A program that maps for the first time waits for the fork server to load what workers need, and has
much to load itself. Both happen at the same time, so this module loads little.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

from weft.resources import THREAD_VARIABLES

_PROGRAM = """\
import sys
sys.path[:] = sys.argv[3:]
from weft.engines.local.pool.fork_server import main
main(int(sys.argv[1]), numpy=sys.argv[2] == "numpy")
"""

#: has PyTorch ask NVML whether there is CUDA
_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"

#: bytes that glibc keeps free at the end of its heap, and the size from which on it returns memory
#: to the system as soon as it is freed (32 MB is the largest that it accepts)
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(64 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}

#: seconds for an interpreter to end by itself
_ENDING = 2.0

#: the connection and the process of at most one that was started and not taken
_ready: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []


#: whether one was ever taken: what is started early is for the first workers
_taken = False
#: several threads may map first
_lock = threading.RLock()


def prestart() -> None:
    """Start an interpreter for whoever takes it next, unless one was taken before."""
    with _lock:
        if not _ready and not _taken:
            _ready.append(_start())


def take() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the prestarted interpreter, or a new one: this end of its connection, its process."""
    global _taken
    with _lock:
        _taken = True
        while _ready:
            connection, process = _ready.pop()
            if process.poll() is None:
                return connection, process
            connection.close()  # it was killed while it waited
    return _start()


def drop() -> None:
    """End a prestarted interpreter that nobody has taken."""
    while _ready:
        connection, process = _ready.pop()
        connection.close()  # ends it, unless it is stopped or stuck
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise _os_error(error) from error
    numpy = "numpy" if "numpy" in sys.modules else ""
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), numpy, *map(str, sys.path)],
            env=server_environment(),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal is for the driver alone
        )
    except OSError as error:
        ours.close()
        raise _os_error(error) from error
    finally:
        theirs.close()
    return ours, process


def server_environment() -> dict[str, str]:
    """Return the environment of a fork server; its workers replace it by their driver's.

    With more than one thread it could not fork. A module that Python loads by itself and that asks
    PyTorch whether there is CUDA must not initialise it there (`processes/cuda.py`). malloc reads
    its settings when a process starts, and workers inherit them: a training step that frees and
    allocates the same few megabytes again and again then has no page fault for each page of them. A
    user's own settings win.
    """
    one_thread = dict.fromkeys(THREAD_VARIABLES, "1")
    environment = {**os.environ, **one_thread, _ASK_NVML: "1"}
    if not any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environment):
        environment |= _MALLOC
    return environment


def _os_error(error: OSError) -> Exception:
    from weft.engines.local.processes.linux import translate_os_error

    return translate_os_error(error)


def _in_child() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent's may have held it
    for connection, process in _ready:
        connection.close()
        process.returncode = 0  # it is not this process's child
    _ready.clear()


os.register_at_fork(after_in_child=_in_child)
