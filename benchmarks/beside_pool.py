"""Map beside multiprocessing.Pool alone: trivial items, also on a busy machine, bytes and text.

    python benchmarks/beside_pool.py                  2 workers, 4 busy processes
    python benchmarks/beside_pool.py --workers 16     as many busy processes as two for each core

Both have workers that are ready, and take turns in an order drawn by lot, so that a noisy moment
hurts both alike. A turn is some calls in a row, of ten milliseconds together. The table has medians
over turns, and the median of the ratios of pairs of turns: above 1, weft is faster. Nothing is
kept; `map.py` measures more peers, for docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import weft

#: seconds for which a row is measured, of a turn, and before it, for what the other has left to do
LONGEST_ROW, TURN, PAUSE = 5.0, 0.01, 0.002

Map = Callable[[Callable[[Any], Any], Any], list[Any]]


class Row(NamedTuple):
    """What is mapped, and what comes out of it."""

    name: str
    function: Callable[[Any], Any]
    items: Any
    expected: list[Any]
    #: whether other processes keep the machine busy
    busy: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=LONGEST_ROW, help="for each row")
    given = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    # first, as it forks
    with multiprocessing.get_context("fork").Pool(given.workers) as pool:
        both: dict[str, Map] = {
            "weft": lambda function, items: weft.map(function, items, n=given.workers),
            "pool": pool.map,
        }
        print(f"{given.workers} workers, {cores} cores, Python {sys.version.split()[0]}")
        print(f"{'':28}{'weft ms':>10}{'Pool ms':>10}{'ratio':>8}{'quarters':>16}{'pairs':>7}")
        for row in rows(given.workers):
            with busy_processes(2 * cores if row.busy else 0):
                print(line(row.name, pairs(row, both, given.seconds)), flush=True)
    weft.shutdown()


def rows(workers: int) -> Iterator[Row]:
    counts = 2, 16, 1000, 10_000
    for busy in (False, True):
        for count in counts:
            name = f"{count:,} trivial items{', busy' if busy else ''}"
            yield Row(name, negative, range(count), [-item for item in range(count)], busy)
    size = 100_000_000 // max(1, workers // 2)  # so that many workers need no more memory
    for kind, value in (("bytes", bytes(size)), ("text", "t" * size)):
        name = f"{workers} x {size // 1_000_000} MB of {kind}"
        yield Row(f"{name} in", len, [value] * workers, [size] * workers)
        function = as_bytes if kind == "bytes" else as_text
        yield Row(f"{name} out", function, [size] * workers, [value] * workers)


def pairs(row: Row, both: dict[str, Map], seconds: float) -> list[tuple[float, float]]:
    """Return the seconds of a call, weft's and Pool's, of each pair of turns."""
    for name, one in both.items():
        if one(row.function, row.items) != row.expected:
            sys.exit(f"{name}, {row.name}: wrong results")
    found: list[tuple[float, float]] = []
    order = random.Random(len(row.expected))
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        taken = {name: turn(row, both[name]) for name in order.sample(list(both), 2)}
        found.append((taken["weft"], taken["pool"]))
    return found


def turn(row: Row, one: Map) -> float:
    """Return the seconds of a call, on average of some calls in a row."""
    time.sleep(PAUSE)
    calls, began = 0, time.perf_counter()
    while not calls or time.perf_counter() - began < TURN:
        one(row.function, row.items)
        calls += 1
    return (time.perf_counter() - began) / calls


def line(name: str, found: list[tuple[float, float]]) -> str:
    ours, theirs = (statistics.median(column) * 1000 for column in zip(*found, strict=True))
    ratios = [pool / weft for weft, pool in found]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    quarters = f"{low:.2f} to {high:.2f}"
    return f"{name:28}{ours:10.3f}{theirs:10.3f}{ratio:8.2f}{quarters:>16}{len(found):7}"


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def negative(item: int) -> int:
    return -item


def as_bytes(size: int) -> bytes:
    return bytes(size)


def as_text(size: int) -> str:
    return "t" * size


if __name__ == "__main__":
    main()
