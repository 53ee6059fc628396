"""Simulate a table on many hosts: adds per second and staleness for async, ssp and bsp.

    python benchmarks/simulate.py                    up to 128 hosts of 8 ranks; a minute or two
    python benchmarks/simulate.py --latency 5e-6 --bandwidth 1.2e10 --compute 2e-3
    sudo python benchmarks/simulate.py --check       only the real thing beside it, on 2 and 3 hosts

What is decided is decided by the functions that the engine calls (`weft._core.sharding`: who has
which rows, what goes to whom in which messages, when adds are told; `weft._core.tables`: who waits
for whom). Simulated are the hosts and the network, as they are given:

    rank      computes | add: its own rows itself, others' in messages | the same for a get
    agent     takes one message after the other: `handling` for each, `applying` bytes a second
    network   `latency` for each message; a host sends `bandwidth` bytes a second

Each rank makes so many steps: it computes, adds to some random rows and gets the same rows.
`--check` measures how long a call takes for a rank that is alone, takes the handling of a message
from that, and then compares what all ranks reach together with what is simulated for them.
Results go to benchmarks/results/simulation.json, and their picture to docs/pictures/simulation.svg.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean, median
from typing import Any

import comparison
import numpy as np
import simulation_picture

from weft._core import sharding
from weft._core.sharding import ID_BYTES, USES, WINDOW, News, Sharding
from weft._core.tables import ASYNC, BSP, Consistency, ssp

HERE = Path(__file__)
PICTURE = HERE.parent.parent / "docs" / "pictures" / "simulation.svg"
#: bytes of a message beside ids and rows
HEAD = 64
#: more adds than any rank makes: the count of a rank that has left
LEFT = 1 << 40
RULES = (ASYNC, ssp(4), BSP)
HOSTS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Cluster:
    """Hosts, and the network between them."""

    hosts: int
    #: of each host
    ranks: int = 8
    #: seconds of a message on its way
    latency: float = 30e-6
    #: bytes that a host sends in a second
    bandwidth: float = 1.2e9
    #: seconds that an agent needs for a message, and bytes of rows that it reads or updates in one
    handling: float = 10e-6
    applying: float = 2e9


@dataclass(frozen=True)
class Program:
    """What every rank does."""

    n_rows: int = 1_000_000
    row_nbytes: int = 256
    #: rows of one add, and of one get
    touched: int = 32
    #: seconds of a step's computing: the median, and how much they vary
    compute: float = 0.02
    spread: float = 0.3
    steps: int = 10


@dataclass(frozen=True)
class Outcome:
    """What a program reached."""

    adds_per_second: float
    #: of all gets: the mean, and what 99 of 100 do not exceed
    staleness: float
    most_stale: float
    #: the part of the ranks' time in which they computed
    computing: float


def simulate(cluster: Cluster, program: Program, rule: Consistency, seed: int = 0) -> Outcome:
    """Run a program on a cluster until all ranks have made all steps."""
    return Run(cluster, program, rule, seed).outcome()


class Run:
    """One program on one cluster: its events in the order of their times."""

    def __init__(
        self, cluster: Cluster, program: Program, rule: Consistency, seed: int = 0
    ) -> None:
        self.cluster, self.program, self.rule = cluster, program, rule
        self.random = np.random.default_rng(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        room = sharding.room_for(cluster.ranks, program.row_nbytes)
        self.sharding = Sharding(program.n_rows, program.row_nbytes, cluster.hosts, room)
        size = cluster.hosts * cluster.ranks
        self.hosts = [Host(self, number) for number in range(cluster.hosts)]
        self.ranks = [Rank(self, rank, self.hosts[rank // cluster.ranks]) for rank in range(size)]
        self.computed = 0.0
        self.staleness: list[int] = []

    def outcome(self) -> Outcome:
        for rank in self.ranks:
            rank.begin()
        while self._events:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        unfinished = [rank.number for rank in self.ranks if rank.adds < self.program.steps]
        if unfinished:
            raise AssertionError(f"ranks {unfinished[:8]} wait for ever under {self.rule}")
        ended = [rank.ended for rank in self.ranks]
        adds = len(self.ranks) * self.program.steps
        return Outcome(
            adds / max(ended),
            fmean(self.staleness),
            float(np.percentile(self.staleness, 99)),
            self.computed / sum(ended),
        )

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (time, next(self._numbers), action, arguments))


class Host:
    """A host: its agent, its link, and how many adds it knows of every rank."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.known = np.zeros(run.cluster.hosts * run.cluster.ranks, np.int64)
        self._agent_free = self._link_free = 0.0
        #: who waits until the smallest count is so large
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._told: dict[int, News] = {}
        self._told_at = -1.0
        self._tells = False

    def handle(self, nbytes: float, then: Callable[..., None], *arguments: Any) -> None:
        """Have the agent take a message, and read or update so many bytes for it."""
        cluster = self.run.cluster
        begin = max(self.run.now, self._agent_free)
        self._agent_free = begin + cluster.handling + nbytes / cluster.applying
        self.run.at(self._agent_free, then, *arguments)

    def send(self, nbytes: float, then: Callable[..., None], *arguments: Any) -> None:
        """Send a message; `then` is what happens where it arrives."""
        cluster = self.run.cluster
        self._link_free = max(self.run.now, self._link_free) + nbytes / cluster.bandwidth
        self.run.at(self._link_free + cluster.latency, then, *arguments)

    def when_known(self, needed: int, then: Callable[[], None]) -> None:
        """Go on when every rank has made so many adds, as this host knows."""
        if needed <= 0 or self.known.min() >= needed:
            then()
        else:
            self._waiting.append((needed, then))

    def note(self, news: Sequence[News]) -> None:
        """Learn how many adds ranks have made."""
        for entry in news:
            self.known[entry.rank] = entry.adds
        if self._waiting:
            least = self.known.min()
            ready = [then for needed, then in self._waiting if needed <= least]
            self._waiting = [entry for entry in self._waiting if entry[0] > least]
            for then in ready:
                then()

    def tell(self) -> None:
        """Tell the other hosts what ranks of this one have added, now or when it is due."""
        if self._tells or len(self.run.hosts) == 1:
            return
        self._tells = True
        due = self.run.now
        if not sharding.is_due(self.run.rule, due - self._told_at):
            due = self._told_at + sharding.TELLING_SECONDS
        self.run.at(max(due, self._agent_free), self._tell)

    def _tell(self) -> None:
        self._tells, self._told_at = False, self.run.now
        first = self.number * self.run.cluster.ranks
        own = range(first, first + self.run.cluster.ranks)
        news = sharding.news((News(r, int(self.known[r]), USES) for r in own), self._told)
        self._told.update((entry.rank, entry) for entry in news)
        for other in self.run.hosts:
            if news and other is not self:
                # one handling here and one there, as for any message
                self.handle(0, self.send, HEAD + 24 * len(news), other.handle, 0, other.note, news)


