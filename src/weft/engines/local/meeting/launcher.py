"""`weft run`: start the ranks, relay their output, and end all of them when one fails.

    weft run ──┬── rank 0   has stdin
               ├── rank 1
               └── ...      stdout and stderr come back through pipes

Each rank leads a session of its own. So a Ctrl-C in the terminal reaches only the
launcher, which passes it on once; a rank may read from the terminal although it
runs in the background; and the processes that a rank has started can be ended
with it. If the launcher dies, the kernel kills the ranks. How a rank ended is
written into the launch's shared memory, where its peers read it.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import selectors
import signal
import struct
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import IO

from weft._core import arguments
from weft._core.launch import environment
from weft.engines.base import Command
from weft.engines.local.meeting.rendezvous import create_memory, roster_block
from weft.engines.local.meeting.roster import Roster
from weft.engines.local.processes import linux, mps
from weft.engines.local.processes.linux import oom_kills, peek_end, translate_os_error
from weft.engines.local.processes.output import Stream
from weft.resources import narrow, plan, visible_gpus

#: seconds from the failure of a rank until the others get SIGTERM: time to report their own errors
_PATIENCE = 0.7
#: seconds from SIGTERM until SIGKILL
_GRACE = 1.0
#: seconds that ranks get to save their work after a signal from outside
_SIGNAL_GRACE = 10.0
_LAST_LINES = 30
_LONGEST_LINE = 300
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


def run(command: Command) -> int:
    """Run the ranks to their end. Return the exit code of the first that failed, or 0. Raises
    DeviceUnavailable."""
    with contextlib.ExitStack() as stack:
        variables = stack.enter_context(mps.started()) if command.mps else {}
        return _Launcher(command, variables).run()


@dataclass(eq=False)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    pipes: dict[IO[bytes], Stream]
    last_lines: deque[str]
    started: float = field(default_factory=time.monotonic)
    #: the exit code, or the negative signal number; None while the rank runs
    code: int | None = None

    def signal_all(self, number: int) -> None:
        """Signal the rank's process group, unless the rank has been reaped."""
        if self.code is None:
            os.killpg(self.process.pid, number)  # a session leader cannot leave its group


