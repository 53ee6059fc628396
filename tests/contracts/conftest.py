"""On what the contract suites run: every engine, launcher and size."""

from __future__ import annotations

import socket
import sys
from typing import Any

import cloudpickle
import pytest

import weft
from tests.contracts.fakes import hosts_of, on_two_hosts
from tests.hosts import require_hosts
from tests.support import run_ranks, run_ranks_on_hosts

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
#: of several hosts, so many ranks each; for modules that say `OVER_HOSTS = True`
HOSTS = {"2 x 1 hosts": (1, 1), "2 x 2 hosts": (2, 2), "3 x 1 hosts": (1, 1, 1)}
OVER_HOSTS = [(name, sum(ranks)) for name, ranks in HOSTS.items()]
#: each engine and launcher once
FEW = [("serial", 1), ("weft run", 3), ("mpirun", 2), ("two hosts", 3)]


#: by fixture: the cases in which its tests run, and whether `make soak` has the others
FIXTURES = {
    "outcome": (CASES, False),
    "outcome_of_several": (SEVERAL, False),
    "outcome_of_some": (SOME, True),  # for what costs much
    "outcome_of_few": (FEW, True),  # where every rank loads torch, in two seconds
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test in the cases of its fixture, those over hosts included where they belong."""
    for name in FIXTURES.keys() & metafunc.fixturenames:
        chosen, others_in_soak = FIXTURES[name]
        over_hosts = OVER_HOSTS if getattr(metafunc.module, "OVER_HOSTS", False) else []
        cases = [
            pytest.param(
                case, marks=() if case in chosen else pytest.mark.soak, id=f"{case[0]}-{case[1]}"
            )
            for case in (CASES if others_in_soak else chosen)
        ]
        cases += [pytest.param(case, id=case[0].replace(" ", "-")) for case in over_hosts]
        metafunc.parametrize(name, cases, indirect=True)


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Any:
    """A function that tells what a body of the module's BODIES returned, by rank."""
    if request.param[0] in HOSTS:
        require_hosts()
    return request.module.BODIES.outcome(request.param)


outcome_of_several = outcome_of_some = outcome_of_few = outcome


def hosts_in(case: tuple[str, int]) -> tuple[str, ...]:
    """The host of each rank in a case."""
    launcher, size = case
    if launcher in HOSTS:
        return tuple(f"host{k}" for k, n in enumerate(HOSTS[launcher], 1) for _ in range(n))
    return hosts_of(range(size)) if launcher == "two hosts" else (socket.gethostname(),) * size


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
        if launcher in HOSTS:
            return run_ranks_on_hosts(HOSTS[launcher], function, *arguments)
        return run_ranks(size, function, *arguments, launcher=launcher)

    return call
