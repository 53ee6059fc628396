"""Map over machines: two hosts with two workers each, beside Ray's tasks, its Pool, and Dask.

    sudo python benchmarks/machines_map.py             all peers, five rounds
    sudo python benchmarks/machines_map.py --quick     one round, fewer repetitions
    ... --peers weft,tasks                             only these

The hosts are made of namespaces of this machine (tests/hosts.py), as in machines.py: they share its
processor and its memory, and a ratio of one run is what counts. `weft open` starts the cluster;
Ray's tasks and its Pool run on the same one, in the same program as weft, Dask on a scheduler and
workers of its own. In each round each peer runs each row some times, in turn:

    row, repetition 1: weft, tasks, Pool, Dask    repetition 2: tasks, Pool, Dask, weft    ...

Each call begins when the machine has little to do, or a second after the last: what a peer leaves
to others is not the next one's. A round's time is the median over repetitions, after one that is
not counted. Ratios are taken within a round; above 1, weft is faster. Results are checked each
time.

"in and out": two arrays of 100 MB, one for each host, and as much back; Ray's are put into its
store in the call. "shared": one array for 16 items, put into it in the call as well. "one host":
weft's local engine beside the engine ray on the same host. "best schedule": the sum of all items
over four workers; it is no peer. "cluster to first result": both `weft open`, and a program that
prints what calls on both hosts return. Results go to benchmarks/results/machines_map.json.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import command
import peers
from comparison import Line, lines_of

if TYPE_CHECKING:
    from tests.hosts import Hosts, Job

HERE = Path(__file__)
PEERS = {
    "weft": ("weft", "weft"),
    "tasks": ("Ray tasks", "ray"),
    "pool": ("Ray Pool", "ray"),
    "dask": ("Dask", "distributed"),
}
LABELS = {peer: label for peer, (label, _) in PEERS.items()} | {
    "local": "weft, one host",
    "best": "best schedule",
}
OWN = {"WEFT_KEY": "for the benchmark of machines", "OMP_NUM_THREADS": "1"}
OPEN = (sys.executable, "-m", "weft", "open", "--max-cpu", "2", "--max-gpu", "0")
SCHEDULER = "10.78.0.1:8786"
LONGEST_JOB = 600.0  # seconds
QUIET = 0.05  # seconds in which the machine has next to nothing to do
TRIVIAL, UNEVEN, BIG, SHARED, ONE = (
    "1,000 trivial items",
    "64 uneven items",
    "2 x 100 MB in and out",
    "400 MB shared, 16 items",
    "64 items of 10 ms, one host",
)
START = "cluster to first result"
#: how many times faster than each peer weft is to be; below 1: may be slower
ASKED = {
    TRIVIAL: {"tasks": 50, "pool": 1.7},
    UNEVEN: {"best": 1 / 1.15},
    BIG: {"tasks": 1 / 1.2},
    SHARED: {"tasks": 1 / 1.2},
    ONE: {"local": 1 / 1.2},
}


def main() -> None:
    given = command.options(
        __doc__, rounds=5, quick_rounds=1, peers=PEERS, roles=("measure", "first")
    )
    if given.role == "measure":
        print(json.dumps(measure(given.peers, quick=given.quick)), flush=True)
        return
    if given.role == "first":
        print(first_result(), flush=True)
        return
    sys.path.append(str(HERE.parent.parent))
    from tests.hosts import Hosts, obstacle

    if reason := obstacle():
        print(f"machines_map.py has measured nothing: {reason}", file=sys.stderr)
        return
    present, skipped = peers.looked_for(PEERS, given.peers)
    results: dict[str, dict[str, list[float]]] = {}
    with Hosts(2) as hosts:
        for _ in range(given.rounds):
            note(results, START, {"weft": weft_cluster(hosts, present, given.quick, results)})
    found: list[Line] = []
    for name, row in results.items():
        wanted = ASKED.get(name, {})
        found += lines_of("two hosts", name, row, labels=LABELS, asked=wanted)
    packages = ("ray", "distributed")
    command.finish("machines_map", found, given, packages=packages, skipped=skipped)


def note(results: dict[str, dict[str, list[float]]], name: str, seconds: dict[str, float]) -> None:
    for peer, one in seconds.items():
        results.setdefault(name, {}).setdefault(peer, []).append(one)


# the conductor: clusters, and the program on the first host


def weft_cluster(
    hosts: Hosts, present: list[str], quick: bool, results: dict[str, dict[str, list[float]]]
) -> float:
    """Measure everything on a fresh cluster; return the seconds until the first result."""
    began = time.perf_counter()
    run(hosts, 1, *OPEN, "--port", "2718")
    run(hosts, 2, *OPEN, "--join", "host1:2718")
    run(hosts, 1, sys.executable, str(HERE), "--role", "first")
    seconds = time.perf_counter() - began
    dask = start_dask(hosts) if "dask" in present else []
    options = ("--role", "measure", "--peers", ",".join(present), *(["--quick"] if quick else []))
    printed = run(hosts, 1, sys.executable, str(HERE), *options)
    for name, row in json.loads(printed.splitlines()[-1]).items():
        note(results, name, row)
    for job in dask:
        job.kill(15)
        job.wait()
    for k in (1, 2):
        run(hosts, k, "rm", "-rf", "/run/tmp/dask-scratch-space")
    for k in (2, 1):
        run(hosts, k, sys.executable, "-m", "weft", "close")
    if left := hosts.leave_nothing(10):
        sys.exit(f"left: {left}")
    return seconds


def start_dask(hosts: Hosts) -> list[Job]:
    dask = (sys.executable, "-m", "distributed.cli.dask_worker")
    scheduler = (sys.executable, "-m", "distributed.cli.dask_scheduler")
    line = (*scheduler, "--host", "10.78.0.1", "--port", "8786", "--no-dashboard", "--no-show")
    jobs = [hosts.start_on(1, line, env=OWN)]
    for k in (1, 2):
        worker = (*dask, SCHEDULER, "--nthreads", "1", "--nworkers", "2", "--no-dashboard")
        jobs.append(hosts.start_on(k, worker, env=OWN))
    return jobs


def run(hosts: Hosts, k: int, *line: str) -> str:
    done = hosts.run_on(k, line, env=OWN, timeout=LONGEST_JOB)
    if done.code:
        sys.exit(str(done))
    return done.out


# the program on the first host


def first_result() -> list[str]:
    import socket

    import weft

    return sorted(set(weft.map(lambda _: socket.gethostname(), range(4), machines=["host2"])))


def add_one(x: Any) -> Any:
    return x + 1


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def column(k: int, shared_data: Any) -> float:
    return float(shared_data["a"][k::16].sum())


def column_of(k: int, array: Any) -> float:
    return float(array[k::16].sum())


def spin(seconds: float) -> float:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return seconds


def measure(chosen: list[str], *, quick: bool) -> dict[str, dict[str, float]]:
    import numpy as np

    import weft

    others = ["host2"]
    weft.map(add_one, range(8), machines=others)  # connects this process, also for Ray's own
    here = connected(chosen)
    numbers = list(range(1000))
    drawn = random.Random(1)
    uneven = [drawn.uniform(0.01, 0.09) for _ in range(64)]
    arrays = [np.full(12_500_000, float(k)) for k in range(2)]
    shared = np.arange(50_000_000.0)
    sums = [float(shared[k::16].sum()) for k in range(16)]

    def is_big(result: Any) -> bool:
        return all((one[::1000] == k + 1).all() for k, one in enumerate(result))

    rows: dict[str, tuple[dict[str, Callable[[], Any]], Callable[[Any], bool], int]] = {
        TRIVIAL: (
            {
                "weft": lambda: weft.map(add_one, numbers, machines=others),
                "tasks": lambda: here["tasks"](add_one, numbers),
                "pool": lambda: here["pool"].map(add_one, numbers),
                "dask": lambda: here["dask"](add_one, numbers),
            },
            lambda result: result == [x + 1 for x in numbers],
            3 if quick else 7,
        ),
        UNEVEN: (
            {
                "weft": lambda: weft.map(sleep, uneven, machines=others),
                "tasks": lambda: here["tasks"](sleep, uneven),
                "pool": lambda: here["pool"].map(sleep, uneven, chunksize=1),
                "dask": lambda: here["dask"](sleep, uneven),
            },
            lambda result: result == uneven,
            1 if quick else 3,
        ),
        BIG: (
            {
                "weft": lambda: weft.map(add_one, arrays, machines=others),
                "tasks": lambda: here["tasks"](add_one, map(here["put"], arrays)),
                "dask": lambda: here["dask"](add_one, arrays),
            },
            is_big,
            3 if quick else 5,
        ),
        SHARED: (
            {
                "weft": lambda: weft.map(
                    column, range(16), shared_data={"a": shared}, machines=others
                ),
                "tasks": lambda: here["tasks"](column_of, range(16), here["put"](shared)),
            },
            lambda result: result == sums,
            3 if quick else 5,
        ),
        ONE: (
            {
                "weft": lambda: weft.map(spin, [0.01] * 64, machines=["host1"]),
                "local": lambda: weft.map(spin, [0.01] * 64, n=2),
            },
            lambda result: result == [0.01] * 64,
            3 if quick else 7,
        ),
    }
    found = {}
    for name, (calls, holds, repetitions) in rows.items():
        wanted = {peer: call for peer, call in calls.items() if peer in here}
        found[name] = in_turn(wanted, holds, repetitions)
    found[UNEVEN]["best"] = sum(uneven) / 4
    weft.shutdown()
    return found


def connected(chosen: list[str]) -> dict[str, Any]:
    """Return what calls the peers, by name, in the cluster that this process is connected to."""
    here: dict[str, Any] = {"weft": True, "local": True}
    if "tasks" in chosen:
        import ray

        def tasks(function: Any, items: Any, *more: Any) -> list[Any]:
            task = ray.remote(function).options(scheduling_strategy="SPREAD")
            return list(ray.get([task.remote(item, *more) for item in items]))

        here |= {"tasks": tasks, "put": ray.put}
    if "pool" in chosen:
        from ray.util.multiprocessing import Pool

        here["pool"] = Pool(4)
    if "dask" in chosen:
        from distributed import Client

        client = Client(SCHEDULER)
        client.wait_for_workers(4)
        here["dask"] = lambda function, items: client.gather(
            client.map(function, items, pure=False)
        )
    return here


def settle() -> None:
    """Wait until the machine has little to do, a second at most: what the call before has left to
    others, as a thousand tasks leave to Ray, is not the next one's."""
    for _ in range(50):
        before = idle_seconds()
        time.sleep(QUIET)
        if idle_seconds() - before > 0.8 * QUIET * (os.cpu_count() or 1):
            return


def idle_seconds() -> float:
    """Return for how long the machine's processors have had nothing to do."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[4]) / os.sysconf("SC_CLK_TCK")


def in_turn(
    calls: dict[str, Callable[[], Any]], holds: Callable[[Any], bool], repetitions: int
) -> dict[str, float]:
    """Return each call's seconds, the median over repetitions of which the first does not count."""
    times: dict[str, list[float]] = {peer: [] for peer in calls}
    order = list(calls)
    for _ in range(repetitions + 1):
        for peer in order:
            settle()
            began = time.perf_counter()
            result = calls[peer]()
            times[peer].append(time.perf_counter() - began)
            if not holds(result):
                sys.exit(f"{peer} has returned something else")
            del result
        order = order[1:] + order[:1]
    print(
        {peer: [round(one, 4) for one in found] for peer, found in times.items()}, file=sys.stderr
    )
    return {peer: statistics.median(found[1:]) for peer, found in times.items()}


if __name__ == "__main__":
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    main()
