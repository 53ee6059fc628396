"""Tests that need a GPU say why they are skipped where there is none, or fail."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.gpus import REQUIRED
from tests.support import run_command


def test_a_machine_without_a_gpu_skips_or_fails(tmp_path: Path) -> None:
    """No GPU is visible to it. Fixtures of such a test are not made."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def device(): raise AssertionError('made')\n"
        "@pytest.mark.gpu\n"
        "def test_it(device): pass\n"
    )
    line = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parent.parent)}
    skipped = run_command(line, env={**env, REQUIRED: ""})
    assert "1 skipped" in skipped.out, skipped
    assert "no GPU that PyTorch can use: " in skipped.out
    failed = run_command(line, env={**env, REQUIRED: "required"})
    assert "WEFT_TEST_GPU=required, but no GPU" in failed.out
    assert failed.code == 1
