"""On what the contract suites run: every engine, launcher and size."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import run_ranks
from weft.engines.serial import SerialGroup

#: the serial engine has no launcher; the others start ranks of the local engine
CASES = [
    ("serial", 1),
    *((launcher, size) for launcher in ("weft run", "mpirun") for size in (1, 2, 3, 4)),
]
SEVERAL = [(launcher, size) for launcher, size in CASES if size > 1]


@pytest.fixture(params=CASES, ids=[f"{name}-{size}" for name, size in CASES])
def ranks(request: pytest.FixtureRequest) -> Any:
    """A function that calls another in every rank of a group, and returns the results by rank."""
    return caller(*request.param)


def caller(launcher: str, size: int) -> Any:
    """A function that calls another in every rank of such a group."""

    def call(function: Any, *arguments: Any) -> list[Any]:
        if launcher == "serial":
            return [function(SerialGroup(timeout=60.0), *arguments)]
        return run_ranks(size, function, *arguments, launcher=launcher)

    call.size = size  # type: ignore[attr-defined]
    return call
