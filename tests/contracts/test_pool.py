"""What every engine's pool does. Each test runs on every engine and size."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import deadline, wait_until, within
from weft._api.mapping import make_pool
from weft._core.items import ColumnSlice, Finished, Job, Window
from weft._core.seeding import derive
from weft.engines.base import Pool
from weft.errors import Cancelled, RemoteTraceback, Stalled

Process = tuple[str, int]


def process() -> Process:
    """Which process this is, on which host."""
    return socket.gethostname(), os.getpid()


def lives_here(one: Process) -> bool:
    """Whether a process of this host runs."""
    host, pid = one
    assert host == socket.gethostname()
    return Path(f"/proc/{pid}").exists()


def lives_there(one: Process) -> bool:
    """Whether a process of any host of the cluster runs."""
    host, pid = one
    pool = make_pool("ray", 4)
    found = by_index(
        run(pool, lambda _: (process()[0], Path(f"/proc/{pid}").exists()), range(4), one_each=True)
    )
    return dict(found)[host]


#: where these tests run on a host of a cluster (test_pool_over_hosts.py), its engine's pools
OVER_HOSTS = os.environ.get("WEFT_TEST_POOLS") == "ray"
SHARES = OVER_HOSTS  # actors are started once
CASES = [("ray", 4)] if OVER_HOSTS else [("serial", 1), ("local", 1), ("local", 2), ("local", 4)]
#: by engine: whether one of its processes, on whatever host, runs
LIVES: dict[str, Callable[[Process], bool]] = {
    "serial": lives_here,
    "local": lives_here,
    "ray": lives_there,
}


@pytest.fixture(params=CASES, ids=[f"{name}-{size}" for name, size in CASES])
def pool(request: pytest.FixtureRequest) -> Pool:
    made = make_pool(*request.param)
    assert made.size == request.param[1]
    return made


@pytest.fixture
def lives(request: pytest.FixtureRequest, pool: Pool) -> Callable[[Process], bool]:
    """Whether a process of the pool runs."""
    engine, _ = request.node.callspec.params["pool"]
    return LIVES[engine]


def run(pool: Pool, function: Any, items: Iterable[Any], **options: Any) -> list[Finished]:
    return list(pool.run(Job(pool.prepare(function), items, **options)))


def by_index(parts: list[Finished]) -> list[Any]:
    """The results or failures in the order of their items, each of them once."""
    found: dict[int, Any] = {}
    for part in parts:
        assert set(part.failures) <= set(range(part.first, part.first + len(part.values)))
        for position, value in enumerate(part.values, part.first):
            assert position not in found
            found[position] = part.failures.get(position, value)
    assert list(range(len(found))) == sorted(found)
    return [found[index] for index in range(len(found))]


def test_every_item_is_run_once(pool: Pool) -> None:
    """Each under its own index, from lists and generators, short and long, also when there are
    fewer than workers or none."""
    for items in ([], [3], list(range(7)), list(range(3000))):
        expected = [x * x for x in items]
        assert by_index(run(pool, lambda x: x * x, items)) == expected
        assert by_index(run(pool, lambda x: x * x, iter(items))) == expected
    uneven = by_index(run(pool, lambda x: time.sleep(x) or x, [0.02, 0, 0, 0.01, 0, 0, 0.005]))
    assert uneven == [0.02, 0, 0, 0.01, 0, 0, 0.005]


def test_chunks_say_who_ran_them(pool: Pool) -> None:
    """Which process, how long, and how many bytes there and back; the pid is the worker's."""
    began = time.monotonic()
    parts = run(pool, lambda x: (process(), time.sleep(0.01), x), [b"x" * 1000] * 6)
    for part in parts:
        assert all(value[0] == (part.host, part.pid) for value in part.values)
        assert 0.01 <= part.seconds <= time.monotonic() - began
        assert 0 <= part.worker < pool.size
        assert part.host == pool.hosts[part.worker]
    elsewhere = process() not in {(part.host, part.pid) for part in parts}
    assert all((part.sent > 1000 and part.received > 1000) == elsewhere for part in parts)


