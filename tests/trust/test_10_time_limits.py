"""Time limits keep what is done: `timeout=`, `timeout_each=`, `retry_on=`, as programs use them."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.support import deadline, wait_until, within
from weft.engines.local.pool.workers import workers
from weft.errors import Cancelled, InvalidType, InvalidValue, Stalled

ENGINES = ["local", "serial"]


@pytest.fixture(autouse=True)
def warm_workers() -> None:
    """So that a short deadline is not over before they have started."""
    weft.map(abs, [-1, -2], n=2)


def sleeps_at(*items: int) -> Callable[[int], int]:
    def function(x: int) -> int:
        for _ in range(6000 if x in items else 0):  # threads are interrupted between two steps
            time.sleep(0.01)
        return x * x

    return function


def kinds(found: list[Any]) -> list[type]:
    return [type(value) for value in found]


# the whole map


@pytest.mark.parametrize("engine", ENGINES)
def test_finished_results_are_returned(engine: str) -> None:
    """Those before the one that hangs, here; the others are values that say what became of them."""
    began, limit = time.monotonic(), deadline(0.5)
    options = {"engine": engine, "on_error": "return", "timeout": limit}
    found = weft.map(sleeps_at(3), range(6), n=1, **options)
    assert time.monotonic() - began < limit + within(5)
    assert found[:3] == [0, 1, 4]
    assert kinds(found[3:]) == [Stalled, Cancelled, Cancelled]
    assert "item 3" in str(found[3])
    assert f"{limit} s have passed" in str(found[3]).replace("had", "have")
    assert f"had not begun when {limit} s had passed" in str(found[4])
    if engine == "local":
        assert "worker" in str(found[3])
        assert "pid" in str(found[3])
    assert weft.map(abs, [-1, -2], n=2) == [1, 2]


def test_short_items_that_came_with_the_one_that_hangs_are_kept() -> None:
    """Of a thousand items, most of them in chunks with others, only one is not finished."""
    function = sleeps_at(500)
    weft.map(sleeps_at(), range(1000), n=2)
    found = weft.map(function, range(1000), n=2, timeout=deadline(1), on_error="return")
    assert found[:500] == [x * x for x in range(500)]
    assert isinstance(found[500], Stalled)
    for x, value in enumerate(found[501:], 501):
        assert value == x * x or isinstance(value, Cancelled)
    assert kinds(found).count(Cancelled) < 490  # those of its chunk that come after it


def catches_everything() -> None:
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


def computes_in_c() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # the lock of the interpreter is free


@pytest.mark.parametrize("hang", [catches_everything, computes_in_c])
def test_what_was_finished_is_kept_though_the_function_does_not_end(hang: Any) -> None:
    """Of items that came in one chunk; the results are arrays in shared memory, and an error."""
    import numpy as np

    def function(x: int) -> Any:
        if x == 7:
            hang()
        if x == 3:
            raise KeyError(x)
        return np.full(20_000, x)

    weft.map(function, range(100, 120), n=2)  # what they cost is known
    pids = {worker.pid for worker in workers()._idle}
    found = weft.map(function, range(20), n=2, timeout=deadline(1), on_error="return")
    assert kinds(found[:8]) == [*[np.ndarray] * 3, KeyError, *[np.ndarray] * 3, Stalled]
    assert all((value == x).all() for x, value in enumerate(found) if isinstance(value, np.ndarray))
    assert kinds(found).count(Stalled) == 1
    assert "item 7 had no result" in str(found[7])
    (ended,) = pids - {worker.pid for worker in workers()._idle}
    assert not Path(f"/proc/{ended}").exists()
    assert weft.map(abs, [-1, -2], n=2) == [1, 2]


def test_what_cannot_be_kept_is_not_called_unfinished() -> None:
    """A function that holds the interpreter's lock keeps its worker from answering."""

    def function(x: int) -> int:
        return sum(range(10**12)) if x == 7 else x

    weft.map(function, range(100, 120), n=2)
    found = weft.map(function, range(20), n=2, timeout=deadline(1), on_error="return")
    assert kinds(found).count(Stalled) > 1
    assert "item 7 had no result" in str(found[7])
    assert "item 6 was finished, and its result is lost with worker" in str(found[6])


