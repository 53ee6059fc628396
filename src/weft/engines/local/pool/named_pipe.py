"""Named pipes: fork servers that any script of this user can reach.

    weft open --pipe NAME             the server, in the background until `weft close`
    serve_pipe, for `funworker`       or as long as the script that has started it
    distribute(..., named_pipe="NAME")
        connect  ──── key ────>       each end proves that it has the key
                 <─── Pool ────       who serves, for how many workers; over a channel of its own
        Start    ─────────────>       as with a fork server of one's own

The pipe is a Unix socket in the abstract namespace, so that a killed server leaves no file. It is
found by this user's processes only, and accepts those that have the user's key. Each script gets
fresh workers, forked in milliseconds: what one script has loaded or changed, the next does not see.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError, connection

from weft._version import __version__
from weft.engines import key
from weft.engines.local.pool.fork_server import Server, preload
from weft.engines.local.pool.interpreter import server_environment
from weft.engines.local.processes import linux
from weft.engines.local.processes.channel import Channel, Close, Closed, Pool
from weft.engines.local.processes.linux import readable
from weft.errors import InvalidType, InvalidValue, LaunchError, NoSuchPipe, Refused, Stalled

DEFAULT = "weft"

#: seconds for the other end to prove that it has the key, for a server to open, and to end
_PATIENCE, _START, _END = 5, 60.0, 10.0

#: drivers that may wait to be accepted
_WAITING = 64

_TIMEVAL = struct.Struct("ll")

_CREDENTIALS = struct.Struct("3i")


def validate_name(name: object) -> str:
    """Return the name of a pipe; True stands for the default one. Raises InvalidType,
    InvalidValue."""
    if name is True:
        return DEFAULT
    if not isinstance(name, str):
        raise InvalidType(
            f"named_pipe={name!r}: expected True or a name, got {type(name).__name__}"
        )
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or len(name) > 64:
        raise InvalidValue(
            f"named_pipe={name!r}: expected a name of letters, digits, dots, - and _, 64 at most"
        )
    return name


# the server's side


class _PipeListener:
    """The socket at which drivers connect."""

    def __init__(self, name: str, size: int) -> None:
        self._size = size
        self.server: Server | None = None
        try:
            self._socket = connection.Listener(_address(name), "AF_UNIX", backlog=_WAITING)
        except OSError as error:
            raise LaunchError(
                f"the pipe {name!r} is served already ({error.strerror}); use it, or end it with\n"
                f"    weft close --pipe {name}"
            ) from None

    def fileno(self) -> int:
        return self._socket._listener._socket.fileno()  # type: ignore[attr-defined, no-any-return]

    def accept(self) -> Channel | None:
        """Return a channel to the next driver; None if it does not have the key."""
        try:
            with (
                self._socket.accept() as caller,
                socket.socket(fileno=os.dup(caller.fileno())) as raw,
            ):
                pid, user, _ = _CREDENTIALS.unpack(
                    raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if user != os.geteuid():
                    return None
                _set_timeouts(raw)
                connection.deliver_challenge(caller, key.read_key())
                connection.answer_challenge(caller, key.read_key())
                return self._hand_over(raw, pid)
        except (OSError, EOFError, AuthenticationError):
            return None  # it does not have the key, or is too slow

    def _hand_over(self, raw: socket.socket, pid: int) -> Channel:
        """Send the driver a channel, which carries messages and descriptors."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(raw, [b"."], [theirs.fileno()])
        channel = Channel(ours)
        channel.pid = pid
        drivers, workers = self.server.sizes if self.server is not None else (0, 0)
        channel.send(
            Pool(__version__, platform.python_version(), os.getpid(), self._size, drivers, workers)
        )
        return channel


def serve(name: str, size: int, ready: int, starter: int) -> None:
    """Serve a pipe until somebody closes it, or, unless `starter` is 0, until that process ends.
    Writes "open" to `ready`, or why it cannot be."""
    if starter:
        linux.end_with_parent(signal.SIGKILL)
        if os.getppid() != starter:
            return  # it ended before the line above
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with open(ready, "w") as answer:
        try:
            key.read_key()
            listener = _PipeListener(name, size)
        except (LaunchError, Refused) as error:
            answer.write(str(error))
            return
        preload()
        answer.write("open")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.chdir("/")
    listener.server = Server([], listener)
    listener.server.run()


def open_pipe(name: str, size: int) -> None:
    """Start a server in the background, and return when it serves. Raises LaunchError."""
    _start_server(name, size, starter=0)


