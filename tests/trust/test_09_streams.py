"""Streams are bounded: `weft.imap` over items without end, as programs use it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.support import run_script, wait_until, within, write_script
from weft.errors import Cancelled, InvalidType, InvalidValue, RemoteError, UsedAfterFork

ENGINES = ["local", "serial"]


class Counted:
    """Endless items, and how many of them have been drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for x in itertools.count():
            self.drawn += 1
            yield x


ENDLESS = """
import itertools, os, sys, time
import numpy as np
import weft

def memory(pid="self"):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

def work(x):
    return os.getpid(), memory(), bytes(20_000), np.zeros(20_000)  # 180 KB, for 360 MB in all

drawn = 0
def items():
    global drawn
    for drawn in itertools.count(1):
        yield np.full(1000, drawn)

pids, before, largest, ahead = set(), None, 0, 0
for count, (pid, used, _, _) in enumerate(weft.imap(work, items(), ordered=ORDERED, n=2), 1):
    pids.add(pid)
    if count % 500 == 0:
        time.sleep(0.1)  # who reads slowly: nothing runs away
    if count == 500:
        before = memory()
    if count > 500:
        largest = max(largest, memory() - before, used - 200)
        ahead = max(ahead, drawn - count)
    if count == 2000:
        break
print(largest < 60, ahead < 1000, len(pids) <= 2)
"""


@pytest.mark.parametrize("ordered", [True, False])
def test_items_without_end_need_no_more_memory_with_time(ordered: bool) -> None:
    """Hundreds of megabytes of results of an endless generator passes through a program and its two
    workers, of which none grows; a reader that pauses is not run away from."""
    outcome = run_script(ENDLESS.replace("ORDERED", str(ordered)))
    assert outcome.out == "True True True\n", outcome


