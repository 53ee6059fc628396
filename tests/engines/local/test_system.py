"""Where the local engine cannot run, each way to it says so."""

from __future__ import annotations

import os
import sys
import types

import pytest

import weft
from weft.engines.local.system import check_system
from weft.errors import EngineUnavailable


@pytest.fixture(params=["another system", "another processor"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    if request.param == "another system":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine="aarch64"))
    check_system.cache_clear()
    yield
    check_system.cache_clear()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "call",
    [
        lambda: weft.map(abs, [1, 2]),
        lambda: weft.map_async(abs, [1, 2]),
        lambda: weft.distribute(abs)([1, 2]),
        lambda: weft.Team(2),
        lambda: weft.init(engine="local"),
    ],
)
def test_it_is_refused(call: object) -> None:
    """With what it needs, what there is, and what can be done."""
    with pytest.raises(EngineUnavailable, match=r"Linux on x86-64, this is .* engine='serial'"):
        call()  # type: ignore[operator]


@pytest.mark.usefixtures("elsewhere")
def test_the_serial_engine_runs_there() -> None:
    """As the message says."""
    assert weft.map(abs, [-1, -2], engine="serial") == [1, 2]
