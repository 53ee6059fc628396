"""`make demo`: its checks pass, and it reads well in a log file and in a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from tests.pages import ROOT
from tests.support import run_command

DEMO = ROOT / "examples" / "demo.py"


def test_the_demo_passes_its_own_checks() -> None:
    """It ends with all checks passed; in a log there are lines of a terminal's width, no bars."""
    outcome = run_command([sys.executable, str(DEMO)])
    assert outcome.code == 0, outcome
    assert outcome.out.endswith("demo: all checks passed\n")
    assert max(map(len, outcome.out.splitlines())) < 80
    assert "\r" not in outcome.out
    assert outcome.err == ""
    ways = re.findall(r"^(\w+) +[\d.]+ s +[\d.]+ s +[\d.]+ x +[\d.]+$", outcome.out, re.MULTILINE)
    assert ways == ["table", "function", "map"], outcome


def test_the_demo_in_a_terminal() -> None:
    """In a terminal of 80 columns bars are drawn, and no line is longer than it."""
    code = f"import sys; sys.path.insert(0, {str(DEMO.parent)!r}); import demo; demo.show_map()"
    screen = run_in_terminal([sys.executable, "-c", code], columns=80)
    lines = [line.split("\r")[-1] for line in screen.replace("\r\n", "\n").split("\n")]
    for label in ("1 process", f"{count_processes(screen)} processes"):
        (bar,) = (line for line in lines if line.startswith(f"{label}: 100%|"))
        assert "24/24" in bar
    assert max(map(len, lines)) < 80, screen


def count_processes(screen: str) -> int:
    found = re.search(r"(\d+) processes: 24 items took", screen)
    assert found, screen
    return int(found[1])


def run_in_terminal(command: list[str], columns: int) -> str:
    """What a program writes to a terminal of that width."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        written = b""
        try:
            while piece := os.read(ours, 65536):
                written += piece
        except OSError:  # Linux says so when nobody writes any more
            pass
    os.close(ours)
    text = written.decode()
    assert process.returncode == 0, text
    return text