def serve_pipe(name: str, size: int, opened: Callable[[], None]) -> None:
    """Start a server that ends with this process, call `opened` when it serves, and return when
    somebody has closed it. Raises LaunchError."""
    process = _start_server(name, size, starter=os.getpid())
    try:
        opened()
        process.wait()
    finally:
        process.kill()
        process.wait()


def _start_server(name: str, size: int, starter: int) -> subprocess.Popen[bytes]:
    read, write = os.pipe2(os.O_CLOEXEC)
    program = (
        "import sys; sys.path[:] = sys.argv[5:]; "
        "from weft.engines.local.pool.named_pipe import serve; "
        "serve(sys.argv[1], *map(int, sys.argv[2:5]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, name, str(size), str(write), str(starter), *sys.path],
        env=server_environment(),
        stdin=subprocess.DEVNULL,
        pass_fds=[write],
        start_new_session=True,
    )
    os.close(write)
    with open(read) as answer:
        if not readable(read, _START):
            process.kill()
            process.wait()
            raise LaunchError(f"the pipe {name!r} was not open after {_START:.0f} s; try again")
        outcome = answer.read()
    if outcome != "open":
        process.wait()
        raise LaunchError(outcome or f"the pipe {name!r} could not be served; see what was printed")
    return process


# the drivers' side


def connect(name: str) -> tuple[Channel, Pool]:
    """Connect to the fork server behind a pipe. Raises NoSuchPipe, Refused."""
    with socket.socket(socket.AF_UNIX) as raw:
        _set_timeouts(raw)
        try:
            raw.connect(_address(name))
            channel, pool = _authenticate(raw)
        except (ConnectionRefusedError, FileNotFoundError):
            served = ", ".join(names()) or "none"
            raise NoSuchPipe(
                f"nobody serves the pipe {name!r} for this user (served: {served}); start it with\n"
                f"    weft open --pipe {name}"
            ) from None
        except (AuthenticationError, OSError, EOFError, IndexError, Closed):
            raise Refused(
                f"the pipe {name!r} did not let this process in: it was opened with another key "
                f"than the one in {key.key_file()} or {key.VARIABLE}, or it does not answer"
            ) from None
    mine = (__version__, platform.python_version())
    if (pool.version, pool.python) != mine:
        channel.close()
        raise Refused(
            f"the pipe {name!r} is served by weft {pool.version} on Python {pool.python}, and this "
            f"is weft {mine[0]} on Python {mine[1]}; open it again with this one"
        )
    return channel, pool


def _authenticate(raw: socket.socket) -> tuple[Channel, Pool]:
    """Return a channel to the server, and its greeting: the mirror of `_PipeListener.accept`."""
    with connection.Connection(os.dup(raw.fileno())) as caller:
        connection.answer_challenge(caller, key.read_key())
        connection.deliver_challenge(caller, key.read_key())
    _, descriptors, _, _ = socket.recv_fds(raw, 1, 1)
    channel = Channel(socket.socket(fileno=descriptors[0]))
    if not channel.wait(time.monotonic() + _PATIENCE):
        channel.close()
        raise Closed("it has stopped")
    return channel, channel.receive(Pool)[0]


def close_pipe(name: str) -> None:
    """End a pipe's server and all its workers. Raises NoSuchPipe, Refused, Stalled."""
    channel, pool = connect(name)
    with contextlib.closing(channel), contextlib.suppress(Closed):
        channel.send(Close())
        if not channel.wait(time.monotonic() + _END):
            raise Stalled(
                f"the pipe {name!r} was told to close {_END:.0f} s ago and has not; process "
                f"{pool.pid}, which serves it, may have been stopped"
            )
        channel.receive(Pool)  # raises Closed at the server's end


def names() -> list[str]:
    """Return the names of the pipes that are served for this user on this host."""
    return sorted(set(_served()))


def _served() -> Iterator[str]:
    prefix = "@" + _address("")[1:]
    with contextlib.suppress(OSError), open("/proc/net/unix") as table:
        for line in table:
            path = line.rstrip("\n").rpartition(" ")[2]
            if path.startswith(prefix):
                yield path.removeprefix(prefix)


def _address(name: str) -> str:
    return f"\0weft/pipe/{os.geteuid()}/{name}"


def _set_timeouts(raw: socket.socket) -> None:
    """Limit how long reads and writes may wait for the other end."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        raw.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(_PATIENCE, 0))
