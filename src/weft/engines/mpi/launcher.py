"""`weft run --hosts a:2,b:2`: start ranks on several hosts by mpirun, and say how they ended.

    weft run ── mpirun ─┬─ ssh a ── daemon ─┬─ rank 0   has stdin
                        │                   └─ rank 1
                        └─ ssh b ── daemon ─── ...      output comes back through mpirun

The hosts are asked first what they have: mpirun says little of a host without Python, and MPI hangs
where two have the same name. mpirun starts and ends the ranks. Its exit code may be 0 although a
host was cut off or a rank was killed; so each rank that joins a group tells in its stderr, by
`launched.place`, that it began and that it ended, and one that began and did not end has failed. If
mpirun still runs some seconds after a failure, it is killed: its daemons end with it, and the ranks
with them.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from types import FrameType
from typing import IO, TextIO

from weft._core import arguments, hosts, mpirun
from weft._core import survey as answers
from weft._core.launch import BEGAN, FAILED, MARK, REPORT, TAKEN, VARIABLES
from weft._core.mpirun import OPEN_MPI
from weft.engines.base import Command
from weft.engines.local.processes import linux
from weft.engines.local.processes.output import Lines, write_all
from weft.engines.mpi import programs, survey
from weft.errors import LaunchError

#: seconds from the first sign of a failure until mpirun gets SIGTERM: it should have ended by then
_PATIENCE = 6.0
#: seconds from SIGTERM until SIGKILL
_GRACE = 2.0
#: seconds that mpirun gets to end the ranks after a signal from outside
_SIGNAL_GRACE = 5.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def run(command: Command) -> int:
    """Run the ranks to their end. Return mpirun's exit code if it is not 0, else 0 if every rank
    has ended as it should. Raises LaunchError, MissingPackage, EngineUnavailable."""
    path, mpi = programs.require_mpirun()
    validate_hosts(command)
    with tempfile.NamedTemporaryFile("w", prefix="weft-hosts-") as file:
        file.write(mpirun.machine_file(command.hosts))
        file.flush()
        environ = _environment(command, mpi)
        names = mpirun.passed_on(environ, (*VARIABLES, TAKEN))
        options = mpirun.arguments(
            mpi,
            command.hosts,
            file.name,
            names,
            keep_going=command.keep_going,
            has_stdin=_has_stdin(),
        )
        line = [path, *options, sys.executable, *command.program]
        return _Job(command, mpi, line, environ).run()


def validate_hosts(command: Command) -> None:
    """Ask the hosts whether they can run the ranks. Raises LaunchError, which lists those that
    cannot, and why; where versions differ with a table."""
    if "SLURM_JOB_ID" in os.environ and survey.remote_shell(os.environ)[0] == "ssh":
        return  # mpirun starts its daemons by srun there, and ssh may be forbidden
    script = "" if command.program[0] == "-m" else command.program[0]
    found = survey.ask([host.name for host in command.hosts], script=script)
    if refusals := answers.refusals(found):
        listed = "\n".join(f"  - {refusal}" for refusal in refusals)
        raise LaunchError(f"these hosts cannot run the ranks:\n{listed}\n{answers.table(found)}")


def _environment(command: Command, mpi: mpirun.Mpi) -> dict[str, str]:
    """Return mpirun's environment; ranks get the part of it that `passed_on` names."""
    environ = {**os.environ, REPORT: "1"}
    if mpi.name == OPEN_MPI:  # the others would mark what is printed without a buffer in pieces
        environ.setdefault("PYTHONUNBUFFERED", "1")
    environ |= mpirun.settings(mpi, environ, root=os.geteuid() == 0)
    if command.timeout is not None:
        environ[arguments.VARIABLE] = repr(command.timeout)
    return environ


def _has_stdin() -> bool:
    """Return whether there is anything to read."""
    try:
        return os.fstat(0).st_rdev != os.stat(os.devnull).st_rdev
    except OSError:  # it is closed
        return False


