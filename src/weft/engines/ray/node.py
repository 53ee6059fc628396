"""A node of Ray on this machine, and the process that watches over it.

    weft open ── pipe ──> watcher ──> ray start --block ──> gcs_server, raylet ──> agents, workers

Each of the three has a session of its own. The watcher tells by the pipe when the node runs, or why
it does not; if `weft open` ends before that, so does the node. After that the watcher answers at a
socket of this user: which node it watches, and `weft close` ends it.

Ray ends only its direct children, so what remains of a node is ended here: whatever its processes
start becomes the watcher's child when its own parent ends (PR_SET_CHILD_SUBREAPER). Both watcher
and `ray start` can do this and remove the node's folder, so that either may be killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from weft._core.launch import Process
from weft.engines.launched import stat_fields
from weft.engines.local.processes import linux
from weft.engines.ray import rpc
from weft.errors import LaunchError, Refused, Stalled
from weft.resources import available_memory

#: seconds for a node to start, for Ray to end it by itself, and for the rest to be gone then
_START, _RAY_ENDS, _END = 90.0, 5.0, 10.0
#: seconds between two looks at whether it runs
_LOOK = 0.05
#: seconds for the watcher to answer
_ANSWER = 5.0
#: the longest path of a folder in which Ray's sockets have names that Unix sockets can have; of
#: that, what a folder's own name takes
_LONGEST, _NAME = 107 - 64, 14
#: ports of a node, counted from the cluster's port: where others reach it, and those of its workers
RAYLET, OBJECTS, RUNTIME_ENV, _AGENTS, WORKERS = 1, 2, 3, (4, 5, 6), (10, 59)
#: the part of this machine's memory that objects on their way may take, and Ray's least
_STORE, _LEAST_STORE = 0.3, 80_000_000
_CREDENTIALS = struct.Struct("3i")
LOOPBACK = "127.0.0.1"
#: an error in the logs of Ray's servers
_SERIOUS = re.compile(r"^\[\S+ \S+ [CEF] ")

#: Ray as it is installed alone: with these it would open further ports, which no option closes
_HIDDEN = ("grpc", "aiohttp", "prometheus_client")

_PROGRAM = "import sys; sys.path[:] = sys.argv[3:]; from weft.engines.ray import node; node."


@dataclass(frozen=True)
class NodeOptions:
    """Describe what a node is started with."""

    #: the cluster's address, HOST:PORT; this node is its first if that is its own
    cluster: str
    #: this node's own address, without a port
    address: str
    cores: int
    gpus: int
    #: what the other machines see of this one
    labels: dict[str, str]
    #: CUDA_VISIBLE_DEVICES of its processes, where that is to name fewer than this process's
    visible: str | None = None
    #: whether it ends with the process that has started it
    tied: bool = False
    #: whether nobody but that process is to find it
    private: bool = False

    @property
    def port(self) -> int:
        return int(self.cluster.rpartition(":")[2])

    @property
    def is_first(self) -> bool:
        return self.cluster == f"{self.address}:{self.port}"


@dataclass(frozen=True)
class OwnNode:
    """This user's node on this machine, as its watcher describes it."""

    cluster: str
    address: str
    cores: int
    gpus: int
    #: the watcher's
    pid: int

    @property
    def port(self) -> int:
        return int(self.cluster.rpartition(":")[2])


# the side of `weft open`


def start(options: NodeOptions, token: str) -> subprocess.Popen[bytes]:
    """Start a node, and return its watcher when it runs. Raises LaunchError if it does not."""
    read, write = os.pipe2(os.O_CLOEXEC)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", f"{_PROGRAM}watch(*sys.argv[1:3])"),
            *(json.dumps(asdict(options)), f"{write} {os.getpid()}", *sys.path),
        ],
        env=_environment(options, token),
        stdin=subprocess.DEVNULL,
        pass_fds=[write],
        start_new_session=True,
    )
    os.close(write)
    try:
        with open(read) as answer:
            if not linux.readable(read, _START):
                raise LaunchError(f"the node did not run after {_START:.0f} s; try again")
            outcome = answer.readline().strip()
        if outcome != "open":
            raise LaunchError(outcome or "the node could not be started; see what was printed")
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return process


def find() -> OwnNode | None:
    """Return this user's node on this machine, None if there is none. Raises Refused, Stalled."""
    connection = _connect()
    if connection is None:
        return None
    with connection:
        return _ask(connection, "which")


def end() -> OwnNode | None:
    """End this user's node on this machine, and return what it was; None if there is none. Raises
    Refused, Stalled."""
    connection = _connect()
    if connection is None:
        return None
    with connection:
        node = _ask(connection, "end")
        connection.settimeout(_RAY_ENDS + _END)
        try:
            connection.recv(1)  # comes back when the watcher has ended
        except TimeoutError:
            raise Stalled(
                f"the node was told to end {_RAY_ENDS + _END:.0f} s ago and has not; process "
                f"{node.pid}, which watches over it, may have been stopped"
            ) from None
        return node


def already_open() -> LaunchError:
    """Return the error for a second node of this user on this machine."""
    return LaunchError(
        "this machine's node is open already (weft status); end it with\n    weft close"
    )