def test_trivial_items_are_not_drawn_by_the_million() -> None:
    """By default a stream is no more than some chunks of a thousand items ahead."""
    drawn = itertools.count()
    with weft.imap(abs, iter(lambda: next(drawn), -1), n=2) as results:
        taken = list(itertools.islice(results, 50_000))
        assert taken == list(range(50_000))
        assert next(drawn) <= 50_000 + 2 * 4 * 1000


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ahead", [1, 5, 64])
def test_no_more_than_ahead_is_drawn(engine: str, ahead: int) -> None:
    """At every moment the items that are drawn and not taken are no more than that; and where
    there are workers that have nothing else to do, they are that many."""
    items = Counted()
    with weft.imap(lambda x: -x, items, n=2, ahead=ahead, engine=engine) as results:
        for count, value in enumerate(itertools.islice(results, 200)):
            assert value == -count
            assert items.drawn <= count + 1 + ahead
        if engine == "local":
            wait_until(lambda: items.drawn > 200 + ahead // 2)
            time.sleep(0.05)  # nothing is drawn later either
            assert items.drawn <= 200 + ahead


def test_one_slow_item_holds_the_others_back(tmp_path: Path) -> None:
    """In order nothing is delivered before it, and no more than `ahead` is computed meanwhile; as
    they come, the others are delivered."""

    def work(x: int) -> int:
        while x == 0 and not (tmp_path / "go").exists():
            time.sleep(0.005)
        return x

    items = Counted()
    with weft.imap(work, items, n=2, ahead=10) as results:
        first: list[int] = []
        thread = threading.Thread(target=lambda: first.append(next(results)))
        thread.start()
        wait_until(lambda: items.drawn > 8)  # items may be sent by twos
        time.sleep(0.05)
        assert items.drawn <= 10
        assert not first
        (tmp_path / "go").touch()
        thread.join()
        assert first + list(itertools.islice(results, 30)) == list(range(31))
    (tmp_path / "go").unlink()
    with weft.imap(work, Counted(), n=2, ahead=10, ordered=False) as results:
        seen = list(itertools.islice(results, 9))
        assert sorted(seen) == list(range(1, 10))
        (tmp_path / "go").touch()
        assert 0 in results


def test_the_results_are_those_of_map() -> None:
    """Of lists, ranges, generators and several iterables, with seeds, shared data and a total that
    would fill the memory."""
    import random

    for items in ([], [3], range(2000), [1.5] * 10):
        expected = [x * 2 for x in items]
        for engine in ENGINES:
            assert list(weft.imap(lambda x: x * 2, items, n=2, engine=engine)) == expected
            assert list(weft.imap(lambda x: x * 2, iter(items), n=2, engine=engine)) == expected
        assert sorted(weft.imap(lambda x: x * 2, items, n=2, ordered=False)) == sorted(expected)
    drawn = [
        list(weft.imap(lambda _: random.random(), range(50), seed=3, engine=engine))
        for engine in ENGINES
    ]
    assert drawn[0] == drawn[1] == weft.map(lambda _: random.random(), range(50), seed=3)
    shared = weft.imap(lambda x, y, data: x + y + data["z"], [1, 2], [3, 4], shared_data={"z": 10})
    assert list(shared) == [14, 16]
    with weft.imap(abs, range(10**12), n=2) as huge:
        assert list(itertools.islice(huge, 3)) == [0, 1, 2]


# errors


@pytest.mark.parametrize("engine", ENGINES)
def test_an_exception_comes_at_its_items_turn(engine: str) -> None:
    """The results before it come first, however long they take; then it ends the iterator, or
    stands where its result would."""

    def work(x: int) -> float:
        time.sleep(0.05 if x < 5 else 0)
        return 1 / (5 - x)

    seen: list[float] = []
    results = weft.imap(work, range(100), n=2, engine=engine)
    with pytest.raises(ZeroDivisionError) as caught:
        seen.extend(results)
    assert seen == [1 / (5 - x) for x in range(5)]
    assert list(results) == []
    if engine == "local":
        assert caught.value.__cause__.item == 5  # type: ignore[union-attr]
    found = list(weft.imap(work, range(8), n=2, engine=engine, on_error="return"))
    assert [type(value) for value in found] == [float] * 5 + [ZeroDivisionError] + [float] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stop_iteration_does_not_end_a_loop_quietly(engine: str) -> None:
    """What a function raises by mistake would look like the end of the items."""

    def work(x: int) -> int:
        return next(iter([x] * (x != 2)))

    seen: list[int] = []
    with pytest.raises(RemoteError, match=r"StopIteration: .*item 2"):
        seen.extend(weft.imap(work, range(5), n=1, engine=engine))
    assert seen == [0, 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_items_raise_comes_after_the_results_before_it(engine: str) -> None:
    """As with the built-in: all items that came have results."""

    def items() -> Iterator[int]:
        yield from range(7)
        raise LookupError("dry")

    seen: list[int] = []
    with pytest.raises(LookupError, match="dry"):
        seen.extend(weft.imap(lambda x: time.sleep(0.02) or x, items(), n=2, engine=engine))
    assert seen == list(range(7))


def test_a_lost_worker_is_told_at_its_items_turn(tmp_path: Path) -> None:
    """And with retries nobody notices."""

    def work(x: int) -> int:
        if x == 20 and not (tmp_path / "lost").exists():
            (tmp_path / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    results = weft.imap(work, itertools.count(), n=2)
    assert list(itertools.islice(results, 20)) == list(range(20))
    with pytest.raises(weft.WorkerLost, match="item 20"):
        next(results)
    (tmp_path / "lost").unlink()
    with weft.imap(work, itertools.count(), n=2, retries=1) as again:
        assert list(itertools.islice(again, 100)) == list(range(100))
    assert (tmp_path / "lost").exists()


# ends


def _leave_by_break(results: Any) -> None:
    for _ in results:
        break


def _leave_by_exception(results: Any) -> None:
    def consume() -> None:
        for _ in results:
            raise KeyError("the program's own")

    with pytest.raises(KeyError):
        consume()
    results.close()


def _leave_by_close(results: Any) -> None:
    next(results)
    results.close()
    results.close()
    assert next(results, "none") == "none"


def _leave_by_with(results: Any) -> None:
    with closing(results):
        next(results)


@pytest.mark.parametrize(
    "leave", [_leave_by_break, _leave_by_exception, _leave_by_close, _leave_by_with]
)
def test_whoever_stops_early_ends_what_runs(leave: Any, tmp_path: Path) -> None:
    """Items that would run for a minute are ended, the thread too, and the workers are free."""

    def work(x: int) -> int:
        try:
            (tmp_path / f"begun {x}").write_text(str(os.getpid()))
            time.sleep(60 if x else 0)
        finally:
            (tmp_path / f"ended {x}").touch()
        return x

    results = weft.imap(work, itertools.count(), n=2)
    leave(results)
    del results
    wait_until(lambda: "weft imap" not in [thread.name for thread in threading.enumerate()])
    for path in tmp_path.glob("begun *"):
        ended = (tmp_path / path.name.replace("begun", "ended")).exists()
        assert ended or not Path(f"/proc/{path.read_text()}").exists()
    began = time.monotonic()
    assert weft.map(abs, [-1, -2], n=2) == [1, 2]
    assert time.monotonic() - began < within(5)


INTERRUPTED = """
import itertools, signal, sys, threading, time
import weft

def work(x):
    print("item", x, flush=True)
    time.sleep(60 if x else 0)

def consume():
    for _ in weft.imap(work, itertools.count(), n=2):
        pass

try:
    consume()
except KeyboardInterrupt:
    names = [thread.name for thread in threading.enumerate()]
    print("weft imap" in names, weft.map(abs, [-1, -2], n=2))
"""


def test_ctrl_c_while_a_result_is_awaited() -> None:
    """KeyboardInterrupt in the program, and nothing runs any more."""
    line = [sys.executable, "-u", str(write_script(INTERRUPTED))]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        seen = {program.stdout.readline() for _ in range(3)}
        assert seen == {"item 0\n", "item 1\n", "item 2\n"}
        began = time.monotonic()
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "False [1, 2]\n"
        assert time.monotonic() - began < within(5)
    assert program.returncode == 0


def test_shutdown_ends_a_stream_and_says_so() -> None:
    """What was computed can be taken; then Cancelled tells that it was not all."""
    results = weft.imap(lambda x: x, itertools.count(), n=2, ahead=8)
    assert next(results) == 0
    weft.shutdown()
    seen: list[int] = []
    with pytest.raises(Cancelled):
        seen.extend(results)
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) < 8


def test_a_stream_belongs_to_its_process() -> None:
    """A forked child is told to make its own."""
    results = weft.imap(abs, itertools.count(), n=1)
    next(results)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            next(results)
        except UsedAfterFork as error:
            code = 0 if "weft.imap(fun, items)" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert next(results) == 1
    results.close()


# several at once


def test_other_calls_within_the_loop() -> None:
    """Each result is the input of a map, with the same two workers: nobody waits for ever, and no
    more processes are started than the two ask for."""
    pids = set()
    for x, pid in itertools.islice(
        weft.imap(lambda x: (x, os.getpid()), itertools.count(), n=2), 30
    ):
        found = weft.map(lambda y: (y * 2, os.getpid()), [x, x + 1, x + 2], n=2)
        assert [y for y, _ in found] == [2 * x, 2 * x + 2, 2 * x + 4]
        pids |= {pid, *(one for _, one in found)}
    assert len(pids) <= 4


def test_a_stream_that_nobody_reads_has_no_workers() -> None:
    """When what it may compute ahead is computed, another call has its workers."""
    results = weft.imap(lambda _: os.getpid(), itertools.count(), n=2, ahead=40)
    pids = {next(results) for _ in range(20)}
    wait_until(lambda: pids >= set(weft.map(lambda _: os.getpid(), range(20), n=2)))
    pids |= {next(results) for _ in range(60)}
    assert len(pids) <= 4
    results.close()


def slow(x: int) -> int:
    time.sleep(0.002)
    return x


def test_streams_whose_consumer_waits_leave_the_workers_to_others() -> None:
    """However many of them there are, and however short their windows: a map gets workers, also one
    whose items are such a stream's."""
    streams = [weft.imap(slow, itertools.count(), ahead=4) for _ in range(3)]
    for _ in range(20):
        for stream in streams:
            next(stream)
    assert weft.map(abs, [-1, -2, -3], timeout=60) == [1, 2, 3]
    for stream in streams:
        stream.close()
    inner = weft.imap(slow, weft.imap(slow, iter(range(100))))
    assert weft.map(slow, inner, timeout=60) == list(range(100))


def test_streams_take_turns_and_form_pipelines() -> None:
    """Two in one thread, one after the other, and one whose items are another's results."""
    one = weft.imap(lambda x: x, itertools.count(), n=2)
    two = weft.imap(lambda x: -x, itertools.count(), n=2)
    for x in range(300):
        assert (next(one), next(two)) == (x, -x)
    three = weft.imap(lambda x: x * 10, weft.imap(lambda x: x + 1, one, n=2), n=2, ahead=4)
    assert list(itertools.islice(three, 50)) == [(x + 301) * 10 for x in range(50)]
    for stream in (three, two):
        stream.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_that_take_from_one_stream(engine: str) -> None:
    """Each result goes to one of them."""
    results = weft.imap(lambda x: x * 3, range(500), n=2, engine=engine)
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.extend(results)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [x * 3 for x in range(500)]


def test_streams_of_several_threads() -> None:
    """Each thread has its own, with its own items."""
    found: dict[int, list[int]] = {}

    def consume(number: int) -> None:
        with weft.imap(lambda x: x * number, itertools.count(), n=2) as results:
            found[number] = list(itertools.islice(results, 200))

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [x * number for x in range(200)] for number in range(4)}


def test_serial_is_the_built_in() -> None:
    """Nothing is drawn or run before it is asked for, and all of it in this thread."""
    items = Counted()
    results = weft.imap(lambda x: (x, threading.get_ident()), items, engine="serial", ahead=100)
    assert items.drawn == 0
    for x in range(5):
        assert next(results) == (x, threading.get_ident())
        assert items.drawn == x + 1


def test_a_bar_counts_what_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """With its label, and the total if that is known."""
    assert list(weft.imap(abs, range(8), n=2, progress="sweep")) == list(range(8))
    text = capsys.readouterr().err
    assert "sweep: 100%" in text
    assert "8/8" in text


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ahead": 0}, InvalidValue, r"imap\(ahead=0\): expected a whole number, 1 or more"),
    ({"ahead": 2.5}, InvalidType, r"imap\(ahead=2\.5\): expected a whole number"),
    ({"ordered": "no"}, InvalidType, r"imap\(ordered='no'\): expected True or False, got str"),
    ({"on_error": "skip"}, InvalidValue, r"imap\(on_error='skip'\): expected 'raise' or 'return'"),
    ({"retry_on": OSError}, InvalidValue, r"retry_on=\.\.\.\) without retries=(.|\n)*imap\(fun"),
    ({"n": 0}, InvalidValue, r"n=0: expected one worker or more"),
]


@pytest.mark.parametrize(("options", "kind", "text"), WRONG, ids=[str(one[0]) for one in WRONG])
def test_what_makes_no_sense_is_refused_at_the_call(
    options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    """Not when the first result is asked for."""
    with pytest.raises(kind, match=text):
        weft.imap(abs, [1], **options)
    with pytest.raises(InvalidType, match="imap got items of type int, which cannot be gone"):
        weft.imap(abs, 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="items"):
        weft.imap(abs)  # type: ignore[call-arg]
