"""Hosts for tests and benchmarks: network, UTS, IPC, mount and PID namespaces, joined by a bridge.

    this process ── hub  10.78.0.254   mpirun and `weft run --hosts` run here
                     │ bridge
                     ├── host1  10.78.0.1   own /dev/shm, /run and TMPDIR=/run/tmp
                     └── host2  10.78.0.2   the root file system is everybody's, as over NFS

Each has an init that reaps. The hosts' PID namespaces lie within the hub's, whose init ends when
this process does, even by SIGKILL; the kernel then ends all that runs in them. Nothing has a name
outside of these namespaces, so many processes may have hosts of the same names and addresses at the
same time. Needs root, iproute2 and util-linux; `obstacle` says what is missing.

>>> with Hosts(2) as hosts:
...     outcome = hosts.launch("import weft; print(weft.init().rank)", 2)
...     assert outcome.code == 0 and not hosts.leave_nothing()
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

import pytest

from tests.support import HANGS, MARK, Outcome, load, wait_until, write_script

#: under WEFT_TEST_HOSTS=required a machine that cannot make hosts fails the tests
REQUIRED = "WEFT_TEST_HOSTS"
NETWORK = "10.78.0.0/24"
HUB = 0
#: how `timeout` ends what takes too long
TIMED_OUT = 124

#: what becomes the init of a host: its own memory, files and names, then the loop below
_SETUP = """
set -e
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -m 1777 /run/tmp
printf '%s' "$1" > /run/names
mount --bind /run/names /etc/hosts
shift
exec "$@"
"""

#: reaps what ends; ends itself, and so all else in its namespace, with the process of the pidfd
_INIT = """
import os, select, signal, socket, sys
name, owner, ready = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
socket.sethostname(name)
read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
signal.signal(signal.SIGCHLD, lambda *_: None)
signal.set_wakeup_fd(write, warn_on_full_buffer=False)
socket.socket(fileno=ready).send(b"ready")
poll = select.poll()
poll.register(owner, select.POLLIN)
poll.register(read, select.POLLIN)
while owner not in (events := dict(poll.poll())):
    if read in events:
        os.read(read, 4096)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""

#: what mpirun calls in the place of ssh: enters a host, whose environment is not the caller's
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
case $host in
{cases}
*) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255;;
esac
if [ -e /run/cut/$number ]; then
    echo "ssh: connect to host $host port 22: No route to host" >&2
    exit 255
