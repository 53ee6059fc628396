"""A pipe whose server has been stopped, or does not open: nobody waits for it for ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import HANGS, run_command, wait_until, within
from weft.engines.key import VARIABLE
from weft.engines.local.pool import named_pipe
from weft.errors import LaunchError, Refused, Stalled

pytestmark = pytest.mark.alone

PIPE = f"test-{os.getpid()}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process that serves the pipe, for which this side has little patience."""
    key = {VARIABLE: "a key of this test's"}
    monkeypatch.setenv(*next(iter(key.items())))
    assert run_command([sys.executable, "-m", "weft", "open", "--pipe", PIPE], env=key).code == 0
    channel, pool = named_pipe.connect(PIPE)
    channel.close()
    monkeypatch.setattr(named_pipe, "_PATIENCE", 1)
    monkeypatch.setattr(named_pipe, "_END", 0.5)
    yield pool.pid
    if PIPE in named_pipe.names():
        os.kill(pool.pid, signal.SIGCONT)
        monkeypatch.setattr(named_pipe, "_END", 10.0)
        named_pipe.close_pipe(PIPE)
    wait_until(lambda: PIPE not in named_pipe.names())


def test_a_stopped_server_lets_nobody_wait_for_ever(server: int) -> None:
    """Each of many who come is refused in time, also those for whom there is no room to wait."""
    os.kill(server, signal.SIGSTOP)
    refused: list[float] = []

    def come() -> None:
        began = time.monotonic()
        with pytest.raises(Refused, match="does not answer"):
            named_pipe.connect(PIPE)
        refused.append(time.monotonic() - began)

    comers = [threading.Thread(target=come) for _ in range(80)]
    for one in comers:
        one.start()
    for one in comers:
        one.join(HANGS)
    assert len(refused) == 80
    assert max(refused) < within(5)


def test_a_server_that_is_stopped_before_it_has_closed(
    server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who closes it is told which process has not ended; once that goes on, it ends."""
    connect = named_pipe.connect

    def connect_and_stop(name: str) -> Any:
        found = connect(name)
        os.kill(server, signal.SIGSTOP)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(named_pipe, "connect", connect_and_stop)
        with pytest.raises(Stalled, match=f"told to close .* process {server}, which serves it"):
            named_pipe.close_pipe(PIPE)
    os.kill(server, signal.SIGCONT)
    wait_until(lambda: PIPE not in named_pipe.names())


def test_a_server_that_does_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended, and whoever wanted it is told."""
    monkeypatch.setattr(named_pipe, "_START", 0.0)
    with pytest.raises(LaunchError, match="was not open after"):
        named_pipe.open_pipe(PIPE, 1)
    assert PIPE not in named_pipe.names()
