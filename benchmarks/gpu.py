"""GPUs: collectives, tables and training of ranks that share one GPU.

    python benchmarks/gpu.py                       what was asked, then as much as four minutes hold
    python benchmarks/gpu.py --seconds 900         all of it
    python benchmarks/gpu.py --quick               half the repetitions, and nothing very large
    python benchmarks/gpu.py --only collectives    or tables, or training
    python benchmarks/gpu.py --device cpu          only to try the program where there is no GPU:
                                                   small, and to be kept with --results elsewhere

Ranks share the first GPU that may be used, by turns or under MPS. In a job all parties take turns
within the same processes, repetition by repetition:

    collectives   weft | gloo (torch.distributed) | the bare operation of torch, by rank 0 alone
    tables        weft's table on the GPU | the same operation of torch on memory of each rank's own
    training      train_step or ModelTable.sync | the plain loop | DDP over gloo

and a call ends when the GPU has nothing left to do. One repetition's time is that of its slowest
rank, a job's time the median over repetitions. A ratio is taken within a round, then its median
over rounds: above 1, weft is faster. DDP and train_step run in jobs of their own. Rows that name
a path are measured with it forced (WEFT_GPU_PATH). Results go to benchmarks/results/gpu.json.

Numbers are float32, 1 KB is 1,000 bytes. A table of 100 MB has 25 M elements, or 100,000 rows of
256, of which 10,000 random ones are got and added. ResNet-32 is that of examples/resnet32.py; a
batch is what all ranks train on together, and one process trains on all of it. train_step returns
the loss, so the plain loop reads it as well, unless it says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command
import gpu_jobs
import peers
from comparison import Line, lines_of
from gpu_jobs import NOT_AVAILABLE, PATH, Found, step_of, sync_of

from weft.resources import visible_gpus

HERE = Path(__file__)
LONGEST_RUN, LONGEST_JOB = 240.0, 120.0  # seconds
PACKAGES = ("torch",)

PARTS = ("collectives", "tables", "training")
#: how ranks share a GPU
TURNS, MPS = "by turns", "MPS"
#: what WEFT_GPU_PATH can be, and what rows say of it
PATHS = {"device": "device slots", "host": "host slots", "staged": "staged"}

LABELS = {
    "weft": "weft",
    "gloo": "gloo",
    "torch": "torch, alone",
    "own": "torch (own memory)",
    "read": "plain loop",
    "unread": "plain loop, loss unread",
    "without": "loop without sync",
    "one": "one process, whole batch",
    "ddp": "DDP over gloo",
}
#: no peers: they do less, or have the GPU to themselves
YARDSTICKS = ("torch", "own", "read", "unread", "without", "one")


@dataclass(frozen=True)
class Job:
    """What is started once in a round."""

    part: str
    role: str
    ranks: int
    how: str = ""  #: empty for one rank, which shares with nobody
    path: str = ""  #: empty where weft chooses it

    @property
    def section(self) -> str:
        return section(self.part, self.ranks, self.how)


def section(part: str, ranks: int, how: str = "") -> str:
    named = f"{part}, {ranks} rank{'s' * (ranks > 1)}"
    return f"{named}, {how}" if how else named


def jobs(only: str, *, is_gpu: bool) -> Iterator[Job]:
    """All jobs of a round, in the order of the report."""
    ways = (TURNS, MPS) if is_gpu else (TURNS,)
    shared = [(ranks, how) for ranks in (2, 4) for how in ways]
    for part, role in (("collectives", "collectives"), ("tables", "tables"), ("training", "alone")):
        if only not in ("all", part):
            continue
        yield Job(part, role, 1)
        for ranks, how in shared:
            if part == "training":
                yield Job(part, "team", ranks, how)
                yield Job(part, "ranks", ranks, how)
                continue
            if part == "tables" and ranks > 2:
                continue
            yield Job(part, role, ranks, how)
            if part == "collectives" and is_gpu and (ranks, how) == (2, TURNS):
                yield from (Job(part, role, ranks, how, path) for path in PATHS)


#: section -> row -> party -> how many times faster weft is to be; below 1: may be slower
ASKED: dict[str, dict[str, dict[str, float]]] = {
    section("collectives", 2, TURNS): {
        "all_reduce 100 MB": {"gloo": 60},
        f"all_reduce 100 MB, {PATHS['host']}": {"gloo": 5},
    },
    section("collectives", 2, MPS): {"all_reduce 100 MB": {"gloo": 120}},
    section("tables", 1): {
        "get all": {"own": 0.85},
        "add all": {"own": 0.85},
        **{
            f"{what} rows{ids}": {"own": 0.7}
            for what in ("get", "add")
            for ids in ("", ", ids on the host")
        },
    },
    section("training", 1): {
        name(count): {party: 1 / 1.02}
        for name, party in ((step_of, "read"), (sync_of, "unread"))
        for count in gpu_jobs.BATCHES
    },
    section("training", 2, TURNS): {
        name(1024): {"one": 1 / 1.2} for name in (step_of, gpu_jobs.from_host, sync_of)
    },
    section("training", 2, MPS): {
        name(1024): {"one": 1 / 0.8} for name in (step_of, gpu_jobs.from_host, sync_of)
    },
}
#: section -> row -> what weft's seconds are to stay below
LIMITS: dict[str, dict[str, float]] = {
    section("collectives", 2, TURNS): {"all_reduce 1 KB": 80e-6, "all_reduce 1 MB": 300e-6},
    section("collectives", 2, MPS): {"all_reduce 1 KB": 80e-6, "all_reduce 1 MB": 80e-6},
}

#: section -> row -> party -> one number per round
Results = dict[str, dict[str, dict[str, list[float]]]]


def was_asked(job: Job) -> bool:
    """Whether there are figures that it is to reach."""
    rows = {**ASKED.get(job.section, {}), **LIMITS.get(job.section, {})}
    return any(not job.path or name.endswith(PATHS[job.path]) for name in rows)


def main() -> None:
    given = command.options(
        __doc__,
        rounds=1,
        quick_rounds=1,
        roles=ROLES,
        choices={"only": ("all", *PARTS), "device": ("cuda", "cpu")},
        seconds=LONGEST_RUN,
    )
    if given.role:
        ROLES[given.role](*given.place, device=given.device, quick=given.quick)
        return
    machine = answer(Job("", "facts", 0), given.device, quick=given.quick)
    if isinstance(machine, str):  # the other benchmarks are not to end by it
        print(f"gpu.py has measured nothing: {machine}", file=sys.stderr)
        return
    skipped: list[str] = []
    found: list[Line] = []
    for results in measured(given, skipped):
        found = lines(results)  # kept at once: the machine may be there for some minutes only
        command.keep("gpu", found, given, packages=PACKAGES, skipped=skipped, machine=machine)
    command.finish("gpu", found, given, packages=PACKAGES, skipped=skipped, machine=machine)


# the conductor: starts jobs, puts together what they print


def measured(given: Any, skipped: list[str]) -> Iterator[Results]:
    """What was found so far, after each job; what could not be measured goes to `skipped`."""
    in_order = list(jobs(given.only, is_gpu=given.device == "cuda"))
    results: Results = {job.section: {} for job in in_order}
    end = time.monotonic() + given.seconds
    for _ in range(given.rounds):
        for job in sorted(in_order, key=was_asked, reverse=True):
            told = ", ".join(filter(None, (job.section, job.role, PATHS.get(job.path))))
            began = time.monotonic()
            if began > end:
                skipped.append(f"{told}: no time left")
                continue
            found = answer(job, given.device, quick=given.quick)
            print(f"{told}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            if isinstance(found, str):
                skipped.append(f"{told}: {found}")
            else:
                add(results[job.section], found, job.path)
            yield results


def add(rows: dict[str, dict[str, list[float]]], found: Found, path: str) -> None:
    for name, seconds in found.items():
        row = rows.setdefault(f"{name}, {PATHS[path]}" if path else name, {})
        for party, number in seconds.items():
            row.setdefault(party, []).append(number)


def answer(job: Job, device: str, *, quick: bool) -> Any:
    """What a job has printed, or in words why it has printed nothing."""
    try:
        found = json.loads(printed(job, device, quick=quick))
    except (SystemExit, ValueError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return str(error).strip().splitlines()[-1]
    return found.get(NOT_AVAILABLE, found)


def printed(job: Job, device: str, *, quick: bool) -> str:
    """The line that a job prints last."""
    arguments = ["--role", job.role, "--device", device, *(["--quick"] if quick else [])]
    variables = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // max(job.ranks, 1)))}
    if device == "cuda":
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(os.environ)[:1])
    if job.path:
        variables[PATH] = job.path
    if job.role in ("facts", "alone", "team"):
        place = [str(job.ranks), "mps" * (job.how == MPS)] if job.role == "team" else []
        own = [sys.executable, str(HERE), *arguments, *place]
        return peers.printed(own, variables, LONGEST_JOB)
    options = ["--mps"] if job.how == MPS else []
    with tempfile.TemporaryDirectory() as folder:
        place = [str(Path(folder) / "meet")]
        return peers.under_weft(
            HERE,
            job.ranks,
            [*arguments, *place],
            options,
            variables=variables,
            longest=LONGEST_JOB,
        )


def lines(results: Results) -> list[Line]:
    found = []
    for place, rows in results.items():
        for name, row in rows.items():
            limit = LIMITS.get(place, {}).get(name)
            if limit is not None:  # besides what the parties needed
                found.append(Line(place, name, row["weft"], limit=limit))
            asked = ASKED.get(place, {}).get(name)
            found += lines_of(place, name, row, labels=LABELS, asked=asked, yardsticks=YARDSTICKS)
    return found


ROLES: dict[str, Callable[..., None]] = {
    "facts": gpu_jobs.facts_job,
    "collectives": gpu_jobs.collectives_job,
    "tables": gpu_jobs.tables_job,
    "alone": gpu_jobs.alone_job,
    "team": gpu_jobs.team_job,
    "ranks": gpu_jobs.ranks_job,
}

if __name__ == "__main__":
    main()
