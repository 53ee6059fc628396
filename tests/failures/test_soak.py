"""A thousand kills, under load: `make soak`."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import launch

KILLS = 1000

#: A group of 4 in which a rank is killed, and what is left of it regroups; three kills a run. In
#: every other generation the ranks meet once; in the others they reduce arrays all the time, small
#: or large ones.
PROGRAM = """
import os, random, signal, sys, time
import numpy as np
import weft
from weft.engines.local.collectives.collective import transport as slots
seed = int(sys.argv[1])
group = weft.init(timeout=30)
rng = random.Random(seed)
ARRAYS = {"small": np.ones(100), "large": np.ones(slots.ROOM // 8 + 1)}

def end():
    os.write(1, f"END {kind} {group.generation} {time.monotonic()}\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)

def reduce_until_lost(array):
    while True:
        assert group.all_reduce(array)[-1] == group.size

while group.size > 1:
    victim, pause = rng.randrange(group.size), rng.random() * 0.03
    kind = ("barrier", "small", "barrier", "large")[(seed + group.generation) % 4]
    if kind != "barrier":
        group.all_reduce(ARRAYS[kind])  # the first one sets up
    group.barrier()
    if group.rank == victim and kind == "barrier":
        until = time.monotonic() + pause
        while time.monotonic() < until:
            pass
        end()
    if group.rank == victim:
        signal.signal(signal.SIGALRM, lambda *_: end())  # anywhere in the loop
        signal.setitimer(signal.ITIMER_REAL, 0.001 + pause)
    try:
        group.barrier() if kind == "barrier" else reduce_until_lost(ARRAYS[kind])
    except weft.PeerLost as error:
        told = time.monotonic()
        assert error.ranks == (victim,), (error, victim)
        os.write(1, f"LOST {kind} {group.generation} {told}\\n".encode())
    group = group.survivors()
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("load", [0, 2], ids=["quiet", "under load"])
def test_peer_lost_comes_in_time_every_time(load: int, capsys: pytest.CaptureFixture[str]) -> None:
    """PeerLost within 100 ms of every SIGKILL, at every survivor."""
    with busy_processes(load):
        told = kill(KILLS // 2)
    with capsys.disabled():  # for docs/guarantees.md
        print(f"\nbeside {load} busy processes:")
        for kind, found in sorted(told.items()):
            print(f"  {kind}: {summary(found)}")
        latencies = [latency for found in told.values() for latency in found]
        print(f"  all: {summary(latencies)}")
    late = [latency for latency in latencies if latency > 0.1]
    assert not late, f"{len(late)} of {len(latencies)} were told late: {late[-5:]}"


def test_peer_lost_comes_after_a_few_kills() -> None:
    """The same for a dozen kills, on a machine that may be busy: long before the deadline."""
    assert max(map(max, kill(12).values())) < 10


def summary(latencies: list[float]) -> str:
    median, longest = 1000 * statistics.median(latencies), 1000 * max(latencies)
    late = sum(latency > 0.1 for latency in latencies)
    return (
        f"{len(latencies)} losses told, median {median:.0f} ms, longest {longest:.0f} ms, "
        f"{late} after more than 100 ms"
    )


def kill(kills: int) -> dict[str, list[float]]:
    """How long survivors of so many kills had to wait until they were told, by what they did."""
    latencies: dict[str, list[float]] = {}
    for seed in range(-(-kills // 3)):
        options = ("--keep-going", "--no-prefix")
        outcome = launch(PROGRAM, 4, str(seed), options=options)
        ends, losses = {}, []
        for line in outcome.out.splitlines():
            what, kind, generation, moment = line.split()
            if what == "END":
                ends[generation] = float(moment)
            else:
                losses.append((kind, generation, float(moment)))
        assert len(ends) == 3, outcome
        assert len(losses) == 3 + 2 + 1, outcome
        for kind, generation, moment in losses:
            latencies.setdefault(kind, []).append(moment - ends[generation])
    return latencies


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Processes that compute as hard as they can."""
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: sum(range(10_000))"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
