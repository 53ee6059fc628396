"""Run everything that `make test` is: lint, types, every test.

    beside      some at a time: what can wait for its turn
    alone       afterwards, one by one: tests with the marker `alone`, which measure times

A test says by itself that it must have the machine to itself, with `@pytest.mark.alone`, or
a file that all of its tests must, with `pytestmark = pytest.mark.alone`; all others run
beside something else. What fails holds up nothing. In the end every failure is listed, with
the command that repeats it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
#: what takes more than some ten seconds, the longest first: whatever begins last should be short
SLOW = (
    "engines/ray/test_pool.py",
    "engines/mpi/test_service.py",
    "engines/mpi/test_tables.py",
    "engines/ray/test_cluster.py",
    "engines/ray/test_node.py",
    "test_documents.py",
    "failures/test_points_and_deadlines.py",
    "test_examples.py",
    "engines/mpi/test_group.py",
    "seeds/test_synkhronos.py",
    "contracts/test_pool.py",
    "adapters/test_apart.py",
    "failures/test_collectives.py",
    "contracts/test_group.py",
    "trust/test_07_nothing_grows.py",
    "failures/test_points.py",
    "trust/test_10_time_limits.py",
    "contracts/test_collectives.py",
    "contracts/test_tables.py",
    "engines/mpi/test_launcher.py",
    "failures/test_functions.py",
    "engines/mpi/test_speaker.py",
    "contracts/test_team.py",
    "failures/test_giving_up.py",
    "failures/test_tables.py",
    "seeds/test_multiverso.py",
    "seeds/test_playdoh.py",
    "_api/test_training.py",
    "engines/ray/test_placement.py",
    "engines/ray/test_arrays.py",
    "engines/local/tables/test_store_device.py",
    "_api/test_training_device.py",
    "_api/test_models.py",
    "engines/local/tables/test_store.py",
    "failures/test_interrupts.py",
    "failures/test_functions_interrupted.py",
    "engines/local/collectives/test_pipelined_memory.py",
    "engines/local/meeting/test_rendezvous.py",
    "trust/test_01_values.py",
    "trust/test_06_no_storm.py",
    "trust/test_03_random.py",
    "trust/test_02_collect.py",
    "trust/test_04_edited_modules.py",
    "trust/test_08_one_pool.py",
    "_api/test_mapping.py",
    "failures/test_table_histories.py",
    "engines/local/collectives/test_collective.py",
    "trust/test_soak.py",
    "trust/test_12_beside_pool.py",
    "contracts/test_tensors.py",
    "seeds/test_multiverso_torch.py",
    "failures/test_map.py",
    "failures/test_map_points.py",
    "failures/test_map_drivers.py",
    "test_readme.py",
    "test_package.py",
    "trust/test_05_driver_state.py",
    "_api/test_sharing.py",
    "_api/test_functions.py",
)
#: parts at a time: two more than there are cores, up to four of them, as many tests wait for
#: deadlines, and those on hosts for mpirun
AT_ONCE = min(len(os.sched_getaffinity(0)), 4) + 2
#: files of one pytest, where they are short: each start of it takes a second
BUNDLE = 8
#: seconds after which a part is ended; every test has a limit of its own, which comes first
LIMIT = 1800
PYTEST = (sys.executable, "-m", "pytest", "-q", "-rfE", "--continue-on-collection-errors")
#: how pytest ends if all tests passed, and if some failed; else not all may have run
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Part:
    """One command of the run."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def repeat(self, *what: str) -> str:
        """The command line that runs this again, or only some tests of it."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        command = [*PYTEST[:3], *what] if what else self.command
        return shlex.join([*variables, *command])


#: where there is no compiler NumPy does what the kernels do; two ranks show it
WITHOUT_KERNELS = Part(
    "contracts without kernels",
    (*PYTEST, "tests/contracts", "-k", "run-2 and (collectives or tables or tensors)"),
    {"WEFT_KERNELS": "0"},
)


@dataclass(frozen=True)
class Result:
    """How a part ended: the commands that repeat what failed."""

    part: Part
    seconds: float
    output: str
    failures: tuple[str, ...]


def main() -> int:
    began = time.monotonic()
    beside, alone = parts()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = [pool.submit(run, part) for part in beside]
        results = [show(done.result()) for done in as_completed(started)]
    results += [show(run(part)) for part in alone]
    failures = [failure for result in results for failure in result.failures]
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    print(f"\n{len(results)} parts in {minutes} min {seconds} s", end="")
    if not failures:
        print(": all passed")
        return 0
    print(f"; {len(failures)} failed, repeat them with")
    for failure in failures:
        print(f"    {failure}")
    return 1


def parts() -> tuple[list[Part], list[Part]]:
    """What runs beside something else, longest first, and what runs alone."""
    files = sorted(TESTS.rglob("test_*.py"))
    alone = [path for path in files if "pytest.mark.alone" in path.read_text()]
    wholly = {path for path in alone if "pytestmark = pytest.mark.alone" in path.read_text()}
    slow = [TESTS / name for name in SLOW]
    if lost := set(slow) - set(files):
        sys.exit(f"tests/run.py: SLOW names what is not there: {sorted(map(str, lost))}")
    short = [path for path in files if path not in wholly and path not in slow]
    beside = [
        *(pytest(path) for path in slow),
        Part("types", (sys.executable, "-m", "mypy")),
        WITHOUT_KERNELS,
        *(pytest(*short[start : start + BUNDLE]) for start in range(0, len(short), BUNDLE)),
        Part("lint", (sys.executable, "-m", "ruff", "check", ".")),
        Part("format", (sys.executable, "-m", "ruff", "format", "--check", ".")),
    ]
    return beside, [pytest(path, marked="alone and not soak") for path in alone]


def pytest(*paths: Path, marked: str = "not alone and not soak") -> Part:
    names = [str(path.relative_to(ROOT)) for path in paths]
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return Part(name, (*PYTEST, "-m", marked, *names))


def run(part: Part) -> Result:
    """Run a part to its end; nothing that it does is raised here."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            part.command,
            cwd=ROOT,
            env={**os.environ, **part.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT,
        )
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        output, code = f"{output}\nended after {LIMIT} s", -1
    failures = [part.repeat(test) for test in failed_tests(output)] if code != PASSED else []
    if code not in (PASSED, FAILED) or (code == FAILED and not failures):
        failures.append(part.repeat())
    return Result(part, time.monotonic() - began, output, tuple(failures))


def failed_tests(output: str) -> Iterator[str]:
    """The tests that pytest's summary tells of."""
    for line in output.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("FAILED", "ERROR") and ".py" in rest:
            yield rest.partition(" - ")[0]


def show(result: Result) -> Result:
    """Print a line for what passed, everything for what failed."""
    last = (result.output.strip().splitlines() or [""])[-1].strip("= ")
    how = "FAILED" if result.failures else "ok"
    print(f"{how:6} {result.seconds:6.1f} s  {result.part.name}: {last}", flush=True)
    if result.failures:
        print(result.output, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
