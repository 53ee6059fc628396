"""A thousand kills, under load: `make soak`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import launch

KILLS = 1000

#: a group of 4 in which a rank is killed, and what is left of it regroups; three kills a run
PROGRAM = """
import os, random, signal, sys, time
import weft
seed = int(sys.argv[1])
group = weft.init(timeout=30)
me = group.rank
rng = random.Random(seed)
while group.size > 1:
    victim, pause = rng.randrange(group.size), rng.random() * 0.03
    group.barrier()
    if group.rank == victim:
        end = time.monotonic() + pause
        while time.monotonic() < end:
            pass
        os.write(1, f"END {group.generation} {time.monotonic()}\\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except weft.PeerLost as error:
        told = time.monotonic()
        assert error.ranks == (victim,), (error, victim)
        os.write(1, f"LOST {group.generation} {told}\\n".encode())
    group = group.survivors()
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("load", [0, 2], ids=["quiet", "under load"])
def test_peer_lost_comes_in_time_every_time(load: int) -> None:
    """PeerLost within 100 ms of every SIGKILL, at every survivor."""
    latencies: list[float] = []
    kills = run = 0
    with busy_processes(load):
        while kills < KILLS // 2:
            outcome = launch(
                PROGRAM, 4, str(run), options=("--keep-going", "--no-prefix"), limit=120
            )
            run += 1
            ends, losses = {}, []
            for line in outcome.out.splitlines():
                kind, generation, moment = line.split()
                if kind == "END":
                    ends[int(generation)] = float(moment)
                else:
                    losses.append((int(generation), float(moment)))
            assert len(ends) == 3, outcome
            assert len(losses) == 3 + 2 + 1, outcome
            kills += len(ends)
            latencies += [moment - ends[generation] for generation, moment in losses]
    latencies.sort()
    late = [latency for latency in latencies if latency > 0.1]
    print(
        f"\n{kills} kills, {len(latencies)} survivors told: median "
        f"{1000 * latencies[len(latencies) // 2]:.1f} ms, longest {1000 * latencies[-1]:.1f} ms"
    )
    assert not late, f"{len(late)} of {len(latencies)} were told late: {late[-5:]}"


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
