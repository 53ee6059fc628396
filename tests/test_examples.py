"""The examples: real programs, each of which checks its own result."""

from __future__ import annotations

import importlib.util
import os
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
#: those that start workers themselves
OF_MAP = {
    "bootstrap.py": "MB of their own read 400 MB",
    "monte_carlo.py": "with 1, 2 and 3 workers and with none",
    "playdoh/column_sums.py": "[5. 5. 5. 5.] as without workers",
    "playdoh/inverses.py": "2 matrices, inverted: 0.500 and 0.333",
    "sweep.py": "400 epidemics; none is further than",
}
OF_FUNCTIONS = {
    "least_squares.py": "2,000,000 rows in shared memory, as NumPy solves them",
    "torch_mlp.py": "90 steps as in one process",
    "torch_resnet.py": "50 steps as in one process",
}
#: those of synkhronos, which PyTensor compiles, or would: small graphs do without
OF_SYNKHRONOS = {
    "synkhronos/digits.py": "the losses are those of one process",
    "synkhronos/example_0.py": "2 processes: all assertions passed",
    "synkhronos/example_1.py": "after broadcast, a call and all_reduce",
    "synkhronos/lengths.py": "gathered 7 rows of both into each",
}


def run_example(
    name: str, workers: int, launcher: str, folder: Path, *arguments: str, **variables: str
) -> Outcome:
    traces = folder / "traces"  # frameworks leave things in the temporary folder
    traces.mkdir()
    env, path = {"TMPDIR": str(traces), **variables}, FOLDER / name
    if launcher == "python":
        outcome = run_command([sys.executable, str(path), *arguments], env=env, limit=100)
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


@pytest.mark.parametrize("name", OF_MAP)
def test_an_example_of_map(name: str, tmp_path: Path) -> None:
    """It ends well, and says so."""
    outcome = run_example(name, 1, "python", tmp_path)
    assert OF_MAP[name] in outcome.out, outcome
    assert "Traceback" not in outcome.err, outcome


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_an_example_of_functions(name: str, tmp_path: Path) -> None:
    """It ends well, and says so."""
    outcome = run_example(name, 1, "python", tmp_path)
    assert OF_FUNCTIONS[name] in outcome.out, outcome
    assert "Traceback" not in outcome.err, outcome


@pytest.mark.parametrize("name", OF_SYNKHRONOS)
def test_an_example_of_synkhronos(name: str, tmp_path: Path) -> None:
    """It ends well, and says so."""
    flags = "linker=py,optimizer=fast_compile"
    outcome = run_example(name, 1, "python", tmp_path, PYTENSOR_FLAGS=flags)
    assert OF_SYNKHRONOS[name] in outcome.out, outcome
    assert "Traceback" not in outcome.err, outcome


def test_every_example_is_run() -> None:
    """Here, or by `make demo`."""
    demo = (FOLDER / "demo.py").read_text()
    for path in FOLDER.rglob("*.py"):
        name = str(path.relative_to(FOLDER))
        apart = ("demo.py", "theano/logistic_regression_single.py")
        known = {*EXAMPLES, *OF_MAP, *OF_FUNCTIONS, *OF_SYNKHRONOS, *apart}
        assert name in known or f"examples/{name}" in demo, name


def test_the_sweep_with_a_plot(tmp_path: Path) -> None:
    """With matplotlib there is a file afterwards; without, the program says how to get it."""
    plot = tmp_path / "plot.png"
    outcome = run_example("sweep.py", 1, "python", tmp_path, str(plot), MPLCONFIGDIR=str(tmp_path))
    if importlib.util.find_spec("matplotlib") is None:
        assert "pip install matplotlib" in outcome.out, outcome
    else:
        assert plot.read_bytes().startswith(b"\x89PNG"), outcome


def test_the_sweep_without_matplotlib(tmp_path: Path) -> None:
    """The sweep itself does not need it."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "matplotlib.py").write_text("raise ImportError('not installed')")
    hidden = os.pathsep.join([str(tmp_path / "hidden"), os.environ.get("PYTHONPATH", "")])
    outcome = run_example("sweep.py", 1, "python", tmp_path, "plot.png", PYTHONPATH=hidden)
    assert "no plot without matplotlib: pip install matplotlib" in outcome.out, outcome
    assert "400 epidemics" in outcome.out, outcome


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