def test_a_failure_keeps_its_class_and_ends_the_job(pool: Pool) -> None:
    """It is among the failures of its chunk, nothing is run after it was seen, and the pool can be
    used again."""

    def function(x: int) -> int:
        if x == 5:
            raise KeyError("five", x)
        return x

    parts = run(pool, function, range(10_000))
    (error,) = [error for part in parts for error in part.failures.values()]
    assert [index for part in parts for index in part.failures] == [5]
    assert isinstance(error, KeyError)
    assert error.args == ("five", 5)
    assert parts[-1].failures
    assert sum(len(part.values) for part in parts) < 10_000
    if (parts[0].host, parts[0].pid) != process():
        assert isinstance(error.__cause__, RemoteTraceback)
        assert error.__cause__.item == 5
        assert error.__cause__.host == parts[-1].host
        assert str(parts[-1].pid) in error.__cause__.where
        assert "in function" in error.__cause__.text
    assert by_index(run(pool, function, [1, 2])) == [1, 2]


def test_keep_going_runs_everything(pool: Pool) -> None:
    """Failures are where their results would be, and all others are results."""

    def function(x: int) -> int:
        if x % 7 == 3:
            raise ValueError(x)
        return -x

    found = by_index(run(pool, function, range(200), keep_going=True))
    for x, value in enumerate(found):
        if x % 7 == 3:
            assert isinstance(value, ValueError)
            assert value.args == (x,)
        else:
            assert value == -x


def test_one_each_is_one_in_every_worker(pool: Pool) -> None:
    """As many items as workers: each is run by another process, however short they are."""
    found = by_index(run(pool, lambda x: (x, process()), range(pool.size), one_each=True))
    assert [x for x, _ in found] == list(range(pool.size))
    assert len({one for _, one in found}) == pool.size


def test_seeds_do_not_depend_on_the_pool(pool: Pool) -> None:
    """What an item draws depends on the seed and its index only, in chunks of any size."""

    def draw(_: Any) -> tuple[float, float]:
        return random.random(), float(np.random.rand())

    expected = []
    for index in range(300):
        random.seed(derive(5, index))
        np.random.seed(derive(5, index) % 2**32)
        expected.append((random.random(), float(np.random.rand())))
    assert by_index(run(pool, draw, range(300), seed=5)) == expected
    assert by_index(run(pool, draw, iter(range(300)), seed=5)) == expected
    assert by_index(run(pool, draw, range(20), seed=6)) != expected[:20]
    # without one, workers do not all draw the same
    drawn = by_index(run(pool, lambda _: random.random(), range(pool.size), one_each=True))
    assert len(set(drawn)) == pool.size


def test_a_generator_is_asked_only_for_what_workers_need(pool: Pool) -> None:
    """No item is drawn before a worker is free for it; nor before the job is begun."""
    drawn = []

    def items() -> Iterator[int]:
        for x in range(40):
            drawn.append(x)
            yield x

    finished = 0
    with closing(pool.run(Job(pool.prepare(lambda x: time.sleep(0.005)), items()))) as parts:
        assert drawn == []
        for part in parts:
            finished += len(part.values)
            assert len(drawn) <= finished + pool.size
    assert finished == len(drawn) == 40


def test_what_the_items_iterator_raises_is_raised(pool: Pool) -> None:
    """Its own exception comes out of the run, and the pool can be used again."""

    class Ran(Exception):
        pass

    def items() -> Iterator[int]:
        yield from range(10)
        raise Ran("dry")

    parts = pool.run(Job(pool.prepare(lambda x: x + 1), items()))
    found = []
    with pytest.raises(Ran, match="dry"):
        found.extend(parts)
    assert {value for part in found for value in part.values} <= set(range(1, 11))
    assert by_index(run(pool, lambda x: x + 1, [1])) == [2]


