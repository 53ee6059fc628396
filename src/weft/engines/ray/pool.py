"""A pool over hosts: one map, shared among them.

    driver: RayPool.run                       each host: HostActor, weft's own pool in it
    Shares: which host runs what
    Request: a host's whole share   ──>       runs them on its workers
    Report: what has ended          <──       at least once a second
    take_back                       ──>       gives back what it has not begun, for a host
                                              that has nothing more to begin

Nothing is known of a host but what it answers. One that is silent for some seconds is lost: another
runs what it had not begun, and what it ran as often as `retries` allow. Ray carries messages, and
starts and ends actors; results and exceptions are data in them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from weft._core.items import (
    Bound,
    Finished,
    Job,
    Unwrapping,
    at_hand,
    not_begun,
    not_drawn,
)
from weft._core.schedule import draw_some
from weft._core.shares import Shares
from weft.engines.base import Pool
from weft.engines.interruption import by_signal_handler
from weft.engines.local.pool import modules as local_modules
from weft.engines.local.pool.driver_state import Captured, capture
from weft.engines.local.pool.forwarded_warnings import reissue
from weft.engines.local.pool.messages import Modules, Outdated, Update, Warned
from weft.engines.local.pool.payload import unpicklable_error
from weft.engines.local.pool.pool import Feed, Limits
from weft.engines.local.processes.output import Logged, print_to, replay
from weft.engines.ray import modules
from weft.engines.ray.actors import Actor, Actors, Place, connection
from weft.engines.ray.arrays import Noting, Placed, Repeated
from weft.engines.ray.messages import Batch, Begin, Part, Report, Request
from weft.engines.ray.wire import (
    LARGE,
    Packed,
    Sent,
    TooLarge,
    pack_function,
    pack_values,
    receive_error,
)
from weft.engines.refusals import forked_error
from weft.errors import Loss, OutOfMemory, Stalled, WorkerLost, format_bytes
from weft.resources import THREAD_VARIABLES, host_name

if TYPE_CHECKING:
    from weft._core.arithmetic import Array

#: bytes of items that are sent in one message, unless one item has more
_MOST_BYTES = 64 << 20
#: chunks for each worker that a stream is ahead of its consumer, unless that is said
_AHEAD = 4
#: seconds to wait for an answer before looking at silence, deadline and cancellation again
_LOOK = 0.25
#: the same while an iterator is asked for items
_LOOK_FOR_ITEMS = 0.01
#: seconds that hosts have to end what runs, and after the deadline to say what has ended
_END = 5.0
#: seconds from the first result of a host to its report: of a list, and of a stream
_PATIENCE, _PATIENCE_OF_STREAM = 0.05, 0.002


@dataclass
class Prepared:
    """A function as it is sent to hosts."""

    name: str
    packed: Packed
    modules: set[str]
    arrays: dict[int, Placed]
    state: Captured
    #: Ray's reference to a large one, once it was sent
    reference: Any = None

    def send(self, store: int) -> Packed | list[Any]:
        """Return it as hosts get it; the first call puts a large one into Ray's store. Raises
        OutOfMemory if it has more bytes than the smallest `store`."""
        if self.packed.nbytes < LARGE:
            return self.packed
        if self.reference is None:
            import ray

            if self.packed.nbytes > store:
                raise OutOfMemory(
                    f"the function {self.name!r}, with what it refers to, has "
                    f"{format_bytes(self.packed.nbytes)}, and the smallest of Ray's stores, "
                    f"through which it goes to other machines, {format_bytes(store)}; give it a "
                    "part, or the name of a file that it reads"
                )
            self.reference = ray.put(self.packed)
        return [self.reference]


class RayPool(Pool):
    """Workers on several hosts."""

    def __init__(self, actors: Actors, *, uses_gpus: bool = False) -> None:
        self._actors = actors
        self._places = actors.places
        self.size = sum(place.workers for place in self._places)
        self.uses_gpus = uses_gpus

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(place.node.name for place in self._places for _ in range(place.workers))

    def prepare(self, function: Callable[[Any], Any]) -> Prepared:
        with Noting() as noting:
            packed, names = pack_function(function)
        return Prepared(_name_of(function), packed, names, noting.mentioned, capture())

    def forget(self, prepared: Any) -> None:
        prepared.arrays.clear()
        prepared.reference = None

    def put(self, array: Array, *, readonly: bool = False) -> Any:
        return Placed(array, readonly=readonly)

    def run(self, job: Job) -> Generator[Finished, None, None]:
        run = Run(job, self._actors, self._places)
        try:
            for finished in run.steps():
                yield finished
                if finished.failures and not job.keep_going:
                    return
        finally:
            run.end()

    def close(self) -> None:
        self._actors.close()

    def shut_down(self) -> None:
        from weft.engines.ray import engine

        engine.shut_down(self._actors.cluster)


class _Host:
    """A host as a map under way sees it."""

    def __init__(self, place: Place, actor: Actor, offset: int) -> None:
        self.place, self.actor, self.offset = place, actor, offset
        #: Ray's references to the answers that are awaited
        self.exchange: Any = None
        self.taking: Any = None
        #: for whom it is asked to give back items
        self.thief: str = ""
        self.begun = False
        #: messages about modules for the next request
        self.messages: list[Modules | Update] = []
        #: what waits to be sent: a stream's items too
        self.name = place.node.name


class Run:
    """A map under way."""

    def __init__(self, job: Job, actors: Actors, places: Sequence[Place]) -> None:
        import ray

        self._ray = ray
        self._process = os.getpid()
        self._job, self._actors = job, actors
        self._function: Prepared = job.function
        self._state = capture() if job.cancelled is None else self._function.state
        self._limits = Limits(job)
        self._began = time.monotonic()
        self._number = actors.next_job()
        self._connection = connection.number
        #: bytes of the smallest of Ray's stores: of this host, and of those that are used
        self._store = min(node.store for node in (*actors.cluster.nodes, *(p.node for p in places)))
        self._items = Items(job, self._limits, lambda: sum(p.workers for p in places))
        self._repeated = Repeated(streamed=self._items.known is None)
        self._shares = Shares(self._items.known, retries=job.retries)
        self._places = list(places)
        self._hosts: dict[str, _Host] = {}
        #: hosts that have joined, or may be back, until their actors answer
        self._joining: list[tuple[Place, Actor]] = []
        #: awaited answers: the host, and whether it is one to take_back
        self._pending: dict[Any, tuple[str, bool]] = {}
        self._digests = local_modules.look(self._function.modules)
        self._archive = modules.collect(self._function.modules)
        #: whether the job's deadline has passed: nothing more is sent
        self._over = False
        self._counts = _counts_of(self._places) if job.one_each else {}

    def steps(self) -> Generator[Finished, None, None]:
        """Yield each chunk when it is finished. Raises Stalled, Cancelled. If the job keeps going,
        its deadline raises nothing: items that are not finished then are failures."""
        with connection.using(self._connection):
            for place in self._places:
                self._add(place)
        while True:
            try:
                self._draw()
                yield from self._use(self._send)
                if self._items.ended and not self._shares.left:
                    return
                self._check()
                yield from self._use(self._receive)
            except Stalled as error:
                if error is not self._limits.stalled or not self._job.keep_going:
                    raise
                yield from self._end_at_deadline()
                return

    def _use(self, step: Callable[[], Iterator[Finished]]) -> list[Finished]:
        with connection.using(self._connection):
            return list(step())

    def end(self) -> None:
        """End what still runs, and give the actors back."""
        if os.getpid() != self._process:
            return
        self._items.close()
        if not connection.is_open(self._connection):
            return
        with connection.using(self._connection):
            self._end()

    def _end(self) -> None:
        used = [host.actor for host in self._hosts.values()]
        for _, actor in self._joining:
            self._actors.lose(actor)
        if self._items.ended and not self._shares.left:
            self._actors.give_back(self._number, used)
        else:
            self._actors.end_job(self._number, used, _END, self._say)

    # hosts

    def _add(self, place: Place, actor: Actor | None = None) -> None:
        """Take part of the map to another host."""
        offset = sum(host.place.workers for host in self._hosts.values())
        if place in self._places:
            before = self._places[: self._places.index(place)]
            offset = sum(one.workers for one in before)
        self._store = min(self._store, place.node.store)
        actor = actor or self._actors.take(place)
        host = _Host(place, actor, offset)
        self._hosts[actor.key] = host
        self._shares.join(actor.key, place.workers)
        host.messages = list(actor.modules.messages(self._digests))
        actor.modules.note(self._digests)

    def _add_joined(self) -> None:
        """Use hosts that have joined. A host that was lost may still count as one that lives for
        Ray: so their actors have to answer first."""
        if not self._job.one_each:
            known = [self._hosts[key].place for key in self._hosts]
            known += [place for place, _ in self._joining]
            for place in self._actors.joined(known):
                self._joining.append((place, self._actors.take(place)))
        waiting, self._joining = self._joining, []
        for place, actor in waiting:
            if actor.has_answered:
                self._add(place, actor)
            elif actor.is_silent:
                self._actors.lose(actor)
            else:
                self._joining.append((place, actor))

    def _lose(self, key: str, why: str) -> Iterator[Finished]:
        """Go on without a host. Yield its items that are not run again as failures."""
        host = self._hosts.pop(key)
        for reference in [one for one, (name, _) in self._pending.items() if name == key]:
            del self._pending[reference]
        begun = self._shares.begun(key)
        failed = self._shares.lose(key)
        self._actors.lose(host.actor)
        self._actors.check_head(now=True)  # without it all hosts are lost, one after the other
        yield from self._lost(host, why, begun, failed)
        if not self._hosts and (self._shares.left or not self._items.ended):
            self._replace_all(why)

    def _lost(
        self, host: _Host, why: str, begun: list[range], failed: list[range]
    ) -> Iterator[Finished]:
        if not failed:
            return
        which = _which(begun)
        retries = self._job.retries
        again = f" for the {retries + 1}. time" if retries else ""
        advice = "" if retries else "; retries=1 runs such items again on another host"
        for span in failed:
            failures: dict[int, Exception] = {}
            for index in span:
                loss = Loss(index, host.offset, host.actor.pid, None, 0, False, host.name)
                failures[index] = WorkerLost(
                    f"{host.name} was lost ({why}) while it ran {which}{again}{advice}", loss=loss
                )
            yield Finished(
                span.start,
                [None] * len(span),
                failures,
                host.offset,
                host.actor.pid,
                host=host.name,
            )

    def _replace_all(self, why: str) -> None:
        """Start anew on the hosts that live, where all were lost. Raises WorkerLost."""
        for place in self._actors.living_places():
            self._add(place)
        if not self._hosts:
            raise self._all_lost_error(why)

    def _all_lost_error(self, why: str) -> WorkerLost:
        waiting = self._shares.waiting
        first = waiting[0].start if waiting else self._items.taken
        loss = Loss(first, -1, 0, None, 0, False, "")
        return WorkerLost(
            f"all hosts of this map were lost ({why}), and {_which(waiting)} had not ended; look "
            "at them by\n    weft status",
            loss=loss,
        )

    # sending

    def _draw(self) -> None:
        """Draw items of a stream, as many as hosts have room for."""
        if self._items.known is None and not self._items.ended and not self._over:
            room = self._shares.room()
            while room > 0:
                span = self._items.draw(room, self._where)
                if not span:
                    return
                self._shares.add(span)
                room -= len(span)

    def _send(self) -> Iterator[Finished]:
        """Send each host that is not being asked what it is to run, and ask how far it is."""
        idle = [key for key, host in self._hosts.items() if host.exchange is None]
        given = {} if self._over else {key: self._next(key) for key in idle}
        # to this host last: its part travels less far
        for key in sorted(idle, key=lambda key: self._hosts[key].place.node.is_this):
            host = self._hosts[key]
            batches, arrays, failed = self._batches(key, given.get(key, []))
            yield from failed
            if host.taking is None and not batches and self._shares.is_hungry(key):
                self._take_for(key)
            if self._shares.held(key):
                more = not host.thief and self._may_have_more(key)
                self._ask(host, batches, arrays, more)

    def _next(self, key: str) -> list[range]:
        return self._shares.next(key, self._counts.get(self._hosts[key].place.node.node_id))

    def _may_have_more(self, key: str) -> bool:
        if self._job.one_each or self._items.known is None:
            return False
        if any(host.thief == key for host in self._hosts.values()):
            return False
        if self._shares.waiting:
            return True
        return not self._shares.is_hungry(key) and len(self._hosts) > 1

    def _batches(
        self, key: str, spans: list[range]
    ) -> tuple[tuple[Batch, ...], dict[int, Placed], list[Finished]]:
        """Return items for a host, the arrays that they mention, and those items that cannot be
        sent, as failures."""
        if not spans:
            return (), {}, []
        try:
            batch, arrays, rest = self._pack(spans)
        except _Unsendable as error:
            for span in spans:
                self._shares.unsent(key, span)
            for one in error.failures:
                span = range(one.first, one.first + 1)
                self._shares.drop(span)
                self._items.forget(span)
            return (), {}, error.failures
        for span in rest:
            self._shares.unsent(key, span)
        return (batch,), arrays, []

    def _pack(self, spans: list[range]) -> tuple[Batch, dict[int, Placed], list[range]]:
        """Return items as they are sent, the arrays that they mention, and which of them are too
        many to be sent at once."""
        rest: list[range] = []
        while True:
            values = [value for span in spans for value in self._items.get(span)]
            try:
                with Noting() as noting:
                    most = min(_MOST_BYTES, self._store) if len(values) > 1 else self._store
                    packed, names = pack_values(values, most, self._repeated)
            except TooLarge:
                if self._finds_repeated():
                    continue
                if len(values) == 1:
                    raise self._too_large(spans[0].start) from None
                spans, later = _halves(spans)
                rest = later + rest
                continue
            except Exception as error:
                if by_signal_handler(error):
                    raise
                raise self._unsendable(spans, error) from None
            if not self._finds_repeated():
                break
        runs = self._shares.runs
        known = [(span, runs(span.start)) for span in spans]
        if self._job.retries:
            known = [(range(i, i + 1), runs(i)) for span in spans for i in span if runs(i)] or known
            if any(count for _, count in known):
                known = [(range(i, i + 1), runs(i)) for span in spans for i in span]
        self._note_modules(names)
        return Batch(tuple(known), packed), noting.mentioned, rest

    def _finds_repeated(self) -> bool:
        """Look whether the large arrays that were just packed are used by several items. Return
        whether more are known now, so that items are to be packed anew."""
        return self._repeated.met_others and self._repeated.look(self._items.new())

    def _too_large(self, index: int) -> _Unsendable:
        error = OutOfMemory(
            f"items[{index}] has more bytes than the smallest of Ray's stores, "
            f"{format_bytes(self._store)}, through which it would go to another machine; send a "
            "part, or a name from which the function reads it"
        )
        return _Unsendable([Finished(index, [None], {index: error}, worker=-1, pid=0)])

    def _unsendable(self, spans: list[range], error: Exception) -> _Unsendable:
        failures = []
        for index in [index for span in spans for index in span]:
            (value,) = self._items.get(range(index, index + 1))
            try:
                pack_values([value])
            except Exception as own:
                wrong = unpicklable_error(value, f"items[{index}]", own)
                wrong.__cause__ = own
                failures.append(Finished(index, [None], {index: wrong}, worker=-1, pid=0))
        if not failures:
            raise error
        return _Unsendable(failures)

    def _note_modules(self, names: set[str]) -> None:
        """Bring hosts up to date with modules that only items refer to."""
        if names <= self._digests.keys():
            return
        found = local_modules.look(names)
        if found.keys() <= self._digests.keys():
            return
        self._digests = {**self._digests, **found}
        for host in self._hosts.values():
            host.messages += host.actor.modules.messages(self._digests)
            host.actor.modules.note(self._digests)

    def _ask(
        self, host: _Host, batches: tuple[Batch, ...], arrays: dict[int, Placed], more: bool
    ) -> None:
        begin = None if host.begun else self._begin(host)
        known = host.actor.arrays
        new = {
            number: placed.send(self._store)
            for number, placed in {**self._function.arrays, **arrays}.items()
            if number not in known
        }
        request = Request(
            self._number,
            begin,
            batches,
            tuple(host.messages),
            new,
            host.actor.take_dropped(),
            more,
            _PATIENCE if self._items.known is not None else _PATIENCE_OF_STREAM,
        )
        known.update(new)
        host.messages = []
        host.exchange = host.actor.call("exchange", request)
        self._pending[host.exchange] = host.actor.key, False

    def _begin(self, host: _Host) -> Begin:
        job, actor = self._job, host.actor
        retry_on, _ = pack_values(job.retry_on)
        archive = None if actor.archive == self._archive.digest else self._archive
        actor.archive = self._archive.digest
        node = host.place.node
        return Begin(
            self._function.name,
            f"{host_name()} pid {os.getpid()}",
            node.address,
            self._function.send(self._store),
            retry_on,
            workers=host.place.workers,
            gpus=host.place.gpus,
            cores=host.place.cores,
            seed=job.seed,
            retries=job.retries,
            keep_going=job.keep_going,
            one_each=job.one_each,
            timeout=job.timeout,
            elapsed=time.monotonic() - self._began,
            timeout_each=job.timeout_each,
            state=self._state.data,
            is_driver=node.is_this,
            variables={} if node.is_this else own_variables(),
            modules=self._archive.digest,
            archive=archive,
            store=self._store,
        )

    def _take_for(self, key: str) -> None:
        """Ask the host that has most left to begin for a part of it, for one that has none."""
        if self._over or self._job.one_each:
            return
        found = self._shares.take_from(key)
        if found is None:
            return
        victim = self._hosts[found[0]]
        if victim.taking is not None:
            return
        victim.thief = key
        victim.taking = victim.actor.call("take_back", self._number, found[1])
        self._pending[victim.taking] = found[0], True

    # receiving

    def _receive(self) -> Iterator[Finished]:
        """Wait for answers, and go through them. Go on without hosts that are silent."""
        if not self._pending:
            if self._items.waiting:
                time.sleep(_LOOK_FOR_ITEMS)
            elif not self._hosts:
                self._replace_all("nobody is left")
            return
        pause = min(_LOOK_FOR_ITEMS if self._items.waiting else _LOOK, self._limits.pause)
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=max(pause, 0.001))
        for reference in ready:
            found = self._pending.pop(reference, None)
            if found is not None:
                yield from self._attend(reference, *found)
        for key in [key for key, host in self._hosts.items() if host.actor.is_silent]:
            yield from self._lose(key, self._hosts[key].actor.silence)
        self._actors.check_head()
        self._add_joined()

    def _attend(self, reference: Any, key: str, is_taking: bool) -> Iterator[Finished]:
        host = self._hosts[key]
        try:
            answer = self._ray.get(reference)
        except Exception as error:
            if by_signal_handler(error):
                raise
            yield from self._lose(key, _reason(error))
            return
        host.actor.heard()
        if is_taking:
            host.taking, host.thief = None, ""
            if not answer:
                self._shares.heard(key, ())
            self._shares.taken_back(key, answer)
            return
        host.exchange = None
        host.begun = not answer.outdated
        yield from self._take(host, answer)

    def _take(self, host: _Host, report: Report) -> Iterator[Finished]:
        key = host.actor.key
        self._say(host.actor, report.output)
        if report.outdated:
            host.messages.append(host.actor.modules.answer(Outdated(report.outdated)))
            host.actor.modules.warn()
        values = [] if report.values is None else report.values.load()
        for part, own in zip(report.parts, values, strict=True):
            span = range(part.first, part.first + part.length)
            self._shares.finished(key, span, part.seconds)
            self._items.forget(span)
            yield self._finished(host, part, own)
        if host.taking is None:
            self._shares.heard(key, report.unbegun)
        if report.error is not None:
            raise receive_error(report.error)
        if report.ended and self._shares.held(key) and not self._over:
            if any(part.failures for part in report.parts) and not self._job.keep_going:
                return
            yield from self._lose(key, "its actor has ended the job")

    def _finished(self, host: _Host, part: Part, values: list[Any]) -> Finished:
        failures = {index: self._error(host, sent) for index, sent in part.failures}
        worker = part.worker
        if worker >= 0:
            worker = host.offset + worker % host.place.workers
        return Finished(
            part.first,
            values,
            failures,
            worker,
            part.pid,
            part.seconds,
            part.sent,
            part.received,
            part.host,
        )

    def _error(self, host: _Host, sent: Sent) -> Exception:
        error = receive_error(sent)
        if isinstance(error, ModuleNotFoundError) and error.name and modules.is_here(error.name):
            error.add_note(
                f"the module {error.name!r} is on this host and did not travel to {host.name}: it "
                "is imported only by its name as text; import it in the program too"
            )
        return error

    def _say(self, actor: Actor, output: Iterable[tuple[str, int, Any]]) -> None:
        """Print and log what workers have."""
        for stream, worker, what in output:
            prefix = f"[{actor.name} {worker}] "
            if stream:
                lines = what.splitlines(keepends=True)
                print_to(stream, "".join(prefix + line for line in lines))
            elif isinstance(what, Logged):
                replay(Logged({**what.record, "msg": prefix + str(what.record["msg"])}))
            elif isinstance(what, Warned):
                reissue(what)

    # ending

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise forked_error("this map", self._process)
        self._limits.check(self._where)

    def _end_at_deadline(self) -> Iterator[Finished]:
        """Yield what is left of the job: results that are ready, and items that are not. Hosts end
        their parts at the same time by themselves."""
        self._over = True
        timeout = self._job.timeout
        self._limits.extend(_END)
        yield from not_begun(self._shares.waiting, timeout)
        for span in self._shares.waiting:
            self._shares.drop(span)
        while self._shares.busy and not self._limits.over:
            yield from self._use(self._send)
            yield from self._use(self._receive)
            yield from not_begun(self._shares.waiting, timeout)
            for span in self._shares.waiting:
                self._shares.drop(span)
        for key in list(self._hosts):
            for span in self._shares.held(key):
                name = self._hosts[key].name
                failures: dict[int, Exception] = {
                    index: Stalled(
                        f"item {index} had no result when {timeout} s had passed, and {name}, "
                        "which had it, has not answered since"
                    )
                    for index in span
                }
                yield Finished(span.start, [None] * len(span), failures, worker=-1, pid=0)
        if self._items.known is None and not self._items.ended:
            yield not_drawn(self._items.taken, timeout)

    def _where(self) -> str:
        """Return lines that say which host has which items."""
        lines = [
            f"  {host.name} has {_which(spans)}"
            for key, host in self._hosts.items()
            if (spans := self._shares.held(key))
        ]
        if waiting := self._shares.waiting:
            lines.append(f"  {_which(waiting)} wait for a host")
        if self._items.waiting or (not self._items.ended and self._items.known is None):
            lines.append(f"  item {self._items.taken} has not come out of its iterator yet")
        return "\n".join(lines)


class _Unsendable(Exception):
    """Some items cannot be pickled: these."""

    def __init__(self, failures: list[Finished]) -> None:
        super().__init__()
        self.failures = failures


class Items:
    """The items of a job: all at once, or as they are drawn."""

    def __init__(self, job: Job, limits: Limits, workers: Callable[[], int]) -> None:
        self._job, self._limits, self._workers = job, limits, workers
        streamed = not at_hand(job.items) or job.window is not None
        #: how many there are; None for a stream, which is drawn as hosts have room
        self.known: int | None = None
        self.taken = 0
        #: whether there are no more than were drawn
        self.ended = False
        #: whether the next item was asked for and has not come yet, or may not be drawn yet
        self.waiting = False
        self._all: Any = None
        self._drawn: dict[int, Any] = {}
        #: how many `new` has returned
        self._shown = 0
        self._feed: Feed | None = None
        if not streamed:
            items = job.items
            self._all = items if isinstance(items, (list, tuple, range)) else list(items)
            self.known = self.taken = len(self._all)
            self.ended = True
            return
        self._iterator = iter(job.items)
        in_main = threading.current_thread() is threading.main_thread()
        apart = job.cancelled is not None or (job.timeout is not None and not in_main)
        if apart and not at_hand(job.items):
            self._feed = Feed(self._iterator, lambda: None)

    def get(self, span: range) -> list[Any]:
        if self._all is not None:
            return list(self._all[span.start : span.stop])
        return [self._drawn[index] for index in span]

    def new(self) -> list[Any]:
        """Return the items at hand that this has not returned before."""
        first, self._shown = self._shown, self.taken
        if self._all is not None:
            return list(self._all[first:])
        return [self._drawn[index] for index in range(first, self.taken) if index in self._drawn]

    def forget(self, span: range) -> None:
        """Drop items that have ended."""
        for index in span if self._all is None else ():
            self._drawn.pop(index, None)

    def draw(self, most: int, where: Callable[[], str]) -> range:
        """Draw at most so many items. Return their indexes. Raises what their iterator raises."""
        self.waiting = False
        window = self._job.window
        if window is not None:
            ahead = window.ahead or _AHEAD * most
            most = min(most, ahead)
            while most > 0 and not window.has_room(self.taken + most - ahead):
                most -= 1
            if not most:
                self.waiting = True
                return range(0)
        items: list[Any] | None
        if self._feed is not None:
            items = self._feed.draw(most)
        elif at_hand(self._job.items):
            items = [*islice(self._iterator, most)]
        else:
            items = self._limits.run_until_deadline(lambda: draw_some(self._iterator, most), where)
        self.waiting = items is None
        self.ended = items == []
        first = self.taken
        self.taken += len(items or ())
        self._drawn.update(enumerate(items or (), first))
        return range(first, self.taken)

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()


def _name_of(function: Any) -> str:
    """Return the name of the user's function, within what weft has put around it."""
    while isinstance(function, (Bound, Unwrapping)):
        function = function.function
    return str(getattr(function, "__name__", type(function).__name__))


