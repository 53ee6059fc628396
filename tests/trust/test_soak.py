"""An hour of mixed calls from eight threads, with edits, kills, time limits and cancellations:
every result is that of serial, and nothing grows. `make soak` runs it; WEFT_SOAK_SECONDS=60 makes
it a minute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from tests.support import marked_processes
from tests.trust import soak
from weft.resources import count_cores

SECONDS = float(os.environ.get("WEFT_SOAK_SECONDS", "3600"))

#: the part of a process's life that is not looked at, and its seconds at least: modules are
#: imported, pools start, caches fill
WARM_UP, WARM_UP_SECONDS = 0.1, 10.0

#: by how much a process's median may grow from the first third of its life to the last. Memory:
#: the calls under way have some MB for each of eight threads, malloc keeps as much again for each
#: of its arenas, and caches have their bounds; a leak of 1 KB a call would be hundreds of MB in an
#: hour. Descriptors and threads: each caller is in another call at any time, which holds a few.
LIMITS = {"threads": 8, "descriptors": 8, "memory": 50 << 20}

#: samples after the warm-up from which on a process is judged by itself
ENOUGH = 30


@dataclass(frozen=True)
class Sample:
    """What one process had at one time."""

    threads: int
    descriptors: int
    memory: int


class Recorder(threading.Thread):
    """Looks at all processes of a program, again and again, until the program has ended."""

    def __init__(self, program: subprocess.Popen[str], gap: float) -> None:
        super().__init__(name="recorder")
        self._program, self._gap = program, gap
        #: how many processes there were at each time
        self.counts: list[int] = []
        #: by number and start of the process, and whether it has loaded torch, which is no growth
        self.processes: dict[tuple[int, str, bool], list[Sample]] = {}

    def run(self) -> None:
        while self._program.poll() is None:
            present = [pid for pid in marked_processes() if self._look(pid)]
            self.counts.append(len(present))
            time.sleep(self._gap)

    def _look(self, pid: int) -> bool:
        folder = Path(f"/proc/{pid}")
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            sample = Sample(
                threads=int(fields[17]),
                descriptors=len(os.listdir(folder / "fd")),
                memory=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
            )
            with_torch = "libtorch_cpu" in (folder / "maps").read_text()
        except (OSError, IndexError):  # it has ended
            return False
        self.processes.setdefault((pid, fields[19], with_torch), []).append(sample)
        return True

    def thirds(self, values: list[int]) -> tuple[float, float] | None:
        """Return the medians of the first and of the last third, after the warm-up; None of too
        few values."""
        values = values[int(max(WARM_UP * len(values), WARM_UP_SECONDS / self._gap)) :]
        third = len(values) // 3
        return (median(values[:third]), median(values[-third:])) if third > ENOUGH // 3 else None


def run(seconds: float, folder: Path) -> tuple[dict[str, int], Recorder]:
    """Run the program, and return how often it made each call, and what was recorded of it."""
    folder.mkdir()
    program = subprocess.Popen(
        [sys.executable, soak.__file__, str(seconds), "1", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        # a module that is edited twice in a second is not to be found in a cache of bytecode
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    recorder = Recorder(program, gap=max(0.5, seconds / 1200))
    recorder.start()
    try:
        out, _ = program.communicate(timeout=seconds + 2 * soak.HANGS)
    finally:
        program.kill()
        recorder.join()
    found = json.loads(out) if out else {"troubles": ["it ended by itself: see stderr"]}
    assert not found["troubles"], "\n".join(found["troubles"])
    assert program.returncode == 0
    return found["calls"], recorder


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 3 * soak.HANGS)
def test_an_hour_of_mixed_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every result is that of serial; processes, descriptors, threads and memory are flat."""
    calls, recorder = run(SECONDS, tmp_path / "soak")
    first, last = recorder.thirds(recorder.counts) or (0, 0)
    assert first, "the run was too short to tell"
    lines = [f"{SECONDS:.0f} s of mixed calls: {json.dumps(calls, sort_keys=True)}"]
    lines += [f"processes: {first:g}, in the last third {last:g}, at most {max(recorder.counts)}"]
    troubles = [] if last <= first + 1 else [f"{last:g} processes, and {first:g} at first"]
    # the driver, a fork server, a worker for each core and each rank, and as many that still end
    # while their successors start
    most = 2 + 2 * (count_cores()[0] + soak.RANKS - 1)
    if max(recorder.counts) > most:
        troubles.append(f"{max(recorder.counts)} processes at once; expected {most} at most")
    for (pid, _, with_torch), samples in recorder.processes.items():
        grown = {
            name: medians
            for name in LIMITS
            if (medians := recorder.thirds([getattr(sample, name) for sample in samples]))
        }
        if grown:
            line = f"process {pid}{', with torch' * with_torch}: {describe(grown, len(samples))}"
            lines.append(line)
            if any(last > first + LIMITS[name] for name, (first, last) in grown.items()):
                troubles.append(f"has grown: {line}")
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert not troubles, "\n".join(troubles)


def test_seconds_of_mixed_calls(tmp_path: Path) -> None:
    """The same for a few seconds, in which nothing can be said about growth."""
    calls, _ = run(5, tmp_path / "soak")
    assert calls["mapped"]


def describe(grown: dict[str, tuple[float, float]], samples: int) -> str:
    """Return medians of a process, in the first third of its life and in the last."""
    figures = {**grown, "memory": [figure / 2**20 for figure in grown["memory"]]}
    words = [f"{name} {first:.0f} -> {last:.0f}" for name, (first, last) in figures.items()]
    return f"{', '.join(words)} MB, in {samples} samples"