fi
exec nsenter -t $pid -n -u -i -m -p -- env -i {environment} {mark}="${mark}" sh -c "$*"
"""

#: what runs a command in another folder, as entering a mount namespace changes to the root
_IN_FOLDER = 'cd "$0" && exec "$@"'

_TAG = re.compile(r"^\[[^\]\s]*,(\d+)\]<std(?:out|err)>: ?", re.MULTILINE)
#: a race of mpirun with the agent that it starts, which does no harm
_NOISE = re.compile(r"^\[[^\]]*\] plm:ssh: Warning: setpgid.*\n", re.MULTILINE)


@cache
def obstacle() -> str:
    """Why this machine cannot make hosts; "" if it can."""
    if sys.platform != "linux":
        return "hosts of namespaces need Linux"
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    programs = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
    for program, package in programs.items():
        if shutil.which(program) is None:
            return f"there is no {program}: apt-get install {package}"
    trial = "ip link add br0 type bridge && ip link add v1 type veth peer name eth0"
    command = ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-c"]
    done = subprocess.run([*command, trial], capture_output=True, text=True, timeout=HANGS)
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


def require_hosts() -> None:
    """Skip the test where the machine cannot make hosts; fail it where it has to."""
    if reason := obstacle():
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(f"{REQUIRED}=required, but {reason}")
        pytest.skip(reason)


@dataclass(frozen=True)
class Process:
    """A process of a host."""

    #: as this process sees it: for os.kill
    pid: int
    parent: int
    #: as the host sees it
    inner: int
    #: its command line
    command: str
    #: the rank in whose place it was started; None for no rank
    rank: int | None


class Hosts:
    """Hosts 1 to `count`, named host1, host2, ..., and the hub, which is number 0."""

    def __init__(self, count: int) -> None:
        self.count = count
        #: the addresses of the hosts
        self.addresses = tuple(f"10.78.0.{k}" for k in range(1, count + 1))
        #: the names of the hosts
        self.names = tuple(f"host{k}" for k in range(1, count + 1))
        #: what was started and not waited for
        self.jobs: set[Job] = set()
        self._inits: list[int] = []
        #: what has started them
        self._unshares: list[int] = []
        #: files that hosts have from the start
        self._first_files: dict[int, set[str]] = {}
        self._starters: list[subprocess.Popen[bytes]] = []
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115
        self._cut: set[int] = set()
        if reason := obstacle():
            raise OSError(reason)

    def __enter__(self) -> Hosts:
        try:
            for k in range(self.count + 1):
                self._start_init(k)
            self._connect()
            self._write_agent()
            self._first_files = {k: set(self.files(k)) for k in range(self.count + 1)}
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the hosts and all that runs on them."""
        for pid in self._inits[:1]:
            os.kill(pid, signal.SIGKILL)  # the kernel ends all of its namespace, the hosts too
        for job in list(self.jobs):
            job.wait()
        for starter in self._starters:
            if not self._inits:
                starter.kill()
            starter.wait()
        self._inits, self._starters = [], []
        self._complaints.close()

    # running programs

    def launch(
        self,
        program: str | Path,
        ranks_per_host: int | Sequence[int],
        *arguments: str,
        env: Mapping[str, str] | None = None,
        mpirun: Sequence[str] = (),
        timeout: float = 60,
        ft: bool = False,
    ) -> Outcome:
        """Run a script, given as a path or as its text, in ranks of mpirun, to its end. Each line
        of the output begins with its rank: [0] text."""
        job = self.start(program, ranks_per_host, *arguments, env=env, mpirun=mpirun, ft=ft)
        return job.wait(timeout)

    def start(
        self,
        program: str | Path,
        ranks_per_host: int | Sequence[int],
        *arguments: str,
        env: Mapping[str, str] | None = None,
        mpirun: Sequence[str] = (),
        ft: bool = False,
    ) -> Job:
        """Start what `launch` runs. `env` is for the ranks; they get variables of weft, too."""
        path = write_script(program) if isinstance(program, str) else program
        each = [ranks_per_host] * self.count if isinstance(ranks_per_host, int) else ranks_per_host
        places = [f"{host}:{n}" for host, n in zip(self.addresses, each, strict=True) if n]
        ours = {name: text for name, text in os.environ.items() if name.startswith("WEFT_")}
        passed = {"PYTHONUNBUFFERED": "1", **ours, **(env or {})}
        line = [
            str(Path(sys.executable).parent / "mpirun"),
            *("--bind-to", "none", "--output", "tag"),
            *(("--with-ft", "ulfm") if ft else ()),
            *(word for name in passed for word in ("-x", name)),
            *mpirun,
            *("--host", ",".join(places), "-np", str(sum(each))),
            *(sys.executable, str(path), *arguments),
        ]
        return self.start_on(HUB, line, env=passed)

    def run_on(
        self,
        k: int,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> Outcome:
        """Run a command on a host, or on the hub, to its end; a text is one for the shell."""
        return self.start_on(k, command, env=env).wait(timeout)

    def start_on(
        self, k: int, command: str | Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> Job:
        """Start a command on a host, or on the hub, in this process's folder."""
        line = ["sh", "-c", command] if isinstance(command, str) else command
        environment = {**os.environ, **_ENVIRONMENT, **(env or {})}
        entering = [*self._entering(k), "sh", "-c", _IN_FOLDER, os.getcwd()]
        return Job(self, k, [*entering, *line], environment)

    # looking at the hosts

    def processes(self, k: int) -> list[Process]:
        """What runs on a host, or in the hub, beside its init."""
        namespace = os.readlink(f"/proc/{self._inits[k]}/ns/pid")
        own = {*self._inits, *self._unshares}
        found = []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                    process = _process(int(name))
                    if process is not None and process.pid not in own:
                        found.append(process)
        return found

    def ranks(self, k: int) -> dict[int, int]:
        """The pids of the ranks on a host, as mpirun started them, by rank."""
        processes = self.processes(k)
        ranks = {process.pid for process in processes if process.rank is not None}
        return {
            process.rank: process.pid
            for process in processes
            if process.rank is not None and process.parent not in ranks
        }

    def files(self, k: int) -> list[str]:
        """What lies in /dev/shm, /run and the temporary folder of a host, as it sees them."""
        root = str(self._root(k))
        walks = (
            os.walk(f"{root}/{top}") for top in ("dev/shm", "run")
        )  # passes over what vanishes
        names = {
            os.path.join(folder, name).removeprefix(root)
            for walk in walks
            for folder, folders, files in walk
            for name in (*folders, *files)
        }
        return sorted(names - self._first_files.get(k, set()))

    def left(self) -> list[str]:
        """What is on the hosts now that no fresh host has: processes and files; in the hub
        processes."""
        found = [f"hub: {process}" for process in self.processes(HUB)]
        for k in range(1, self.count + 1):
            found += [f"host{k}: {process}" for process in self.processes(k)]
            found += [f"host{k}: {name}" for name in self.files(k)]
        return found

    def leave_nothing(self, within: float = 3.0) -> list[str]:
        """Wait until nothing is left on any host. Return what still is after so many seconds (of
        an idle machine), which is nothing if all is well."""
        began = time.monotonic()
        while left := self.left():
            if time.monotonic() > began + within and time.monotonic() > began + within * load():
                break
            time.sleep(0.01)
        return left

    def clean(self) -> None:
        """End what runs on the hosts and in the hub, empty their folders, mend their links."""
        for k in sorted(self._cut):
            self.mend(k)
        for k in range(self.count + 1):
            while processes := self.processes(k):
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
        for job in list(self.jobs):
            job.wait()
        for k in range(self.count + 1):
            root = self._root(k)
            for path in (*(root / "dev/shm").iterdir(), *(root / "run/tmp").iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    # the network

    def cut(self, k: int) -> None:
        """Take down a host's link: it reaches nobody, and mpirun cannot start anything there."""
        self._run_ip(HUB, f"link set v{k} down")
        self._cut.add(k)
        (self._marks_cut() / str(k)).touch()

    def mend(self, k: int) -> None:
        """Bring a host's link up again."""
        self._run_ip(HUB, f"link set v{k} up")
        for other in range(self.count + 1):  # whom it tried in vain is tried again at once
            self._run_ip(other, f"neigh flush dev {'eth0' if other else 'br0'}")
        self._cut.discard(k)
        (self._marks_cut() / str(k)).unlink(missing_ok=True)

    def is_quiet(self, k: int) -> bool:
        """Whether all that TCP connections of a host have sent was received. Of a connection that
        is not, keep-alive notices no cut, only the end of TCP's patience after a quarter hour."""
        lines = Path(f"/proc/{self._inits[k]}/net/tcp").read_text().splitlines()[1:]
        return all(line.split()[4].startswith("00000000:") for line in lines)

    # making them

    def _start_init(self, k: int) -> None:
        """Start the init of a host, or first of the hub, and wait until it is there."""
        name = "hub" if k == HUB else f"host{k}"
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.pidfd_open(os.getpid())
        with here, there:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            here.settimeout(HANGS)
            starter = subprocess.Popen(
                [
                    *(self._entering(HUB) if self._inits else ()),
                    *("unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
                    *("--mount-proc", "sh", "-c", _SETUP, "init", self._names()),
                    *(sys.executable, "-I", "-S", "-c", _INIT, name),
                    *(str(owner), str(there.fileno())),
                ],
                stdin=subprocess.DEVNULL,
                stderr=self._complaints,
                pass_fds=(owner, there.fileno()),
            )
            self._starters.append(starter)
            os.close(owner)
            there.close()
            data, credentials, _, _ = here.recvmsg(16, socket.CMSG_SPACE(12))
            if not data:
                raise OSError(f"{name} was not made: {_read_all(self._complaints)}")
            # the kernel gives the sender's pid as this process sees it
            init = struct.unpack("iii", credentials[0][2])[0]
            self._inits.append(init)
            self._unshares.append(int(_stat(init)[1]))

    def _entering(self, k: int) -> tuple[str, ...]:
        return ("nsenter", "-t", str(self._inits[k]), "-n", "-u", "-i", "-m", "-p", "--")

    def _names(self) -> str:
        pairs = [("127.0.0.1", "localhost"), ("10.78.0.254", "hub")]
        pairs += zip(self.addresses, self.names, strict=True)
        return "".join(f"{address} {name}\n" for address, name in pairs)

    def _connect(self) -> None:
        commands = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        commands.append("addr add 10.78.0.254/24 dev br0")
        for k in range(1, self.count + 1):
            # as nsenter's ip sees the host: in the hub's PID namespace
            inner = _inner_pids(self._inits[k])[1]
            commands.append(f"link add v{k} type veth peer name eth0 netns {inner}")
            commands.append(f"link set v{k} master br0 up")
        self._run_ip(HUB, *commands)
        for k in range(1, self.count + 1):
            own = f"addr add 10.78.0.{k}/24 dev eth0"
            self._run_ip(k, "link set lo up", own, "link set eth0 up")

    def _run_ip(self, k: int, *commands: str) -> None:
        line = [*self._entering(k), "ip", "-batch", "-"]
        text = "\n".join(commands)
        done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=HANGS)
        if done.returncode:
            raise OSError(f"ip: {done.stderr.strip()}, of:\n{text}")

    def _root(self, k: int) -> Path:
        return Path(f"/proc/{self._inits[k]}/root")

    def _marks_cut(self) -> Path:
        """Where the agent sees by a file's name that a host cannot be reached."""
        return self._root(HUB) / "run/cut"

    def _write_agent(self) -> None:
        cases = "\n".join(
            f"{self.names[k - 1]}|{self.addresses[k - 1]}) "
            f"number={k} pid={_inner_pids(self._inits[k])[1]};;"
            for k in range(1, self.count + 1)
        )
        environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.environ.get("HOME", "/root"),
            "TMPDIR": "/run/tmp",
            **_AS_ROOT,
        }
        words = " ".join(shlex.quote(f"{name}={text}") for name, text in environment.items())
        for k in range(self.count + 1):  # hosts start nothing by it, but look whether it is there
            agent = self._root(k) / "run/agent"
            agent.write_text(_AGENT.format(cases=cases, environment=words, mark=MARK))
            agent.chmod(0o755)
        self._marks_cut().mkdir()


class Job:
    """A command that runs on a host or in the hub."""

    def __init__(
        self, hosts: Hosts, k: int, line: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._hosts, self._k = hosts, k
        self._began = time.monotonic()
        # files, as a pipe would stay open as long as anything that was left behind
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._entered = subprocess.Popen(
            line,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )
        self._outcome: Outcome | None = None
        hosts.jobs.add(self)

    @property
    def pid(self) -> int:
        """The pid of the command itself, as this process sees it. Raises ProcessLookupError."""
        pid = wait_until(lambda: self._find_pid() or not self.running)
        if pid is True:
            raise ProcessLookupError(f"it has ended: {self.wait()}")
        return int(pid)

    @property
    def running(self) -> bool:
        """Whether the command has not ended yet."""
        return self._entered.poll() is None

    @property
    def out(self) -> str:
        """What it has printed until now, each line beginning with its rank: [0] text."""
        return self._outcome.out if self._outcome else _read_all(self._out)

    @property
    def err(self) -> str:
        """What it has printed to stderr until now."""
        return self._outcome.err if self._outcome else _read_all(self._err)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the command itself."""
        os.kill(self.pid, number)

    def wait(self, timeout: float = 60) -> Outcome:
        """Wait until the command has ended. After so many seconds end it, and all that runs on any
        host; the exit code is then 124."""
        if self._outcome is None:
            try:
                code = self._entered.wait(timeout)
            except subprocess.TimeoutExpired:
                self._hosts.jobs.discard(self)
                self._hosts.clean()
                self._entered.wait()
                code = TIMED_OUT
            seconds = time.monotonic() - self._began
            code = code if code >= 0 else 128 - code  # as a shell has it, and mpirun
            self._outcome = Outcome(code, self.out, self.err, seconds)
            self._hosts.jobs.discard(self)
            self._out.close()
            self._err.close()
        return self._outcome

    def _find_pid(self) -> int | None:
        processes = self._hosts.processes(self._k)
        own = (process.pid for process in processes if process.parent == self._entered.pid)
        return next(own, None)


_AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}

#: of what runs on a host or in the hub: Open MPI uses this network, and enters hosts by the agent
_ENVIRONMENT = {
    **_AS_ROOT,
    "TMPDIR": "/run/tmp",
    "PRTE_MCA_plm_ssh_agent": "/run/agent",
    "PRTE_MCA_prte_if_include": NETWORK,
    "OMPI_MCA_btl_tcp_if_include": NETWORK,
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


def _read_all(file: IO[bytes]) -> str:
    # from the start, without moving the position at which the job writes
    data = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    return _NOISE.sub("", _TAG.sub(r"[\1] ", data.decode(errors="replace")))


def _process(pid: int) -> Process | None:
    """A process as /proc shows it; None for one that has ended and was not reaped yet."""
    fields = _stat(pid)
    if fields[0] == "Z":
        return None
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    rank = next((v for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")), None)
    return Process(
        pid=pid,
        parent=int(fields[1]),
        inner=_inner_pids(pid)[-1],
        command=Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip(),
        rank=None if rank is None else int(rank.partition(b"=")[2]),
    )


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _inner_pids(pid: int) -> list[int]:
    """The pids of a process in each PID namespace, from this process's to its own."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return [int(word) for word in line.split()[1:]]
