"""The examples: programs that check their own results, and print what their index says."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests.gpus import require_any_names
from tests.pages import ROOT, Shown, shown
from tests.support import Outcome, launch, run_command

FOLDER = ROOT / "examples"
#: examples/README.md: the commands of each example and what they print
INDEX = shown(FOLDER / "README.md")
#: those that the index has without a command: tests/test_documents.py and test_notebook.py run them
APART = {"demo.py", "tour.ipynb"}
#: those of ranks, which run alone too, and then say so of one worker or rank
ALONE = {
    "average.py": "rank 0 of 1: 1001 rows, weights [ 0.999 -2.001  0.504]",
    "digits_table.py": "1 rank: 0.9",
    "meet.py": "I am rank 0 of 1",
    "resnet32.py": "ModelTable, 1 rank:",
    "skip_gram.py": "of the nearest words are of the same topic",
    "survive.py": "rank 0 of 1 survivors went on, generation 0",
    "theano/logistic_regression.py": "1 workers: 0.9",
    "theano/multi_gpu.py": "as least squares has them",
    "torch_cnn.py": "1 workers: 0.9",
}
#: those whose model one rank has to train by itself: `make soak` has them
LONG_ALONE = {"torch_cnn.py", "theano/logistic_regression.py"}
#: small graphs do without a compiler
FLAGS = {"PYTENSOR_FLAGS": "linker=py,optimizer=fast_compile"}


def test_the_index_has_every_example() -> None:
    """Each program and notebook is linked once, in a line of its own, with what it prints."""
    examples = [path for end in ("*.py", "*.ipynb") for path in FOLDER.rglob(end)]
    names = sorted(str(path.relative_to(FOLDER)) for path in examples)
    linked = re.findall(r"^\[(.+)\]\(\1\)[:,] ", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(linked) == names
    assert sorted({*map(example, INDEX), *APART}) == names


def example(one: Shown) -> str:
    """The program of a command."""
    (path,) = (word for word in one.command if word.startswith("examples/"))
    return path.removeprefix("examples/")


@pytest.mark.parametrize("one", INDEX, ids=lambda one: " ".join(one.command))
def test_an_example_prints_what_the_index_says(one: Shown, tmp_path: Path) -> None:
    """A command of the index ends well; `survive.py` with the code of the rank it kills."""
    outcome = run_shown(one, tmp_path, code=128 + 9 if example(one) == "survive.py" else 0)
    assert one.is_printed_by(outcome.out), f"the index has\n{one.output}\nand it was\n{outcome}"
    assert "Traceback" not in outcome.err, outcome


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name in LONG_ALONE else ()) for name in ALONE],
)
def test_an_example_of_ranks_alone(name: str, tmp_path: Path) -> None:
    """Without a launcher it is a group of one, ends well, and says so once."""
    outcome = run_example(name, 1, "python", tmp_path)
    assert outcome.out.count(ALONE[name]) == 1, outcome


def run_shown(one: Shown, folder: Path, code: int) -> Outcome:
    """Run a command of the index from the project's folder, as its reader does."""
    program = {"python": [sys.executable], "weft": [sys.executable, "-m", "weft"]}[one.command[0]]
    env = {**FLAGS, "TMPDIR": str(traces_in(folder))}
    outcome = run_command([*program, *one.command[1:]], env=env, folder=ROOT)
    assert outcome.code == code, outcome
    return outcome


def run_example(
    name: str, workers: int, launcher: str, folder: Path, *arguments: str, **variables: str
) -> Outcome:
    env, path = {"TMPDIR": str(traces_in(folder)), **variables}, FOLDER / name
    if launcher == "python":
        outcome = run_command([sys.executable, str(path), *arguments], env=env)
    else:
        outcome = launch(path, workers, env=env, launcher=launcher)
    assert outcome.code == 0, outcome
    return outcome


def traces_in(folder: Path) -> Path:
    """A temporary folder in which frameworks may leave things."""
    traces = folder / "traces"
    traces.mkdir()
    return traces


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
    require_any_names()
    env = {
        "TMPDIR": str(traces_in(tmp_path)),
        "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1",
        "JAX_PLATFORMS": "cpu",
    }
    outcome = launch(FOLDER / "theano/multi_gpu.py", 2, env=env)
    assert outcome.code == 0, outcome
    assert outcome.out.count("computes on the CPU: this JAX has no CUDA") == 2, outcome
    assert "as least squares has them" in outcome.out, outcome
