"""The fixture that looks for what a test has left: it finds the test's own, and nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.support import run_command

#: what a test does, and what is told to be left of it
LEFT = {
    "process": "import subprocess; kept = subprocess.Popen(['sleep', '3'])",
    "shared memory": "import numpy, weft; from weft.engines.local.memory import blocks; "
    "kept = blocks.allocate(4096)",
    "thread": "import threading; kept = threading.Thread(target=threading.Event().wait, "
    "daemon=True); kept.start()",
    "temporary file": "import os; open(os.environ['TMPDIR'] + '/it', 'w').close()",
}


def outcome(folder: Path, body: str) -> str:
    """What pytest says of a test that does this."""
    path = folder / "test_leaving.py"
    path.write_text(f"def test_leaving():\n    global kept\n    {body}\n")
    line = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    return run_command(
        [*line, "--rootdir", str(folder), "--basetemp", str(folder / "inner"), str(path)],
        folder=ROOT,
        env={"WEFT_TEST_PATIENCE": "0.2"},
    ).out


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_is_told(what: str, tmp_path: Path) -> None:
    """By what it is."""
    told = outcome(tmp_path, LEFT[what])
    assert f"left behind: ['{what} " in told, told


def test_what_others_leave_is_not(tmp_path: Path) -> None:
    """A file of another program in /dev/shm, which nobody has in use."""
    foreign = Path(f"/dev/shm/test-{os.getpid()}")
    try:
        told = outcome(tmp_path, f"open({str(foreign)!r}, 'w').close()")
        assert foreign.exists()
    finally:
        foreign.unlink(missing_ok=True)
    assert "1 passed" in told, told
    assert "error" not in told, told
