"""The frameworks that are tested in processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import run_command

FOLDER = Path(__file__).parent / "apart"
ROOT = FOLDER.parent.parent.parent


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("names", "env"),
    [
        (["jax_arrays", "jax_models"], {}),
        (["keras_models"], {"KERAS_BACKEND": "torch"}),
        (["keras_models"], {"KERAS_BACKEND": "jax"}),
        (["pytensor_models"], {}),
    ],
    ids=["jax", "keras on torch", "keras on jax", "pytensor"],
)
def test_a_framework(names: list[str], env: dict[str, str], tmp_path: Path) -> None:
    """Its tests pass, by themselves."""
    theirs = tmp_path / "theirs"  # what a framework leaves there is not weft's
    theirs.mkdir()
    line = [sys.executable, "-m", "pytest", "-q", *(str(FOLDER / f"{name}.py") for name in names)]
    options = ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", f"--rootdir={ROOT}"]
    env = {**env, "TMPDIR": str(theirs), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    outcome = run_command(line + options, env=env, limit=280)
    assert outcome.code == 0, outcome
    assert " passed" in outcome.out, outcome


def test_all_are_run() -> None:
    """No file there is forgotten."""
    text = Path(__file__).read_text()
    for path in FOLDER.glob("[!_]*.py"):
        assert f'"{path.stem}"' in text, path