def _connect() -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ANSWER)
    try:
        connection.connect(_socket_name())
    except ConnectionRefusedError:
        connection.close()
        return None
    if _user_of(connection) != os.geteuid():
        connection.close()
        raise Refused("another user's process answers in the place of this user's node")
    return connection


def _ask(connection: socket.socket, what: str) -> OwnNode:
    try:
        connection.sendall(f"{what}\n".encode())
        with connection.makefile() as answer:
            return OwnNode(**json.loads(answer.readline()))
    except (OSError, ValueError):
        raise Stalled(
            f"the process that watches over this machine's node did not answer within {_ANSWER:g} "
            "s; it may have been stopped"
        ) from None


def _environment(options: NodeOptions, token: str) -> dict[str, str]:
    """Return the environment of a node's processes: the user's, of which certificates count, but
    nothing else that is for another Ray."""
    environment = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith("RAY_") or name in rpc.TLS
    }
    if options.address == LOOPBACK:
        environment |= _LOOPBACK_SETTINGS
    if options.visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = options.visible
    return {**environment, **RAY_SETTINGS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


#: what keeps Ray from putting another address of this machine in place of that for loopback, the
#: only address to which it binds all of its ports
_LOOPBACK_SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

#: how Ray behaves in nodes of weft
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "false",
    # another patch version of Python is no obstacle
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    # a host that is cut off is lost after two to three seconds
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
    # who ends a node does not wait for what runs there
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    # the seconds for which a node outlives the first one
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    # niceness, memory and GPUs of workers are weft's
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}


# the watcher


def watch(options: str, starter: str) -> None:
    """Start a node, and watch over it until somebody ends it, or it ends. `starter` has two
    numbers: a pipe, to which "open" is written when it runs, or why it cannot, and the pid of who
    reads that; the node ends with that process as long as it does not run, or at any time if it is
    tied."""
    ready, pid = map(int, starter.split())
    pidfd = linux.open_pidfd(Process(pid, linux.process_start(pid)))
    if os.getppid() != pid:
        return  # it has ended
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signalled, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.set_inheritable(ready, False)
    linux.become_subreaper()
    os.chdir("/")
    _Watcher(NodeOptions(**json.loads(options)), ready, pidfd, signalled).run()