class _Launcher:
    def __init__(self, command: Command, variables: Mapping[str, str]) -> None:
        self._command = command
        #: what it adds to the ranks' environment
        self._variables = variables
        self._memory = create_memory(command.ranks)
        self._roster = Roster(roster_block(self._memory, command.ranks), -1)
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        #: ranks that failed on their own, in the order of their ends
        self._failed: list[int] = []
        #: ranks that were asked to end
        self._asked_to_end: set[int] = set()
        #: ranks that did not end in time and were killed
        self._killed: set[int] = set()
        self._signalled: int | None = None
        self._tell_at = self._kill_at = math.inf
        self._oom_kills = oom_kills()

    def run(self) -> int:
        self._take_signals()
        try:
            self._start_all()
            while self._running():
                self._step()
        finally:
            for rank in self._running():
                rank.signal_all(signal.SIGKILL)
                rank.process.wait()
            for number in _ENDING:  # a signal that comes now must not change the exit code
                signal.signal(number, signal.SIG_IGN)
        return self._verdict()

    def _step(self) -> None:
        """Wait for the next event or deadline, and handle it."""
        due = min(self._tell_at, self._kill_at)
        remaining = None if math.isinf(due) else max(0.0, due - time.monotonic())
        ended = []
        for key, _ in self._selector.select(remaining):
            if isinstance(key.data, _Rank) and key.fd == key.data.pidfd:
                ended.append(key.data)
            elif isinstance(key.data, _Rank):
                self._read(key.data, key.fileobj)  # type: ignore[arg-type]
            else:
                os.read(key.fd, 4096)  # the wake-up byte of a signal
        if ended:
            self._note_ends(ended)
        if time.monotonic() >= self._kill_at:
            self._kill_running()
        elif time.monotonic() >= self._tell_at:
            # a rank that has left is about to end, and its own exit code is worth waiting for
            leaving = [r for r in self._running() if self._roster.has_left(r.number)]
            self._end_running(signal.SIGTERM, besides=leaving)

    # starting

    def _start_all(self) -> None:
        ranks = self._command.ranks
        plans = plan(ranks).environment(os.environ)
        gpus = self._command.gpus or visible_gpus(os.environ)
        if not self._command.gpus and (ranks == 1 or len(gpus) == 1):
            gpus = ()  # they see what they have
        job = os.urandom(16).hex()
        for number in range(ranks):
            if self._signalled is not None:
                break
            variables = environment(
                rank=number,
                size=ranks,
                job=job,
                memory=self._memory.descriptor,
                launcher=os.getpid(),
            )
            variables |= narrow(gpus, number, ranks)
            environ = {"PYTHONUNBUFFERED": "1", **os.environ, **plans, **self._variables}
            environ |= variables
            if self._command.timeout is not None:
                environ[arguments.VARIABLE] = repr(self._command.timeout)
            self._start(number, environ)

    def _start(self, number: int, environ: dict[str, str]) -> None:
        launcher = os.getpid()

        def before_exec() -> None:
            linux.end_with_parent(signal.SIGKILL)
            if os.getppid() != launcher:  # it died before the prctl
                os._exit(1)

        try:
            process = subprocess.Popen(
                [sys.executable, *self._command.program],
                env=environ,
                stdin=None if number == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[self._memory.descriptor],
                preexec_fn=before_exec,  # noqa: PLW1509  this process has one thread
            )
            rank = _Rank(number, process, -1, {}, deque(maxlen=_LAST_LINES))
            self._ranks.append(rank)
            rank.pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            raise translate_os_error(error) from error
        prefix = f"[{number}] " if self._command.prefix else ""
        for pipe, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                rank.pipes[pipe] = Stream(prefix, target, rank.last_lines)
                self._selector.register(pipe, selectors.EVENT_READ, rank)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, rank)

    # running

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.code is None]

    def _read_rest(self, rank: _Rank, pipe: IO[bytes]) -> None:
        """Relay what an ended rank has left in a pipe that its children may still hold open."""
        waiting = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
        self._read(rank, pipe, max(1, waiting))
        if pipe in rank.pipes:
            self._finish(rank, pipe)

    def _read(self, rank: _Rank, pipe: IO[bytes], most: int = 1 << 16) -> None:
        """Relay what a rank has printed."""
        if pipe not in rank.pipes:
            return
        data = pipe.read(most)
        if data:
            self._relay(partial(rank.pipes[pipe].feed, data))
        elif data == b"":
            self._finish(rank, pipe)

    def _finish(self, rank: _Rank, pipe: IO[bytes]) -> None:
        self._relay(rank.pipes.pop(pipe).finish)
        self._selector.unregister(pipe)
        pipe.close()

    def _relay(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError:  # nobody reads the launcher's output
            if self._signalled is None:
                self._signalled = signal.SIGPIPE
                self._end_running(signal.SIGTERM)

    def _note_ends(self, ended: list[_Rank]) -> None:
        for rank in ended:
            code = peek_end(rank.process.pid)
            out_of_memory = code == -signal.SIGKILL and oom_kills() > self._oom_kills
            self._roster.publish_end(rank.number, code, out_of_memory=out_of_memory)
            for pipe in list(rank.pipes):
                self._read_rest(rank, pipe)
            self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)
            if code != 0 or self._failed or self._signalled:
                rank.signal_all(signal.SIGKILL)  # its children, while its pid is not yet free
            rank.process.wait()
            rank.code = code
            if code != 0 and rank.number not in self._asked_to_end:
                self._failed.append(rank.number)
        if self._failed and not self._command.keep_going and math.isinf(self._kill_at):
            self._tell_at = min(self._tell_at, time.monotonic() + _PATIENCE)

    def _end_running(
        self, number: int, besides: Sequence[_Rank] = (), grace: float = _GRACE
    ) -> None:
        for rank in self._running():
            if rank not in besides:
                self._asked_to_end.add(rank.number)
                rank.signal_all(number)
        self._tell_at = math.inf
        self._kill_at = time.monotonic() + grace

    def _kill_running(self) -> None:
        self._killed |= {rank.number for rank in self._running()}
        self._end_running(signal.SIGKILL)

    # signals

    def _take_signals(self) -> None:
        # if SIGCHLD is ignored, the kernel reaps the ranks and their exit codes are lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(read, selectors.EVENT_READ)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (*_ENDING, *_PASSED_ON, signal.SIGTSTP):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number in _ENDING:
            self._end(number)
            return
        # SIGSTOP, because a session without a terminal ignores SIGTSTP
        for rank in self._running():
            rank.signal_all(signal.SIGSTOP if number == signal.SIGTSTP else number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    def _end(self, number: int) -> None:
        """Pass on a signal that ends the launch; kill the ranks at the second one."""
        again = self._signalled is not None
        self._signalled = self._signalled or number
        if again:
            self._kill_running()
        else:
            self._end_running(number, grace=_SIGNAL_GRACE)

    # the end

    def _verdict(self) -> int:
        codes = {rank.number: rank.code or 0 for rank in self._ranks}
        if self._killed:
            ranks = ", ".join(map(str, sorted(self._killed)))
            _complain(f"weft run: rank {ranks} did not end when told to, and was killed")
        if self._signalled is not None and any(codes.values()):
            return 128 + self._signalled
        if not self._failed:
            return 0
        causes = {number: self._roster.cause_of(number) for number in codes}
        first = first_failure(self._failed, causes)
        self._explain(self._ranks[first])
        return codes[first] if codes[first] > 0 else 128 - codes[first]

    def _explain(self, rank: _Rank) -> None:
        lines = [
            f"weft run: rank {rank.number} (pid {rank.process.pid}) failed first: "
            f"{self._roster.describe_end(rank.number)}, {time.monotonic() - rank.started:.1f} s "
            "after its start",
            f"weft run: the last lines of rank {rank.number}:"
            if rank.last_lines
            else f"weft run: rank {rank.number} printed nothing",
            *(f"    {line[:_LONGEST_LINE]}" for line in rank.last_lines),
        ]
        _complain("\n".join(lines))


def _complain(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        return  # nobody reads it


def first_failure(failed: Sequence[int], causes: Mapping[int, int | None]) -> int:
    """Return the rank whose failure caused the others. Pure.

    `failed` are the ranks that failed on their own, in the order of their ends; `causes` maps a
    rank that failed because it lost another to that one. Follow the causes from the first rank of
    `failed`, as long as they lead to ranks that failed too.
    """
    first, seen = failed[0], set()
    while first not in seen:
        seen.add(first)
        cause = causes.get(first)
        if cause is not None and cause in failed:
            first = cause
    return first