class Rank:
    """A rank, step after step."""

    def __init__(self, run: Run, number: int, host: Host) -> None:
        self.run, self.number, self.host = run, number, host
        self.adds = 0
        self.ended = 0.0
        self._shares: list[sharding.Share] = []
        self._requests: deque[Callable[[], None]] = deque()
        self._open = 0

    def begin(self) -> None:
        program = self.run.program
        seconds = program.compute * float(self.run.random.lognormal(0, program.spread))
        self.run.computed += seconds
        rows = self.run.random.integers(0, program.n_rows, program.touched)
        self._shares = self.run.sharding.shares(np.unique(rows))
        self.run.at(self.run.now + seconds, self._add)

    def _add(self) -> None:
        self.host.when_known(self.run.rule.before_add(self.adds), self._send_adds)

    def _send_adds(self) -> None:
        self._call(0, rows_go=True, then=self._added)

    def _added(self) -> None:
        self.adds += 1
        self._count(self.adds)
        self._call(self.run.rule.before_get(self.adds), rows_go=False, then=self._got)

    def _got(self) -> None:
        behind = self.adds - int(self.host.known.min())
        self.run.staleness.append(max(0, behind))
        if self.adds < self.run.program.steps:
            self.begin()
        else:
            self.ended = self.run.now
            self._count(LEFT)

    def _count(self, adds: int) -> None:
        self.host.note([News(self.number, adds, USES)])
        self.host.tell()

    def _call(self, needed: int, *, rows_go: bool, then: Callable[[], None]) -> None:
        """Ask every host that has some of the rows; go on when all have answered."""
        self._then = then
        self._open = 1
        for share in self._shares:
            owner = self.run.hosts[share.host]
            for part in self.run.sharding.cut_share(share):
                rows = part.stop - part.start
                self._open += 1
                self._requests.append(self._request(owner, rows, needed, rows_go=rows_go))
        for _ in range(min(WINDOW, len(self._requests))):
            self._requests.popleft()()
        self._answered(None)

    def _request(self, owner: Host, rows: int, needed: int, *, rows_go: bool) -> Callable[[], None]:
        nbytes = rows * self.run.program.row_nbytes
        ids = rows * ID_BYTES
        there = HEAD + ids + nbytes * rows_go
        back = HEAD + nbytes * (not rows_go)

        def answered() -> None:
            self._answered(owner)

        if owner is self.host:  # the rank itself does it, in shared memory

            def begin() -> None:
                seconds = nbytes / self.run.cluster.applying
                owner.when_known(needed, lambda: self.run.at(self.run.now + seconds, answered))
        else:

            def begin() -> None:
                self.host.handle(0, self.host.send, there, owner.handle, 0, arrived)

            def arrived() -> None:
                owner.when_known(needed, lambda: owner.handle(nbytes, owner.send, back, came_back))

            def came_back() -> None:
                self.host.handle(0, answered)

        return begin

    def _answered(self, owner: Host | None) -> None:
        self._open -= 1
        if owner is not None and self._requests:
            self._requests.popleft()()
        if self._open == 0:
            self._then()


