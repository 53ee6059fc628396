"""On which core a process wakes."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from weft.engines.local.libc import current_core
from weft.engines.local.placing import Placing

several_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="there is no other core"
)


class Sleeper:
    """A process that says on which core it was woken, each time."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            while there.recv(1):
                there.send(bytes([current_core()]))
            os._exit(0)
        there.close()

    def wake(self) -> None:
        self._here.send(b"x")

    def core(self) -> int:
        return self._here.recv(1)[0]

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._here.close()


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    made = Sleeper()
    yield made
    made.end()


def asleep(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"


@several_cores
def test_it_wakes_on_another_core(sleeper: Sleeper) -> None:
    """Always; and afterwards it may use all cores again."""
    placing, cores = Placing(sleeper.pid), os.sched_getaffinity(sleeper.pid)
    for _ in range(20):
        while not asleep(sleeper.pid):
            time.sleep(0.001)
        barred = []

        def wake(barred: list[set[int]] = barred) -> None:
            barred.append(cores - os.sched_getaffinity(sleeper.pid))
            sleeper.wake()

        placing.wake_elsewhere(wake)
        assert sleeper.core() not in barred[0]
        assert len(barred[0]) == 1
        assert os.sched_getaffinity(sleeper.pid) == cores


@several_cores
def test_what_is_raised_meanwhile(sleeper: Sleeper) -> None:
    """It may use all cores again; also where an interrupt kept that from being said at once."""
    placing, cores = Placing(sleeper.pid), os.sched_getaffinity(sleeper.pid)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        placing.wake_elsewhere(fail)
    assert os.sched_getaffinity(sleeper.pid) == cores
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "_unbar", fail)
        with pytest.raises(KeyboardInterrupt):
            placing.wake_elsewhere(sleeper.wake)
    sleeper.core()
    assert os.sched_getaffinity(sleeper.pid) < cores
    placing.wake_elsewhere(sleeper.wake)
    sleeper.core()
    assert os.sched_getaffinity(sleeper.pid) == cores


def test_one_that_has_a_single_core(sleeper: Sleeper) -> None:
    """It keeps it, whichever that is: where its user wants it, it is."""
    only = {max(os.sched_getaffinity(0))}
    os.sched_setaffinity(sleeper.pid, only)
    Placing(sleeper.pid).wake_elsewhere(sleeper.wake)
    assert {sleeper.core()} == only
    assert os.sched_getaffinity(sleeper.pid) == only


def test_one_that_has_ended() -> None:
    """Who wakes it finds that out as ever."""
    ended = Sleeper()
    ended.end()
    woken = []
    Placing(ended.pid).wake_elsewhere(lambda: woken.append(True))
    assert woken
