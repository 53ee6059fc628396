"""Exceptions that signal handlers raise, and threads that start whole or not at all."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from tests.support import run_python
from weft.engines import interruption
from weft.engines.interruption import by_signal_handler

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def handler_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def press(*_: object) -> None:
    raise TimeoutError("pressed")


class Presser:
    def press(self, *_: object) -> None:
        raise TimeoutError("pressed")

    def __call__(self, *_: object) -> None:
        raise TimeoutError("pressed")


@pytest.mark.parametrize(
    "handler",
    [press, Presser().press, Presser(), functools.partial(press, 1), lambda *_: press()],
    ids=["function", "method", "object", "partial", "lambda"],
)
def test_a_handlers_exception_is_known(handler: Any) -> None:
    """Whatever kind of handler it is. The same exception raised by somebody else is not one."""
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(TimeoutError) as caught:
        signal.raise_signal(signal.SIGUSR1)
    assert by_signal_handler(caught.value)
    with pytest.raises(ZeroDivisionError) as other:
        _ = 1 // 0
    assert not by_signal_handler(other.value)


class PressedWhilePickled:
    """The handler's exception comes while it is packed, as often as it is."""

    times = 0

    def __reduce__(self) -> Any:
        PressedWhilePickled.times += 1
        signal.raise_signal(signal.SIGUSR1)
        return str, ("packed",)


@pytest.mark.parametrize("place", ["item", "function", "argument", "kept"])
def test_a_handlers_exception_is_raised_and_not_taken_for_an_items(place: str) -> None:
    """A signal that comes while something is packed says nothing of what is packed: no second
    pickler tries, and no item fails."""
    signal.signal(signal.SIGUSR1, press)
    value, PressedWhilePickled.times = PressedWhilePickled(), 0
    with pytest.raises(TimeoutError, match="pressed"):
        pack_as(place, value)
    assert PressedWhilePickled.times == 1
    assert weft.map(len, [[1]], n=1) == [1]


def pack_as(place: str, value: Any) -> None:
    if place == "item":
        weft.map(len, [[1], [value]], n=1, on_error="return")
    elif place == "function":
        weft.map(lambda x: value, [1], n=1)
    else:
        with weft.Team(2) as team:
            if place == "argument":
                weft.function(len, team=team, collect="sum")([[1], [value]])
            else:
                weft.replicate([value], team=team)


# guards


@pytest.mark.parametrize("thread", ["main", "another"])
def test_a_guard_that_cannot_tell_whether_it_failed(thread: str) -> None:
    """What it raises interrupts the block and is raised by it. The guards after it are checked as
    those before."""

    def cannot_tell() -> bool:
        raise OSError("cannot tell")

    def attempt() -> None:
        for failed in (cannot_tell, cannot_tell, lambda: True):
            try:
                with interruption.ComputationGuard(failed):
                    end = time.monotonic() + 20
                    while time.monotonic() < end:
                        time.sleep(0.01)
            except BaseException as error:
                raised.append(type(error))

    raised: list[type] = []
    if thread == "main":
        attempt()
    else:
        other = threading.Thread(target=attempt)
        other.start()
        other.join()
    assert raised == [OSError, OSError, interruption.ComputationInterrupted]


# threads


def test_a_thread_starts() -> None:
    """From the main thread and from another one it runs, once, and can be joined."""
    ran: list[str] = []

    def from_another() -> None:
        inner = threading.Thread(target=ran.append, args=("inner",))
        interruption.start(inner)
        inner.join(10)

    outer = threading.Thread(target=from_another)
    interruption.start(outer)
    outer.join(10)
    assert ran == ["inner"]
    assert not outer.is_alive()


def test_a_thread_starts_once() -> None:
    """What `Thread.start` says comes out here."""
    thread = threading.Thread(target=print, args=("",), kwargs={"end": ""})
    interruption.start(thread)
    thread.join(10)
    with pytest.raises(RuntimeError, match="can only be started once"):
        interruption.start(thread)


def test_starts_survive_interrupts() -> None:
    """However often who starts threads is interrupted, each thread that began also ends, and Python
    has nothing to say about them."""
    outcome = run_python(
        """
import signal, threading, time
from weft.engines import interruption

class Interrupt(Exception):
    pass

def strike(*_):
    raise Interrupt

def begin():
    thread = threading.Thread(target=lambda: None)
    made.append(thread)
    interruption.start(thread)

made, struck = [], 0
signal.signal(signal.SIGALRM, strike)
end = time.monotonic() + 60
while struck < 100 and time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.00002 + len(made) % 97 * 0.000002)
        begin()
        time.sleep(0.01)  # until the timer strikes
    except Interrupt:
        struck += 1
signal.setitimer(signal.ITIMER_REAL, 0)
while threading.active_count() > 1 and time.monotonic() < end:
    time.sleep(0.01)
print(struck, len(threading.enumerate()), threading.active_count())
"""
    )
    assert (outcome.out, outcome.err) == ("100 1 1\n", ""), outcome