def test_closing_ends_what_runs(pool: Pool, tmp_path: Path) -> None:
    """Whoever has seen enough closes the run: items that still run are ended, no others begin."""

    def function(x: int) -> int:
        (tmp_path / str(x)).touch()
        if x >= pool_size:
            time.sleep(60)
        return x

    pool_size = pool.size
    parts = pool.run(Job(pool.prepare(function), iter(range(1000))))
    first = next(parts)
    began = time.monotonic()
    parts.close()
    assert time.monotonic() - began < within(3)
    begun = len(os.listdir(tmp_path)) - ("temporary" in os.listdir(tmp_path))
    assert first.values
    assert begun <= 2 * pool.size
    assert by_index(run(pool, lambda x: x, [1, 2])) == [1, 2]


def test_a_deadline_raises_stalled(pool: Pool) -> None:
    """The message says how many seconds, and where the items are; the pool can be used again."""
    run(pool, lambda x: x, range(pool.size), one_each=True)  # they have started
    began = time.monotonic()
    with pytest.raises(Stalled, match=r"map: 0\.15 s have passed.*item"):
        run(pool, lambda x: time.sleep(0.05), range(1000), timeout=0.15)
    assert time.monotonic() - began < within(3)
    assert by_index(run(pool, lambda x: x, range(5), timeout=30.0)) == list(range(5))


def sleeps(x: int, *, at: int) -> int:
    for _ in range(3000 if x == at else 0):
        time.sleep(0.01)
    return x


@pytest.mark.parametrize("known", [True, False])
def test_a_job_that_keeps_going_ends_at_its_deadline(pool: Pool, known: bool) -> None:
    """Each item once: results of those that are finished, Stalled for those that ran, Cancelled for
    those that had not begun; one more Stalled where nobody knows how many there are."""
    items: Iterable[int] = range(50) if known else iter(range(50))
    function = partial(sleeps, at=pool.size)
    run(pool, function, [0] * pool.size, one_each=True)  # all workers have loaded this module
    began, limit = time.monotonic(), deadline(2.0)
    found = by_index(run(pool, function, items, keep_going=True, timeout=limit))
    assert time.monotonic() - began < limit + within(5)
    assert found[: pool.size] == list(range(pool.size))
    assert isinstance(found[pool.size], Stalled)
    for x, value in enumerate(found):
        assert value == x or isinstance(value, (Stalled, Cancelled))
    if known:
        assert len(found) == 50
        assert sum(isinstance(value, Stalled) for value in found) == 1
    elif pool.size == 1:  # others go on to the end
        assert isinstance(found[-1], Stalled)
    assert by_index(run(pool, function, [77], keep_going=True, timeout=30.0)) == [77]


def test_an_item_that_runs_too_long_has_failed(pool: Pool) -> None:
    """Alone, also while others of its job go on; with retries it is run so often."""
    function = partial(sleeps, at=1)
    each = deadline(0.4)
    options = {"keep_going": True, "timeout_each": each}
    found = by_index(run(pool, function, range(4), **options))
    assert [type(value) for value in found] == [int, Stalled, int, int]
    assert f"item 1 has run for more than {each} s" in str(found[1])
    parts = run(pool, function, range(4), timeout_each=each)
    assert isinstance(parts[-1].failures[1], Stalled)
    found = by_index(run(pool, function, [1], retries=1, **options))
    assert "for the 2. time" in str(found[0])


