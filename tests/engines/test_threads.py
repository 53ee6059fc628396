"""Threads that start whole or not at all."""

from __future__ import annotations

import threading

import pytest

from tests.support import run_python
from weft.engines import interruption

pytestmark = pytest.mark.alone


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
from weft.engines import interruption as threads

class Interrupt(Exception):
    pass

def strike(*_):
    raise Interrupt

def begin():
    thread = threading.Thread(target=lambda: None)
    made.append(thread)
    threads.start(thread)

made, struck = [], 0
signal.signal(signal.SIGALRM, strike)
end = time.monotonic() + 2
while time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.00002 + len(made) % 97 * 0.000002)
        begin()
        time.sleep(0.01)  # until the timer strikes
    except Interrupt:
        struck += 1
time.sleep(0.2)
print(struck > 50, len(threading.enumerate()), threading.active_count())
"""
    )
    assert (outcome.out, outcome.err) == ("True 1 1\n", ""), outcome
