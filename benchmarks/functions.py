"""Functions: an empty call, a step of training, NumPy over 200 MB, `distribute()`, beside peers.

    python benchmarks/functions.py                three rounds
    python benchmarks/functions.py --quick        one round, a third of the turns

In each round and for each row, the processes of all parties start and make one call, whose results
must agree. Then the parties take turns, and those whose turn it is not wait for input:

    weft | map | weft | map | ...    weft | one process | two processes | gloo | weft | ...

A ratio is taken within a turn; the table shows medians over the turns of all rounds: above 1, weft
is faster. Each process has one thread to compute with.

"two processes" are what no library can beat: each does half, and knows nothing of the other. The
training step is that of a network of 784-800-800-10 with a batch of 1,024; "DDP" is torch's
DistributedDataParallel over gloo with two processes. "given before": an array of weft.share, a
file that joblib maps, an array that Pool's processes inherited; "in the call": a plain array.

`distribute()` is that of synkhronos, of five functions: function_start.py, which runs twice in each
round, first without anything in PyTensor's cache. Beside it stands what compiling them took, and,
as that is when PyTensor makes machine code, the first call of one. Results go to
benchmarks/results/functions.json.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import command
import peers
from comparison import Line, lines_of
from function_jobs import RANKS
from peers import installed

JOBS = Path(__file__).with_name("function_jobs.py")
QUIET = 0.02  # seconds between two turns

LABELS = {
    "weft": "weft",
    "map": "weft.map of 2 items",
    "one": "one process",
    "two": "two processes (half each)",
    "ddp": "DDP over gloo",
    "joblib": "joblib",
    "pool": "Pool",
    "compile": "compiling in the driver",
    "call": "first call of one",
}
#: no peers: less work than weft's, other work, or weft's own
YARDSTICKS = ("map", "one", "two", "compile", "call")
#: what must be installed for a party
NEEDS = {"joblib": "joblib"}


@dataclass(frozen=True)
class Row:
    """One thing that parties do; so many calls in one turn, so many turns in a round."""

    name: str
    #: party -> its program, and how many processes run it
    parties: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    calls: int = 1
    turns: int = 1
    #: party -> how many times faster weft is to be; below 1: may be slower
    asked: Mapping[str, float] = field(default_factory=dict)
    #: whether the results of a party's processes are means, or sums
    means: bool = False
    needs: str = "numpy"


ROWS = (
    Row(
        "an empty call",
        {"weft": ("empty call", 1), "map": ("map of two", 1)},
        calls=50,
        turns=21,
        asked={"map": 1},
    ),
    Row(
        "training step",
        {
            "weft": ("train_step", 1),
            "one": ("train", 1),
            "two": ("train", RANKS),
            "ddp": ("train ddp", RANKS),
        },
        calls=5,
        turns=15,
        asked={"two": 0.95, "ddp": 1.15},
        means=True,
        needs="torch",
    ),
    Row(
        "200 MB, given before",
        {
            "weft": ("shared", 1),
            "two": ("half", RANKS),
            "joblib": ("joblib shared", 1),
            "pool": ("pool shared", 1),
        },
        calls=1,
        turns=9,
        asked={"two": 0.93},
    ),
    Row(
        "200 MB, in the call",
        {
            "weft": ("plain", 1),
            "two": ("half", RANKS),
            "joblib": ("joblib plain", 1),
            "pool": ("pool plain", 1),
        },
        calls=1,
        turns=9,
        asked={"two": 0.75},
    ),
)
STARTS = (
    Row("distribute(), no cache", asked={"compile": 1 / 1.5}),
    Row("distribute(), warm cache", asked={"compile": 1 / 1.5}),
)

#: row -> party -> seconds, one number per turn
Results = dict[str, dict[str, list[float]]]


def main() -> None:
    given = command.options(__doc__, rounds=3, quick_rounds=1)
    skipped: list[str] = []
    results = measured_in_turns(given.rounds, skipped, quick=given.quick)
    if installed("pytensor"):
        results |= measured_starts(given.rounds)
    else:
        skipped.append("distribute(): pytensor is not installed")
    packages = ("torch", "joblib", "pytensor")
    command.finish("functions", lines(results), given, packages=packages, skipped=skipped)


def measured_in_turns(rounds: int, skipped: list[str], *, quick: bool) -> Results:
    results: Results = {}
    for row in ROWS:
        if not installed(row.needs):
            skipped.append(f"{row.name}: {row.needs} is not installed")
            continue
        present = [party for party in row.parties if installed(NEEDS.get(party, "numpy"))]
        skipped += [
            f"{row.name}: {LABELS[party]} is not installed"
            for party in row.parties
            if party not in present
        ]
        results[row.name] = {party: [] for party in present}
        for _ in range(rounds):
            print(row.name, file=sys.stderr)
            for party, seconds in measured(row, present, quick).items():
                results[row.name][party] += seconds
    return results


def measured_starts(rounds: int) -> Results:
    """In each round with an empty cache, then with what that run has left there."""
    results: Results = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for row in STARTS:
                print(row.name, file=sys.stderr)
                command = [sys.executable, str(JOBS.with_name("function_start.py"))]
                cache = {"PYTENSOR_FLAGS": f"base_compiledir={folder}/cache", "TMPDIR": folder}
                for party, seconds in json.loads(peers.printed(command, cache)).items():
                    results.setdefault(row.name, {}).setdefault(party, []).append(seconds)
    return results


def measured(row: Row, present: list[str], quick: bool) -> dict[str, list[float]]:
    """What each party takes in each turn of a round."""
    parties: dict[str, Party] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in present:
                own = Path(folder) / name
                own.mkdir()
                parties[name] = Party(*row.parties[name], own)
            check(row, {name: party.first(means=row.means) for name, party in parties.items()})
            for party in parties.values():
                party.turn(row.calls)  # to warm up
            found: dict[str, list[float]] = {name: [] for name in parties}
            for _ in range(max(3, row.turns // 3) if quick else row.turns):
                for name, party in parties.items():
                    time.sleep(QUIET)
                    found[name].append(party.turn(row.calls))
            for party in parties.values():
                party.close()
    finally:
        for party in parties.values():
            party.kill()
    return found


def check(row: Row, firsts: Mapping[str, float]) -> None:
    if not all(math.isclose(first, firsts["weft"], rel_tol=1e-4) for first in firsts.values()):
        sys.exit(f"{row.name}: results differ: {dict(firsts)}")


class Party:
    """The processes that run one program."""

    def __init__(self, program: str, size: int, folder: Path) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(JOBS), program, str(rank), str(size), str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=peers.environment(),
            )
            for rank in range(size)
        ]

    def first(self, *, means: bool) -> float:
        """What the first call came to."""
        return (statistics.fmean if means else math.fsum)(self._lines())

    def turn(self, calls: int) -> float:
        """Seconds of a call: of the slower process, where there are two."""
        for process in self.processes:
            if process.stdin:
                process.stdin.write(f"{calls}\n")
                process.stdin.flush()
        return max(self._lines())

    def close(self) -> None:
        for process in self.processes:
            process.communicate(timeout=peers.LONGEST_WAIT)
        if any(process.returncode for process in self.processes):
            sys.exit(f"{self.processes[0].args} did not end well")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _lines(self) -> list[float]:
        deadline = threading.Timer(peers.LONGEST_WAIT, self.kill)
        deadline.start()
        lines = [process.stdout.readline() for process in self.processes if process.stdout]
        deadline.cancel()
        if not all(lines):
            sys.exit(f"{self.processes[0].args} ended too early")
        return [float(line) for line in lines]


def lines(results: Results) -> list[Line]:
    return [
        line
        for row in (*ROWS, *STARTS)
        if row.name in results
        for line in lines_of(
            f"{RANKS} ranks",
            row.name,
            results[row.name],
            labels=LABELS,
            asked=row.asked,
            yardsticks=YARDSTICKS,
        )
    ]


if __name__ == "__main__":
    main()
