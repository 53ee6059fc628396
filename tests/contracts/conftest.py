"""On what the contract suites run: every engine, launcher and size."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from tests.support import run_ranks
from weft.engines.serial import SerialGroup

#: the serial engine has no launcher; the others start ranks of the local engine
CASES = [
    ("serial", 1),
    *((launcher, size) for launcher in ("weft run", "mpirun") for size in (1, 2, 3, 4)),
]
SEVERAL = [(launcher, size) for launcher, size in CASES if size > 1]


def caller(launcher: str, size: int) -> Any:
    """A function that calls another in every rank of such a group."""

    def call(function: Any, *arguments: Any) -> list[Any]:
        if launcher == "serial":
            return [function(SerialGroup(timeout=60.0), *arguments)]
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Failure, which ranks return
        return run_ranks(size, function, *arguments, launcher=launcher)

    return call


class Failure(str):
    """The traceback of a body; those after it are not reached."""

    __slots__ = ()


def results_of(body: Callable[..., Any], outcomes: list[dict[str, Any]]) -> list[Any]:
    """What a body returned, by rank, of what the bodies of all ranks did."""
    found = [results.get(body.__name__) for results in outcomes]
    if any(body.__name__ not in results for results in outcomes) or any(
        isinstance(result, Failure) for result in found
    ):
        ended = [result for results in outcomes for result in results.values()]
        pytest.fail("\n".join(result for result in ended if isinstance(result, Failure)))
    return found