def test_children_of_a_function_may_be_interrupted() -> None:
    """SIGINT to a process that the function has forked is not this worker's."""

    def function(x: int) -> int:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, lambda *_: None)
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.3)  # longer than a function has to end after SIGINT
        return x

    found = weft.map(function, range(4), n=2, timeout=deadline(30), on_error="return")
    assert found == [0, 1, 2, 3]


def test_every_place_is_filled_by_workers_that_do_not_answer() -> None:
    """One that catches the interrupt is killed, one that somebody has stopped too."""

    def function(x: int) -> int:
        if x == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while x == 2:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                continue
        return x

    began, limit = time.monotonic(), deadline(0.5)
    found = weft.map(function, range(8), n=2, timeout=limit, on_error="return")
    assert time.monotonic() - began < limit + within(5)
    assert (found[0], kinds(found[1:])) == (0, [Stalled] * 2 + [Cancelled] * 5)
    assert weft.map(abs, [-1, -2], n=2) == [1, 2]


@pytest.mark.parametrize("engine", ENGINES)
def test_items_of_which_nobody_knows_how_many_there_are(engine: str) -> None:
    """The list ends with one Stalled for those that were not drawn, so that it is never taken for
    all; also if the iterator itself hangs. One that has ended has no such value. Items that were
    drawn to be sent together, and had not begun, are Cancelled."""
    limit = deadline(0.5)
    options = {"engine": engine, "on_error": "return", "timeout": limit}
    found = weft.map(sleeps_at(3), itertools.count(), n=1, **options)
    assert found[:3] == [0, 1, 4]
    begun, *drawn, last = kinds(found[3:])
    assert (begun, set(drawn) - {Cancelled}, last) == (Stalled, set(), Stalled)
    text = f"the iterator had neither given item {len(found) - 1} nor ended when {limit} s"
    assert text in str(found[-1])

    def items() -> Iterator[int]:
        yield from (1, 2)
        time.sleep(60)

    *found, last = weft.map(abs, items(), n=1, **options)
    assert found == [1, 2]
    assert isinstance(last, Stalled)
    assert "the iterator had neither given item 2 nor ended" in str(last)
    assert weft.map(abs, iter([1, 2]), **{**options, "timeout": 60}) == [1, 2]
    assert weft.map(abs, [], **options) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_in_the_background_too(engine: str) -> None:
    """A handle ends as finished, and gives the values as they come and all in order."""
    handle = weft.map_async(
        sleeps_at(2), range(4), n=1, engine=engine, timeout=deadline(0.5), on_error="return"
    )
    found = handle.wait(60)
    assert found[:2] == [0, 1]
    assert kinds(found[2:]) == [Stalled, Cancelled]
    assert handle.status == "finished"
    assert handle.progress == (4, 4)
    assert sorted(index for index, _ in handle.results()) == [0, 1, 2, 3]


def test_nothing_has_begun() -> None:
    """The process that starts workers is stopped: each item says that it has not begun."""
    process = workers()._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        found = weft.map(abs, range(3), n=3, timeout=0.3, on_error="return")
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert kinds(found) == [Cancelled] * 3


def test_without_on_error_the_limit_is_raised_and_says_how_to_keep_results() -> None:
    """As before: who has which items, and what to write."""
    limit = deadline(0.5)
    with pytest.raises(Stalled, match=rf"{limit} s have passed(.|\n)*worker \d+ \(pid \d+\) has"):
        weft.map(sleeps_at(1), range(4), n=1, timeout=limit)
    with pytest.raises(Stalled, match='on_error="return" to get the results of the others'):
        weft.map(sleeps_at(1), range(4), engine="serial", timeout=0.3)