def test_named_exceptions_are_run_again(pool: Pool, tmp_path: Path) -> None:
    """Each item as often as asked for and no more, with its seed; others fail at once."""

    def function(x: int) -> tuple[int, float]:
        drawn = random.random()
        (tmp_path / f"{x} {len(list(tmp_path.glob(f'{x} *')))}").touch()
        if x % 3 == 1 and len(list(tmp_path.glob(f"{x} *"))) < 3:
            raise KeyError(x)
        if x % 3 == 2:
            raise IndexError(x)
        return x, drawn

    options = {"retries": 2, "retry_on": (KeyError,), "keep_going": True}
    found = by_index(run(pool, function, range(30), seed=4, **options))
    expected = by_index(run(pool, lambda x: (x, random.random()), range(30), seed=4))
    for x, value in enumerate(found):
        assert isinstance(value, IndexError) if x % 3 == 2 else value == expected[x]
        assert len(list(tmp_path.glob(f"{x} *"))) == (3 if x % 3 == 1 else 1)
    parts = run(pool, lambda x: {}[x], [8], retries=2, retry_on=(KeyError,))
    (error,) = parts[-1].failures.values()
    assert error.__notes__ == ["item 0 was run 3 times: retries=2"]


@pytest.mark.parametrize("known", [True, False])
def test_a_job_with_a_window_waits_for_its_consumer(pool: Pool, known: bool) -> None:
    """No more is drawn than it has room for; the rest when there is room."""
    drawn = []

    def items() -> Iterator[int]:
        for x in range(60):
            drawn.append(x)
            yield x

    window = Window(6)
    finished: list[Finished] = []
    ended = threading.Event()
    job = Job(
        pool.prepare(lambda x: x * x),
        list(range(60)) if known else items(),
        cancelled=lambda: window.closed,
        window=window,
    )

    def carry_out() -> None:
        finished.extend(pool.run(job))
        ended.set()

    if pool.computes_here:
        parts = pool.run(job)
        for count in range(60):
            finished.append(next(parts))
            assert len(drawn) <= count + 1
        return
    thread = threading.Thread(target=carry_out)
    thread.start()
    for consumed in range(60):
        wait_until(lambda consumed=consumed: sum(len(one.values) for one in finished) > consumed)
        assert sum(len(one.values) for one in finished) <= consumed + 6
        assert len(drawn) <= consumed + 6
        window.consume()
    thread.join(60)
    assert ended.is_set()
    assert by_index(finished) == [x * x for x in range(60)]


def test_a_cancelled_job_raises_cancelled(pool: Pool, tmp_path: Path) -> None:
    """Somebody else's wish is seen within a moment, also while items run."""
    begun = tmp_path / "begun"
    with pytest.raises(Cancelled, match="cancelled"):
        run(pool, lambda x: begun.touch() or time.sleep(0.05), range(1000), cancelled=begun.exists)
    assert time.time() - begun.stat().st_mtime < within(3)


def test_an_array_that_is_put_arrives_in_every_worker(pool: Pool) -> None:
    """In a function or in an item, large or small; where it is read-only, nobody writes."""
    for array in (np.arange(5.0), np.arange(60_000.0).reshape(300, 200).T, np.zeros((0, 2))):
        handle = pool.put(array, readonly=True)

        def function(x: int, placed: Any = handle) -> Any:
            try:
                placed[...] = 1
            except ValueError as error:
                return placed * 1, str(error)

        results = by_index(run(pool, function, range(pool.size), one_each=True))
        assert {text for _, text in results} == {"assignment destination is read-only"}
        assert all(np.array_equal(placed, array) for placed, _ in results)
        assert {placed.dtype for placed, _ in results} == {array.dtype}
        items = [ColumnSlice(pool.put(array), 0, 2)] * pool.size
        for found in by_index(run(pool, lambda item: item.view() + 1, items, one_each=True)):
            assert np.array_equal(found, array[..., :2] + 1)
    assert array.flags.writeable


def test_a_closed_pool_starts_anew(pool: Pool, lives: Callable[[Process], bool]) -> None:
    """Its workers end; a later job has others."""

    def processes() -> set[Process]:
        return set(by_index(run(pool, lambda _: process(), range(pool.size), one_each=True)))

    before = processes()
    assert processes() == before
    pool.close()
    if before != {process()}:
        assert not any(lives(one) for one in before)
        assert processes().isdisjoint(before)
