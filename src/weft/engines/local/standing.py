"""A standing team: a driver and workers that stay and form a group.

driver, rank 0                     worker, rank 1, 2, ...
call(procedure, arguments)
  ──── Work: the procedure ────>   runs it
  runs it too                      (both may meet in the group on the way)
  <─── Done ────────────────────
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from weft._core.failures import restore
from weft._core.work import Done, Stopped, Unreadable, Work
from weft.engines.base import Member, StandingTeam
from weft.engines.local.channel import Closed
from weft.engines.local.guard import Guard, Interrupted
from weft.engines.local.losses import lost
from weft.engines.local.member import (
    Place,
    enter,
    enter_as_worker,
    keep,
    leave,
    pack_mentioning,
    perform,
    places,
)
from weft.engines.local.processes import end_as_text
from weft.engines.local.remote_worker import Worker
from weft.engines.local.wire import Packed, load, pack, pack_function
from weft.engines.local.workers import Workers
from weft.errors import Disagreement, PeerLost, Stalled, TeamBroken

#: seconds that workers have to end what they do after another has failed
_GRACE = 2.0
#: seconds for a team to assemble
_START = 60.0


class LocalStandingTeam(StandingTeam):
    """Processes of this machine."""

    def __init__(
        self,
        size: int,
        workers: Workers,
        *,
        cores: int,
        timeout: float,
        gpus: Sequence[str] = (),
    ) -> None:
        self.size = size
        self._gpus = [*gpus, *[None] * size][: size - 1]
        self._pool = workers
        self._threads = max(1, cores // size)
        self._timeout = timeout
        self._perform = pack_function(perform)
        #: everything kept, with its name, by number
        self._objects: dict[int, tuple[Any, str]] = {}
        self._broken: str | None = None
        self._process = os.getpid()
        self._workers: list[Worker] = []
        self._start()

    def keep(self, value: Any, what: str) -> int:
        number = len(self._objects)
        self._objects[number] = (value, what)
        try:
            self._send(number)
        except BaseException:
            del self._objects[number]
            raise
        return number

    def call(
        self, procedure: Callable[..., Any], arguments: Sequence[tuple[Any, ...] | None]
    ) -> list[Any]:
        self._check_usable()
        mine, *others = arguments
        pending = _Round(self, procedure, others)
        result = None
        try:
            if mine is not None:
                with Guard(pending.failed):
                    result = procedure(self.member, *mine)
            values = pending.finish(self._timeout)
        except BaseException as error:
            worse = pending.abandon(error)
            if worse is None:
                raise
            raise worse from worse.__cause__
        return [result, *values]

    def restart(self) -> None:
        self.close()
        self._broken = None
        self._start()
        for number in self._objects:
            self._send(number)

    def close(self) -> None:
        if self._process != os.getpid() or self._broken == "closed":
            return
        self._broken = "closed"
        leave(self.name)
        for worker in self._workers:
            worker.close()
        self._workers = []

    def _start(self) -> None:
        self.name = secrets.token_hex(8)
        self._workers, self._watch = self._pool.lend(self._gpus, self._threads)
        places = [
            (self.name, rank, self.size, self._timeout, _START) for rank in range(1, self.size)
        ]
        pending = _Round(self, enter_as_worker, places)
        try:
            self.member: Member = enter(self.name, 0, self.size, self._timeout, _START)
            pending.finish(_START)
        except BaseException as error:
            worse = pending.abandon(error)
            self.close()
            raise (worse or error) from error.__cause__
        self.member.kept = {number: value for number, (value, _) in self._objects.items()}

    def _send(self, number: int) -> None:
        """Have the workers keep an object as it is now."""
        value, what = self._objects[number]
        known: dict[int, Place] = {}
        for earlier in range(number):
            known = {**places(earlier, self._objects[earlier][0]), **known}
        packed = pack_mentioning(value, self.name, known, what)
        try:
            self.call(keep, [None, *[(number, packed.payload)] * (self.size - 1)])
        finally:
            packed.release()
        self.member.kept[number] = value

    def _check_usable(self) -> None:
        if self._process != os.getpid():
            raise TeamBroken(
                f"this team belongs to process {self._process}, from which this one was forked; "
                "a child makes a team of its own"
            )
        if self._broken == "closed":
            raise TeamBroken("this team has been closed; make a new one: weft.Team()")
        if self._broken is not None:
            raise TeamBroken(
                f"this team has lost a worker and what it kept ({self._broken}); start it again "
                "with the driver's values:\n    team.restart()"
            )


class _Round:
    """One procedure in the workers' hands."""

    def __init__(
        self,
        team: LocalStandingTeam,
        procedure: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...] | None],
    ) -> None:
        self._team = team
        self._values: list[Any] = [None] * len(arguments)
        self._busy: dict[Worker, tuple[int, Packed]] = {}
        self._failures: list[Exception] = []
        function = team._perform
        for index, (worker, own) in enumerate(zip(team._workers, arguments, strict=True)):
            if own is not None:
                packed = pack([(team.name, procedure, own)], index + 1, "arguments of rank")
                self._busy[worker] = index, packed
                work = Work(function.digest, index + 1, packed.payload, None, False)
                try:
                    worker.frames.send(*worker.lesson(function.digest, function), work)
                except Closed:
                    self._lose(worker)
                if worker.frames.unsent:
                    team._watch.follow_sending(worker)

    def failed(self) -> bool:
        """Whether a worker has failed by now. For the guard's thread, while this one computes."""
        self._attend(0.0)
        return bool(self._failures)

    def finish(self, timeout: float) -> list[Any]:
        """The workers' results. Raises what one of them raised, WorkerLost, Stalled."""
        deadline = time.monotonic() + timeout
        while self._busy and not self._failures:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._stalled(timeout)
            self._attend(min(remaining, 1.0))
        if self._failures:
            raise self._failures[0]
        return self._values

    def abandon(self, error: BaseException) -> Exception | None:
        """After a failure: end what still runs; the failure of a worker that was behind it all."""
        met = isinstance(error, (Disagreement, PeerLost))  # the others have met it too, and end
        deadline = time.monotonic() + _GRACE
        if not met:
            for worker in self._busy:
                worker.interrupt()
        while self._busy and (remaining := deadline - time.monotonic()) > 0:
            self._attend(remaining)
        for worker in list(self._busy):
            worker.kill()
            self._lose(worker)
        causes = [one for one in self._failures if not isinstance(one, (Disagreement, PeerLost))]
        if met or isinstance(error, Interrupted) or error in self._failures:
            return next(iter(causes or self._failures), None)
        return None

    def _attend(self, seconds: float) -> None:
        """Take what the workers say within so many seconds."""
        watch = self._team._watch
        for worker, events in watch.wait(seconds).items():
            watch.echo(worker, events)
            if worker not in self._busy:
                if worker.pidfd in events:
                    self._lose(worker)
                continue
            try:
                if worker.frames.unsent and worker.frames.flush():
                    watch.follow_sending(worker)
                message = worker.receive() if worker.frames.fileno() in events else None
            except Closed:
                self._lose(worker)
                continue
            if message is not None:
                self._take(worker, message)
            elif worker.pidfd in events:
                self._lose(worker)

    def _take(self, worker: Worker, message: Done | Unreadable | Stopped) -> None:
        index, packed = self._busy.pop(worker)
        where = f"rank {index + 1}, {worker}"
        if isinstance(message, Unreadable):
            packed.release()
            self._failures.append(restore(message.failure, where))
        elif isinstance(message, Done):
            self._failures += [restore(failure, where) for _, failure in message.failures]
            try:
                self._values[index] = load(message.values)[0]
            except Exception as error:  # a class's own unpickling may raise anything
                self._failures.append(error)

    def _lose(self, worker: Worker) -> None:
        """A worker has ended, and with it what it kept: the team is of no use until it restarts."""
        team = self._team
        task = self._busy.pop(worker, None)
        if task is not None:
            task[1].release()
        team._watch.remove(worker)
        rank = team._workers.index(worker) + 1
        ended = team._pool.end(worker)
        error = lost(
            worker,
            ended,
            item=rank,
            doing=f"was rank {rank} of a team",
            advice="; team.restart() starts it again with the driver's values",
        )
        team._broken = f"rank {rank} {'ended' if ended is None else end_as_text(ended.code)}"
        self._failures.append(error)

    def _stalled(self, timeout: float) -> Stalled:
        late = ", ".join(
            f"rank {index + 1} ({worker})" for worker, (index, _) in self._busy.items()
        )
        return Stalled(
            f"{timeout} s have passed, and {late} has not answered; it is alive: give the team a "
            "longer timeout=, or find out what it does"
        )