def test_arrays_of_finished_items_are_whole() -> None:
    """Results that came through shared memory are kept like others, and the memory is given back
    with the results of those that were ended."""
    import numpy as np

    def function(x: int) -> Any:
        if x == 5:
            time.sleep(60)
        return np.full(50_000, x)

    weft.map(function, range(4), n=2)  # the workers load NumPy
    one_by_one = {"timeout_each": 60}  # else those in one chunk with the one that hangs do not run
    limit = deadline(1)
    found = weft.map(function, range(10), n=2, timeout=limit, on_error="return", **one_by_one)
    assert isinstance(found[5], Stalled)
    for x, value in enumerate(found):
        if not isinstance(value, (Stalled, Cancelled)):
            assert (value == x).all()
    assert kinds(found).count(np.ndarray) == 9


# one item


def test_an_item_that_runs_too_long_is_ended_alone() -> None:
    """Its worker is ended and replaced; the others have results, and no more processes run."""
    began, each = time.monotonic(), deadline(0.5)
    found = weft.map(
        lambda x: (time.sleep(60 if x == 4 else 0.01), os.getpid())[1],
        range(10),
        n=2,
        timeout_each=each,
        on_error="return",
    )
    assert time.monotonic() - began < within(10)
    assert isinstance(found[4], Stalled)
    text = str(found[4])
    assert f"item 4 has run for more than {each} s; worker" in text
    assert "(pid " in text
    assert "timeout_each=" in text
    ended = int(text.partition("(pid ")[2].partition(")")[0])
    assert not Path(f"/proc/{ended}").exists()
    assert len({pid for pid in found if isinstance(pid, int)}) <= 3
    with pytest.raises(Stalled, match=f"item 1 has run for more than {each} s"):
        weft.map(sleeps_at(1), range(4), n=2, timeout_each=each)


def test_a_stopped_worker_is_no_reason_to_wait() -> None:
    """Somebody has sent it SIGSTOP: it is ended like one that computes."""

    def function(x: int) -> int:
        if x == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return x

    found = weft.map(function, range(4), n=2, timeout_each=deadline(0.5), on_error="return")
    assert kinds(found) == [int, Stalled, int, int]


def test_retries_count_for_items_that_run_too_long(tmp_path: Path) -> None:
    """They are like items that lost their worker: run again only if that was asked for, and no more
    often."""

    def function(x: int) -> int:
        with (tmp_path / str(x)).open("a") as file:
            file.write("run ")
        runs = (tmp_path / str(x)).read_text().count("run")
        if x == 1 or (x == 2 and runs == 1):
            time.sleep(60)
        return x

    options = {"timeout_each": deadline(0.5), "retries": 1, "on_error": "return"}
    found = weft.map(function, range(4), n=2, **options)
    assert kinds(found) == [int, Stalled, int, int]
    assert "for the 2. time" in str(found[1])
    assert [(tmp_path / str(x)).read_text().count("run") for x in range(4)] == [1, 2, 2, 1]


class SlowToLoad:
    """A function that takes longer to load than an item may run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __setstate__(self, state: dict[str, float]) -> None:
        time.sleep(state["seconds"])
        self.__dict__.update(state)

    def __call__(self, x: int) -> int:
        return x


def test_the_time_counts_from_the_items_beginning() -> None:
    """Neither loading the function nor unpickling the item, nor waiting for a free worker, is the
    item's own time."""
    each = deadline(0.5)
    slow = SlowToLoad(2 * each)
    assert weft.map(slow, range(3), n=1, timeout_each=each) == [0, 1, 2]
    assert weft.map(lambda item: item.seconds, [slow], n=1, timeout_each=each) == [2 * each]
    assert len(weft.map(time.sleep, [each / 4] * 6, n=1, timeout_each=each)) == 6


def test_a_driver_that_draws_slowly_does_not_punish_its_items() -> None:
    """While it waits for the next item nobody reads the answers, which have come all the same."""

    each = deadline(0.4)

    def items() -> Iterator[int]:
        for x in range(3):
            yield x
            time.sleep(2 * each)

    assert weft.map(lambda x: x, items(), n=2, timeout_each=each) == [0, 1, 2]


