"""A team: a driver, which is rank 0, and local workers that stay and form a group.

    driver, rank 0                                       worker, rank 1, 2, ...
    call(function, own, common)
        arguments -> payload   ──── Work ──────────>     run_remote: the function with its member
        runs it too            <─── collectives ───>     (they may meet in the group on the way)
        load the result        <─── Done ───────────     reply

`LocalTeam` is the contract's team: what is registered, and who may use it now. `TeamWorkers` are
its workers between two starts. `TeamCall` is one call, and has these states:

    sent ───────────> computing ──────────> collecting ──────────> over: the results
    begin()           the driver's part     finish()
      │                 │                     │
      └─────────────────┴─────────────────────┴──> cancelling ───> over: the error
                        any exception              abandon()
                                                       └─────────> broken until restart()

    sent         every worker with arguments has its payload, or will: the rest is sent meanwhile.
    computing    the guard's thread attends to the workers. When one fails or is lost, the guard
                 interrupts the driver's part by ComputationInterrupted.
    collecting   the driver's thread attends to them, until the timeout: Stalled.
    cancelling   where the driver met Disagreement or PeerLost, the workers meet it too, and first
                 have half a second to end by themselves. Then each gets Cancel, and SIGINT every
                 0.1 s, and has ten seconds to acknowledge. A worker that does not is killed: at
                 once after a second Ctrl-C.
    broken       `TeamWorkers.broken` says why: a worker was lost (it ended, or was killed), the
                 group could not be renewed after a failure, or cancelling was interrupted, so that
                 `LocalTeam._under_way` still holds the call.

What the caller gets: the worker's error where one was behind the driver's (`abandon` returns it),
else the driver's own. The next call after a failure first renews the group (`renew`): a collective
may have been left half way. `close` in another thread kills the workers; the call under way then
raises TeamBroken and takes the team down.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from weft._core.failures import INTERRUPTED, restore
from weft.engines.base import NO_COMMON, Member, Team
from weft.engines.interruption import ComputationGuard, ComputationInterrupted, by_signal_handler
from weft.engines.local.pool import modules
from weft.engines.local.pool.driver_state import capture
from weft.engines.local.pool.messages import (
    Answer,
    CancelAcknowledged,
    Done,
    Stopped,
    Unreadable,
    Work,
)
from weft.engines.local.pool.payload import Payload, load, pack, pack_function
from weft.engines.local.pool.remote_worker import Watch, Worker, worker_lost_error
from weft.engines.local.pool.workers import Workers
from weft.engines.local.processes.channel import Closed
from weft.engines.local.processes.linux import end_as_text, readable
from weft.engines.local.team.member import (
    Arguments,
    PersistentId,
    enter,
    enter_as_worker,
    has_parts,
    leave,
    pack_for_registration,
    pack_once,
    part_ids,
    register,
    renew,
    run_remote,
    stays_shared,
    unregister,
)
from weft.engines.serial.group import SerialGroup
from weft.engines.turns import Turns
from weft.errors import (
    Disagreement,
    PeerLost,
    SegmentGone,
    Stalled,
    TeamBroken,
    UsedConcurrently,
    WorkerLost,
)
from weft.resources import share_gpus

_Result = TypeVar("_Result")

#: seconds for a team to assemble
_START = 60.0

#: seconds that a call under way has to end when its team is closed, and between two checks
_PATIENCE, _LOOK = 2.0, 0.01


class LocalTeam(Team):
    """A team of processes of this host."""

    def __init__(
        self,
        size: int,
        workers: Workers,
        *,
        cores: int,
        timeout: float,
        gpus: Sequence[str] = (),
        fresh: bool = False,
        restart_hint: str = "team.restart()",
    ) -> None:
        self.size = size
        self._restart_hint = restart_hint
        self._gpus = share_gpus(gpus, size - 1)
        #: whether its workers must not have served others before
        self._fresh = fresh
        self._pool = workers
        self._threads = max(1, cores // size)
        self._timeout = timeout
        self.turns = Turns("this team", timeout)
        self._run_remote = pack_function(run_remote)
        self._nobody = SerialGroup(timeout=timeout)
        self._nobody.leave()
        #: the registered objects, each with its name and whether it is by value, by number
        self._objects: dict[int, tuple[Any, str, bool]] = {}
        #: the numbers of those that the workers have, by identity, and of those with parts
        self._numbers: dict[int, int] = {}
        self._models: list[int] = []
        self._registered_so_far = 0
        #: numbers to be dropped; finalizers add to it
        self._dropped: deque[int] = deque()
        self._closed = False
        self._process = os.getpid()
        #: the thread that uses the team now
        self._user: int | None = None
        #: whether the last call failed, perhaps in the middle of a collective
        self._failed = False
        #: a call that is not over
        self._under_way: TeamCall | None = None
        self._start()

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
        return self._use(self._call_after_drops, function, own, common)

    def persistent_ids(self) -> Callable[[Any], Hashable]:
        registered = self._registered_ids()

        def persistent_id(value: Any) -> Hashable:
            return ("shared", id(value)) if self._shares(value) else registered(id(value))

        return persistent_id

    def _shares(self, value: Any) -> bool:
        return stays_shared(value)

    def restart(self) -> None:
        self._validate_process()
        self.turns.call(self._restart)

    def _restart(self) -> None:
        self._validate_unused()
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
            worker.kill()  # that ends the call under way, which takes the team down
        deadline = time.monotonic() + _PATIENCE
        while user != threading.get_ident() and self._user is not None:
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK)

    def _take_down(self) -> None:
        self._mark_broken_if_unfinished()
        leave(self._team_workers.name, peers_end=self._team_workers.end)
        # so that who holds a closed team does not hold its group
        self.member = Member(0, self.size, self._nobody)

    def _start(self) -> None:
        self._numbers.clear()
        self._models.clear()
        name = secrets.token_hex(8)
        capture()  # first: it raises in a folder that was deleted
        lent, watch = self._pool.lend_for_good(self._gpus, self._threads, fresh=self._fresh)
        self._team_workers = TeamWorkers(name, lent, watch, self._pool, self._restart_hint)
        self._closed = self._failed = False
        self._under_way = None
        pending = TeamCall(self._team_workers, self._run_remote)
        try:
            own = [(name, rank, self.size, self._timeout, _START) for rank in range(1, self.size)]
            pending.begin(enter_as_worker, own)
            self.member = enter(name, 0, self.size, self._timeout, _START)
            pending.finish(_START)
        except BaseException as error:
            cause = pending.abandon(error)
            self.close()
            raise (cause or error) from error.__cause__

    def _call_after_drops(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        common: Mapping[str, Any],
    ) -> list[Any]:
        self._send_drops()
        return self._call(function, own, common)

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
        pending = TeamCall(self._team_workers, self._run_remote)
        guard = ComputationGuard(pending.failed)
        result = None
        try:
            self._under_way = pending
            pending.begin(function, others, common)
            if mine is not None:
                with guard:
                    result = function(self.member, *mine, **common)
            values = pending.finish(self._timeout)
            self._under_way = None
        except BaseException as error:
            self._failed = True
            guard.close()
            # some ranks may be in the new generation, and some not
            if function is renew and pending.sent:
                self._team_workers.broken = f"it could not meet again after a failure ({error!r})"
            cause = pending.abandon(error)
            self._under_way = None
            if cause is None:
                raise
            raise cause from cause.__cause__
        return [result, *values]

    def _register(self, value: Any, name: str, by_value: bool) -> int:
        number = self._registered_so_far
        self._registered_so_far += 1
        self._send(number, value, name, by_value)
        return number

    def _send(self, number: int, value: Any, name: str, by_value: bool) -> None:
        """Send an object to the workers as it is now, and register it there and here."""
        self._send_drops()  # first: what it replaces may be as large
        payload = None
        try:
            payload = pack_for_registration(value, self._registered_ids(), name)
            self._team_workers.modules |= payload.modules
            self._call(register, [None, *[(number, payload.data)] * (self.size - 1)])
        except BaseException:
            if number not in self._objects:
                self._dropped.append(number)
            raise
        finally:
            if payload is not None:
                payload.release()
        self._objects[number] = (value, name, by_value)
        self.member.registered[number] = value
        if by_value:
            return
        self._numbers.setdefault(id(value), number)
        if has_parts(value):
            self._models.append(number)

    def _registered_ids(self) -> Callable[[int], PersistentId | None]:
        """Return a function that gives the persistent id of a registered object, or of a part of
        one, by its identity now."""
        parts: dict[int, PersistentId] | None = None

        def persistent_id_of(identity: int) -> PersistentId | None:
            nonlocal parts
            known = self._numbers.get(identity)
            if known is not None:
                return known, None
            if parts is None:
                parts = {}
                for model in reversed(self._models):  # of several with one part the first counts
                    parts.update(part_ids(model, self._objects[model][0]))
            return parts.get(identity)

        return persistent_id_of

    def _send_all(self) -> None:
        for number, registered in list(self._objects.items()):
            if number in self._objects:  # finalizers drop some meanwhile
                self._send(number, *registered)

    def _send_drops(self) -> None:
        """Make the workers forget what was dropped."""
        if not self._dropped:
            return
        dropped = self._drop_released()
        try:
            self._call(unregister, [None, *[(dropped,)] * (self.size - 1)])
        except BaseException:
            self._dropped.extend(dropped)
            raise

    def _drop_released(self) -> list[int]:
        """Forget the dropped objects in the driver. Return their numbers."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        for number in dropped:
            value, _, _ = self._objects.pop(number, (None, "", True))
            self.member.registered.pop(number, None)
            if self._numbers.get(id(value)) == number:
                del self._numbers[id(value)]
                for other, (same, _, by_value) in self._objects.items():
                    if same is value and not by_value:  # it is registered twice
                        self._numbers[id(value)] = other
                        break
        self._models = [number for number in self._models if number in self._objects]
        return dropped

    def _use(self, method: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a method when no other thread uses the team. Raises TeamBroken, Stalled, and
        UsedConcurrently within a call of this thread."""
        self._validate_process()
        result: _Result = self.turns.call(self._use_in_turn, method, *arguments)
        return result

    def _use_in_turn(self, method: Callable[..., _Result], *arguments: Any) -> _Result:
        if self._closed:
            raise TeamBroken("this team has been closed; make a new one: weft.Team()")
        if self._user is None:
            self._mark_broken_if_unfinished()
        if self._team_workers.broken is not None:
            raise TeamBroken(
                f"this team cannot go on: {self._team_workers.broken}; start it again with the "
                f"driver's values:\n    {self._restart_hint}"
            )
        self._validate_unused()
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
        """Mark the team as broken if its last call was interrupted, and cancelling it too: nobody
        knows what the workers will answer."""
        if self._under_way is not None and self._team_workers.broken is None:
            self._team_workers.broken = "a call was interrupted twice, and may be going on"

    def _was_closed(self) -> bool:
        """Return whether another thread or the function itself has closed the team since the call
        began. (A method: mypy would take the attribute for unchanged.)"""
        return self._closed

    def _validate_unused(self) -> None:
        if self._user is not None:
            raise UsedConcurrently(
                "a call while the team is in the middle of another; a function that is called by a "
                "team calls its own with .serial(...)"
            )

    def _validate_process(self) -> None:
        if self._process != os.getpid():
            raise TeamBroken(
                f"this team belongs to process {self._process}, from which this one was forked; "
                "a child makes a team of its own: weft.Team()"
            )


#: seconds that workers have to acknowledge Cancel: one that imports a large library ignores SIGINT
#: for several. And seconds that they have before that, where they meet the failure by themselves
_GRACE, _BY_THEMSELVES = 10.0, 0.5

#: seconds between two SIGINTs to a worker that has not acknowledged
_AGAIN = 0.1


@dataclass
class TeamWorkers:
    """The workers of a team, rank 1 first, between two starts."""

    name: str
    workers: list[Worker]
    watch: Watch
    pool: Workers
    #: what the user writes to have the team started again
    restart_hint: str
    #: why it is of no use until the team starts again: a worker was lost
    broken: str | None = None
    #: the user's modules that registered objects and arguments refer to
    modules: set[str] = field(default_factory=set)

    def rank(self, worker: Worker) -> int:
        return self.workers.index(worker) + 1

    def end(self) -> None:
        """End the workers. Those of a broken team, which may be in the middle of anything, have
        ended when this returns."""
        for worker in self.workers:
            if self.broken is not None and worker.pidfd >= 0:
                self.pool.end(worker)
            worker.close()

    def lose(self, worker: Worker) -> Exception:
        """End a worker, if it has not ended, and break the team. Return the error to be raised."""
        self.watch.remove(worker)
        rank = self.rank(worker)
        # first: waiting for its end may be interrupted
        self.broken = f"it has lost a worker and what was registered there, rank {rank}"
        ended = self.pool.end(worker)
        how = "ended" if ended is None else end_as_text(ended.code)
        self.broken += f": {how}"
        return worker_lost_error(
            worker,
            ended,
            item=rank,
            doing=f"was rank {rank} of a team",
            advice=f"; to start the team again with the driver's values:\n    {self.restart_hint}",
        )


class TeamCall:
    """One call in the workers. Used by one thread at a time: the driver's, or the guard's while the
    driver computes."""

    def __init__(self, team_workers: TeamWorkers, run_remote: Payload) -> None:
        self._team_workers = team_workers
        self._run_remote = run_remote
        #: common arguments, packed once: workers can load them while these objects live
        self._common: Mapping[str, Any] = NO_COMMON
        self._values: list[Any] = [None] * len(team_workers.workers)
        #: the workers that have not answered, each with the payload of its arguments
        self._busy: dict[Worker, Payload] = {}
        self._failures: list[Exception] = []
        #: whether a worker may have something of it
        self.sent = False
        #: the workers that have not acknowledged Cancel; None before cancelling
        self._unacknowledged: set[Worker] | None = None
        self._lock = threading.Lock()

    def begin(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        common: Mapping[str, Any] = NO_COMMON,
    ) -> None:
        """Send the call to the workers that have arguments. Raises InvalidType for what cannot be
        pickled, before any worker has begun."""
        state = capture()
        busy = [(rank, mine) for rank, mine in enumerate(own, 1) if mine is not None]
        if len(busy) > 1:
            self._common = common = {name: pack_once(value, name) for name, value in common.items()}
        payloads: list[tuple[int, Payload]] = []
        try:
            for rank, mine in busy:
                work = (self._team_workers.name, function, mine, dict(common))
                payloads.append((rank, pack([work], rank, "arguments of rank", Arguments())))
        except BaseException:
            for _, payload in payloads:
                payload.release()
            raise
        for _, payload in payloads:
            self._team_workers.modules |= payload.modules
        # what cannot be sent of them was told in the call that failed
        used = {} if function is renew else modules.look(self._team_workers.modules)
        self.sent = True
        for rank, payload in payloads:
            worker = self._team_workers.workers[rank - 1]
            self._busy[worker] = payload
            try:
                worker.bring_up_to_date(state, used)
            except Closed:
                self._lose(worker)
                continue
            self._send(worker, rank, payload)

    def failed(self) -> bool:
        """Return whether a worker has failed. For the guard's thread, while the driver computes."""
        self._attend(0.0)
        return bool(self._failures)

    def finish(self, timeout: float) -> list[Any]:
        """Return the workers' results. Raises what one of them raised, WorkerLost, Stalled."""
        deadline = time.monotonic() + timeout
        while self._busy and not self._failures:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._stalled_error(timeout)
            self._attend(min(remaining, 1.0))
        if self._failures:
            raise self._failures[0]
        return self._values

    def abandon(self, error: BaseException) -> Exception | None:
        """End what still runs after a failure. Return the worker's failure that caused it; None if
        the driver's own did."""
        # the workers meet such an error too
        common_error = isinstance(error, (Disagreement, PeerLost))
        try:
            if common_error:
                self._await_all(self._busy, _BY_THEMSELVES)
            self._cancel()
        finally:  # also after a second Ctrl-C
            with self._lock:
                late = list(self._busy if self._unacknowledged is None else self._unacknowledged)
                for worker in late:  # all first: they may be using memory of this call
                    worker.kill()
                for worker in late:
                    self._lose(worker)
        causes = [
            failure
            for failure in self._failures
            if not isinstance(failure, (Disagreement, PeerLost))
        ]
        is_workers = any(error is failure for failure in self._failures)
        if common_error or is_workers or isinstance(error, ComputationInterrupted):
            return next(iter(causes or self._failures), None)
        return None

    def _cancel(self) -> None:
        """Cancel the call in every worker, also in idle ones: this process may have been
        interrupted anywhere, and not know what it has sent or received."""
        self._unacknowledged = {
            worker for worker in self._team_workers.workers if worker.pidfd >= 0
        }
        for worker in list(self._unacknowledged):
            try:
                worker.cancel()
                self._team_workers.watch.watch_writable(worker)
            except (Closed, FileNotFoundError):  # not watched: `lose` was interrupted
                self._lose(worker)
        deadline = time.monotonic() + _GRACE
        while self._unacknowledged and time.monotonic() < deadline:
            self._await_all(self._unacknowledged, _AGAIN)
            for worker in self._unacknowledged:
                worker.interrupt()  # again: before its function has begun it ignores SIGINT

    def _await_all(self, workers: Collection[Worker], seconds: float) -> None:
        """Attend to the workers until this collection, from which `_take` and `_lose` remove them,
        is empty; so many seconds at most."""
        deadline = time.monotonic() + seconds
        while workers and (remaining := deadline - time.monotonic()) > 0:
            self._attend(remaining)

    def _send(self, worker: Worker, rank: int, payload: Payload) -> None:
        function = self._run_remote
        self._busy[worker] = payload
        work = Work(function.digest, rank, payload.data, None, keep_going=False)
        try:
            worker.give(function, work)
        except Closed:
            self._lose(worker)
            return
        if worker.frames.unsent:
            self._team_workers.watch.watch_writable(worker)

    def _attend(self, seconds: float) -> None:
        """Wait for events of the workers, so many seconds at most, and handle them."""
        watch = self._team_workers.watch
        with self._lock:
            for worker, events in watch.wait(seconds).items():
                watch.relay(worker, events)
                try:
                    ended = not self._receive(worker, events) and worker.pidfd in events
                except Closed:
                    ended = True
                if ended:
                    self._lose(worker)

    def _receive(self, worker: Worker, events: set[int]) -> bool:
        """Handle a worker's messages. Return whether there was one. Raises Closed."""
        if worker.frames.unsent and worker.frames.flush():
            self._team_workers.watch.watch_writable(worker)
        if worker.frames.fileno() not in events:
            return False
        message = worker.receive()  # also from an idle one: its threads may log
        if worker.frames.unsent:  # it has asked for something
            self._team_workers.watch.watch_writable(worker)
        received = message is not None
        while message is not None:
            self._take(worker, message)
            # an answer and CancelAcknowledged may have come together: poll reports no second event
            message = worker.receive() if self._unacknowledged else None
        return received

    def _take(self, worker: Worker, message: Answer | CancelAcknowledged) -> None:
        rank = self._team_workers.rank(worker)
        where = f"rank {rank}, {worker}"
        if isinstance(message, Done):
            self._failures += [
                restore(failure, where, host=worker.host) for _, failure in message.failures
            ]
        elif isinstance(message, Unreadable):
            self._failures.append(restore(message.failure, where, host=worker.host))
        if self._unacknowledged is not None:  # cancelling: its results are not needed
            if isinstance(message, CancelAcknowledged):
                self._unacknowledged.discard(worker)
                self._release(worker)
            return
        self._release(worker)
        if isinstance(message, Stopped):
            self._failures.append(restore(INTERRUPTED, where, host=worker.host))
        elif isinstance(message, Done):
            self._load_result(worker, rank, message)

    def _load_result(self, worker: Worker, rank: int, message: Done) -> None:
        try:
            self._values[rank - 1] = load(message.values)[0]
        except Exception as error:  # a class's own unpickling may raise anything
            if by_signal_handler(error):
                raise
            if isinstance(error, SegmentGone) and readable(worker.pidfd, _BY_THEMSELVES):
                self._lose(worker)  # it ended before the memory of its results was attached here
            else:
                self._failures.append(error)

    def _lose(self, worker: Worker) -> None:
        self._failures.append(self._team_workers.lose(worker))
        if self._unacknowledged is not None:
            self._unacknowledged.discard(worker)
        self._release(worker)  # only now: until its end the worker may write there

    def _release(self, worker: Worker) -> None:
        """Release the memory of a worker's arguments."""
        payload = self._busy.pop(worker, None)
        if payload is not None:
            payload.release()

    def _stalled_error(self, timeout: float) -> Stalled:
        ranks = ((self._team_workers.rank(worker), worker) for worker in self._busy)
        late = ", ".join(f"rank {rank} ({worker})" for rank, worker in ranks)
        return Stalled(
            f"{timeout} s have passed, and {late} has not answered; it is alive: give the team a "
            "longer timeout=, or find out what it does"
        )
