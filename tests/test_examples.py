"""The examples: real programs, each of which checks its own result."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import Outcome, launch, run_command

FOLDER = Path(__file__).parent.parent / "examples"
#: what each prints, after how many workers there were
EXAMPLES = {
    "skip_gram.py": "of the nearest words are of the same topic",
    "theano/logistic_regression.py": "of 360 digits are right",
    "theano/multi_gpu.py": "as least squares has them",
    "torch_cnn.py": "of 360 digits are right",
}


def run_example(name: str, workers: int, launcher: str, folder: Path) -> Outcome:
    traces = folder / "traces"  # frameworks leave things in the temporary folder
    traces.mkdir()
    env, path = {"TMPDIR": str(traces)}, FOLDER / name
    if launcher == "python":
        outcome = run_command([sys.executable, str(path)], env=env, limit=100)
    else:
        outcome = launch(path, workers, env=env, limit=100, launcher=launcher)
    assert outcome.code == 0, outcome
    return outcome


@pytest.mark.parametrize(("workers", "launcher"), [(1, "python"), (2, "weft run")])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, workers: int, launcher: str, tmp_path: Path) -> None:
    """It ends well, and says so once, alone and with two workers."""
    outcome = run_example(name, workers, launcher, tmp_path)
    assert outcome.out.count(EXAMPLES[name]) == 1, outcome
    if "digits" in EXAMPLES[name]:
        assert f"{workers} workers" in outcome.out, outcome


def test_logistic_regression_as_the_tutorial_runs_it(tmp_path: Path) -> None:
    """mpirun -np 4 python ./examples/theano/logistic_regression.py"""
    outcome = run_example("theano/logistic_regression.py", 4, "mpirun", tmp_path)
    assert outcome.out.startswith("4 workers: 0.9"), outcome


def test_logistic_regression_in_one_process(tmp_path: Path) -> None:
    """The program without multiverso."""
    outcome = run_example("theano/logistic_regression_single.py", 1, "python", tmp_path)
    assert outcome.out.startswith("1 worker: 0.9"), outcome


def test_every_difference_is_marked() -> None:
    """Without the lines that a comment marks, the program is the one for one process."""
    single, many = (
        (FOLDER / "theano" / f"logistic_regression{end}.py").read_text().split('"""', 2)[2]
        for end in ("_single", "")
    )
    assert "multiverso" not in single
    marked = set()
    lines = many.splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith("# MULTIVERSO:"):
            end = number + 1
            while end < len(lines) and lines[end].strip() and "MULTIVERSO" not in lines[end]:
                end += 1
            marked |= set(range(number, end))
    unmarked = [line for number, line in enumerate(lines) if line.strip() and number not in marked]
    assert len(marked) < len(lines) / 2
    assert all(line in single.splitlines() for line in unmarked), unmarked


def test_one_gpu_each_where_jax_cannot_use_it(tmp_path: Path) -> None:
    """The way for GPUs is taken where there may be one; without CUDA in JAX the program says so."""
    traces = tmp_path / "traces"
    traces.mkdir()
    env = {"TMPDIR": str(traces), "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1", "JAX_PLATFORMS": "cpu"}
    outcome = launch(FOLDER / "theano/multi_gpu.py", 2, env=env)
    assert outcome.code == 0, outcome
    assert outcome.out.count("computes on the CPU: this JAX has no CUDA") == 2, outcome
    assert "as least squares has them" in outcome.out, outcome
