"""Weft beside its peers: whose turn it is, how each is started, how its processes keep step.

A benchmark starts itself again as a job of one peer, and the job's last line
of output is what it measured. Only one job is alive at a time.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

LONGEST_JOB = 900.0  # seconds
LONGEST_WAIT = 120.0  # seconds
#: gloo and TensorPipe would look up this host's name, which may not resolve; Ray would listen on
#: every interface, unless it takes this for a system on which it has no clusters
LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def interleaved(rounds: int, measures: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """What each peer measures in each round; in a round one after the other, so that a noisy
    minute hurts all alike, in an order drawn by lot, the same in every run, so that none always
    comes after the same: the one before may leave caches cold, or processes still ending."""
    found: dict[str, list[T]] = {name: [] for name in measures}
    for number in range(rounds):
        for name in random.Random(number).sample(list(measures), len(measures)):
            found[name].append(measures[name]())
    return found


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def looked_for(
    known: Mapping[str, tuple[str, str]], chosen: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Of peers with their names and modules: those that are chosen and here, and why others are
    not."""
    present, skipped = [], []
    for peer, (label, module) in known.items():
        if peer not in chosen:
            skipped.append(f"{label}: not asked for")
        elif not installed(module):
            skipped.append(f"{label}: {module} is not installed")
        else:
            present.append(peer)
    return present, skipped


# how each peer is started; each returns the last line that the job printed


def under_weft(
    script: Path,
    ranks: int,
    arguments: Sequence[str],
    options: Sequence[str] = (),
    *,
    variables: Mapping[str, str] | None = None,
    longest: float = LONGEST_JOB,
) -> str:
    return printed(
        [sys.executable, "-m", "weft", "run", "-n", str(ranks), "--no-prefix", *options]
        + [str(script), *arguments],
        variables,
        longest,
    )


def under_mpi(script: Path, ranks: int, arguments: Sequence[str]) -> str:
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    # -m mpi4py: a rank's exception ends the job, instead of leaving the others waiting
    return printed(
        [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
        + [sys.executable, "-m", "mpi4py", str(script), *arguments]
    )


def under_nobody(
    script: Path, ranks: int, arguments: Sequence[str], variables: Mapping[str, str] | None = None
) -> str:
    """Each process gets its rank, the number of ranks and the file to meet at, as arguments."""
    with tempfile.TemporaryDirectory() as folder:
        meet = str(Path(folder) / "meet")
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments, str(rank), str(ranks), meet],
                stdout=subprocess.PIPE,
                text=True,
                env={**environment(), **(variables or {})},
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=LONGEST_JOB)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if not outputs[0].strip():
        sys.exit(f"{script.name} {' '.join(arguments)}: rank 0 of {ranks} printed nothing")
    return outputs[0].splitlines()[-1]


def printed(
    command: list[str], variables: Mapping[str, str] | None = None, longest: float = LONGEST_JOB
) -> str:
    """The line that a command prints last."""
    env = {**environment(), **(variables or {})}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=longest)
    if not done.stdout.strip():
        sys.exit(f"{command} printed nothing:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **LOOPBACK}


class Meeting:
    """How the processes of a job keep step, the same for all peers: words in a file they all map.

    A process's strip: how many barriers it has come to, then what it last gathered.
    """

    LONGEST = 64  # numbers that each can gather
    YIELDS = 2000

    def __init__(self, file: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        length = 8 * size * (1 + self.LONGEST)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, length)
        self._words = memoryview(mmap.mmap(descriptor, length)).cast("d")
        os.close(descriptor)
        self._counters = [other * (1 + self.LONGEST) for other in range(size)]

    def barrier(self) -> None:
        words, mine = self._words, self._counters[self.rank]
        words[mine] += 1
        came, looked, deadline = words[mine], 0, time.monotonic() + LONGEST_WAIT
        while any(words[counter] < came for counter in self._counters):
            looked += 1
            # others may need the processor more, as a peer's server does
            time.sleep(0 if looked < self.YIELDS else 1e-4)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{LONGEST_WAIT} s at a barrier: another process has failed")

    def gathered(self, values: Sequence[float]) -> list[list[float]]:
        """Everyone's values, in the order of ranks."""
        mine = self._counters[self.rank] + 1
        for place, value in enumerate(values):
            self._words[mine + place] = value
        self.barrier()
        everyones = [
            self._words[counter + 1 : counter + 1 + len(values)].tolist()
            for counter in self._counters
        ]
        self.barrier()  # nobody writes the next before all have read these
        return everyones
