"""A pool and a team without workers: this process does the work itself."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import TYPE_CHECKING, Any

from weft._core.items import Finished, Job, add_note_of_runs, not_begun, not_drawn
from weft._core.seeding import derive, seed_generators
from weft.engines.base import NO_COMMON, Member, Pool, Team
from weft.engines.interruption import ComputationInterrupted, run_until
from weft.engines.serial.group import SerialGroup
from weft.engines.turns import Turns
from weft.errors import Cancelled, Stalled, TeamBroken, UsedConcurrently
from weft.resources import host_name

if TYPE_CHECKING:
    from weft._core.arithmetic import Array


class SerialPool(Pool):
    """The reference for every other pool, and the one to debug with."""

    size = 1
    computes_here = True

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
        deadline = math.inf if job.timeout is None else time.monotonic() + job.timeout
        items = iter(job.items)
        for index in itertools.count():
            if job.cancelled is not None and job.cancelled():
                raise Cancelled(f"cancelled before item {index}")
            drawn = begun = False
            try:
                item = run_until(deadline, partial(next, items, _END))
                if item is _END:
                    return
                drawn = True
                begun = time.monotonic() < deadline
                if not begun:
                    raise ComputationInterrupted
                finished = _run_item(job, index, item, deadline)
            except ComputationInterrupted:
                if time.monotonic() < deadline:
                    raise  # it is about an outer computation
                yield from _left(job, index, drawn=drawn, begun=begun)
                return
            yield finished
            if finished.failures and not job.keep_going:
                return

    def close(self) -> None:
        """Do nothing: there are no workers."""


#: stands for an item where there are no more
_END = object()


def _left(job: Job, index: int, *, drawn: bool, begun: bool) -> Iterator[Finished]:
    """Yield the items from this one on as failures: the deadline has passed. Raises Stalled if the
    job does not keep going."""
    stalled = _stalled_error(job, index, "is not finished" if begun else "has not begun")
    if not job.keep_going:
        raise stalled
    if begun:
        yield _finished(index, None, {index: stalled})
    first, end = index + begun, index + drawn
    if isinstance(job.items, Sized):
        yield from not_begun([range(first, len(job.items))], job.timeout)
    else:
        yield from not_begun([range(first, end)], job.timeout)
        yield not_drawn(end, job.timeout)


def _run_item(job: Job, index: int, item: Any, deadline: float) -> Finished:
    """Call the function on an item, as often as is needed and asked for. Raises
    ComputationInterrupted at the deadline."""
    each = math.inf if job.timeout_each is None else job.timeout_each
    start = time.perf_counter()
    errors: dict[int, Exception] = {}
    for retries in range(job.retries, -1, -1):
        value = None
        errors.clear()
        due = min(deadline, time.monotonic() + each)
        try:
            if job.seed is not None:
                seed_generators(derive(job.seed, index))
            value = run_until(due, partial(job.function, item))
            break
        except ComputationInterrupted:
            if not due <= time.monotonic() < deadline:
                raise
            errors[index] = _too_long_error(job, index)
        except Exception as error:
            errors[index] = error  # the exception itself: a debugger sees its frames
            if not isinstance(error, job.retry_on):
                break
            if not retries:
                add_note_of_runs(error, index, job.retries)
    return _finished(index, value, errors, time.perf_counter() - start)


def _finished(
    index: int, value: Any, errors: dict[int, Exception], seconds: float = 0.0
) -> Finished:
    return Finished(index, [value], errors, 0, os.getpid(), seconds, host=host_name())


def _stalled_error(job: Job, index: int, state: str) -> Stalled:
    return Stalled(
        f"map: {job.timeout} s have passed, and item {index} {state}; pass a longer timeout=, or "
        'on_error="return" to get the results of the others'
    )


def _too_long_error(job: Job, index: int) -> Stalled:
    again = f", for the {job.retries + 1}. time" if job.retries else ""
    return Stalled(
        f"item {index} has run for more than {job.timeout_each} s{again} in this process, and was "
        "interrupted. Pass a longer timeout_each=, or retries= to run such items again"
    )


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
