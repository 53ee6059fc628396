"""Teams that are closed, restarted or shut down in the middle of a call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import HANGS, wait_until, within
from weft._api import team as team_module

pytestmark = pytest.mark.alone


def slow(x: Any) -> float:
    """Say that the call runs, and wait until it may end."""
    (folder() / "running").touch()
    wait_until((folder() / "go on").exists)
    return float(x.sum())


def folder() -> Path:
    return Path(os.environ["WEFT_TEST_FOLDER"])


def await_call() -> None:
    wait_until((folder() / "running").exists)


@pytest.mark.parametrize("end", [lambda team: team.close(), lambda team: weft.shutdown()])
def test_a_team_that_another_thread_closes(end: Callable[[weft.Team], None]) -> None:
    """The call ends at once, and says why; so does the next."""
    team = weft.Team(2, timeout=20.0)
    f = weft.function(slow, collect="sum", team=team, check=None)
    f.send()
    ended: list[float] = []
    thread = threading.Thread(
        target=lambda: (await_call(), ended.append(time.monotonic()), end(team))
    )
    thread.start()
    with pytest.raises(weft.TeamBroken, match="closed in the middle of a call"):
        f(np.ones(4))
    assert time.monotonic() - ended[0] < within(2.2)
    thread.join()
    with pytest.raises(weft.TeamBroken, match="has been closed"):
        f(np.ones(4))
    team.restart()
    assert weft.function(np.sum, split=[0], collect="sum", team=team)(np.ones(4)) == 4
    team.close()


def closes(x: Any) -> float:
    if teams := list(team_module._teams):  # the driver's
        teams[0].close()
    else:  # until it is ended
        time.sleep(HANGS)
    return float(x.sum())


def test_a_function_that_closes_its_own_team() -> None:
    team = weft.Team(2, timeout=20.0)
    f = weft.function(closes, collect="sum", team=team, check=None)
    with pytest.raises(weft.TeamBroken, match="closed in the middle of a call"):
        f(np.ones(4))
    with pytest.raises(weft.TeamBroken, match="has been closed"):
        f(np.ones(4))


def test_a_restart_in_the_middle_of_a_call() -> None:
    """By another thread: it waits for the end of the call."""
    with weft.Team(2, timeout=20.0) as team:
        f = weft.function(slow, collect="sum", team=team, check=None)

        def restart() -> None:
            await_call()
            threading.Timer(0.1, (folder() / "go on").touch).start()  # it may wait by then
            team.restart()

        thread = threading.Thread(target=restart)
        thread.start()
        assert f(np.ones(4)) == 4
        thread.join()
        assert team.starts == 1
        assert f(np.ones(4)) == 4
