"""Programs that are asked for facts, and what they answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

#: seconds for a program that only prints what it is
ANSWER = 5.0
#: PR_SET_PDEATHSIG
_END_WITH_PARENT = 1


def ask(
    command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Raises OSError, TimeoutError. It gets a session of its own, so that
    its children can be killed with it."""
    with subprocess.Popen(
        command,
        env={**os.environ, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_end_with_this_process(),  # noqa: PLW1509  this process has one thread
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                late = f"{command[0]} did not answer within {seconds:g} s"
                raise TimeoutError(late) from None
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end_with_this_process() -> Callable[[], None] | None:
    """Return what makes the kernel kill a child when this process dies, on systems that can."""
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


def complaint(text: str) -> str:
    """Return the line of `weft run`'s errors that says most. Pure."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if last.startswith("weft run:"):  # the rank printed no error: an earlier line says how it ended
        last = next((line for line in lines if "failed first" in line), last)
    return last.removeprefix("weft: ").removeprefix("weft run: ")[:300]


def reason(error: Exception) -> str:
    """Return an exception as one line; an OSError without its number."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