def _counts_of(places: Iterable[Place]) -> dict[str, int]:
    return {place.node.node_id: place.workers for place in places}


def _halves(spans: list[range]) -> tuple[list[range], list[range]]:
    """Return the first half of some numbers, and the second."""
    half = max(1, sum(map(len, spans)) // 2)
    first: list[range] = []
    rest: list[range] = []
    for span in spans:
        own = min(len(span), half)
        half -= own
        first += [span[:own]] if own else []
        rest += [span[own:]] if own < len(span) else []
    return first, rest


def _which(spans: Sequence[range]) -> str:
    """Return numbers of items as text."""
    count = sum(map(len, spans))
    if not count:
        return "no item"
    words = [
        str(one.start) if len(one) == 1 else f"{one.start} to {one.stop - 1}" for one in spans[:4]
    ]
    more = f" and {count - sum(map(len, spans[:4]))} others" if len(spans) > 4 else ""
    return ("item " if count == 1 else "items ") + ", ".join(words) + more


def _reason(error: Exception) -> str:
    """Return in few words what Ray says of an actor that does not answer."""
    names = {
        "ActorDiedError": "its process has ended",
        "ActorUnavailableError": "it cannot be reached",
        "ObjectLostError": "what it sent was lost",
        "OwnerDiedError": "what it sent was lost",
        "OutOfDiskError": "its disk is full",
        "WorkerCrashedError": "its process has ended",
    }
    return names.get(type(error).__name__, f"{type(error).__name__}: {error}".splitlines()[0])


def own_variables() -> dict[bytes, bytes]:
    """Return the variables of the environment that this program has set itself, and those for
    threads: the others, and which GPUs there are, are each host's own."""
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = (line.partition(b"=") for line in file.read().split(b"\0"))
            before = {name: value for name, _, value in pairs}
    except OSError:
        before = {}
    threads = {name.encode() for name in THREAD_VARIABLES}
    return {
        name: value
        for name, value in os.environb.items()
        if (before.get(name) != value and name != b"CUDA_VISIBLE_DEVICES") or name in threads
    }
