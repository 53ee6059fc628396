"""The three ways of weft on this machine, each timed beside one process: `make demo`.

Every result is checked. There are bars where this runs in a terminal, and none in a log file.
"""

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from digits_table import CLASSES, POINTS, accuracy, draw_digits, slope
from tqdm import tqdm

import weft
from weft import resources

FOLDER = Path(__file__).parent
WIDTH = 79
#: how many processes; more than eight learn no faster from one small table
N = max(2, min(resources.count_cores()[0], 8))
#: whether bars are drawn: a log file gets lines only
BARS = sys.stderr.isatty()

Array = np.ndarray
#: seconds of one process and of N, and the share of digits that were right
Measured = tuple[float, float, float]


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)  # so that lines and bars keep their order
    began, load = time.perf_counter(), os.getloadavg()[0]
    cores = resources.count_cores()[0]
    say(
        f"weft {weft.__version__} with Python {platform.python_version()} on {cores} cores. "
        f"Each job is done by one process, then by {N}; they are started before the clock runs."
    )
    measured = {"table": show_table(), "function": show_function(), "map": show_map()}
    show_losses()
    summarise(measured)
    if load > cores / 2:
        say(f"The load was {load:.1f} at the start: speed-ups are larger on a machine at rest.")
    print(f"\n{len(CHECKED)} checks in {time.perf_counter() - began:.0f} s")
    print("demo: all checks passed")


# ---- a table


def show_table() -> Measured:
    title("A table: ranks learn to read digits, with weights that all of them share")
    script = str((FOLDER / "digits_table.py").relative_to(FOLDER.parent))
    alone, right_alone = train(["python", script])
    together, right = train(["weft", "run", "-n", str(N), "--no-prefix", script])
    check(min(right_alone, right) > 0.9, "nine of ten new digits are read, and more")
    check(abs(right - right_alone) < 0.03, f"{N} ranks at their own pace read as well as one")
    return alone, together, right


