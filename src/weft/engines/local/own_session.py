"""One session for all ranks of a job, which is not the terminal's.

    weft run               what the shell knows: passes signals on, and the exit code back
      └── the launcher     leads the session
            ├── rank 0
            └── ...

Linux shares a core out between sessions first, and then among the processes of each (autogroups):
who leaves the core to others leaves it to those of its own session. So ranks that wait for each
other need a common one: four on two cores, each in its own, took a sixth longer for a broadcast of
100 MB. It is not the terminal's, in which a process in the background is stopped when it reads.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

from weft.engines.local import libc
from weft.engines.local.translation import translated

#: end the job
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: go to every rank
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
_ALL = (*ENDING, *PASSED_ON, signal.SIGTSTP)


def enter() -> None:
    """Go on in a child that leads a session. This process itself passes on signals until that ends,
    and ends as it did; if this one is killed, so is the child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)  # until there is who takes them
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        raise translated(error) from error
    if child:
        _stand_for(child, before)
    libc.end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stand_for(child: int, mask: set[int]) -> NoReturn:
    """Be to others what the child is."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would reap the child unseen
    pidfd = os.pidfd_open(child)

    def pass_on(number: int, _: FrameType | None) -> None:
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return  # it has ended
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    for number in _ALL:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
