"""Keeping two processes from sharing a core."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from weft.engines.local import placing, remote_worker
from weft.engines.local.frames import Frames
from weft.engines.local.libc import current_core
from weft.engines.local.placing import cores_of, move_off_this_core, use

pytestmark = pytest.mark.alone

CORES = os.sched_getaffinity(0)
several_cores = pytest.mark.skipif(
    len(CORES) < 2 or not placing.FEW_CORES, reason="there is no other core, or there are many"
)


class Sleeper:
    """A process that says on which core it was woken, each time."""

    def __init__(self) -> None:
        self._here, there = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            try:
                self._here.close()
                while there.recv(1):
                    there.send(struct.pack("i", current_core()))
            finally:
                os._exit(0)
        there.close()

    def wake(self) -> int:
        """On which core it woke."""
        self._here.send(b"x")
        (core,) = struct.unpack("i", self._here.recv(4))
        return int(core)

    def fall_asleep(self) -> None:
        while self._state() != "S":
            time.sleep(0.001)

    def _state(self) -> str:
        with open(f"/proc/{self.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._here.close()


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    made = Sleeper()
    yield made
    made.end()


@several_cores
def test_it_wakes_on_another_core(sleeper: Sleeper) -> None:
    """Always, whichever core the one who wakes it is on."""
    for _ in range(20):
        use(CORES, sleeper.pid)
        sleeper.fall_asleep()
        this = current_core()
        use(CORES - {this}, sleeper.pid)
        assert sleeper.wake() != this


@several_cores
def test_one_that_was_started(sleeper: Sleeper) -> None:
    """It is moved, and may use all cores afterwards; one that has a single core keeps it."""
    move_off_this_core(sleeper.pid)
    assert cores_of(sleeper.pid) == CORES
    use({max(CORES)}, sleeper.pid)
    move_off_this_core(sleeper.pid)
    assert cores_of(sleeper.pid) == {max(CORES)}
    assert sleeper.wake() == max(CORES)


def test_one_that_has_ended() -> None:
    """Who wakes it, or started it, finds that out as ever."""
    ended = Sleeper()
    ended.end()
    assert cores_of(ended.pid) == set()
    use(CORES, ended.pid)
    move_off_this_core(ended.pid)


def test_what_a_signal_handler_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error of the system's."""

    def handler(*_: object) -> None:
        raise TimeoutError("the user's own")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for name in ("sched_getaffinity", "sched_setaffinity"):
            monkeypatch.setattr(os, name, lambda *_: signal.raise_signal(signal.SIGALRM))
        for call in (lambda: cores_of(os.getpid()), lambda: use(CORES)):
            with pytest.raises(TimeoutError, match="the user's own"):
                call()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def kept_off(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are kept off this core from now on, each time."""
    pids: list[int] = []

    def counted(cores: set[int], pid: int) -> None:
        pids.append(pid)
        use(cores, pid)

    monkeypatch.setattr(remote_worker, "use", counted)
    return pids


def cores_after(seconds: float) -> tuple[int, set[int]]:
    if seconds:
        time.sleep(seconds)
    return os.getpid(), os.sched_getaffinity(0)


@several_cores
def test_a_map_of_short_items_after_a_pause(kept_off: list[int]) -> None:
    """The worker, which has fallen asleep, wakes elsewhere, and may use all cores then; those of
    long items wake where they may."""
    found = weft.map(cores_after, [0.0, 0.0], n=2)
    kept_off.clear()
    for _ in range(20):  # on a busy machine no item is short
        time.sleep(0.05)
        found = weft.map(cores_after, [0.0, 0.0], n=2)
        if kept_off:
            break
    assert kept_off == [found[0][0]]
    assert [cores for _, cores in found] == [CORES, CORES]
    weft.map(cores_after, [0.1, 0.1], n=2)
    kept_off.clear()
    time.sleep(0.05)
    weft.map(cores_after, [0.1, 0.1], n=2)
    assert not kept_off


def pinned(_: Any) -> set[int]:
    os.sched_setaffinity(0, {max(CORES)})
    return os.sched_getaffinity(0)


@several_cores
def test_a_worker_that_its_function_has_pinned() -> None:
    """It stays so."""
    for _ in range(3):
        assert weft.map(pinned, [1], n=1) == [{max(CORES)}]
        time.sleep(0.05)
    try:
        assert weft.map(cores_after, [0.0], n=1)[0][1] == {max(CORES)}
    finally:
        weft.shutdown()  # with its workers


@several_cores
def test_an_interrupt_after_it_was_kept_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its next work, of whatever kind, the worker hears that it may use all cores."""
    for _ in range(5):
        weft.map(cores_after, [0.0], n=1)
    time.sleep(0.05)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Frames, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            weft.map(cores_after, [0.0], n=1)
    assert weft.map(cores_after, [0.1], n=1)[0][1] == CORES


@several_cores
def test_a_function_after_a_pause(kept_off: list[int]) -> None:
    """Its workers wake elsewhere if there is a core for each, as the driver computes meanwhile."""
    for size in (2, len(CORES) + 1):
        with weft.Team(size) as team:
            function = weft.function(sum, split=0, collect="sum", team=team)
            function([1.0, 2.0, 3.0])
            kept_off.clear()
            time.sleep(0.05)
            function([1.0, 2.0, 3.0])
            assert len(kept_off) == (1 if size == 2 else 0)


def core_here(_: object) -> tuple[int, int]:
    return os.getpid(), current_core()


@several_cores
def test_one_that_has_come_to_this_core(
    kept_off: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer says so, and its next work moves it, though it is awake."""
    monkeypatch.setattr(remote_worker, "awake_after", lambda _: 60.0)  # never taken for asleep
    this = min(CORES)
    ((pid, _),) = weft.map(core_here, [0], n=1)
    try:
        use({this})
        use({this}, pid)
        assert weft.map(core_here, [0], n=1) == [(pid, this)]
        use(CORES, pid)
        kept_off.clear()
        ((_, core),) = weft.map(core_here, [0], n=1)
        assert kept_off == [pid]
        assert core != this
        weft.map(core_here, [0], n=1)
        assert kept_off == [pid]
        assert cores_of(pid) == CORES
    finally:
        use(CORES)
