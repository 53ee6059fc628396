"""The notebook: functions of its cells travel to workers, and it prints what is stored in it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.notebook import TOUR, printed
from tests.pages import ROOT
from tests.support import run_command


def test_the_notebook_prints_what_it_shows(tmp_path: Path) -> None:
    """Run from top to bottom, every cell has the output that is stored, but for times."""
    ran = tmp_path / "tour.ipynb"
    # the kernel's own files and what IPython keeps of a session stay with the test
    env = {
        name: str(tmp_path / name)
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")
    }
    outcome = run_command([sys.executable, "-m", "tests.notebook", str(ran)], env=env, folder=ROOT)
    assert outcome.code == 0, outcome
    assert printed(ran) == printed(TOUR)
    assert len(printed(TOUR)) > 5
