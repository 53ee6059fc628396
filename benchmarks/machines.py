"""Machines: all_reduce and broadcast between two hosts, beside mpi4py and gloo.

    sudo python benchmarks/machines.py             all peers, five rounds
    sudo python benchmarks/machines.py --quick     two rounds, half the repetitions
    ... --peers weft,mpi                           only these

The hosts are made of namespaces of this machine (tests/hosts.py): each has its own network, names,
processes and memory, and a bridge joins them. So they share its processor, and the bytes between
them pass through its memory: a ratio of one run is what counts here, and no time.

In each round every peer runs once as a job of its own, started by the same mpirun with the same
options, and measures all rows:

    round 1: weft | mpi4py | gloo    round 2: gloo | weft | mpi4py    ...

and in a job, on each rank, for each row:

    check the result, warm up, then per repetition: barrier, clock, one call, clock

One repetition's time is that of its slowest rank, a round's time the median over repetitions, and
the table shows medians over rounds. A ratio is taken within a round, then its median over rounds:
above 1, weft is faster. Last comes what waiting costs: the share of a core that a rank and its
host's agent use. Results go to benchmarks/results/machines.json.

Arrays are float32 and the same memory for all peers; 1 KB is 1,000 bytes. mpi4py's calls are those
for buffers, Allreduce and Bcast. gloo's all_reduce has no separate output: it works in place.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import between_hosts
import collectives
import peers
from collectives import KB, MB, Row
from comparison import CORES, Line, lines_of

if TYPE_CHECKING:
    from tests.hosts import Hosts

HERE = Path(__file__)
RANKS_PER_HOST = (1, 2)
#: where the ranks of gloo meet: on the first host
MEET = "10.78.0.1:29400"
NETWORK = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}

ROWS = tuple(
    Row(operation, size, calls=1, repetitions=repetitions)
    for operation in ("all_reduce", "broadcast")
    for size, repetitions in (
        (1 * KB, 101),
        (64 * KB, 61),
        (1 * MB, 21),
        (16 * MB, 11),
        (100 * MB, 5),
    )
)

#: peer -> its name in the table, and what must be installed for it
PEERS = {"weft": ("weft", "weft"), "mpi": ("mpi4py", "mpi4py"), "gloo": ("gloo", "torch")}
LABELS = {peer: label for peer, (label, _) in PEERS.items()}

#: how long a rank waits, and which share of a core that may take
WAITED, MOST_CPU = 10.0, 0.02
WAITING_RANK = "CPU of a rank, waits 10 s"
WAITING_AGENT = "CPU of its agent"
IDLE_AGENT = "CPU of an agent, no call for 10 s"

#: section -> row -> peer -> one number per round
Results = dict[str, dict[str, dict[str, list[float]]]]


def main() -> None:
    between_hosts.run(HERE, __doc__, known=PEERS, roles=ROLES, measured=measured_lines)


# the conductor: starts jobs, puts together what they print


def section(ranks: int) -> str:
    return f"2 hosts, {ranks} rank{'s' * (ranks > 1)} each"


def measured_lines(hosts: Hosts, present: list[str], given: Namespace) -> list[Line]:
    results: Results = {
        section(ranks): measured(hosts, ranks, given.rounds, present, given.quick)
        for ranks in RANKS_PER_HOST
    }
    if "weft" in present:
        shares = json.loads(printed(hosts, 2, "waiting", given.quick))
        results["waiting"] = {what: {"weft": [share]} for what, share in shares.items()}
    return lines(results)


def measured(
    hosts: Hosts, ranks: int, rounds: int, chosen: list[str], quick: bool
) -> dict[str, dict[str, list[float]]]:
    def job(peer: str) -> dict[str, float]:
        print(f"{section(ranks)}: {LABELS[peer]}", file=sys.stderr)
        found: dict[str, float] = json.loads(printed(hosts, ranks, peer, quick))
        return found

    found = peers.interleaved(rounds, {peer: partial(job, peer) for peer in chosen})
    return {
        row.name: {peer: [one[row.name] for one in found[peer]] for peer in chosen} for row in ROWS
    }


def printed(hosts: Hosts, ranks: int, role: str, quick: bool) -> str:
    return between_hosts.printed(hosts, HERE, ranks, role, quick=quick, env=NETWORK)


def asked(ranks: int, row: Row) -> dict[str, float]:
    """How many times faster than each peer weft is to be; below 1: may be slower."""
    figures: dict[str, float] = {}
    if ranks == 1:
        figures["mpi"] = 1 / 1.4 if row.bytes >= MB else 1 / 4
    elif row.operation == "all_reduce":
        figures["mpi"] = 1.4 if row.bytes >= MB else 1 / 3
    if row.bytes >= 64 * KB:
        figures["gloo"] = 1
    return figures


def lines(results: Results) -> list[Line]:
    figures = {(section(n), row.name): asked(n, row) for n in RANKS_PER_HOST for row in ROWS}
    found = []
    for place, rows in results.items():
        for name, row in rows.items():
            if place in map(section, RANKS_PER_HOST):
                wanted = figures[place, name]
                found += lines_of(place, name, row, labels=LABELS, asked=wanted)
            else:
                found += lines_of(place, name, row, labels=LABELS, unit=CORES, limit=MOST_CPU)
    return found


# what each rank of a job does


def measure_weft(quick: bool) -> None:
    collectives.measure_all(collectives.Weft(), ROWS, quick=quick)


def measure_mpi(quick: bool) -> None:
    collectives.measure_all(collectives.Mpi(), ROWS, quick=quick)


def measure_gloo(quick: bool) -> None:
    rank, size = (os.environ[f"OMPI_COMM_WORLD_{what}"] for what in ("RANK", "SIZE"))
    collectives.measure_all(collectives.Gloo(rank, size, MEET, scheme="tcp"), ROWS, quick=quick)


def wait(_quick: bool) -> None:
    """Rank 0 is elsewhere while the others wait at a barrier; then nobody calls anything."""
    import numpy as np

    import weft

    group = weft.init()
    # the first rank of a host is the parent of its agent
    agent = speaker() if group.rank == group.hosts.index(group.hosts[group.rank]) else None
    group.barrier()
    rank_share, agent_share = shares(
        (lambda: time.sleep(WAITED)) if group.rank == 0 else group.barrier, agent
    )
    if group.rank == 0:
        group.barrier()
    group.barrier()
    _, idle_share = shares(lambda: time.sleep(WAITED), agent)
    waited = [rank_share if group.rank else 0.0, agent_share, idle_share]
    everyones = group.gather(np.array(waited)[np.newaxis])
    if everyones is not None:
        names = (WAITING_RANK, WAITING_AGENT, IDLE_AGENT)
        print(json.dumps(dict(zip(names, everyones.max(axis=0).tolist(), strict=True))), flush=True)
    weft.shutdown()


def shares(call: Callable[[], object], agent: int | None) -> tuple[float, float]:
    """The share of a core that this process and an agent use during a call."""
    before, agents, began = time.process_time(), seconds_of(agent), time.perf_counter()
    call()
    seconds = time.perf_counter() - began
    return (time.process_time() - before) / seconds, (seconds_of(agent) - agents) / seconds


def speaker() -> int:
    """The process that stands for this rank in MPI: the only one it has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        parent = stat.read_text().rpartition(")")[2].split()[1]
        if int(parent) == os.getpid():
            found.append(int(stat.parent.name))
    (only,) = found
    return only


def seconds_of(pid: int | None) -> float:
    """The processor time that a process has used, in user and system mode."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


ROLES: dict[str, Callable[[bool], Any]] = {
    "weft": measure_weft,
    "mpi": measure_mpi,
    "gloo": measure_gloo,
    "waiting": wait,
}

if __name__ == "__main__":
    main()