class _Watcher:
    """A node from its start to its end."""

    def __init__(self, options: NodeOptions, ready: int, starter: int, signalled: int) -> None:
        self._options = options
        self._ready = ready
        #: a pidfd
        self._starter = starter
        #: readable once this process was told to end
        self._signalled = signalled
        self._listener = socket.socket(socket.AF_UNIX)
        self._folder = ""
        self._process: subprocess.Popen[bytes] | None = None
        #: what `ray start` prints
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  as long as this process
        #: who has asked for the end, and waits for it
        self._closers: list[socket.socket] = []

    def run(self) -> None:
        try:
            if not self._options.private:
                self._listen()
            self._folder = _make_folder()
            self._process = process = self._start_ray()
            if failure := self._await_start(process):
                self._say(failure)
                return
            self._say("open")
            self._watch(process)
        except LaunchError as error:
            self._say(str(error))
        finally:
            self._end()

    def _listen(self) -> None:
        try:
            self._listener.bind(_socket_name())
        except OSError:
            raise already_open() from None
        self._listener.listen()

    def _start_ray(self) -> subprocess.Popen[bytes]:
        """Start `ray start --block`."""
        arguments = json.dumps(_ray_arguments(self._options, self._folder))
        return subprocess.Popen(
            [
                *(sys.executable, "-c", f"{_PROGRAM}serve(sys.argv[1], sys.argv[2])"),
                *(self._folder, arguments, *sys.path),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            start_new_session=True,
        )

    def _await_start(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until the node runs. Return why it does not."""
        runs = Path(self._folder, "ray_current_cluster")  # Ray writes it when all is started
        until = time.monotonic() + _START
        ended = select.poll()
        ended.register(self._starter, select.POLLIN)
        ended.register(self._signalled, select.POLLIN)
        while not runs.exists():
            if ended.poll(_LOOK * 1000):
                return "it was told to end"
            if process.poll() is not None or time.monotonic() > until:
                return self._failure()
        return ""

    def _failure(self) -> str:
        """Return why the node does not run: the last lines that `ray start` has printed, and the
        last error of the servers that it has started."""
        self._printed.seek(0)
        told = " ".join(_lines(self._printed.read())[-3:]) or "it said nothing"
        for name in ("gcs_server", "raylet"):
            log = Path(self._folder, "session_latest/logs", f"{name}.out")
            with contextlib.suppress(OSError):
                errors = [line for line in _lines(log.read_bytes()) if _SERIOUS.search(line)]
                told += f"; {name}: {errors[-1][:500]}" if errors else ""
        return f"Ray did not start the node: {told[-1500:]}"

    def _say(self, outcome: str) -> None:
        """Tell `weft open`, and leave its terminal."""
        with contextlib.suppress(OSError):
            os.write(self._ready, f"{' '.join(outcome.split())}\n".encode())
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.close(self._ready)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Answer until somebody asks for the end, `ray start` ends, or who has started it does."""
        poll = select.poll()
        poll.register(self._signalled, select.POLLIN)
        poll.register(os.pidfd_open(process.pid), select.POLLIN)
        if self._options.tied:
            poll.register(self._starter, select.POLLIN)
        if not self._options.private:
            poll.register(self._listener, select.POLLIN)
        while not self._closers:
            for descriptor, _ in poll.poll():
                if descriptor != self._listener.fileno():
                    return
                with contextlib.suppress(OSError):
                    self._answer(self._listener.accept()[0])

    def _answer(self, caller: socket.socket) -> None:
        caller.settimeout(1.0)
        if _user_of(caller) != os.geteuid():
            caller.close()
            return
        with caller.makefile() as questions:
            question = questions.readline().strip()
        options = self._options
        node = OwnNode(options.cluster, options.address, options.cores, options.gpus, os.getpid())
        caller.sendall(f"{json.dumps(asdict(node))}\n".encode())
        if question == "end":
            self._closers.append(caller)
        else:
            caller.close()

    def _end(self) -> None:
        """End the node: Ray by its own ways, then whatever is left."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_RAY_ENDS)
        if self._folder:
            clean_up(self._folder)


def _socket_name() -> str:
    """Return where this user's node on this machine is asked: in the abstract namespace, so that a
    killed watcher leaves no file."""
    return f"\0weft/node/{os.geteuid()}"


def _user_of(connection: socket.socket) -> int:
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _make_folder() -> str:
    """Make the folder of a node. Raises LaunchError."""
    bases = [base for base in (tempfile.gettempdir(), "/tmp") if len(base) + _NAME <= _LONGEST]
    try:
        return tempfile.mkdtemp(prefix="weft-", dir=bases[0])
    except OSError as error:
        raise LaunchError(f"no folder can be made for the node: {error}") from None


def _lines(text: bytes) -> list[str]:
    lines = (line.strip() for line in text.decode(errors="replace").splitlines())
    return [line for line in lines if line]


# `ray start`


def _ray_arguments(options: NodeOptions, folder: str) -> list[str]:
    """Return the arguments of `ray start`. Pure, but for the size of the object store."""
    port = options.port
    grpc_agent, http_agent, metrics = (port + offset for offset in _AGENTS)
    numbers = {
        "node-manager-port": port + RAYLET,
        "object-manager-port": port + OBJECTS,
        "runtime-env-agent-port": port + RUNTIME_ENV,
        "dashboard-agent-grpc-port": grpc_agent,
        "dashboard-agent-listen-port": http_agent,
        "metrics-export-port": metrics,
        "min-worker-port": port + WORKERS[0],
        "max-worker-port": port + WORKERS[1],
        "num-cpus": options.cores,
        "num-gpus": options.gpus,
        **_store_size(),
    }
    first = {
        "port": port,
        "include-dashboard": "false",
        "dashboard-host": options.address,
    }
    texts = {
        "node-ip-address": options.address,
        "labels": ",".join(f"{name}={text}" for name, text in options.labels.items()),
        "temp-dir": folder,
        "include-log-monitor": "false",
        "log-style": "record",
        "log-color": "false",
        **(first if options.is_first else {"address": options.cluster}),
    }
    flags = ["--head", "--no-monitor"] if options.is_first else []
    valued = [f"--{name}={value}" for name, value in {**numbers, **texts}.items()]
    return ["start", "--block", "--disable-usage-stats", *flags, *valued]


def _store_size() -> dict[str, int]:
    """Return the option for how many bytes objects may take in /dev/shm. Where there is little room
    Ray decides, and may use files."""
    memory = available_memory()[0]
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return {}
    size = int(min(_STORE * memory, 0.9 * room.f_bavail * room.f_frsize))
    return {"object-store-memory": size} if size >= _LEAST_STORE else {}


def serve(folder: str, arguments: str) -> None:
    """Run `ray start --block`, until it is told to end or the watcher has ended."""
    signal.signal(signal.SIGTERM, _leave)
    linux.become_subreaper()
    watcher = os.getppid()
    atexit.register(_clean_up_alone, folder, watcher)  # called after what Ray registers
    linux.end_with_parent(signal.SIGTERM)
    if os.getppid() != watcher:
        return
    for name in _HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]
    from ray.scripts.scripts import main

    sys.argv = ["ray", *json.loads(arguments)]
    main()


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)


def _clean_up_alone(folder: str, watcher: int) -> None:
    """Do what the watcher would do, if it has ended."""
    if os.getppid() != watcher:
        clean_up(folder)


def clean_up(folder: str) -> None:
    """End all that this process and its descendants have started, and remove the folder."""
    until = time.monotonic() + _END
    while time.monotonic() < until:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # none is left
            break
        time.sleep(0.005)
    shutil.rmtree(folder, ignore_errors=True)


def _descendants() -> Iterator[int]:
    """Yield the pids of this process's children, their children, and so on."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat_fields(int(name))):
            parents[int(name)] = int(fields[1])
    families = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in families} - families:
        yield from more
        families |= more
