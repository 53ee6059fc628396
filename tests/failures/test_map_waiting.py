"""Maps that wait for their items, or for their workers to start: deadlines, cancelling, results."""

from __future__ import annotations

import itertools
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from tests.support import wait_until, within
from weft.engines.local.pool.pool import Feed
from weft.engines.local.pool.workers import workers

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def warm_workers() -> None:
    """So that a short deadline is not over before they have started."""
    weft.map(abs, [-1, -2], n=2)


def test_a_deadline_while_the_items_do_not_come() -> None:
    """In the main thread a sleep is ended too; the error says what is waited for."""
    ended = []

    def items() -> Iterator[int]:
        yield 1
        try:
            time.sleep(60)
        finally:
            ended.append(True)

    start = time.monotonic()
    with pytest.raises(weft.Stalled, match="item 1 has not come out of its iterator"):
        weft.map(abs, items(), n=2, timeout=0.5)
    assert time.monotonic() - start < within(5)
    assert ended
    assert weft.map(abs, [-1], n=2, timeout=20) == [1]


@pytest.fixture
def items() -> Iterator[queue.Queue[Any]]:
    """What the iterator of a map waits for; None ends it."""
    given: queue.Queue[Any] = queue.Queue()
    yield given
    given.put(None)


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_a_deadline_in_another_thread(items: queue.Queue[Any], on_error: str) -> None:
    """There too it holds while the iterator blocks, which nobody can end."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            given = itertools.chain([-1], iter(items.get, None))
            outcome.append(weft.map(abs, given, n=2, timeout=0.5, on_error=on_error))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    start = time.monotonic()
    thread.start()
    thread.join(20)
    assert time.monotonic() - start < within(5)
    (found,) = outcome
    if on_error == "return":
        assert found[0] == 1
        (found,) = found[1:]
    assert isinstance(found, weft.Stalled if on_error == "raise" else Exception)
    assert "0.5 s" in str(found)


def test_results_come_while_items_do_not(items: queue.Queue[Any]) -> None:
    """A program may wait for a result before it has the next item."""
    handle = weft.map_async(lambda x: x * x, iter(items.get, None), n=2)
    found = handle.results()
    for index in range(40):  # later ones are wanted several at a time
        items.put(index)
        assert next(found) == (index, index * index)
    items.put(None)
    assert handle.wait(20) == [index * index for index in range(40)]
    assert next(found, None) is None


def test_cancelling_while_the_items_do_not_come(items: queue.Queue[Any]) -> None:
    """It returns at once, and the workers are free."""
    handle = weft.map_async(abs, iter(items.get, None), n=2)
    items.put(-1)
    assert next(handle.results()) == (0, 1)
    start = time.monotonic()
    handle.cancel()
    assert time.monotonic() - start < within(2)
    assert handle.status == "cancelled"
    assert weft.map(abs, [-1, -2], n=2) == [1, 2]


def test_a_handles_deadline_while_the_items_do_not_come(items: queue.Queue[Any]) -> None:
    handle = weft.map_async(abs, iter(items.get, None), n=2, timeout=0.5)
    items.put(-1)
    with pytest.raises(weft.Stalled, match="item 1 has not come out of its iterator"):
        handle.wait(20)


def test_an_iterator_of_a_handle_that_raises() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        weft.map_async(abs, items(), n=2).wait(20)


def test_a_feed_asks_for_no_more_than_is_wanted() -> None:
    """And gives all, in order, with none at the end."""
    asked = []

    def items() -> Iterator[int]:
        for item in range(10):
            asked.append(item)
            yield item

    feed = Feed(items(), lambda: None)
    assert not asked
    found: list[int] = []
    while (drawn := wait_until(lambda: _or_none(feed.draw(3)))) != "end":
        assert len(asked) - len(found) <= 3
        found += drawn
    assert found == list(range(10))
    feed.close()
    feed.close()


def _or_none(drawn: list[Any] | None) -> Any:
    return "end" if drawn == [] else drawn


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_workers_that_do_not_start(how: str) -> None:
    """The process that starts them is stopped: a deadline and `cancel` are seen all the same, and
    nothing is lost once it goes on."""
    process = workers()._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        if how == "deadline":
            with pytest.raises(weft.Stalled, match="no worker has started"):
                weft.map(abs, [-1, -2, -3], n=3, timeout=0.5)
        else:
            handle = weft.map_async(abs, [-1, -2, -3], n=3)
            assert not handle.done()
            handle.cancel()
            assert handle.status == "cancelled"
        assert time.monotonic() - start < within(2)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert weft.map(abs, [-1, -2, -3], n=3, timeout=20) == [1, 2, 3]
