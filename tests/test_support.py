"""How tests measure what else the machine has to do."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.support import MARK, load


def test_load_that_has_just_ended_counts() -> None:
    """Whoever asks how long something may have taken asks afterwards."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], env={**os.environ, MARK: ""})
        for _ in range(os.cpu_count() or 1)
    ]
    time.sleep(0.6)
    for process in others:
        process.kill()
    found = load()  # when they have ended, and before they are known to have been this test's
    for process in others:
        process.wait()
    assert found > 2
