"""Seeds 002 and 003, and Synkhronos's names: its programs run, and print what the documents show.

What uses PyTensor runs in processes of its own: `apart/` has those tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import synkhronos
from tests.support import Outcome, launch, run_command
from weft.errors import NotInitialized

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
#: a compiler takes longer than all the rest; small graphs do without
QUICK = "linker=py,optimizer=fast_compile"
#: what example_1 prints, with two processes: the numbers of the documents
PRINTED = """
plain call, s in the master: [10. 10.]

parallel call, s in the master: [3. 3.]
s in all processes:
 [[3. 3.]
 [7. 7.]]

after reduce, s in the master: [10. 10.]
s in all processes:
 [[10. 10.]
 [ 7.  7.]]

after broadcast, a call and all_reduce, s in all processes:
 [[10. 10.]
 [10. 10.]]
"""


def run_script(path: Path, folder: Path, **variables: str) -> Outcome:
    traces = folder / "traces"  # frameworks leave things in the temporary folder
    traces.mkdir(exist_ok=True)
    env = {"TMPDIR": str(traces), "PYTENSOR_FLAGS": QUICK, **variables}
    outcome = run_command([sys.executable, str(path)], env=env)
    assert outcome.code == 0, outcome
    return outcome


def test_the_introductory_example(tmp_path: Path) -> None:
    """Seed 002: a script without a guard; its assertions pass."""
    outcome = run_script(ROOT / "examples" / "synkhronos" / "example_0.py", tmp_path)
    assert outcome.out == "2 processes: all assertions passed\n"
    assert outcome.err == ""


@pytest.mark.parametrize("float_type", ["float32", "float64"])
def test_the_example_of_shared_variables(float_type: str, tmp_path: Path) -> None:
    """Seed 003: the numbers of its worked example."""
    script = ROOT / "examples" / "synkhronos" / "example_1.py"
    outcome = run_script(script, tmp_path, PYTENSOR_FLAGS=f"floatX={float_type},{QUICK}")
    assert outcome.out == PRINTED
    assert outcome.err == ""


@pytest.mark.parametrize(
    ("ranks", "launcher"),
    [(1, "python"), (2, "weft run"), pytest.param(2, "mpirun", marks=pytest.mark.soak)],
)
def test_the_old_programs(ranks: int, launcher: str, tmp_path: Path) -> None:
    """The introductory examples of both versions, the demos and the tests do what they did, alone
    in float32 as on GPUs, and in several ranks, each of which starts processes of its own."""
    paths = [*map(str, sorted((FOLDER / "programs" / "synkhronos").glob("*.py")))]
    assert len(paths) == 4
    paths += [str(ROOT / "examples" / "synkhronos" / f"example_{number}.py") for number in (0, 1)]
    runner = FOLDER / "programs" / "synkhronos_in_turn.py"
    env = {"TMPDIR": str(tmp_path), "PYTENSOR_FLAGS": QUICK}
    if launcher == "python":
        env["PYTENSOR_FLAGS"] += ",floatX=float32"
        outcome = run_command([sys.executable, str(runner), *paths], env=env)
    else:
        outcome = launch(runner, ranks, *paths, env=env, launcher=launcher)
    assert outcome.code == 0, outcome
    assert outcome.out.count("done: ") == ranks * len(paths), outcome


@pytest.mark.parametrize(
    "name",
    ["functions", "collectives", "session", "extensions", "backends", "names", "defaults"],
)
def test_apart(name: str, tmp_path: Path) -> None:
    """The tests of a file pass, by themselves."""
    theirs = tmp_path / "theirs"  # what a framework leaves there is not weft's
    theirs.mkdir()
    path = FOLDER / "apart" / f"synkhronos_{name}.py"
    options = ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", f"--rootdir={ROOT}"]
    env = {
        "TMPDIR": str(theirs),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
        "PYTENSOR_FLAGS": QUICK,
        "TORCHDYNAMO_DISABLE": "1",  # PyTorch's compiler takes seconds for every function
        "JAX_PLATFORMS": "cpu",
    }
    line = [sys.executable, "-m", "pytest", "-q", str(path), *options]
    outcome = run_command(line, env=env)
    assert outcome.code == 0, outcome
    assert " passed" in outcome.out, outcome


def test_all_are_run() -> None:
    """No file there is forgotten."""
    text = Path(__file__).read_text()
    for path in (FOLDER / "apart").glob("synkhronos_*.py"):
        assert f'"{path.stem.partition("_")[2]}"' in text, path


def test_every_name() -> None:
    """The names of old are there, and importing them loads no PyTensor."""
    functions = ["fork", "close", "function", "distribute", "data", "Data", "get_n_gpu"]
    collectives = ["broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce"]
    values = ["set_value", "get_value", "get_lengths", "get_shapes"]
    names = functions + collectives + values
    for name in names:
        assert callable(getattr(synkhronos, name)), name
        assert name in synkhronos.__all__
    code = (
        "import sys, synkhronos\n"
        "from synkhronos.extensions import train, updates\n"
        "assert callable(train.make_train_function)\n"
        "names = 'sgd momentum nesterov_momentum adagrad rmsprop adadelta adam adamax'.split()\n"
        "assert all(callable(getattr(updates, name)) for name in names)\n"
        "assert 'pytensor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_calls_before_fork() -> None:
    """Say which line is missing."""
    for call in (synkhronos.distribute, lambda: synkhronos.gather("s")):
        with pytest.raises(NotInitialized, match=r"before synkhronos\.fork.*\n.*synkhronos\.fork"):
            call()
    synkhronos.close()  # there is nothing to close


def test_without_pytensor(tmp_path: Path) -> None:
    """The error prints the pip line."""
    (tmp_path / "pytensor.py").write_text("raise ImportError('not installed')")
    code = "import synkhronos\nsynkhronos.function([], None)"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    outcome = run_command([sys.executable, "-c", code], env={"PYTHONPATH": path})
    assert "weft.errors.MissingPackage: synkhronos.function needs the package" in outcome.err
    assert "pip install 'weft[pytensor]'" in outcome.err
