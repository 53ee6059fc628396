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
there all peers run in turn, each alone. Results go to benchmarks/results/map.json and map.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import map_jobs
import map_peers
import map_start
import peers
from map_jobs import PRIVATE
from peers import installed, shown

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
    "spawn": "Pool, spawn",
    "fork": "Pool, fork",
    "best": "best schedule",
}
#: Pool has two ways to start
STARTS = {way: "pool" if way in ("spawn", "fork") else way for way in map_start.WAYS}
STARTS_PER_ROUND = 3
START, UNEVEN = "start to first result", "200 uneven items"

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one round, half the repetitions")
    parser.add_argument("--rounds", type=int, help="how often each peer is measured (default: 3)")
    parser.add_argument("--peers", default=",".join(PEERS), help="which (default: %(default)s)")
    parser.add_argument("--role", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--beside-weft", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        beside = options.beside_weft
        map_jobs.job(options.role, options.folder, quick=options.quick, beside_weft=beside)
        return
    chosen = options.peers.split(",")
    rounds = (1 if options.quick else 3) if options.rounds is None else options.rounds
    if unknown := set(chosen) - set(PEERS):
        parser.error(f"--peers {','.join(sorted(unknown))}: known are {','.join(PEERS)}")
    if rounds < 1:
        parser.error(f"--rounds {rounds}: expected 1 or more")
    present, skipped = looked_for(chosen)
    results = measured(rounds, present, options.quick)
    report(results, skipped)
    save(results, skipped, quick=options.quick)
    plot(results)


# the conductor: starts jobs, compares what they print


def looked_for(chosen: list[str]) -> tuple[list[str], list[str]]:
    """The peers that are here, and a line for each thing that is not."""
    skipped = [
        f"{LABELS[peer]}: {PEERS[peer][1]} is not installed"
        for peer in chosen
        if not installed(PEERS[peer][1])
    ]
    present = [peer for peer in chosen if installed(PEERS[peer][1])]
    if not installed("psutil"):
        skipped.append("memory: psutil is not installed")
    return present, skipped


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
    return results | {START: started(rounds * STARTS_PER_ROUND, present)}


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


def started(rounds: int, present: list[str]) -> dict[str, dict[str, list[float]]]:
    """Each way of starting, beside weft's."""
    print(START, file=sys.stderr)
    ways = {way: partial(first_result, way) for way, peer in STARTS.items() if peer in present}
    found = peers.interleaved(rounds, ways)
    ours = {"weft": found["weft"]} if "weft" in found else {}
    others = {way: numbers for way, numbers in found.items() if way != "weft"}
    return {way: {**ours, way: numbers} for way, numbers in others.items()} or {"weft": ours}


def first_result(way: str) -> float:
    command = [sys.executable, str(HERE.with_name("map_start.py")), way]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    began = time.perf_counter()
    with subprocess.Popen(command, env=peers.environment(), text=True, **pipes) as process:
        deadline = threading.Timer(peers.LONGEST_WAIT, process.kill)
        deadline.start()
        line = process.stdout.readline() if process.stdout else ""
        seconds = time.perf_counter() - began
        _, errors = process.communicate()
        deadline.cancel()
    if line != "[4.0, 8.0]\n" or process.returncode:
        sys.exit(f"{command} printed {line!r} and ended with {process.returncode}:\n{errors}")
    return seconds


def verdict(row: str, peer: str, pair: peers.Row) -> peers.Verdict:
    return peers.compared(pair, peer, ASKED.get(row, {}).get(peer))


def report(results: Results, skipped: list[str]) -> None:
    workers = f"{map_peers.WORKERS} workers"
    print(f"{workers:30}{'weft':>10}   {'beside it':21}{'':>10}{'ratio':>9}{'asked':>14}")
    for row, pairs in results.items():
        unit = shown_bytes if row == PRIVATE else shown
        for number, (peer, pair) in enumerate(pairs.items()):
            ours = unit(statistics.median(pair["weft"])) if "weft" in pair else "-"
            print(f"{row if number == 0 else '':30}{ours:>10}", end="")
            if peer != "weft":
                print(f"   {LABELS[peer]:21}{unit(statistics.median(pair[peer])):>10}", end="")
            print(judged(row, peer, pair).rstrip())
    for line in skipped:
        print(f"skipped: {line}")


def shown_bytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def judged(row: str, peer: str, pair: peers.Row) -> str:
    if row != PRIVATE:
        return str(verdict(row, peer, pair)) if peer != "weft" else ""
    if "weft" not in pair:
        return ""
    reached = "yes" if private_reached(pair) else "no"
    return f"{'':9}{'under ' + shown_bytes(PRIVATE_LIMIT):>14} {reached}"


def private_reached(pair: peers.Row) -> bool:
    return statistics.median(pair["weft"]) < PRIVATE_LIMIT


def save(results: Results, skipped: list[str], *, quick: bool) -> None:
    versions = peers.versions("weft", "numpy", "joblib", "ray", "distributed")
    medians = {row: peers.medians(pairs) for row, pairs in results.items()}
    ratios = {
        row: {
            peer: verdict(row, peer, pair)._asdict()
            for peer, pair in pairs.items()
            if peer != "weft"
        }
        for row, pairs in results.items()
        if row != PRIVATE
    }
    limits = {
        peer: {"asked": PRIVATE_LIMIT, "reached": private_reached(pair)}
        for peer, pair in results.get(PRIVATE, {}).items()
        if "weft" in pair
    }
    kept = {"versions": versions, "quick": quick, "skipped": skipped, "rounds": results}
    peers.save("map", {**kept, "medians": medians, "ratios": ratios, "limits": {PRIVATE: limits}})


def plot(results: Results) -> None:
    """Time of each row, one bar per peer; weft's is the median of what it took beside each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results if row != PRIVATE]
    taken = [taken_by_all(results[row]) for row in rows]
    figure, panel = pyplot.subplots(figsize=(9, 8), layout="constrained")
    height = 0.8 / len(PEERS)
    for peer, label in LABELS.items():
        with_it = [number for number, times in enumerate(taken) if peer in times]
        places = [list(taken[number]).index(peer) for number in with_it]
        centres = [(len(taken[number]) - 1) / 2 for number in with_it]
        where = [
            number + (place - centre) * height
            for number, place, centre in zip(with_it, places, centres, strict=True)
        ]
        if where:
            panel.barh(where, [taken[number][peer] for number in with_it], height, label=label)
    panel.set_xscale("log")
    panel.set_yticks(range(len(rows)), rows)
    panel.invert_yaxis()
    panel.set_xlabel(f"seconds, {map_peers.WORKERS} workers")
    panel.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=5, fontsize="small")
    figure.savefig(peers.RESULTS / "map.png", dpi=120)
    pyplot.close(figure)


def taken_by_all(pairs: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Median seconds of everyone that has been measured for a row."""
    everyones = {
        name: [seconds for pair in pairs.values() for seconds in pair.get(name, [])]
        for name in LABELS
    }
    return {name: statistics.median(found) for name, found in everyones.items() if found}


if __name__ == "__main__":
    main()
