"""A team of nobody else: this process does the work itself, item by item."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from typing import Any

from weft._core.elements import Array
from weft._core.seeding import derive, seed_generators
from weft._core.work import Finished, Job
from weft.engines.base import Team
from weft.errors import Cancelled, Stalled


class SerialTeam(Team):
    """The reference for every other team, and the debugger's friend."""

    size = 1

    def prepare(self, function: Callable[[Any], Any]) -> Any:
        return function

    def forget(self, prepared: Any) -> None:
        """Nothing is kept."""

    def place(self, array: Array, *, readonly: bool = False) -> Array:
        if readonly:
            array = array.view()
            array.flags.writeable = False
        return array

    def close(self) -> None:
        """There are none."""

    def run(self, job: Job) -> Generator[Finished, None, None]:
        deadline = None if job.timeout is None else time.monotonic() + job.timeout
        for index, item in enumerate(job.items):
            if job.cancelled():
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
                errors[index] = error  # itself: a debugger sees its frames
            seconds = time.perf_counter() - start
            yield Finished(index, [value], errors, 0, os.getpid(), seconds, 0, 0)
            if errors and not job.keep_going:
                return
