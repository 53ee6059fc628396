"""How a contract suite runs many tests in one launch.

Starting ranks costs more than what they then do: all bodies of a module run in one launch for each
launcher and size, one after the other, and each test looks at what its own body returned:

    BODIES = Bodies(each_in="subgroup")

    @BODIES.of_all
    def something(group):            # in every rank
        return ...

    def test_something(outcome):     # once for each launcher and size; see conftest.py
        assert outcome(something) == [...]
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

import cloudpickle
import pytest

import weft
from tests.contracts.conftest import caller, hosts_in
from weft.engines.base import Group
from weft.engines.serial.group import SerialGroup

Body = Callable[[Group], Any]
#: the group of a body: a subgroup of its own, a round of its own (from init to shutdown), or the
#: one round in which all follow each other
Where = Literal["subgroup", "round", "session"]


class Failure(str):
    """The traceback of a body; those after it are not reached."""

    __slots__ = ()


class Bodies:
    """The bodies of one module."""

    def __init__(self, *, each_in: Where) -> None:
        self._each_in = each_in
        self._bodies: dict[str, Body] = {}
        self._of_several: set[str] = set()
        #: by launcher and size: what each rank's bodies returned, or how they failed
        self._outcomes: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def of_all(self, body: Body) -> Body:
        """Run this body in every group."""
        self._bodies[body.__name__] = body
        return body

    def of_several(self, body: Body) -> Body:
        """Run this body in groups of more than one."""
        self._of_several.add(body.__name__)
        return self.of_all(body)

    def outcome(self, case: tuple[str, int]) -> Any:
        """A function that tells what a body returned, by rank."""

        def of(body: Body) -> list[Any]:
            if case not in self._outcomes:
                self._outcomes[case] = []  # if it fails, it does so once
                self._outcomes[case] = self._run(case)
            outcomes = self._outcomes[case]
            if not outcomes:
                pytest.fail(f"the launch of {case} has failed, see the first test that needed it")
            found = [results.get(body.__name__) for results in outcomes]
            missing = any(body.__name__ not in results for results in outcomes)
            if missing or any(isinstance(result, Failure) for result in found):
                ended = [result for results in outcomes for result in results.values()]
                pytest.fail("\n".join(result for result in ended if isinstance(result, Failure)))
            return found

        of.size = case[1]  # type: ignore[attr-defined]
        of.hosts = hosts_in(case)  # type: ignore[attr-defined]
        return of

    def _run(self, case: tuple[str, int]) -> list[dict[str, Any]]:
        bodies = {
            name: body
            for name, body in self._bodies.items()
            if case[1] > 1 or name not in self._of_several
        }
        for body in bodies.values():  # ranks cannot import the tests
            cloudpickle.register_pickle_by_value(sys.modules[body.__module__])
        found: list[dict[str, Any]] = caller(*case)(run_all, bodies, self._each_in)
        return found


def run_all(group: Group, bodies: dict[str, Body], each_in: Where) -> dict[str, Any]:
    """What a rank does: body after body, until one fails."""
    results: dict[str, Any] = {}
    engine = "serial" if isinstance(group, SerialGroup) else None
    for name, body in bodies.items():
        try:
            if each_in == "round" and results:
                weft.shutdown()
                weft.init(engine=engine)
            part = weft.group().split(0) if each_in == "subgroup" else weft.group()
            assert part is not None
            results[name] = body(part)
        except Exception:
            results[name] = Failure(f"rank {group.rank}: {traceback.format_exc()}")
            break
    return results
