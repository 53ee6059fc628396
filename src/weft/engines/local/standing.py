"""A team: a driver and workers that stay and form a group.

driver, rank 0                     worker, rank 1, 2, ...
call(function, arguments)
  ──── Work: the function ────>    runs it
  runs it too                      (both may meet in the group on the way)
  <─── Done ────────────────────

`rounds.py` is one such call.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from weft.engines.base import NO_COMMON, Member, Team
from weft.engines.local.guard import ComputationGuard
from weft.engines.local.member import (
    Place,
    enter,
    enter_as_worker,
    has_parts,
    leave,
    lies_in_shared_memory,
    pack_mentioning,
    places,
    register,
    renew,
    run_remote,
)
from weft.engines.local.rounds import TeamCall, TeamWorkers
from weft.engines.local.wire import pack_function
from weft.engines.local.workers import Workers
from weft.engines.serial.group import SerialGroup
from weft.errors import TeamBroken, UsedConcurrently, WorkerLost

_Result = TypeVar("_Result")

#: seconds for a team to assemble
_START = 60.0
#: seconds that a call under way has to end when its team is closed, and between two looks
_PATIENCE, _LOOK = 2.0, 0.01


class LocalTeam(Team):
    """Processes of this machine."""

    def __init__(
        self,
        size: int,
        workers: Workers,
        *,
        cores: int,
        timeout: float,
        gpus: Sequence[str] = (),
        restart_hint: str = "team.restart()",
    ) -> None:
        self.size = size
        self._restart_hint = restart_hint
        self._gpus = [*gpus, *[None] * size][: size - 1]
        self._pool = workers
        self._threads = max(1, cores // size)
        self._timeout = timeout
        self._run_remote = pack_function(run_remote)
        self._nobody = SerialGroup(timeout=timeout)
        self._nobody.leave()
        #: everything registered, with its name and whether it is by value, by number
        self._objects: dict[int, tuple[Any, str, bool]] = {}
        #: the numbers of those that the workers have, by identity, and of those that have parts
        self._numbers: dict[int, int] = {}
        self._models: list[int] = []
        self._registered_so_far = 0
        #: numbers of what nobody needs any more; finalizers add to it
        self._dropped: deque[int] = deque()
        self._closed = False
        self._process = os.getpid()
        #: the thread that uses it now
        self._user: int | None = None
        #: whether the last call failed, perhaps in the middle of a collective
        self._failed = False
        #: a call that has not been brought to an end
        self._under_way: TeamCall | None = None
        self._start()
        _teams.add(self)

    def register(self, value: Any, name: str, *, by_value: bool = False) -> int:
        return self._use(self._register, value, name, by_value)

    def drop(self, number: int) -> None:
        self._dropped.append(number)

    def call(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        *,
        common: Mapping[str, Any] = NO_COMMON,
    ) -> list[Any]:
        return self._use(self._call, function, own, common)

    def shares(self, value: Any) -> bool:
        return lies_in_shared_memory(value)

    def restart(self) -> None:
        self._check_process()
        self._check_unused()
        self.close()
        self._start()
        self._drop_released()
        self._use(self._send_all)

    def close(self) -> None:
        if self._process != os.getpid() or self._closed:
            return
        self._closed = True
        user = self._user
        if user is None:
            self._take_down()
            return
        for worker in self._team_workers.workers:
            worker.kill()  # the call under way ends with that, and takes it down
        deadline = time.monotonic() + _PATIENCE
        while user != threading.get_ident() and self._user is not None:
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK)

    def _take_down(self) -> None:
        self._mark_broken_if_unfinished()
        leave(self._team_workers.name, peers_end=self._team_workers.end)
        self.member = Member(0, self.size, self._nobody)  # somebody may hold a closed team for long

    def abandon(self) -> None:
        """In a forked child: these are the parent's workers, which must not outlive the parent's
        connections to them."""
        if not self._closed:
            self._team_workers.abandon()

    def _start(self) -> None:
        self._numbers.clear()
        self._models.clear()
        name = secrets.token_hex(8)
        lent, watch = self._pool.lend(self._gpus, self._threads)
        self._team_workers = TeamWorkers(name, lent, watch, self._pool, self._restart_hint)
        self._closed = self._failed = False
        self._under_way = None
        pending = TeamCall(self._team_workers, self._run_remote)
        try:
            seats = [(name, rank, self.size, self._timeout, _START) for rank in range(1, self.size)]
            pending.begin(enter_as_worker, seats)
            self.member = enter(name, 0, self.size, self._timeout, _START)
            pending.finish(_START)
        except BaseException as error:
            worse = pending.abandon(error)
            self.close()
            raise (worse or error) from error.__cause__

    def _call(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        common: Mapping[str, Any] = NO_COMMON,
    ) -> list[Any]:
        if self._failed and function is not renew:
            self._call(renew, [()] * self.size)
            self._failed = False
        mine, *others = own
        pending = self._under_way = TeamCall(self._team_workers, self._run_remote)
        guard = ComputationGuard(pending.failed)
        result = None
        try:
            pending.begin(function, others, common)
            if mine is not None:
                with guard:
                    result = function(self.member, *mine, **common)
            values = pending.finish(self._timeout)
        except BaseException as error:
            self._failed = True
            guard.close()
            if function is renew:  # some may be in the new generation, and some not
                self._team_workers.broken = f"it could not meet again after a failure ({error!r})"
            worse = pending.abandon(error)
            self._under_way = None
            if worse is None:
                raise
            raise worse from worse.__cause__
        self._under_way = None
        return [result, *values]

    def _register(self, value: Any, name: str, by_value: bool) -> int:
        number = self._registered_so_far
        self._registered_so_far += 1
        self._send(number, value, name, by_value)
        return number

    def _send(self, number: int, value: Any, name: str, by_value: bool) -> None:
        """Register an object with the workers as it is now."""
        dropped = self._drop_released()
        parts: dict[int, Place] = {}
        for model in reversed(self._models):  # the first that has it counts
            # anew each time: its parameters may be others than they were
            parts.update(places(model, self._objects[model][0]))

        def place_of(mentioned: int) -> Place | None:
            found = self._numbers.get(mentioned)
            return parts.get(mentioned) if found is None else (found, None)

        packed = None
        try:
            packed = pack_mentioning(value, place_of, name)
            arguments = (number, packed.payload, dropped)
            self._call(register, [None, *[arguments] * (self.size - 1)])
        except BaseException:
            unknown = [number] if number not in self._objects else []
            self._dropped.extend([*dropped, *unknown])
            raise
        finally:
            if packed is not None:
                packed.release()
        self._objects[number] = (value, name, by_value)
        self.member.registered[number] = value
        if by_value:
            return
        self._numbers.setdefault(id(value), number)
        if has_parts(value):
            self._models.append(number)

    def _send_all(self) -> None:
        for number, registered in list(self._objects.items()):
            if number in self._objects:  # finalizers drop some meanwhile
                self._send(number, *registered)

    def _drop_released(self) -> list[int]:
        """Keep here no longer what has been dropped; returns its numbers."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        for number in dropped:
            value, _, _ = self._objects.pop(number, (None, "", True))
            self.member.registered.pop(number, None)
            if self._numbers.get(id(value)) == number:
                del self._numbers[id(value)]
                others = (
                    one
                    for one, (other, _, by_value) in self._objects.items()
                    if other is value and not by_value
                )
                self._numbers.update({id(value): one for one in itertools.islice(others, 1)})
        self._models = [number for number in self._models if number in self._objects]
        return dropped

    def _use(self, method: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call what only one thread may call at a time. Raises TeamBroken, UsedConcurrently.

        No context manager: a signal handler may raise after its beginning or before its end, and
        the team would stay in use.
        """
        self._check_process()
        if self._closed:
            raise TeamBroken("this team has been closed; make a new one: weft.Team()")
        if self._user is None:
            self._mark_broken_if_unfinished()
        if self._team_workers.broken is not None:
            raise TeamBroken(
                f"this team cannot go on: {self._team_workers.broken}; start it again with the "
                f"driver's values:\n    {self._restart_hint}"
            )
        self._check_unused()
        try:
            self._user = threading.get_ident()
            return method(*arguments)
        except WorkerLost as error:
            if self._was_closed():
                raise TeamBroken("this team was closed in the middle of a call") from error
            raise
        finally:
            try:
                if self._was_closed():
                    self._take_down()
            finally:
                self._user = None

    def _mark_broken_if_unfinished(self) -> None:
        """Nobody knows what the workers will answer after a call that was interrupted, and once
        more before they had been told to end it."""
        if self._under_way is not None and self._team_workers.broken is None:
            self._team_workers.broken = "a call was interrupted twice, and may be going on"

    def _was_closed(self) -> bool:
        """Also since the call began: by another thread, or by the function itself. (A method, as
        mypy believes that the attribute is what it was.)"""
        return self._closed

    def _check_unused(self) -> None:
        if self._user is not None:
            raise UsedConcurrently(
                "a call while the team is in the middle of another, of "
                + ("this" if self._user == threading.get_ident() else "another")
                + " thread; a function that is called by a team calls its own with .serial(...), "
                "and a thread makes a team of its own: weft.Team()"
            )

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise TeamBroken(
                f"this team belongs to process {self._process}, from which this one was forked; "
                "a child makes a team of its own: weft.Team()"
            )


#: of this process
_teams: weakref.WeakSet[LocalTeam] = weakref.WeakSet()


def _in_child() -> None:
    for team in list(_teams):
        team.abandon()
    _teams.clear()


os.register_at_fork(after_in_child=_in_child)
