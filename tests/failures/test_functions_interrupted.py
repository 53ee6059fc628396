"""Drivers that are interrupted in the middle of a call to a team."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import run_python, wait_until, within
from weft.engines import interruption
from weft.engines.interruption import ComputationGuard, ComputationInterrupted
from weft.engines.local.memory import blocks
from weft.engines.local.pool.remote_worker import Worker
from weft.engines.local.team import team as local_team

INTERRUPTED = """
import random, signal, sys, time
import numpy as np, weft

class Pressed(Exception):
    pass

def press(*_):
    raise Pressed

signal.signal(signal.SIGALRM, press)
rng = random.Random(int(sys.argv[1]))
table, struck, longest = np.ones(20_000), 0, 0.0
team = weft.Team(2, timeout=20.0)
f = weft.function(lambda x, w: x * w.sum(), whole=["w"], collect="gather", team=team)

def call(x):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + rng.random() * 0.02)
        return f(x, table)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)

deadline = time.monotonic() + 6
while time.monotonic() < deadline or (struck <= 20 and time.monotonic() < deadline + 60):
    x = rng.random() * np.ones((30_000, 1))
    begun = time.monotonic()
    try:
        assert (call(x) == x * 20_000).all()
    except Pressed:
        struck += 1
        longest = max(longest, time.monotonic() - begun)
    except weft.TeamBroken:
        team.restart()
print(struck, longest)
"""


@pytest.mark.parametrize("seed", range(2))
def test_interrupts_at_random(seed: int) -> None:
    """A call returns what it should, raises what the handler raised, or says that the team cannot
    go on: no call gets another one's answer."""
    outcome = run_python(INTERRUPTED, str(seed))
    assert outcome.code == 0, outcome
    struck, longest = outcome.out.split()
    assert int(struck) > 20
    assert float(longest) < within(5)  # half of what a worker has that does not end


@pytest.mark.parametrize("moment", ["give", "receive"])
def test_an_interrupt_before_a_message_was_sent_or_after_it_was_received(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver does not wait for an answer that it will not get, and the worker gives up the
    memory of one that nobody will take; the team goes on."""
    with weft.Team(2, timeout=20.0) as team:
        f = weft.function(_twice_and_blocks, collect="gather", team=team, check=None)
        x = np.ones(200_000)

        def kept() -> int:
            return int(f(x)[1][1])

        assert wait_until(lambda: kept() == 0)
        whole = getattr(Worker, moment)

        def interrupted(*arguments: Any, **named: Any) -> None:
            if moment == "receive" and whole(*arguments, **named) is None:
                return
            patch.undo()
            raise KeyboardInterrupt

        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(Worker, moment, interrupted)
                begun = time.monotonic()
                with pytest.raises(KeyboardInterrupt):
                    f(x)
                assert time.monotonic() - begun < within(5)
            assert (f(x)[0] == 2).all()
        assert wait_until(lambda: kept() == 0)


def test_a_guard_whose_end_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken down all the same: it would take the answers of later calls."""
    with weft.Team(2, timeout=20.0) as team:
        f = weft.function(_sum, collect="sum", team=team)
        assert f(np.ones(4)) == 4

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ComputationGuard, "__exit__", interrupted)
            with pytest.raises(KeyboardInterrupt):
                f(np.ones(4))
        assert not interruption._watcher.guards
        assert f(np.ones(4)) == 4


def test_a_guard_whose_signal_somebody_else_has_taken() -> None:
    """The computation is ended all the same, and the program goes on; the next one has the signal
    again."""
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(interruption._SIGNAL, handler)
        with pytest.raises(ComputationInterrupted), ComputationGuard(lambda: True):
            _compute(seconds=20)
        with pytest.raises(ComputationInterrupted), ComputationGuard(lambda: True):
            time.sleep(20)


def test_a_second_interrupt_before_the_workers_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may still answer that call: the team says that it cannot go on, and no later call gets
    their answers."""
    close = ComputationGuard.close

    def interrupted(guard: ComputationGuard) -> None:
        close(guard)
        raise KeyboardInterrupt

    with weft.Team(2, timeout=20.0) as team:
        f = weft.function(_sum, collect="sum", team=team)
        assert f(np.ones(4)) == 4
        with monkeypatch.context() as patch:
            patch.setattr(ComputationGuard, "close", interrupted)
            with pytest.raises(KeyboardInterrupt):
                f(np.ones(4))
        for _ in range(2):
            with pytest.raises(weft.TeamBroken, match="interrupted twice"):
                f(np.ones(6))
        team.restart()
        assert f(np.ones(6)) == 6


TRACED = """
import sys, threading, weft
from weft.engines.interruption import ComputationInterrupted, ComputationGuard

def compute():
    try:
        with ComputationGuard(lambda: True):
            while True:
                pass
    except ComputationInterrupted:
        pass
    sys.settrace(lambda *_: None)
    weft.map(abs, range(3), engine="serial")
    print("done")

thread = threading.Thread(target=compute)
thread.start()
thread.join()
"""


def test_a_tracer_after_a_computation_was_ended_in_a_thread() -> None:
    """A debugger, or a measurement of coverage, goes on as if nothing had been raised there."""
    outcome = run_python(TRACED)
    assert (outcome.code, outcome.out) == (0, "done\n"), outcome


def test_a_team_that_could_not_meet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure the ranks meet in a new generation; an interrupt there leaves some in the old
    one, so that the team is of no use until it is started again."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with weft.Team(2, timeout=20.0) as team:
        f = weft.function(_sum, collect="sum", team=team)
        with pytest.raises(ValueError, match="negative"):
            f(-np.ones(4))
        with monkeypatch.context() as patch:
            patch.setattr(local_team, "renew", interrupted)
            with pytest.raises(KeyboardInterrupt):
                f(np.ones(4))
        with pytest.raises(weft.TeamBroken, match=r"could not meet again.*Interrupt.*\n *team\."):
            f(np.ones(4))
        team.restart()
        assert f(np.ones(4)) == 4


@pytest.mark.parametrize("failed", [False, True], ids=["call", "renewal"])
def test_an_interrupt_before_anything_was_sent(
    monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """One Ctrl-C leaves the team as it was, also where it was about to meet again."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with weft.Team(2, timeout=20.0) as team:
        f = weft.function(_sum, collect="sum", team=team)
        if failed:
            with pytest.raises(ValueError, match="negative"):
                f(-np.ones(4))
        for place in ("ComputationGuard", "pack"):
            with monkeypatch.context() as patch:
                patch.setattr(local_team, place, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    f(np.ones(4))
        assert f(np.ones(4)) == 4


def _compute(seconds: float) -> None:
    """Something that goes through many steps of Python."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)


def _twice_and_blocks(x: Any) -> tuple[Any, Any]:
    """Also how many blocks of memory this process keeps."""
    server = blocks._here.server
    with server._lock:
        server._free_dropped()
        return x * 2, np.array([len(server._entries)])


def _sum(x: Any) -> float:
    if x.sum() < 0:
        raise ValueError("negative")
    return float(x.sum())
