"""Map: small items, large arrays, shared data, uneven items and the start, beside five peers.

    python benchmarks/map.py                        all peers, three rounds
    python benchmarks/map.py --quick                one round, half the repetitions
    python benchmarks/map.py --peers weft,pool      only these

In each round every peer runs once, in a job of its own in which weft runs too:

    round 1: weft and Pool | weft and ProcessPoolExecutor | ...    round 2: weft and Pool | ...

Both have two workers that are ready. For each row the job checks the results, warms up, and
lets the two take turns, repetition by repetition; a round's time is the median over
repetitions. Tables show medians over rounds. A ratio is taken within a round, then its median
over rounds: above 1, weft is faster. So each peer stands beside weft as it was at that moment,
and weft has a line of its own for each.

"in": arrays that no call has seen, each read once by its item. "given before": arrays of
weft.share, Ray's after ray.put, Dask's after scatter, joblib's in files; in the row "theirs in
call" the others' are those of "in". "out": made by the item. "400 MB": one array for all items,
given before, inherited by fork in Pool and ProcessPoolExecutor. 1 MB is 1,000,000 bytes.
"best schedule": the sum of all items over two workers; it is no peer. Memory is what reading
400 MB adds to that worker to which it adds most.

"start to first result" is map_start.py, from the start of the interpreter to the line it prints;
there all peers run in turn, each alone, as a user starts a program, with nothing said about
threads; and once more with one thread for each process, as in the other rows. Results go to
benchmarks/results/map.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import command
import map_jobs
import map_peers
import map_start
import peers
from comparison import BYTES, SECONDS, Line, lines_of
from map_jobs import PRIVATE
from peers import installed

HERE = Path(__file__)

#: peer -> its name in the table, and what must be installed for it
PEERS = {
    "weft": ("weft", "weft"),
    "pool": ("Pool", "multiprocessing"),
    "executor": ("ProcessPoolExecutor", "concurrent.futures"),
    "joblib": ("joblib", "joblib"),
    "ray": ("Ray", "ray"),
    "dask": ("Dask", "distributed"),
}
LABELS = {
    **{peer: label for peer, (label, _) in PEERS.items()},
    "spawn": "Pool (spawn)",
    "fork": "Pool (fork)",
    "best": "best schedule",
}
#: no peers: nobody can be faster
YARDSTICKS = ("best",)
#: Pool has two ways to start
STARTS = {way: "pool" if way in ("spawn", "fork") else way for way in map_start.WAYS}
STARTS_PER_ROUND = 3
START, START_ONE_THREAD = "start to first result", "the same, OMP_NUM_THREADS=1"
UNEVEN = "200 uneven items"

#: row -> peer -> how many times faster weft is to be; below 1: may be slower
ASKED: dict[str, dict[str, float]] = {
    "2 trivial items": {"pool": 4, "joblib": 30, "ray": 15},
    "1,000 trivial items": {"pool": 1, "executor": 100, "joblib": 10, "ray": 100, "dask": 100},
    "2 x 100 MB in": {"pool": 25, "joblib": 3, "ray": 1},
    "given before, theirs in call": {"ray": 3},
    "2 x 100 MB out": {"ray": 1},
    "8 items read 400 MB each": {"pool": 1 / 1.2},
    "8 items read an eighth each": {"pool": 1 / 1.2},
    UNEVEN: {"best": 1 / 1.1},
    START: {"spawn": 1, "joblib": 1.5, "ray": 1.5, "dask": 1.5},
}
PRIVATE_LIMIT = 20_000_000  # bytes

#: row -> peer -> "weft" and the peer, measured together -> one number per round
Results = dict[str, dict[str, dict[str, list[float]]]]


def main() -> None:
    given = command.options(
        __doc__, rounds=3, quick_rounds=1, peers=PEERS, roles=PEERS, flags=["--beside-weft"]
    )
    if given.role:
        beside = given.beside_weft
        map_jobs.job(given.role, *given.place, quick=given.quick, beside_weft=beside)
        return
    present, skipped = peers.looked_for(PEERS, given.peers)
    if not installed("psutil"):
        skipped.append("memory: psutil is not installed")
    results = measured(given.rounds, present, given.quick)
    packages = ("joblib", "ray", "distributed")
    command.finish("map", lines(results), given, packages=packages, skipped=skipped)


# the conductor: starts jobs, puts together what they print


def measured(rounds: int, present: list[str], quick: bool) -> Results:
    beside_weft = "weft" in present
    others = [peer for peer in present if peer != "weft"] or present
    jobs = {peer: partial(job, peer, quick, beside_weft) for peer in others}
    found = peers.interleaved(rounds, jobs)
    rows = [*(row.name for row in map_jobs.ROWS), PRIVATE]
    results = {row: paired(row, found) for row in rows if paired(row, found)}
    ours = [number for pair in results[UNEVEN].values() for number in pair.get("weft", [])]
    best = [map_jobs.best_schedule()] * (len(ours) or rounds)
    results[UNEVEN]["best"] = {**({"weft": ours} if ours else {}), "best": best}
    one_thread = peers.environment()
    as_users_do = {name: value for name, value in one_thread.items() if name != "OMP_NUM_THREADS"}
    for row, environment in ((START, as_users_do), (START_ONE_THREAD, one_thread)):
        print(row, file=sys.stderr)
        results[row] = started(rounds * STARTS_PER_ROUND, present, environment)
    return results


def paired(
    row: str, found: dict[str, list[dict[str, dict[str, float]]]]
) -> dict[str, dict[str, list[float]]]:
    """What the jobs of each peer say of one row; nothing of those that have no such way."""
    return {
        peer: {name: [one[row][name] for one in rounds] for name in rounds[0][row]}
        for peer, rounds in found.items()
        if row in rounds[0]
    }


def job(peer: str, quick: bool, beside_weft: bool) -> dict[str, dict[str, float]]:
    print(LABELS[peer], file=sys.stderr)
    options = [*(["--quick"] if quick else []), *(["--beside-weft"] if beside_weft else [])]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE), "--role", peer, *options, folder]
        found: dict[str, dict[str, float]] = json.loads(peers.printed(command))
    return found


def started(
    rounds: int, present: list[str], environment: dict[str, str]
) -> dict[str, dict[str, list[float]]]:
    """Each way of starting, beside weft's."""
    ways = {
        way: partial(first_result, way, environment)
        for way, peer in STARTS.items()
        if peer in present
    }
    found = peers.interleaved(rounds, ways)
    ours = {"weft": found["weft"]} if "weft" in found else {}
    others = {way: numbers for way, numbers in found.items() if way != "weft"}
    return {way: {**ours, way: numbers} for way, numbers in others.items()} or {"weft": ours}


def first_result(way: str, environment: dict[str, str]) -> float:
    command = [sys.executable, str(HERE.with_name("map_start.py")), way]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        deadline = threading.Timer(peers.LONGEST_WAIT, process.kill)
        deadline.start()
        line = process.stdout.readline() if process.stdout else ""
        seconds = time.perf_counter() - began
        _, errors = process.communicate()
        deadline.cancel()
    if line != "[4.0, 8.0]\n" or process.returncode:
        sys.exit(f"{command} printed {line!r} and ended with {process.returncode}:\n{errors}")
    return seconds


def lines(results: Results) -> list[Line]:
    return [
        line
        for row, pairs in results.items()
        for pair in pairs.values()
        for line in lines_of(
            f"{map_peers.WORKERS} workers",
            row,
            pair,
            labels=LABELS,
            asked=ASKED.get(row),
            yardsticks=YARDSTICKS,
            unit=BYTES if row == PRIVATE else SECONDS,
            limit=PRIVATE_LIMIT if row == PRIVATE else None,
        )
    ]


if __name__ == "__main__":
    main()