# the program


def main() -> None:
    given = options()
    path = given.results / "simulation.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if given.check:
        found["check"] = check()
    else:
        found |= simulated(given)
    given.results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    if given.results == comparison.RESULTS and "hosts" in found:
        PICTURE.write_text(simulation_picture.draw(found))


def simulated(given: argparse.Namespace) -> dict[str, Any]:
    """Simulate the program on more and more hosts."""
    cluster = Cluster(
        1, given.ranks, given.latency, given.bandwidth, given.handling, given.applying
    )
    program = Program(compute=given.compute, touched=given.touched, steps=given.steps)
    found: dict[str, Any] = {"cluster": asdict(cluster), "program": asdict(program), "hosts": {}}
    print(f"{'hosts':>5} {'ranks':>6} {'rule':>7} {'adds/s':>9} {'stale':>6} {'99 %':>6} computing")
    for number in (hosts for hosts in HOSTS if hosts <= given.hosts):
        row = found["hosts"][str(number)] = {}
        for rule in RULES:
            outcome = simulate(replace(cluster, hosts=number), program, rule)
            row[str(rule)] = asdict(outcome)
            print(
                f"{number:5} {number * cluster.ranks:6} {rule!s:>7} "
                f"{outcome.adds_per_second:9,.0f} {outcome.staleness:6.2f} "
                f"{outcome.most_stale:6.1f} {outcome.computing:8.0%}"
            )
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default, program = Cluster(1), Program()
    parser.add_argument("--hosts", type=int, default=128, help="at most (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=default.ranks, help="of each host")
    for name in ("latency", "bandwidth", "handling", "applying"):
        parser.add_argument(f"--{name}", type=float, default=getattr(default, name))
    parser.add_argument("--compute", type=float, default=program.compute)
    parser.add_argument("--touched", type=int, default=program.touched)
    parser.add_argument("--steps", type=int, default=program.steps)
    parser.add_argument("--check", action="store_true", help="only beside real hosts, as root")
    parser.add_argument("--results", type=Path, default=comparison.RESULTS)
    return parser.parse_args()


# beside the real thing

#: what ranks over real hosts do: first one of them alone, then all of them together
REAL = """
import json, sys, time
import numpy as np
import weft

program, rules = json.loads(sys.argv[1]), json.loads(sys.argv[2])
group = weft.init(timeout=120)
n_rows, columns = program["n_rows"], program["row_nbytes"] // 4
delta = np.ones((program["touched"], columns), "float32")
found = {}
for name, slack in rules:
    rule = weft.ssp(slack) if name == "ssp" else name
    table = weft.MatrixTable(n_rows, columns, consistency=rule)
    random = np.random.default_rng(group.rank)
    if name == "async":
        alone = []
        # rows of the last host alone
        rows = n_rows - 1 - random.choice(n_rows // group.size, program["touched"], replace=False)
        for _ in range(200 if group.rank == 0 else 0):
            began = time.perf_counter()
            table.get(rows)
            alone.append(time.perf_counter() - began)
        found["alone"] = sorted(alone)[len(alone) // 2] if alone else 0.0
    times = random.lognormal(0, program["spread"], program["steps"]) * program["compute"]
    stale = []
    group.barrier()
    began = time.perf_counter()
    for seconds in times:
        rows = random.integers(0, n_rows, program["touched"])
        time.sleep(seconds)
        table.add(delta, rows)
        table.get(rows)
        stale.append(table.staleness)
    took = group.all_reduce(time.perf_counter() - began, "max")
    adds = group.size * program["steps"] / float(took)
    found[name] = adds, float(group.all_reduce(np.mean(stale), "mean"))
    group.barrier()
if group.rank == 0:
    print(json.dumps(found), flush=True)
"""


def check() -> dict[str, Any]:
    """Compare with ranks on 2 and 3 hosts of namespaces, 2 each."""
    sys.path.append(str(HERE.parent.parent))
    from tests.hosts import Hosts

    program = Program(n_rows=10_000, compute=0.05, steps=40)
    rules = json.dumps([(rule.name, rule.slack) for rule in RULES])
    found: dict[str, Any] = {"program": asdict(program)}
    print(f"\n{'hosts':>5} {'rule':>7} {'adds/s':>15} {'staleness':>13}   measured, simulated")
    for number in (2, 3):
        with Hosts(number) as hosts, tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "real.py"
            script.write_text(REAL)
            done = hosts.launch(script, 2, json.dumps(asdict(program)), rules, timeout=300)
        lines = [line for line in done.out.splitlines() if line.startswith("[0] {")]
        if done.code or not lines:
            sys.exit(f"the ranks on {number} hosts failed: {done}")
        measured = json.loads(lines[-1].removeprefix("[0] "))
        cluster = calibrated(Cluster(number, ranks=2, latency=0.0), program, measured["alone"])
        row = found[str(number)] = {"alone": measured["alone"], "handling": cluster.handling}
        for rule in RULES:
            adds, stale = measured[rule.name]
            outcomes = [simulate(cluster, program, rule, seed) for seed in range(5)]
            expected = median(outcome.adds_per_second for outcome in outcomes)
            behind = median(outcome.staleness for outcome in outcomes)
            row[str(rule)] = {"adds": [adds, expected], "staleness": [stale, behind]}
            print(
                f"{number:5} {rule!s:>7} {adds:7,.0f} {expected:7,.0f} {stale:6.2f} {behind:6.2f}"
            )
    return found


def calibrated(cluster: Cluster, program: Program, alone: float) -> Cluster:
    """Return the cluster whose agents take so long that a get from one other host takes `alone`
    seconds: agents handle it four times."""
    nbytes = program.touched * program.row_nbytes
    rest = 2 * cluster.latency + nbytes / cluster.bandwidth + nbytes / cluster.applying
    return replace(cluster, handling=max(1e-6, (alone - rest) / 4))


if __name__ == "__main__":
    main()
