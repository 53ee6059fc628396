"""Each benchmark turns what it measured into lines. Nothing is measured here."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import collectives
import comparison
import functions
import gpu
import ground
import machines
import machines_tables
import pytest
import report
import tables
from comparison import BYTES, CORES

from tests.support import HANGS

# also the name of a function
map_benchmark = import_module("map")

ROOT = Path(__file__).parents[2]
SCRIPTS = [benchmark.name for benchmark in report.BENCHMARKS]


def test_the_ground() -> None:
    """Memory and processors have units of their own; what only has to be done is no peer."""
    lines = ground.lines(
        {
            "barrier, 2 ranks": {"weft": [2e-6], "mpi": [1e-6]},
            "share 100 MB, again": {"weft": [0.02], "copy": [0.01]},
            ground.MEMORY: {"weft": [1e5]},
            ground.IDLE: {"weft": [0.01]},
        }
    )
    assert [line.beside for line in lines] == ["Open MPI", "numpy copy", "", ""]
    assert [line.yardstick for line in lines] == [False, True, False, False]
    assert [line.unit for line in lines[2:]] == [BYTES, CORES]


def test_collectives() -> None:
    """What was asked depends on how many processes there are."""
    row = {"all_reduce 1 MB": {"weft": [1.0], "mpi": [1.1], "gloo": [5.5]}}
    two_mpi, two_gloo, four_mpi, _ = collectives.lines({2: row, 4: row})
    assert (two_mpi.section, two_mpi.what) == ("2 processes", "all_reduce 1 MB")
    assert (two_mpi.beside, two_mpi.asked, two_gloo.asked) == ("Open MPI", 1, 5)
    assert (four_mpi.section, four_mpi.asked) == ("4 processes", 1 / 1.3)


def test_tables() -> None:
    """Memory is in bytes; NumPy on memory of its own is no peer."""
    lines = tables.lines(
        {
            "2 workers": {"get all": {"weft": [1.0], "numpy": [0.9], "multiverso": [8.0]}},
            "memory": {"adam, 1 worker": {"weft": [1.0], "once": [1.0]}},
        }
    )
    assert [line.asked for line in lines] == [0.85, 6, 1 / 1.05]
    assert [line.yardstick for line in lines] == [True, False, True]
    assert lines[-1].unit == BYTES


def test_machines_tables() -> None:
    """What was asked is beside bare bytes; rows of an owner that computes have a limit alone."""
    row = {"weft": [1.0], "mpi": [0.5], "rma": [4.0]}
    computes = "get 1,000 rows" + machines_tables.MEANWHILE
    lines = machines_tables.lines(
        {
            machines_tables.ROWS: {"get 40 MB": row, computes: {"weft": [0.01], "rma": [2.0]}},
            machines_tables.SYNC: {"sync a model of 8 MB": {"weft": [1.0], "mpi": [1.4]}},
            machines_tables.MEMORY: {"80 MB of rows": {"weft": [1.0], "rows": [1.0]}},
        }
    )
    asked = [line.asked for line in lines]
    assert asked == [1 / 1.3, None, None, None, 1.5, None]
    alone, beside = lines[2:4]
    assert (alone.limit, alone.holds, alone.beside) == (0.02, True, "")
    assert (beside.beside, beside.ratio) == ("mpi4py RMA", 200)
    assert lines[4].holds is False
    assert (lines[5].unit, lines[5].yardstick) == (BYTES, True)


def test_machines() -> None:
    """What was asked depends on the ranks of a host; waiting has a limit, and no peer."""
    row = {"weft": [1.0], "mpi": [1.5], "gloo": [2.0]}
    rows = dict.fromkeys(("all_reduce 1 KB", "all_reduce 1 MB", "broadcast 1 MB"), row)
    lines = machines.lines(
        {
            "2 hosts, 1 rank each": rows,
            "2 hosts, 2 ranks each": rows,
            "waiting": {machines.WAITING_RANK: {"weft": [0.01]}},
        }
    )
    one, two = lines[:6], lines[6:12]
    assert [line.asked for line in one] == [1 / 4, None, 1 / 1.4, 1, 1 / 1.4, 1]
    assert [line.asked for line in two] == [1 / 3, None, 1.4, 1, None, 1]
    assert (lines[12].unit, lines[12].limit, lines[12].holds) == (CORES, 0.02, True)


def test_gpu() -> None:
    """What was asked depends on how ranks share the GPU; a limit has a line of its own."""
    row = {"weft": [1e-4], "gloo": [1e-2], "torch": [1e-5]}
    two = {"all_reduce 1 MB": row, "all_reduce 100 MB": row, "all_reduce 100 MB, host slots": row}
    places = [gpu.section("collectives", 2, how) for how in (gpu.TURNS, gpu.MPS)]
    lines = gpu.lines(
        {
            **dict.fromkeys(places, two),
            gpu.section("training", 1): {"train_step, batch 128": {"weft": [1.01], "read": [1.0]}},
        }
    )
    turns, mps, training = lines[:7], lines[7:14], lines[14]
    assert [(line.limit, line.holds) for line in turns[:3]] == [
        (300e-6, True),
        (None, None),
        (None, None),
    ]
    assert (mps[0].limit, mps[0].holds) == (80e-6, False)
    assert [line.asked for line in turns if line.beside == "gloo"] == [None, 60, 5]
    assert [line.asked for line in mps if line.beside == "gloo"] == [None, 120, None]
    assert {line.beside: line.yardstick for line in turns[1:3]} == {
        "gloo": False,
        "torch, alone": True,
    }
    assert (training.asked, training.holds, training.yardstick) == (1 / 1.02, True, True)


def test_jobs_of_gpu() -> None:
    """Paths are forced and MPS is used where there is a GPU; what was asked is measured first."""
    on_gpu, on_cpu = (list(gpu.jobs("all", is_gpu=is_gpu)) for is_gpu in (True, False))
    assert {job.path for job in on_gpu} == {"", *gpu.PATHS}
    assert {job.how for job in on_cpu} == {"", gpu.TURNS}
    assert {job.part for job in gpu.jobs("tables", is_gpu=True)} == {"tables"}
    asked = [job for job in on_gpu if gpu.was_asked(job)]
    assert {job.section for job in asked} == {*gpu.ASKED, *gpu.LIMITS}
    assert {job.path for job in asked} == {"", "host"}


def test_gpu_measures_where_there_is_none(tmp_path: Path) -> None:
    """Its programs work on the CPU, too, and check what they measure; it stops where it has no time
    left. Without `--device cpu` it says why it has measured nothing, and leaves the results."""
    program = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--results", str(tmp_path)]
    only = ["--device", "cpu", "--quick", "--only", "tables", "--seconds", "0.01"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for options in ([], only):
        done = subprocess.run(
            [*program, *options], capture_output=True, text=True, timeout=HANGS, env=env
        )
        assert done.returncode == 0, done
        if not options:
            assert "measured nothing: no GPU that PyTorch can use" in done.stderr
            assert not (tmp_path / "gpu.json").exists()
    results = comparison.load(tmp_path / "gpu.json")
    assert {line.section for line in results.lines} == {"tables, 1 rank"}
    assert results.skipped == ["tables, 2 ranks, by turns, tables: no time left"]


def test_map() -> None:
    """weft has a time of its own beside each peer; the limit on memory is no ratio."""
    lines = map_benchmark.lines(
        {
            "2 trivial items": {
                "pool": {"pool": [4.0], "weft": [1.0]},
                "ray": {"ray": [15.0], "weft": [2.0]},
            },
            map_benchmark.PRIVATE: {"pool": {"pool": [0.0], "weft": [1e6]}},
            map_benchmark.START: {"spawn": {"weft": [1.0], "spawn": [2.0]}},
        }
    )
    assert [(line.beside, line.ratio) for line in lines] == [
        ("Pool", 4.0),
        ("Ray", 7.5),
        ("Pool", None),
        ("Pool (spawn)", 2.0),
    ]
    assert [line.holds for line in lines] == [True, False, True, True]


def test_functions() -> None:
    """One number per turn; rows that were not measured are not there."""
    lines = functions.lines(
        {"training step": {"weft": [1.0, 2.0], "two": [0.9, 1.8], "ddp": [2.0, 2.0]}}
    )
    assert [(line.beside, line.ratio, line.holds) for line in lines] == [
        ("two processes (half each)", 0.9, False),
        ("DDP over gloo", 1.5, True),
    ]
    assert [line.yardstick for line in lines] == [True, False]


def test_whoever_is_named_has_a_label() -> None:
    """In all tables of what was asked, and among the yardsticks."""
    asked = {
        collectives: [row for rows in collectives.ASKED.values() for row in rows.values()],
        tables: [row for rows in tables.ASKED.values() for row in rows.values()],
        map_benchmark: list(map_benchmark.ASKED.values()),
        functions: [row.asked for row in (*functions.ROWS, *functions.STARTS)],
        gpu: [row for rows in gpu.ASKED.values() for row in rows.values()],
    }
    for script, rows in asked.items():
        assert {peer for row in rows for peer in row} <= set(script.LABELS)
    for script in (ground, tables, map_benchmark, functions, gpu):
        assert set(script.YARDSTICKS) <= set(script.LABELS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_make_bench_runs_it(script: str) -> None:
    """Then the report is written."""
    makefile = (ROOT / "Makefile").read_text()
    bench = makefile.split("\nbench: ")[1].split("\n\n")[0]
    assert f"benchmarks/{script}.py" in bench
    assert bench.endswith("benchmarks/report.py")


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("collectives", ["--peers", "weft,pigeons"], "--peers pigeons: known are weft,mpi,gloo"),
        ("functions", ["--rounds", "0"], "--rounds 0: expected 1 or more"),
    ],
)
def test_wrong_options_are_refused(script: str, options: list[str], said: str) -> None:
    """Before anything is measured."""
    command = [sys.executable, str(ROOT / f"benchmarks/{script}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 2
    assert said in done.stderr
