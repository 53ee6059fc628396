"""On what the contract suites run: every engine, launcher and size."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest

import weft
from tests.contracts.fakes import on_two_hosts
from tests.support import run_ranks

#: the serial engine has no launcher; the others start ranks of the local engine, "two hosts" those
#: of `fakes.py`
CASES = [
    ("serial", 1),
    *((launcher, size) for launcher in ("weft run", "mpirun") for size in (1, 2, 3, 4)),
    ("two hosts", 3),
]
SEVERAL = [(launcher, size) for launcher, size in CASES if size > 1]
#: each engine, launcher and size at least once: weft run has the odd sizes, mpirun the even ones
SOME = [
    (launcher, size)
    for launcher, size in CASES
    if launcher in ("serial", "two hosts", ("mpirun", "weft run")[size % 2])
]
#: each engine and launcher once
FEW = [("serial", 1), ("weft run", 3), ("mpirun", 2), ("two hosts", 3)]


@pytest.fixture(params=CASES, ids=[f"{name}-{size}" for name, size in CASES])
def outcome(request: pytest.FixtureRequest) -> Any:
    """A function that tells what a body of the module's BODIES returned, by rank."""
    return request.module.BODIES.outcome(request.param)


@pytest.fixture(params=SEVERAL, ids=[f"{name}-{size}" for name, size in SEVERAL])
def outcome_of_several(request: pytest.FixtureRequest) -> Any:
    """As `outcome`, where there is more than one rank."""
    return request.module.BODIES.outcome(request.param)


def _in_make_test(chosen: list[tuple[str, int]]) -> list[Any]:
    """All cases; `make soak` has those that are not chosen."""
    return [
        pytest.param(
            case, marks=() if case in chosen else pytest.mark.soak, id=f"{case[0]}-{case[1]}"
        )
        for case in CASES
    ]


@pytest.fixture(params=_in_make_test(SOME))
def outcome_of_some(request: pytest.FixtureRequest) -> Any:
    """As `outcome`, for what costs much."""
    return request.module.BODIES.outcome(request.param)


@pytest.fixture(params=_in_make_test(FEW))
def outcome_of_few(request: pytest.FixtureRequest) -> Any:
    """As `outcome`, where every rank loads torch, in two seconds."""
    return request.module.BODIES.outcome(request.param)


def caller(launcher: str, size: int) -> Any:
    """A function that calls another in every rank of such a group."""

    def call(function: Any, *arguments: Any) -> list[Any]:
        if launcher == "serial":
            try:
                return [function(weft.init(engine="serial", timeout=60.0), *arguments)]
            finally:
                weft.shutdown()
        if launcher == "two hosts":
            cloudpickle.register_pickle_by_value(sys.modules[function.__module__])
            return run_ranks(size, on_two_hosts, function, *arguments)
        return run_ranks(size, function, *arguments, launcher=launcher)

    return call
