"""Weft beside its peers: how each is started, in turn, and how results are kept.

A benchmark starts itself again as a job of one peer, and the job's last line
of output is what it measured. Only one job is alive at a time.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"
LONGEST_JOB = 900.0  # seconds


def interleaved(rounds: int, measures: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """What each peer measures in each round; in a round one after the other, so that a noisy
    minute hurts all alike."""
    found: dict[str, list[T]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            found[name].append(measure())
    return found


def shown(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def save(name: str, results: dict[str, Any]) -> None:
    """Write results/NAME.json, with the machine they hold for."""
    RESULTS.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "python": sys.version}
    target = RESULTS / f"{name}.json"
    target.write_text(json.dumps({"machine": machine, **results}, indent=2) + "\n")


# how each peer is started; each returns the last line that the job printed


def under_weft(
    script: Path, ranks: int, arguments: Sequence[str], options: Sequence[str] = ()
) -> str:
    return printed(
        [sys.executable, "-m", "weft", "run", "-n", str(ranks), "--no-prefix", *options]
        + [str(script), *arguments]
    )


def under_mpi(script: Path, ranks: int, arguments: Sequence[str]) -> str:
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    # -m mpi4py: a rank's exception ends the job, instead of leaving the others waiting
    return printed(
        [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
        + [sys.executable, "-m", "mpi4py", str(script), *arguments]
    )


def under_gloo(script: Path, ranks: int, arguments: Sequence[str]) -> str:
    """Each process gets its rank, the number of ranks and the file to meet at, as arguments."""
    with tempfile.TemporaryDirectory() as folder:
        meet = str(Path(folder) / "meet")
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments, str(rank), str(ranks), meet],
                stdout=subprocess.PIPE,
                text=True,
                env={**environment(), "GLOO_SOCKET_IFNAME": "lo"},
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
        sys.exit(f"gloo's rank 0 of {ranks} printed nothing")
    return outputs[0].splitlines()[-1]


def printed(command: list[str]) -> str:
    """The line that a command prints last."""
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=LONGEST_JOB
    )
    if not done.stdout.strip():
        sys.exit(f"{command} printed nothing:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