def test_serial_interrupts_its_own_calls() -> None:
    """Here no process is ended; a function that sleeps or computes in Python is."""

    def busy(x: int) -> int:
        while x == 1:
            pass
        return x

    def asleep(x: int) -> int:
        time.sleep(60 if x == 1 else 0)
        return x

    each = deadline(0.4)
    options: Any = {"engine": "serial", "timeout_each": each}
    for function in (asleep, busy):
        found = weft.map(function, range(3), **options, on_error="return")
        assert kinds(found) == [int, Stalled, int]
        assert f"item 1 has run for more than {each} s in this process" in str(found[1])
    with pytest.raises(Stalled, match="item 1"):
        weft.map(sleeps_at(1), range(3), **options)


def test_both_limits_at_once() -> None:
    """The map's own limit ends what is left, whatever single items may take."""
    seconds = deadline(1.0)  # in which a worker that was ended is replaced
    found = weft.map(
        time.sleep,
        [0.0] + [60.0] * 5,
        n=1,
        timeout=seconds,
        timeout_each=0.4 * seconds,
        on_error="return",
    )
    assert kinds(found)[:3] == [type(None), Stalled, Stalled]
    assert "has run for more than" in str(found[1])
    assert kinds(found)[-1] is Cancelled


def test_streams_and_distributed_functions_have_limits_for_items() -> None:
    """The same option, the same errors."""
    each = deadline(0.5)
    results = weft.imap(sleeps_at(3), itertools.count(), n=2, timeout_each=each, on_error="return")
    found = list(itertools.islice(results, 6))
    assert kinds(found) == [int, int, int, Stalled, int, int]
    results.close()
    with pytest.raises(Stalled, match=f"item 2 has run for more than {each} s"):
        weft.distribute(sleeps_at(2), max_cpu=2, timeout_each=each)([0, 1, 2, 3])


# exceptions after which an item is run again


def flaky(folder: Path, failures: int, kind: type[Exception] = ConnectionError) -> Any:
    """A function whose calls fail so often for each item; it returns a random number too."""

    def function(x: int) -> tuple[int, float]:
        path = folder / f"{x}"
        runs = len(path.read_text()) if path.exists() else 0
        path.write_text("r" * (runs + 1))
        drawn = random.random()
        if runs < failures:
            raise kind((x, runs))
        return x, drawn

    return function


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[], Path]:
    """A new folder for each run."""
    numbers = itertools.count()

    def make() -> Path:
        path = tmp_path / f"runs {next(numbers)}"
        path.mkdir()
        return path

    return make


@pytest.mark.parametrize("engine", ENGINES)
def test_named_exceptions_are_tried_again(engine: str, folder: Callable[[], Path]) -> None:
    """As often as asked for, with the same random numbers each time, in chunks of any size; the
    last exception is raised, with how often the item was run."""
    for count in (1, 5, 300):
        options = {"n": 2, "engine": engine, "retries": 2, "retry_on": ConnectionError}
        path = folder()
        found = weft.map(flaky(path, 2), range(count), seed=3, **options)
        assert found == weft.map(flaky(folder(), 0), range(count), seed=3, engine="serial")
        assert {len((path / str(x)).read_text()) for x in range(count)} == {3}
    path = folder()
    with pytest.raises(ConnectionError) as caught:
        weft.map(flaky(path, 3), range(3), **options)
    ((x, runs),) = caught.value.args
    assert runs == 2
    assert caught.value.__notes__ == [f"item {x} was run 3 times: retries=2"]
    assert len((path / str(x)).read_text()) == 3
    found = weft.map(flaky(folder(), 3), range(3), **options, on_error="return")
    assert kinds(found) == [ConnectionError] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_other_exceptions_are_not(engine: str, folder: Callable[[], Path]) -> None:
    """Subclasses are; exceptions of other classes come out at once, without a note."""
    options = {"n": 2, "engine": engine, "retries": 2}
    found = weft.map(
        flaky(folder(), 1, ConnectionResetError), range(5), retry_on=[OSError], **options
    )
    assert [x for x, _ in found] == list(range(5))
    path = folder()
    with pytest.raises(KeyError) as caught:
        weft.map(flaky(path, 1, KeyError), [7], retry_on=(OSError, ValueError), **options)
    assert not hasattr(caught.value, "__notes__")
    assert len((path / "7").read_text()) == 1
    with pytest.raises(ConnectionError):  # retries alone are for lost workers
        weft.map(flaky(folder(), 1), [7], **options)


