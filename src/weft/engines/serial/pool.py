"""A pool and a team without workers: this process does the work itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft._core.items import Finished, Job
from weft._core.seeding import derive, seed_generators
from weft.engines.base import NO_COMMON, Member, Pool, Team
from weft.engines.serial.group import SerialGroup
from weft.engines.turns import Turns
from weft.errors import Cancelled, Stalled, TeamBroken, UsedConcurrently
from weft.resources import host_name

if TYPE_CHECKING:
    from weft._core.arithmetic import Array


class SerialPool(Pool):
    """The reference for every other pool, and the one to debug with."""

    size = 1

    def prepare(self, function: Callable[[Any], Any]) -> Any:
        return function

    def forget(self, prepared: Any) -> None:
        """Do nothing: the function is the user's own."""

    def put(self, array: Array, *, readonly: bool = False) -> Array:
        if readonly:
            from weft._core.arrays import read_only

            return read_only(array)
        return array

    def run(self, job: Job) -> Generator[Finished, None, None]:
        deadline = None if job.timeout is None else time.monotonic() + job.timeout
        for index, item in enumerate(job.items):
            if job.cancelled is not None and job.cancelled():
                raise Cancelled(f"cancelled before item {index}")
            if deadline is not None and time.monotonic() >= deadline:
                raise Stalled(
                    f"map: {job.timeout} s have passed, and item {index} has not begun; pass a "
                    "longer timeout="
                )
            start = time.perf_counter()
            value, errors = None, {}
            try:
                if job.seed is not None:
                    seed_generators(derive(job.seed, index))
                value = job.function(item)
            except Exception as error:
                errors[index] = error  # the exception itself: a debugger sees its frames
            seconds = time.perf_counter() - start
            yield Finished(index, [value], errors, 0, os.getpid(), seconds, host=host_name())
            if errors and not job.keep_going:
                return

    def close(self) -> None:
        """Do nothing: there are no workers."""


class SerialTeam(Team):
    """A driver without workers."""

    size = 1

    def __init__(self, *, timeout: float) -> None:
        self.member = Member(0, 1, SerialGroup(timeout=timeout))
        self._registered_so_far = 0
        self._closed = self._busy = False
        self.turns = Turns("this team", timeout)

    def register(self, value: Any, name: str, *, by_value: bool = False) -> int:
        return self.turns.call(self._register, value)

    def _register(self, value: Any) -> int:
        self._validate_usable()
        number = self._registered_so_far
        self._registered_so_far += 1
        self.member.registered[number] = value
        return number

    def drop(self, number: int) -> None:
        self.member.registered.pop(number, None)

    def call(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        *,
        common: Mapping[str, Any] = NO_COMMON,
    ) -> list[Any]:
        return self.turns.call(self._call, function, own, common)

    def _call(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        common: Mapping[str, Any],
    ) -> list[Any]:
        self._validate_usable()
        self._busy = True
        try:
            return [
                None if arguments is None else function(self.member, *arguments, **common)
                for arguments in own
            ]
        finally:
            self._busy = False

    def shares(self, value: Any) -> bool:
        return True

    def restart(self) -> None:
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def _validate_usable(self) -> None:
        if self._closed:
            raise TeamBroken("this team has been closed; make a new one: weft.Team()")
        if self._busy:
            raise UsedConcurrently(
                "a call while the team is in the middle of another; a function that is called by "
                "a team calls its own with .serial(...)"
            )
