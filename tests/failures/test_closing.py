"""Teams that are closed, restarted or shut down in the middle of a call."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import within

pytestmark = pytest.mark.alone


def slow(x: Any) -> float:
    time.sleep(3)
    return float(x.sum())


@pytest.mark.parametrize("end", [lambda team: team.close(), lambda team: weft.shutdown()])
def test_a_team_that_another_thread_closes(end: Callable[[weft.Team], None]) -> None:
    """The call ends at once, and says why; so does the next."""
    team = weft.Team(2, timeout=20.0)
    f = weft.function(slow, collect="sum", team=team)
    f.send()
    thread = threading.Thread(target=lambda: (time.sleep(0.3), end(team)))
    thread.start()
    start = time.monotonic()
    with pytest.raises(weft.TeamBroken, match="closed in the middle of a call"):
        f(np.ones(4))
    assert time.monotonic() - start < within(2.5)
    thread.join()
    with pytest.raises(weft.TeamBroken, match="has been closed"):
        f(np.ones(4))
    team.restart()
    assert weft.function(np.sum, split=[0], collect="sum", team=team)(np.ones(4)) == 4
    team.close()


#: in the driver; workers, which load this module themselves, have none
_teams: list[weft.Team] = []


def closes(x: Any) -> float:
    if _teams:
        _teams[0].close()
    time.sleep(0.5)
    return float(x.sum())


def test_a_function_that_closes_its_own_team(monkeypatch: pytest.MonkeyPatch) -> None:
    team = weft.Team(2, timeout=20.0)
    monkeypatch.setattr(sys.modules[__name__], "_teams", [team])
    f = weft.function(closes, collect="sum", team=team)
    with pytest.raises(weft.TeamBroken, match="closed in the middle of a call"):
        f(np.ones(4))
    with pytest.raises(weft.TeamBroken, match="has been closed"):
        f(np.ones(4))


def test_a_restart_in_the_middle_of_a_call() -> None:
    """By another thread: it waits for the end of the call."""
    with weft.Team(2, timeout=20.0) as team:
        f = weft.function(slow, collect="sum", team=team)

        def restart() -> None:
            time.sleep(0.5)
            team.restart()

        thread = threading.Thread(target=restart)
        thread.start()
        assert f(np.ones(4)) == 4
        thread.join()
        assert team.starts == 1
        assert f(np.ones(4)) == 4