def test_an_item_is_run_so_often_in_all(tmp_path: Path) -> None:
    """Whether it raises or loses its worker: one count."""

    def function(x: int) -> int:
        runs = len(list(tmp_path.glob(f"{x} *")))
        (tmp_path / f"{x} {runs}").touch()
        if runs == 0:
            raise ValueError(x)
        if runs == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    assert weft.map(function, [5], n=1, retries=2, retry_on=ValueError) == [5]
    for path in tmp_path.glob("5 *"):
        path.unlink()
    with pytest.raises(weft.WorkerLost):
        weft.map(function, [5], n=1, retries=1, retry_on=ValueError)


def test_streams_handles_and_distributed_functions_try_again(folder: Callable[[], Path]) -> None:
    """The same option, the same results."""
    options = {"retries": 1, "retry_on": (ConnectionError,)}
    expected = list(range(50))
    results = weft.imap(flaky(folder(), 1), expected, n=2, **options)
    assert [x for x, _ in results] == expected
    handle = weft.map_async(flaky(folder(), 1), expected, n=2, **options)
    assert dict(handle.wait(60)).keys() == set(expected)
    assert sorted(index for index, _ in handle.results()) == expected
    found = weft.distribute(flaky(folder(), 1), max_cpu=2, **options)(expected)
    assert [x for x, _ in found] == expected


def test_a_bar_counts_an_item_once(
    folder: Callable[[], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """When it has ended, however often it was run."""
    weft.map(flaky(folder(), 1), range(8), n=2, retries=1, retry_on=OSError, progress="sweep")
    text = capsys.readouterr().err
    assert "8/8" in text
    assert "failed" not in text


def test_threads_have_limits_of_their_own() -> None:
    """Each call ends at its own deadline; nobody else's items are touched."""
    found: dict[int, list[Any]] = {}

    def call(number: int) -> None:
        found[number] = weft.map(
            sleeps_at(1) if number % 2 else sleeps_at(),
            range(4),
            n=1,
            timeout=deadline(0.5) if number % 2 else 60,
            on_error="return",
        )

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: len(found) == 4)
    for number in range(4):
        if number % 2:
            assert kinds(found[number])[-1] is Cancelled
        else:
            assert found[number] == [0, 1, 4, 9]


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"timeout_each": -1}, InvalidValue, r"timeout_each=-1: expected 0 or more seconds"),
    ({"timeout_each": "1"}, InvalidType, r"timeout_each='1': expected a number of seconds"),
    ({"retry_on": "OSError"}, InvalidType, r"map\(retry_on='OSError'\): expected a class of exc"),
    ({"retry_on": KeyboardInterrupt, "retries": 1}, InvalidType, r"expected a class of exceptions"),
    ({"retry_on": (OSError, 3), "retries": 1}, InvalidType, r"example retry_on=\(ConnectionError"),
    (
        {"retry_on": (OSError, KeyError)},
        InvalidValue,
        r"without retries=(.|\n)*map\(fun, items, retries=3, retry_on=\(OSError, KeyError,\)\)",
    ),
]


@pytest.mark.parametrize(("options", "kind", "text"), WRONG, ids=[str(one[0]) for one in WRONG])
def test_what_makes_no_sense_is_refused(
    options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    """At the call, with the line to write."""
    with pytest.raises(kind, match=text):
        weft.map(abs, [1], **options)
    with pytest.raises(kind):
        weft.map_async(abs, [1], **options)
    with pytest.raises(kind):
        weft.distribute(abs, **options)
