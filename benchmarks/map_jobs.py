"""What the jobs of benchmarks/map.py do: one peer and weft, taking turns.

    open the peer, then weft    what forks does so before weft has threads
    private memory              of workers that have read nothing, of workers that have
    for each row                check the results, warm up, then per repetition and peer:
                                make arrays anew, wait until all is quiet,
                                clock, calls, clock

The job prints row -> peer -> number as one line of JSON: seconds, and in PRIVATE bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import map_peers
from map_peers import WORKERS, Executor, Peer
from peers import installed
from table_jobs import pattern

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.floating[Any]]

Call = Callable[[], list[Any]]

LARGE = 25_000_000  # float32: 100 MB
COMMON = 100_000_000  # float32: 400 MB
READERS = 8
UNEVEN, UNEVEN_SECONDS = 200, 2.0

#: seconds: one repetition is not to take much longer, nor all of one row and peer
LONGEST_REPETITION, LONGEST_ROW = 0.05, 1.5
QUIET = 0.02  # seconds in which this process has next to nothing to do
HELD = 0.02  # seconds for which an item keeps its worker, so that all workers get some

PRIVATE = "private memory of a worker"  # bytes beyond one that has read nothing


class Prepared(NamedTuple):
    """How to get a call that has arrays of its own, and what it is to return."""

    fresh: Callable[[], Call]
    expected: Sequence[Any]


Prepare = Callable[[Peer], Prepared | None]


def job(peer: str, folder: str, *, quick: bool, beside_weft: bool) -> None:
    common = common_array()
    with contextlib.ExitStack() as stack:
        opened: dict[str, Peer] = {}
        for name in dict.fromkeys([peer, *(["weft"] if beside_weft else [])]):
            opened[name] = map_peers.MAKE[name](common, folder)
            stack.callback(opened[name].close)
        found = memory_row(opened) if installed("psutil") else {}
        for row in ROWS:
            found |= measured(row, opened, quick=quick)
    print(json.dumps(found), flush=True)


def measured(row: Row, opened: Mapping[str, Peer], *, quick: bool) -> dict[str, dict[str, float]]:
    """Nothing where a peer has no such way."""
    prepared = {
        name: (row.theirs or row.prepare)(peer) if name != "weft" else row.prepare(peer)
        for name, peer in opened.items()
    }
    calls = {name: one.fresh for name, one in prepared.items() if one}
    if len(calls) < len(opened):
        return {}
    for name, one in prepared.items():
        if one:
            check(f"{name}, {row.name}", one)
    repetitions = row.repetitions // 2 if quick else row.repetitions
    return {row.name: taking_turns(calls, row.calls, repetitions)}


def check(what: str, prepared: Prepared) -> None:
    import numpy as np

    found = prepared.fresh()()
    pairs = zip(found, prepared.expected, strict=True)
    wrong = [place for place, (a, b) in enumerate(pairs) if not np.array_equal(a, b)]
    if wrong:
        sys.exit(f"{what}: results {wrong} are wrong")


def taking_turns(
    calls: Mapping[str, Callable[[], Call]], count: int, repetitions: int
) -> dict[str, float]:
    """Median seconds of a call; a quick one is made several times in a repetition."""
    warm = {name: timed(fresh) for name, fresh in calls.items()}
    counts = {
        name: max(1, min(count, int(LONGEST_REPETITION / seconds)))
        for name, seconds in warm.items()
    }
    longest = max(counts[name] * seconds for name, seconds in warm.items())
    repetitions = max(3, min(repetitions, int(LONGEST_ROW / longest)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, fresh in calls.items():
            seconds[name].append(timed(fresh, counts[name]))
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(fresh: Callable[[], Call], count: int = 1) -> float:
    """Seconds of one call; neither making its arrays nor dropping its results counts."""
    calls = [fresh() for _ in range(count)]
    kept = []
    settle()
    began = time.perf_counter()
    for call in calls:
        kept.append(call())
    return (time.perf_counter() - began) / count


def settle() -> None:
    """Wait a while for what the one before has left to do: Dask forgets its futures later."""
    for _ in range(50):
        began = time.process_time()
        time.sleep(QUIET)
        if time.process_time() - began < QUIET / 10:
            return


# the rows, each made ready for a peer


def trivial(peer: Peer, count: int) -> Prepared:
    return same(partial(peer.map, negative, range(count)), [-item for item in range(count)])


def trivial_chunked(peer: Peer) -> Prepared | None:
    """As the others do by themselves."""
    if not isinstance(peer, Executor):
        return None
    call = partial(peer.map_chunked, negative, range(1000))
    return same(call, [-item for item in range(1000)])


def arrays_in(peer: Peer) -> Prepared:
    arrays = large_arrays()
    return Prepared(
        lambda: partial(peer.map_large, largest, [array.copy() for array in arrays]),
        [array.max() for array in arrays],
    )


def arrays_given(peer: Peer) -> Prepared | None:
    arrays = large_arrays()
    given = peer.given(arrays)
    if given is None:
        return None
    return same(partial(peer.map, largest, given), [array.max() for array in arrays])


def arrays_out(peer: Peer) -> Prepared:
    import numpy as np

    expected = [np.broadcast_to(np.float32(item), LARGE) for item in range(WORKERS)]
    return same(partial(peer.map, filled, range(WORKERS)), expected)


def all_read(peer: Peer) -> Prepared:
    return same(
        partial(peer.reading(largest_of_all), range(READERS)), part_results()[-1:] * READERS
    )


def parts_read(peer: Peer) -> Prepared:
    return same(partial(peer.reading(largest_of_part), range(READERS)), part_results())


def parts_read_in_call(peer: Peer) -> Prepared | None:
    reading = peer.reading_in_call(largest_of_part)
    return None if reading is None else same(partial(reading, range(READERS)), part_results())


def uneven(peer: Peer) -> Prepared:
    lengths = uneven_lengths()
    return same(partial(peer.map, busy, lengths), lengths)


def same(call: Call, expected: Sequence[Any]) -> Prepared:
    return Prepared(lambda: call, expected)


@dataclass(frozen=True)
class Row:
    """One way of mapping; so many calls in one repetition at most, so many repetitions at most."""

    name: str
    prepare: Prepare
    calls: int
    repetitions: int
    #: what others do, where that is something else
    theirs: Prepare | None = None


ROWS = (
    Row("2 trivial items", partial(trivial, count=2), calls=50, repetitions=21),
    Row("1,000 trivial items", partial(trivial, count=1000), calls=10, repetitions=21),
    Row(
        "1,000, chunks by hand",
        partial(trivial, count=1000),
        calls=10,
        repetitions=21,
        theirs=trivial_chunked,
    ),
    Row("2 x 100 MB in", arrays_in, calls=1, repetitions=7),
    Row("2 x 100 MB given before", arrays_given, calls=1, repetitions=15),
    Row("given before, theirs in call", arrays_given, calls=1, repetitions=7, theirs=arrays_in),
    Row("2 x 100 MB out", arrays_out, calls=1, repetitions=7),
    Row("8 items read 400 MB each", all_read, calls=1, repetitions=7),
    Row("8 items read an eighth each", parts_read, calls=1, repetitions=15),
    Row("the same, given in the call", parts_read_in_call, calls=1, repetitions=5),
    Row("200 uneven items", uneven, calls=1, repetitions=3),
)


# what workers do


def negative(item: int) -> int:
    return -item


def largest(array: Array) -> float:
    return float(array.max())


def filled(item: int) -> Array:
    import numpy as np

    return np.full(LARGE, item, np.float32)


def largest_of_all(_item: int, array: Array) -> float:
    return float(array.max())


def largest_of_part(item: int, array: Array) -> float:
    part = COMMON // READERS
    return float(array[item * part : (item + 1) * part].max())


def busy(seconds: float) -> float:
    """Computing, but by the clock: a slower processor makes no item longer."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return seconds


