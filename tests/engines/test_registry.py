"""Which engine a call gets, and what is said where it gets none."""

from __future__ import annotations

import os
import sys
import types
import warnings
from collections.abc import Iterator

import pytest

import weft
from weft._core.launch import Launched
from weft.engines import registry
from weft.engines.registry import ENGINES, choose
from weft.errors import EngineUnavailable, MissingPackage, UnknownEngine

OFFERS = {"group", "pool", "team", "share", "launch", "hosts", "machines"}
RANK = Launched(0, 2, "job", local_rank=0, local_size=2)


def test_every_row_keeps_what_it_says() -> None:
    """A row that has a module has what it offers there, and offers nothing else."""
    functions = {
        "group": {"join"},
        "pool": {"make_pool", "prestart"},
        "team": {"make_team"},
        "share": {"share"},
        "launch": {"launch", "open_pipe", "serve_pipe", "pipes", "close_pipe", "probes"},
        "machines": {"open_node", "serve_node", "close_node", "status"},
        "hosts": {"launch", "survey", "find_mpirun"},
    }
    for name, row in ENGINES.items():
        assert name == row.name
        assert row.offers <= OFFERS
        if row.module:
            module = row.load()
            has = {one for one in set().union(*functions.values()) if hasattr(module, one)}
            assert has == set().union(*(functions[offer] for offer in row.offers)), name
            assert callable(module.close)


def test_the_default_depends_on_the_launcher() -> None:
    """A group of a process that nobody launched is serial; everything else is local."""
    assert choose(None, "group", None).name == "serial"
    assert choose(None, "group", RANK).name == "local"
    for offer in OFFERS - {"group", "hosts", "machines"}:
        assert choose(None, offer).name == "local"


def test_a_name_wins() -> None:
    """Over the launcher, too."""
    assert choose("serial", "group", RANK).name == "serial"
    assert choose("local", "group", None).name == "local"


@pytest.mark.parametrize("offer", sorted(OFFERS))
@pytest.mark.parametrize("name", ["lokal", "", 3, ["local"]])
def test_a_name_that_is_not_known(name: object, offer: str) -> None:
    """The known ones are listed, whatever was asked for."""
    with pytest.raises(UnknownEngine, match=r"is unknown; known are serial, local, mpi, ray"):
        choose(name, offer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "offer", "fit"),
    [
        ("mpi", "pool", "'local', 'ray', 'serial'"),
        ("ray", "group", "'local', 'mpi', 'serial'"),
        ("serial", "launch", "'local'"),
    ],
)
def test_an_engine_that_does_not_offer_it(name: str, offer: str, fit: str) -> None:
    """Those that do are listed."""
    with pytest.raises(UnknownEngine, match=f"engine='{name}': known are {fit}$"):
        choose(name, offer)


def test_an_engine_that_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pip line is printed; with the package, what else is in the way."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"needs? the package mpi4py.*\n.*'weft\[mpi\]'"):
        choose("mpi", "group")
    with pytest.raises(MissingPackage, match=r"needs? the package ray.*\n.*'weft\[ray\]'"):
        choose("ray", "pool")


def test_ranks_that_cannot_meet() -> None:
    """What the launcher's variables say is told, unless each rank is to work alone."""
    spread = Launched(0, 2, "", local_rank=0, local_size=1)
    for name in (None, "local"):
        with pytest.raises(EngineUnavailable, match="ranks span hosts"):
            choose(name, "group", spread)
    assert choose("serial", "group", spread).name == "serial"


# where the local engine cannot run


@pytest.fixture(params=["another system", "another processor"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "another system":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(machine="aarch64"))
    monkeypatch.setattr(registry, "_warned", False)
    return


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "call",
    [
        lambda: weft.map(abs, [1, 2], engine="local"),
        lambda: weft.map_async(abs, [1, 2], engine="local"),
        lambda: weft.distribute(abs, named_pipe=True),
        lambda: weft.Team(2, engine="local"),
        lambda: weft.init(engine="local"),
        lambda: choose(None, "group", RANK),
        lambda: choose(None, "launch"),
    ],
)
def test_it_is_refused_by_name(call: object) -> None:
    """With what it needs, what there is, and what can be done. A launch has no serial ranks."""
    with pytest.raises(EngineUnavailable, match=r"Linux on x86-64, this is .* engine='serial'"):
        call()  # type: ignore[operator]


@pytest.mark.usefixtures("elsewhere")
def test_it_is_replaced_with_one_warning() -> None:
    """Who names no engine gets the serial one, and is told once."""
    with pytest.warns(RuntimeWarning, match=r"serially here.* needs Linux on x86-64, this is"):
        assert weft.map(abs, [-1, -2]) == [1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert weft.distribute(abs)([-1, -2]) == [1, 2]
        assert weft.map(abs, [-1, -2], engine="serial") == [1, 2]
        with weft.Team(2) as team:
            assert team.size == 1
        assert weft.share([1.0, 2.0]).sum() == 3.0
