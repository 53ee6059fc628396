"""A private daemon of NVIDIA's MPS, under which processes use a GPU at once instead of by turns.

    weft run, a driver ── socket ──> watcher ──> nvidia-cuda-mps-control ──> nvidia-cuda-mps-server
      │                                                                          │
      └──> ranks, workers ──────── CUDA_MPS_PIPE_DIRECTORY ──────────────────────┘

The watcher, a process of its own, ends the daemon and removes its folder when it is told to, or
when the process that wanted it has ended, however that was. What the daemon starts becomes the
watcher's child when its own parent ends (PR_SET_CHILD_SUBREAPER), so nothing of it stays.

A driver is a client too, once it uses CUDA, and would lose its context with the daemon. So its
daemon ends when weft is shut down before that, else with the process.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from weft._core.launch import Process
from weft.engines.launched import stat_fields
from weft.engines.local.processes import cuda, linux
from weft.errors import DeviceUnavailable

#: the program of NVIDIA's driver that is the daemon, and talks to one
CONTROL = "nvidia-cuda-mps-control"
#: the variables that name the daemon's folders to what starts later
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
#: seconds for the daemon to start, for the program to take `quit`, for all of it to be gone then
_START, _QUIT, _END = 30.0, 10.0, 3.0
#: seconds between two looks at whether it is gone
_LOOK = 0.01
#: characters of a folder's path with which its sockets have names that Unix sockets can have
_LONGEST = 60

_PROGRAM = """\
import sys
sys.path[:] = sys.argv[4:]
from weft.engines.local.processes.mps import watch
watch(sys.argv[1], *map(int, sys.argv[2:4]))
"""


class Daemon:
    """A daemon that was started for this process."""

    def __init__(self, folder: str, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self._folder, self._process, self._line = folder, process, line

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables by which processes become its clients."""
        return {PIPES: os.path.join(self._folder, "pipe"), LOGS: os.path.join(self._folder, "log")}

    def close(self) -> None:
        """End the daemon. Its clients lose CUDA."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)  # unlike a close it also counts for forks
        self._line.close()
        try:
            self._process.wait(_QUIT + 2 * _END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if os.path.exists(self._folder):  # the watcher was killed
            _quit(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """Forget the daemon in a forked child: it is the parent's."""
        self._line.close()
        self._process.returncode = 0


def start() -> Daemon:
    """Start a daemon that ends with this process or before. Raises DeviceUnavailable."""
    if shutil.which(CONTROL) is None:
        raise DeviceUnavailable(
            f"MPS needs the program {CONTROL}, which is not in PATH; NVIDIA's driver brings it. "
            "Without MPS processes use a GPU by turns"
        )
    folder = _make_folder()
    ours, theirs = socket.socketpair()
    with theirs:
        own = map(str, (os.getpid(), theirs.fileno()))
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, folder, *own, *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal is for others
        )
    daemon = Daemon(folder, process, ours)
    try:
        ours.settimeout(_START + _END)
        outcome = ours.recv(4096).decode()
        if outcome != "open":
            raise DeviceUnavailable(f"MPS could not be started: {outcome or 'its watcher ended'}")
    except TimeoutError:
        daemon.close()
        raise DeviceUnavailable(f"MPS was not started within {_START:.0f} s") from None
    except BaseException:
        daemon.close()
        raise
    return daemon


@contextlib.contextmanager
def started() -> Iterator[Mapping[str, str]]:
    """Run a daemon for as long as the block lasts. Yield the variables of its clients."""
    daemon = start()
    try:
        yield daemon.variables
    finally:
        daemon.close()


def _make_folder() -> str:
    place = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="weft-mps-", dir=place if len(place) <= _LONGEST else "/tmp")
    for name in ("pipe", "log"):
        os.mkdir(os.path.join(folder, name))
    return folder


# the watcher


def watch(folder: str, starter: int, descriptor: int) -> None:
    """Start the daemon, tell by the socket that it runs or why not, and end it when the socket is
    closed or the process `starter` has ended."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # readable once it is told to end
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    linux.become_subreaper()
    os.chdir("/")
    line = socket.socket(fileno=descriptor)
    try:
        pidfd = linux.open_pidfd(Process(starter, linux.process_start(starter)))
        if pidfd < 0 or os.getppid() != starter:
            return  # it has ended
        outcome = _start(folder)
        line.sendall(outcome.encode())
        if outcome == "open":
            poll = select.poll()
            for readable in (line.fileno(), pidfd, told):
                poll.register(readable, select.POLLIN)
            poll.poll()
    finally:
        _quit(folder)
        _end_children()
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: str) -> str:
    """Start the daemon. Return "open", or why it could not be started."""
    printed = Path(folder, "printed")
    with printed.open("wb") as file:
        try:
            done = subprocess.run(
                [CONTROL, "-d"],
                check=False,
                env=_environment(folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=_START,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if done.returncode == 0:
        return "open"
    words = " ".join(printed.read_text(errors="replace").split())[:500]
    return f"{CONTROL} -d ended with {done.returncode}{words and f': {words}'}"


def _quit(folder: str) -> None:
    """Tell the daemon to end."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [CONTROL],
            check=False,
            env=_environment(folder),
            input=b"quit\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_QUIT,
        )


def _environment(folder: str) -> dict[str, str]:
    """Return the daemon's environment. It serves all GPUs: were it narrowed, the numbers in its
    clients' CUDA_VISIBLE_DEVICES would count from there."""
    variables = {PIPES: os.path.join(folder, "pipe"), LOGS: os.path.join(folder, "log")}
    inherited = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**inherited, **variables}


def _end_children() -> None:
    """Wait until this process has no children; kill those that take too long."""
    until = time.monotonic() + _END
    with contextlib.suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            if time.monotonic() > until:
                for pid in _children():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK)


def _children() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdecimal() and stat_fields(int(name))[1:2] == [str(os.getpid())]:
            yield int(name)


# the daemon of a driver

#: this process's daemon, and what the variables of its clients were before
_own: Daemon | None = None
_before: dict[str, str | None] = {}


def use() -> None:
    """Make this process and what it starts clients of a daemon: of one that the environment
    names, else of one of its own. Raises DeviceUnavailable."""
    global _own
    if os.path.exists(os.path.join(os.environ.get(PIPES, ""), "control")):
        return
    if cuda.is_initialized():
        raise DeviceUnavailable(
            "CUDA was initialised in this process before MPS was started, so it cannot use MPS "
            "any more; make the team before anything uses CUDA, torch.cuda.is_available() too, or "
            "start the program with\n    weft run -n 1 --mps script.py"
        )
    end()
    _own = start()
    _before.update({name: os.environ.get(name) for name in _own.variables})
    os.environ.update(_own.variables)


def end() -> None:
    """End this process's daemon, unless the process is a client of it: then it ends with it."""
    global _own
    if _own is None or cuda.is_initialized():
        return
    daemon, _own = _own, None
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    daemon.close()


def _in_child() -> None:
    global _own
    if _own is not None:
        _own.abandon()
        _own = None


os.register_at_fork(after_in_child=_in_child)