class _Job:
    def __init__(
        self, command: Command, mpi: mpirun.Mpi, line: list[str], environ: dict[str, str]
    ) -> None:
        self._command, self._mpi, self._line, self._environ = command, mpi, line, environ
        self._hosts = hosts.hosts_of_ranks(command.hosts)
        self._selector = selectors.DefaultSelector()
        self._lines: dict[IO[bytes], tuple[Lines, TextIO]] = {}
        #: ranks that joined a group, and those of them that ended without an exception
        self._began: set[int] = set()
        self._ended: set[int] = set()
        #: the rank whose line was cut at a carriage return: the rest has no mark
        self._unfinished: dict[TextIO, int | None] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._signalled: int | None = None
        self._terminate_at = self._kill_at = math.inf
        #: whether mpirun said that something failed, and whether it had to be killed
        self._told_failure = self._killed = False

    def run(self) -> int:
        self._take_signals()
        process = self._process = self._start()
        try:
            if self._signalled is not None:  # it came before there was anything to end
                self._end(signal.SIGTERM, _GRACE)
            while process.poll() is None:
                self._step()
            for pipe in list(self._lines):
                self._read(pipe)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            for number in _ENDING:  # a signal that comes now must not change the exit code
                signal.signal(number, signal.SIG_IGN)
        return self._verdict(process.returncode)

    def _start(self) -> subprocess.Popen[bytes]:
        launcher = os.getpid()

        def before_exec() -> None:
            linux.end_with_parent(signal.SIGTERM)
            if os.getppid() != launcher:  # it died before the prctl
                os._exit(1)

        process = subprocess.Popen(
            self._line,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal comes from here, once
            preexec_fn=before_exec,  # noqa: PLW1509  this process has one thread
        )
        pidfd = os.pidfd_open(process.pid)
        self._selector.register(pidfd, selectors.EVENT_READ)
        for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._lines[pipe] = Lines(), target
                self._selector.register(pipe, selectors.EVENT_READ)
        return process

    def _step(self) -> None:
        """Wait for the next event or deadline, and handle it."""
        due = min(self._terminate_at, self._kill_at)
        remaining = None if math.isinf(due) else max(0.0, due - time.monotonic())
        for key, _ in self._selector.select(remaining):
            if key.fileobj in self._lines:
                self._read(key.fileobj)
            elif key.data == "signal":
                os.read(key.fd, 4096)
        if time.monotonic() >= self._kill_at:
            self._kill_at, self._killed = math.inf, True
            self._signal(signal.SIGKILL)
        elif time.monotonic() >= self._terminate_at:
            self._end(signal.SIGTERM, _GRACE)

    def _end(self, number: int, grace: float) -> None:
        """Make mpirun end the ranks, and kill it if it has not ended by then."""
        self._terminate_at = math.inf
        self._kill_at = min(self._kill_at, time.monotonic() + grace)
        self._signal(number)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _note_failure(self) -> None:
        if not self._command.keep_going and math.isinf(self._kill_at):
            self._terminate_at = min(self._terminate_at, time.monotonic() + _PATIENCE)

    # output

    def _read(self, pipe: IO[bytes]) -> None:
        """Relay what has come through a pipe. It stays open for as long as anything holds it."""
        lines, target = self._lines[pipe]
        while data := pipe.read(1 << 16):
            self._relay(lines.feed(data), target)
        ended = self._process is not None and self._process.poll() is not None
        if ended or data == b"":  # not None, as where nothing has come yet
            self._relay(lines.finish(), target)
            self._selector.unregister(pipe)
            del self._lines[pipe]
            pipe.close()

    def _relay(self, lines: list[bytes], target: TextIO) -> None:
        text = b"".join(self._as_printed(line, target) for line in lines)
        if not text:
            return
        try:
            target.flush()
            write_all(target.fileno(), text)
        except OSError:  # nobody reads the launcher's output
            if self._signalled is None:
                self._signalled = signal.SIGPIPE
                self._end(signal.SIGTERM, _GRACE)

    def _as_printed(self, line: bytes, target: TextIO) -> bytes:
        """Return a line of mpirun's output as the user sees it; nothing for one that is for the
        launcher."""
        rank, text = mpirun.split_tag(self._mpi, line)
        rank = self._unfinished.get(target) if rank is None else rank
        self._unfinished[target] = rank if line.endswith(b"\r") else None
        if (mark := MARK.search(text)) is not None:
            self._note(rank, mark[1])
            text = text[: mark.start()] + text[mark.end() :]
            if not text:
                return b""
            text = text.rstrip(b"\n") + b"\n"
        if rank is None:
            if mpirun.tells_failure(text):
                self._told_failure = True
                self._note_failure()
            return b"" if mpirun.is_noise(text) else text
        host = self._hosts[rank] if rank < len(self._hosts) else "?"
        return (f"[{rank} {host}] ".encode() if self._command.prefix else b"") + text

    def _note(self, rank: int | None, word: bytes) -> None:
        """Note what a rank tells of itself. Which one is unknown in what mpirun prints last of all,
        when it ends a job."""
        if word == FAILED:
            self._note_failure()
        elif rank is not None:
            (self._began if word == BEGAN else self._ended).add(rank)

    # signals

    def _take_signals(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would lose mpirun's exit code
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(read, selectors.EVENT_READ, "signal")
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (*_ENDING, *_PASSED_ON):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number in _PASSED_ON:  # mpirun passes them on to the ranks
            self._signal(number)
        elif self._signalled is None:
            self._signalled = number
            self._end(signal.SIGTERM, _SIGNAL_GRACE)
        else:
            self._end(signal.SIGKILL, 0.0)

    # the end

    def _verdict(self, code: int) -> int:
        code = code if code >= 0 else 128 - code
        if self._killed:
            _complain("weft run: mpirun did not end when told to, and was killed")
        silent = sorted(self._began - self._ended)
        if self._signalled is not None and (code or silent):
            return 128 + self._signalled
        if silent and (code == 0 or self._killed):
            listed = ", ".join(f"{rank} ({self._hosts[rank]})" for rank in silent)
            _complain(
                f"weft run: rank {listed} did not end as it should: killed, failed, or on a host "
                f"that was cut off; mpirun's exit code was {code}"
            )
            return code or 1
        return code or int(self._told_failure)


def _complain(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        return  # nobody reads it
