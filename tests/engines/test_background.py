"""Calls beside the caller's own work."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.support import run_ranks, wait_until
from weft.engines.background import Background
from weft.engines.base import Group
from weft.errors import InvalidValue, Stalled


def test_calls_are_made_one_after_the_other() -> None:
    """In the order in which they were started, by one thread that is not the caller's."""
    background, seen, gate = Background("test"), [], threading.Event()

    def work(number: int) -> int:
        gate.wait(10)
        seen.append((number, threading.current_thread().name))
        return number

    calls = [background.start(lambda n=n: work(n), "work") for n in range(5)]
    assert not any(call.done() for call in calls)
    with pytest.raises(Stalled, match=r"work was not done after 0\.01 s; it goes on"):
        calls[0].wait(timeout=0.01)
    gate.set()
    assert [call.wait() for call in reversed(calls)] == [4, 3, 2, 1, 0]
    assert seen == [(number, "weft async test") for number in range(5)]
    background.close()


def test_an_error_is_kept_for_who_waits() -> None:
    """wait() raises what the call raised, as often as it is asked; the calls after it are made."""
    background = Background("test")

    def fail() -> None:
        raise KeyError("lost")

    first, second = background.start(fail, "fail"), background.start(lambda: 7, "work")
    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            first.wait()
    assert second.wait() == 7
    background.finish()
    assert first.done()
    background.close()


def test_the_thread_ends_when_there_is_nothing_to_do() -> None:
    """It is gone after a while without calls, and there again for the next one."""
    background = Background("idle")

    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name == "weft async idle"]

    for _ in range(2):
        assert background.start(lambda: 1, "work").wait() == 1
        wait_until(lambda: not threads())
    background.close()


def test_what_a_call_held_is_free_when_it_is_done() -> None:
    """A finished call keeps its result, not its arguments."""
    background = Background("test")

    class Argument:
        alive = 0

        def __init__(self) -> None:
            Argument.alive += 1

        def __del__(self) -> None:
            Argument.alive -= 1

    def start() -> Any:
        argument = Argument()
        return background.start(lambda: argument and 1, "work")

    call = start()
    assert call.wait() == 1
    wait_until(lambda: Argument.alive == 0)
    with pytest.raises(InvalidValue, match="timeout="):
        call.wait(timeout=-1)
    background.close()


def test_calls_and_work_overlap() -> None:
    """Calls are carried out while their callers do other things and none of them waits."""

    def body(group: Group) -> list[str]:
        events: list[str] = []
        value = np.full(200_000, float(group.rank))
        handles = [group.all_reduce(value, async_op=True) for _ in range(3)]

        def watch() -> None:
            for handle in handles:
                handle.wait()
                events.append("call")

        watcher = threading.Thread(target=watch)
        watcher.start()
        deadline = time.monotonic() + 30
        while not all(handle.done() for handle in handles) and time.monotonic() < deadline:
            np.sqrt(value).sum()  # the caller's own work; it does not enter weft
        watcher.join()
        events.append("work")
        assert (handles[-1].wait() == 1.0).all()
        return events

    assert run_ranks(2, body) == [["call", "call", "call", "work"]] * 2


def test_a_call_ends_while_its_caller_sleeps() -> None:
    """Whether the others' calls end does not depend on what this rank's thread does."""

    def body(group: Group) -> bool:
        side = group.split(0)
        assert side is not None
        handle = group.all_reduce(np.ones(200_000), async_op=True)
        if group.rank == 0:
            side.barrier()  # rank 1 has its result before rank 0 has looked at the call again
        else:
            handle.wait()
            side.barrier()
        deadline = time.monotonic() + 30
        while not handle.done() and time.monotonic() < deadline:
            time.sleep(0.001)
        return handle.done() and bool((handle.wait() == 2).all())

    assert run_ranks(2, body) == [True, True]


def test_an_error_that_nobody_waits_for_is_a_warning() -> None:
    """A failed call whose handle is dropped says so; one that was waited for does not."""
    background = Background("test")

    def fail() -> None:
        raise ValueError("of no use")

    def drop() -> None:
        handle = background.start(fail, "all_reduce")
        handle.join()
        assert repr(handle) == "<all_reduce, failed>"
        del handle
        gc.collect()  # its error's traceback leads to it

    with pytest.warns(RuntimeWarning, match="nobody waited for it: ValueError: of no use"):
        drop()
    handle = background.start(fail, "all_reduce")
    with pytest.raises(ValueError, match="of no use"):
        handle.wait()
    background.close()