def private_bytes(_item: int, array: Array | None = None) -> tuple[int, int]:
    """The worker, and the size of its own memory while it holds the array that it has read."""
    import numpy as np
    import psutil

    (np.zeros(1) if array is None else array).max()
    time.sleep(HELD)
    return os.getpid(), psutil.Process().memory_full_info().uss


# what they get


def large_arrays() -> list[Array]:
    return [pattern((LARGE,)) + number for number in range(WORKERS)]


def common_array() -> Array:
    """Each eighth begins with its largest number, the last with the largest of all."""
    array = pattern((COMMON,))
    array[:: COMMON // READERS] = part_results()
    return array


def part_results() -> list[float]:
    return [1021.0 + part for part in range(READERS)]


def uneven_lengths() -> list[float]:
    """Seconds, log-normal: half are below 3.1 ms and one is 0.2 s. Handed out one by one in this
    order they end 1.2 % after the best schedule, in eight chunks 26 %."""
    import numpy as np

    lengths = np.random.default_rng(5).lognormal(sigma=1.5, size=UNEVEN)
    return [float(length) for length in lengths * (UNEVEN_SECONDS / lengths.sum())]


def best_schedule() -> float:
    """Seconds below which no schedule can come."""
    lengths = uneven_lengths()
    return max(*lengths, sum(lengths) / WORKERS)


# memory


def memory_row(opened: Mapping[str, Peer]) -> dict[str, dict[str, float]]:
    """Bytes that reading the common array adds to a worker: the worker to which it adds most."""
    found = {}
    for name, peer in opened.items():
        idle = by_worker(peer.map(private_bytes, range(READERS)))
        reading = peer.reading(private_bytes)
        reading(range(READERS))
        read = by_worker(reading(range(READERS)))
        # a worker that was not there before is compared with those that were
        usual = statistics.median(idle.values())
        found[name] = max(size - idle.get(worker, usual) for worker, size in read.items())
    return {PRIVATE: found}


def by_worker(sizes: Sequence[tuple[int, int]]) -> dict[int, float]:
    """The least of each worker's: a shared page that nobody else has mapped at the moment counts
    as its own, one that is its own counts always."""
    return {worker: min(size for other, size in sizes if other == worker) for worker, _ in sizes}