def train(command: list[str]) -> tuple[float, float]:
    """Run the program, show its steps as a bar; its seconds, and the share of digits it reads."""
    print(f"$ {' '.join(command)}")
    program = {"python": [sys.executable], "weft": [sys.executable, "-m", "weft"]}[command[0]]
    line, begun = "", 0
    with (
        subprocess.Popen(
            [*program, *command[1:], "tell"], stdout=subprocess.PIPE, text=True, cwd=FOLDER.parent
        ) as process,
        bar(20, "steps") as progress,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            begun += line.startswith("step ")
            progress.update(begun - 1 - progress.n)
        progress.update(progress.total - progress.n)
    print(line, end="")
    found = re.search(r": (\S+) of .* after (\S+) s", line)
    if process.returncode or not found:
        sys.exit(f"demo: FAILED: exit code {process.returncode} where 0 was expected")
    return float(found[2]), float(found[1])


# ---- a function


def show_function() -> Measured:
    title("A function: its rows are split over all cores, its mean is that of all rows")
    generator = np.random.default_rng(1)
    images, digits = draw_digits(2_001, generator)
    known, names = draw_digits(1_600, generator)
    sizes = range(200, 1_601, 200)

    with weft.Team(N) as team:
        distributed = weft.function(
            read_by_nearest, collect="mean", whole=["known", "names"], team=team
        )
        team.send()
        runs = []
        for label, fun in (("1 process", distributed.serial), (f"{N} processes", distributed)):
            began, shares = time.perf_counter(), []
            with bar(len(sizes), label) as progress:
                for size in sizes:
                    shares.append(fun(images, digits, known[:size], names[:size]))
                    progress.update()
            runs.append((time.perf_counter() - began, shares))
            print(f"{label}: {len(sizes)} calls took {runs[-1][0]:.2f} s")
    (alone, expected), (together, found) = runs
    print(
        f"of {len(images):,} digits {found[0]:.3f} are right when {sizes[0]} are known, "
        f"{found[-1]:.3f} when {sizes[-1]:,} are"
    )
    check(np.allclose(found, expected, rtol=1e-12), "every mean is that of one process")
    return alone, together, found[-1]


def read_by_nearest(images: Array, digits: Array, known: Array, names: Array) -> float:
    """The share of images whose digit is that of the known image with the fewest differences."""
    nearest, differences = [], np.empty_like(known)  # one array for all images
    for image in images:
        np.subtract(known, image, out=differences)
        np.abs(differences, out=differences)
        nearest.append(names[differences.sum(axis=1).argmin()])
    return float((nearest == digits).mean())


# ---- a map


def show_map() -> Measured:
    title("A map: one function for many items, here how fast to learn")
    rates = [float(rate) for rate in np.geomspace(0.002, 2.0, 24)]
    weft.map(abs, range(N), n=N)  # the workers have started
    runs = []
    for label, engine in (("1 process", "serial"), (f"{N} processes", "local")):
        began = time.perf_counter()
        shares = weft.map(
            learn, rates, n=N, engine=engine, seed=1, progress=label if BARS else False
        )
        runs.append((time.perf_counter() - began, shares))
        print(f"{label}: {len(rates)} items took {runs[-1][0]:.2f} s")
    (alone, expected), (together, found) = runs
    best = int(np.argmax(found))
    print(f"the best rate is {rates[best]:.2f}: {found[best]:.3f} of the digits are right")
    check(found == expected, "all results are those of one process, to the last bit")
    check(len(set(found)) > len(rates) / 2, "random numbers are each item's own")
    return alone, together, found[best]


def learn(rate: float) -> float:
    """The share of new digits that are read after some steps at this rate."""
    generator = np.random.default_rng(np.random.randint(2**31))
    weights = np.zeros((POINTS + 1, CLASSES))
    for _ in range(300):
        weights -= rate * slope(weights, *draw_digits(50, generator))
    return accuracy(weights, *draw_digits(1_000, generator))


# ---- when a process dies


def show_losses() -> None:
    title("A worker is killed")
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder) / "mark"

        def fragile(item: int) -> int:
            if item == 7 and not mark.exists():
                mark.touch()  # only the first time
                os.kill(os.getpid(), signal.SIGKILL)
            return item * item

        try:
            weft.map(fragile, range(10), n=N)
        except weft.WorkerLost as error:
            say(f"WorkerLost: {error}")
            check("killed by SIGKILL while it ran item 7" in str(error), "map says who and how")
        check(mark.exists(), "the worker was killed")
        mark.unlink()
        squares = weft.map(fragile, range(10), n=N, retries=1)
        check(squares == [item * item for item in range(10)], "with retries=1 nothing is missing")

    title("A rank is killed")
    command = "weft run -n 3 --keep-going --no-prefix examples/survive.py"
    print(f"$ {command}")
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        capture_output=True,
        text=True,
        cwd=FOLDER.parent,
        check=False,
    )
    for line in done.stdout.replace(f"{FOLDER.parent}{os.sep}", "").splitlines():
        say(line)
    check(done.returncode == 128 + signal.SIGKILL, "the exit code is that of the killed rank")
    check("lost rank 1" in done.stdout, "the others are told who was lost, and how")
    check(done.stdout.count("of 2 survivors went on") == 2, "they go on without it")


# ---- what is printed


def summarise(measured: dict[str, Measured]) -> None:
    title("Summary")
    print(f"{'':10}{'1 process':>12}{f'{N} processes':>14}{'speed-up':>11}{'accuracy':>11}")
    for name, (alone, together, right) in measured.items():
        print(f"{name:10}{alone:10.2f} s{together:12.2f} s{alone / together:9.1f} x{right:11.3f}")


#: what has been found to be true
CHECKED: list[str] = []


def check(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"demo: FAILED: {what}")
    CHECKED.append(what)
    print(f"checked: {what}")


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def say(text: str) -> None:
    """Print a text in lines that every terminal has room for."""
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ") if len(text) > WIDTH else [text]
    print("\n".join(lines))


@contextmanager
def bar(total: int, label: str) -> Iterator[tqdm]:
    with tqdm(total=total, desc=label, ncols=WIDTH, disable=not BARS) as progress:
        yield progress


if __name__ == "__main__":
    main()
