"""Tables between two hosts: rows that are on the other one, beside MPI and torch rpc.

    sudo python benchmarks/machines_tables.py             all peers, five rounds
    sudo python benchmarks/machines_tables.py --quick     two rounds, half the repetitions
    ... --peers weft,mpi                                  only these

The hosts are made of namespaces of this machine, as in machines.py: only ratios count. One rank a
host: rank 0 gets and adds, all rows are on the host of rank 1, the owner. 40 MB are 10,000 rows of
4 KB; `rows` are 1,000 of 64 numbers. First the owner waits, then it computes: one call of C after
the other, of about two seconds each, that keep the interpreter's lock.

    weft      a table; its rows on the other host are served by that host's agent
    mpi4py    Send and Recv of the same bytes, without a table: what the network takes
    RMA       a window of mpi4py: lock, Get or Accumulate, unlock
    rpc       torch.distributed.rpc: the owner's threads serve

Last, on two ranks a host, a model of 8 MB: `ModelTable.sync` beside ranks of which each sends the
whole model and receives one, by mpi4py's Sendrecv; and the memory that a table takes on both hosts
together, beside its rows. Results go to benchmarks/results/machines_tables.json.
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
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import between_hosts
import peers
from comparison import BYTES, Line, lines_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tests.hosts import Hosts

    Array = npt.NDArray[np.float32]

HERE = Path(__file__)
#: where the processes of rpc meet: on the first host
MEET = "tcp://10.78.0.1:29401"
NETWORK = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}

#: rows that are got and added to, and numbers of a row
LARGE, SOME = (10_000, 1000), (1000, 64)
#: rows of which the second half is the owner's; with so many numbers each
WHOLE, MANY = 2 * LARGE[0], 100_000
OPERATIONS = ("get 40 MB", "add 40 MB", "get 1,000 rows", "add 1,000 rows")
REPETITIONS = {"get 40 MB": 9, "add 40 MB": 9, "get 1,000 rows": 101, "add 1,000 rows": 101}
#: seconds that the owner computes, and within which rows are to come meanwhile
COMPUTING, MOST_SECONDS = 4.0, 0.020
MEANWHILE = ", the owner computes"
MODEL_BYTES, MODEL_ARRAYS = 8_000_000, 10

#: peer -> its name in the table, and what must be installed for it
PEERS = {
    "weft": ("weft", "weft"),
    "mpi": ("mpi4py, bare bytes", "mpi4py"),
    "rma": ("mpi4py RMA", "mpi4py"),
    "rpc": ("torch rpc", "torch"),
}
LABELS = {peer: label for peer, (label, _) in PEERS.items()}
#: how many times faster than bare bytes weft is to be; below 1: may be slower
ASKED = dict(zip(OPERATIONS, (1 / 1.3, 1 / 1.3, 1 / 3, 1 / 6), strict=True))
ROWS, SYNC, MEMORY = "2 hosts, 1 rank each", "2 hosts, 2 ranks each", "memory of both hosts"

#: section -> row -> peer -> one number per round
Results = dict[str, dict[str, dict[str, list[float]]]]


def main() -> None:
    between_hosts.run(HERE, __doc__, known=PEERS, roles=ROLES, measured=measured_lines)


# the conductor: starts jobs, puts together what they print


def measured_lines(hosts: Hosts, present: list[str], given: Namespace) -> list[Line]:
    return lines(measured(hosts, present, given.rounds, given.quick))


def measured(hosts: Hosts, present: list[str], rounds: int, quick: bool) -> Results:
    def job(role: str, ranks: int) -> dict[str, float]:
        print(f"{ranks} rank{'s' * (ranks > 1)} a host: {role}", file=sys.stderr)
        found: dict[str, float] = json.loads(printed(hosts, ranks, role, quick))
        return found

    results: Results = {}
    found = peers.interleaved(rounds, {peer: partial(job, peer, 1) for peer in present})
    names = [*OPERATIONS, *(name + MEANWHILE for name in OPERATIONS[2:])]
    results[ROWS] = {
        name: {
            peer: [one[name] for one in found[peer]] for peer in present if name in found[peer][0]
        }
        for name in names
    }
    syncing = {peer: partial(job, f"sync-{peer}", 2) for peer in ("weft", "mpi") if peer in present}
    synced = peers.interleaved(rounds, syncing)
    name = "sync a model of 8 MB"
    results[SYNC] = {name: {peer: [one[name] for one in synced[peer]] for peer in synced}}
    if "weft" in present:
        used = job("memory", 1)
        results[MEMORY] = {"80 MB of rows": {peer: [number] for peer, number in used.items()}}
    return results


def printed(hosts: Hosts, ranks: int, role: str, quick: bool) -> str:
    return between_hosts.printed(hosts, HERE, ranks, role, quick=quick, env=NETWORK)


def lines(results: Results) -> list[Line]:
    found = []
    for name, row in results[ROWS].items():
        if name.endswith(MEANWHILE):
            # what matters is that rows come at all: the others wait for the owner
            alone = {"weft": row["weft"]} if "weft" in row else {}
            found += lines_of(ROWS, name, alone, labels=LABELS, limit=MOST_SECONDS)
            found += [line for line in lines_of(ROWS, name, row, labels=LABELS) if line.beside]
        else:
            found += lines_of(ROWS, name, row, labels=LABELS, asked={"mpi": ASKED[name]})
    labels = {**LABELS, "mpi": "each rank the whole model", "rows": "the rows once"}
    for name, row in results[SYNC].items():
        found += lines_of(SYNC, name, row, labels=labels, asked={"mpi": 1.5})
    for name, row in results.get(MEMORY, {}).items():
        found += lines_of(MEMORY, name, row, labels=labels, yardsticks=["rows"], unit=BYTES)
    return found


# what each rank of a job does


class Peer(Protocol):
    """Rank 0 calls the four operations; the owner attends until rank 0 releases it."""

    rank: int
    #: whether rows come while the owner computes, however late
    serves: bool

    def operations(self) -> dict[str, Callable[[], object]]: ...

    def attend(self) -> None: ...

    def release(self) -> None: ...

    def meet(self) -> None: ...

    def close(self) -> None: ...


def measure(make: Callable[[], Peer], quick: bool) -> None:
    peer = make()
    found: dict[str, float] = {}
    operations = peer.operations() if peer.rank == 0 else {}
    for name in OPERATIONS:
        if peer.rank == 0:
            repetitions = REPETITIONS[name] // (2 if quick else 1)
            found[name] = median(timed(operations[name]) for _ in range(repetitions + 2))
            peer.release()
        else:
            peer.attend()
    for name in OPERATIONS[2:] if peer.serves else ():
        peer.meet()
        end = time.monotonic() + COMPUTING
        if peer.rank == 0:
            time.sleep(0.2)
            times = []
            while time.monotonic() < end - COMPUTING / 4:
                times.append(timed(operations[name]))
                time.sleep(0.01)
            found[name + MEANWHILE] = median(times)
        else:
            while time.monotonic() < end:
                sum(range(50_000_000))
        peer.meet()
    if peer.rank == 0:
        print(json.dumps(found), flush=True)
    peer.close()


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def chosen_rows() -> Any:
    """1,000 rows of the owner."""
    import numpy as np

    return MANY // 2 + np.random.default_rng(0).choice(MANY // 2, SOME[0], replace=False)


class Weft:
    serves = True

    def __init__(self) -> None:
        import numpy as np

        import weft

        self.group = weft.init()
        self.rank = self.group.rank
        self.large = weft.MatrixTable(WHOLE, LARGE[1])
        self.some = weft.MatrixTable(MANY, SOME[1])
        self.parts = np.ones(LARGE, "float32"), np.ones(SOME, "float32")

    def operations(self) -> dict[str, Callable[[], object]]:
        rows, owned = chosen_rows(), slice(LARGE[0], WHOLE)
        large, some = (part.copy() for part in self.parts)
        ones, few = self.parts
        calls = (
            lambda: self.large.get(owned, out=large),
            lambda: self.large.add(ones, owned),
            lambda: self.some.get(rows, out=some),
            lambda: self.some.add(few, rows),
        )
        return dict(zip(OPERATIONS, calls, strict=True))

    def attend(self) -> None:
        self.group.barrier()

    release = meet = attend

    def close(self) -> None:
        import weft

        weft.shutdown()


class Bare:
    """The same bytes, there and back."""

    serves = False

    def __init__(self) -> None:
        import numpy as np
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank = self.world.Get_rank()
        self.byte = np.zeros(1, np.uint8)
        ids = {"40 MB": 8 * LARGE[0], "1,000 rows": 8 * SOME[0]}
        rows = {"40 MB": 4 * LARGE[0] * LARGE[1], "1,000 rows": 4 * SOME[0] * SOME[1]}
        #: by operation: what goes and what comes back
        self.buffers = {}
        for name in OPERATIONS:
            kind, _, what = name.partition(" ")
            there = 64 + ids[what] + (rows[what] if kind == "add" else 0)
            back = 64 + (rows[what] if kind == "get" else 0)
            self.buffers[name] = np.ones(there, np.uint8), np.ones(back, np.uint8)
        self.attended = 0

    def operations(self) -> dict[str, Callable[[], object]]:
        return {name: partial(self._converse, name) for name in OPERATIONS}

    def _converse(self, name: str) -> None:
        there, back = self.buffers[name]
        self.world.Send(there, 1)
        self.world.Recv(back, 1)

    def attend(self) -> None:
        there, back = self.buffers[OPERATIONS[self.attended]]
        self.attended += 1
        status = self.mpi.Status()
        while True:
            self.world.Recv(there, 0, self.mpi.ANY_TAG, status)
            if status.Get_count(self.mpi.BYTE) == 1:
                return
            self.world.Send(back, 0)

    def release(self) -> None:
        self.world.Send(self.byte, 1)

    def meet(self) -> None:
        self.world.Barrier()

    def close(self) -> None:
        self.world.Barrier()


class Window:
    serves = True

    def __init__(self) -> None:
        import numpy as np
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank = self.world.Get_rank()
        sizes = (LARGE[0] * LARGE[1], MANY // 2 * SOME[1])
        own = [np.zeros(size if self.rank == 1 else 0, "float32") for size in sizes]
        self.windows = [MPI.Win.Create(part, 4, comm=self.world) for part in own]
        self.own = own

    def operations(self) -> dict[str, Callable[[], object]]:
        import numpy as np

        ones, few = np.ones(LARGE, "float32"), np.ones(SOME, "float32")
        row = self.mpi.FLOAT.Create_contiguous(SOME[1]).Commit()
        rows = row.Create_indexed_block(1, (chosen_rows() - MANY // 2).tolist()).Commit()
        large, some = self.windows
        return {
            "get 40 MB": lambda: self._locked(large, lambda: large.Get(ones, 1)),
            "add 40 MB": lambda: self._locked(
                large, lambda: large.Accumulate(ones, 1, op=self.mpi.SUM)
            ),
            "get 1,000 rows": lambda: self._locked(
                some, lambda: some.Get(few, 1, target=(0, 1, rows))
            ),
            "add 1,000 rows": lambda: self._locked(
                some, lambda: some.Accumulate(few, 1, target=(0, 1, rows), op=self.mpi.SUM)
            ),
        }

    def _locked(self, window: Any, call: Callable[[], object]) -> None:
        window.Lock(1, self.mpi.LOCK_SHARED)
        call()
        window.Unlock(1)

    def attend(self) -> None:
        # within MPI, where the owner makes progress
        self.world.Barrier()

    release = meet = attend

    def close(self) -> None:
        for window in self.windows:
            window.Free()


class Rpc:
    serves = True

    def __init__(self) -> None:
        import torch
        from torch.distributed import rpc

        self.torch, self.rpc = torch, rpc
        self.rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        if self.rank == 1:
            served["40 MB"] = torch.zeros(LARGE)
            served["1,000 rows"] = torch.zeros(MANY, SOME[1])
        rpc.init_rpc(
            f"rank{self.rank}",
            rank=self.rank,
            world_size=2,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=MEET),
        )

    def operations(self) -> dict[str, Callable[[], object]]:
        torch = self.torch
        rows = torch.from_numpy(chosen_rows() - MANY // 2)
        every = torch.arange(LARGE[0])
        large, some = torch.ones(LARGE), torch.ones(SOME)
        return {
            "get 40 MB": partial(self._call, serve_get, "40 MB", every),
            "add 40 MB": partial(self._call, serve_add, "40 MB", every, large),
            "get 1,000 rows": partial(self._call, serve_get, "1,000 rows", rows),
            "add 1,000 rows": partial(self._call, serve_add, "1,000 rows", rows, some),
        }

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.rpc.rpc_sync("rank1", function, arguments)

    def attend(self) -> None:
        while not released:
            time.sleep(0.001)
        released.pop()

    def release(self) -> None:
        self._call(note_release)

    def meet(self) -> None:
        if self.rank == 0:
            self.release()
        else:
            self.attend()

    def close(self) -> None:
        self.rpc.shutdown()


#: the owner's tables, and whether it is released
served: dict[str, Any] = {}
released: list[bool] = []


def serve_get(what: str, rows: Any) -> Any:
    return served[what].index_select(0, rows)


def serve_add(what: str, rows: Any, delta: Any) -> None:
    served[what].index_add_(0, rows, delta)


def note_release() -> None:
    released.append(True)


def sync_weft(quick: bool) -> None:
    import numpy as np

    import weft

    group = weft.init()
    model = [np.zeros(MODEL_BYTES // 4 // MODEL_ARRAYS, "float32") for _ in range(MODEL_ARRAYS)]
    table = weft.ModelTable(model)

    def step() -> float:
        for array in model:
            np.add(array, 1, out=array)
        group.barrier()
        return timed(table.sync)

    times = [float(group.all_reduce(step(), "max")) for _ in range(11 if quick else 21)]
    told(group.rank, median(times[1:]))
    weft.shutdown()


def sync_mpi(quick: bool) -> None:
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    mine, others = (np.ones(MODEL_BYTES // 4, "float32") for _ in range(2))
    other = (rank + size // 2) % size  # on the other host

    def step() -> float:
        world.Barrier()
        return timed(lambda: world.Sendrecv(mine, other, recvbuf=others, source=other))

    times = [world.allreduce(step(), MPI.MAX) for _ in range(11 if quick else 21)]
    told(rank, median(times[1:]))


def told(rank: int, seconds: float) -> None:
    if rank == 0:
        print(json.dumps({"sync a model of 8 MB": seconds}), flush=True)


def memory(_quick: bool) -> None:
    """What a table takes on both hosts: what the machine's processes share."""
    import weft

    group = weft.init()
    small = weft.MatrixTable(2, 2)  # what all tables share is there from now on
    group.barrier()
    before = shared_bytes()
    group.barrier()
    table = weft.MatrixTable(WHOLE, LARGE[1])
    table.get([0, WHOLE - 1])
    group.barrier()
    used = shared_bytes() - before
    group.barrier()
    if group.rank == 0:
        rows = 4 * WHOLE * LARGE[1]
        print(json.dumps({"weft": used, "rows": rows}), flush=True)
    del small
    weft.shutdown()


def shared_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Shmem:"))


ROLES: dict[str, Callable[[bool], Any]] = {
    "weft": partial(measure, Weft),
    "mpi": partial(measure, Bare),
    "rma": partial(measure, Window),
    "rpc": partial(measure, Rpc),
    "sync-weft": sync_weft,
    "sync-mpi": sync_mpi,
    "memory": memory,
}

if __name__ == "__main__":
    main()
