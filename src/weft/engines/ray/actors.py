"""The actors of this process: one on each host for every map that is carried out at the same time.

    Place     a host, and how much of it a pool uses
    Actor     an actor as its driver sees it: what it has, and when it was heard of last
    Actors    the hosts of one pool, whose maps take actors and give them back

A thread of this process, "weft pulse", asks all actors once a second whether they live, also while
the program does something else; another, "weft nodes", asks the cluster which hosts it has. Such a
question may wait for ever, when the first host of the cluster is lost: so nobody else asks it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.engines import interruption
from weft.engines.local.pool.modules import SentModules
from weft.engines.ray import arrays, cluster
from weft.engines.ray.cluster import Cluster, Node
from weft.engines.ray.host import HostActor
from weft.engines.ray.wire import ByValue
from weft.errors import Cancelled, Loss, UsedAfterFork, WorkerLost
from weft.resources import host_name

#: seconds between two questions
_PULSE = 1.0
#: seconds of silence after which an actor is lost; until it has started, these
_SILENCE, _START = 3, 60
#: how many questions in a row the first host of the cluster may leave without an answer
_UNANSWERED = 3
#: seconds after which actors that nobody has used end
_IDLE = 60.0


@dataclass(frozen=True)
class Place:
    """A host, and how much of it a pool uses."""

    node: Node
    workers: int
    #: how many cores the workers share
    cores: int
    #: how many of the host's GPUs they have, one each
    gpus: int = 0


class Actor:
    """An actor as its driver sees it."""

    _keys = itertools.count()

    def __init__(self, node: Node, handle: Any) -> None:
        self.node, self.name = node, node.name
        self.key = f"{node.name} {next(self._keys)}"
        self.handle = handle
        self.pid = 0
        #: what it was told of the driver's modules, and the digest of the archive that it has
        self.modules = SentModules(lambda: ByValue(beside=False))
        self.archive = ""
        #: the numbers of the arrays that it has
        self.arrays: set[int] = set()
        #: how often the pulse has found no answer, about once a second: this process may have been
        #: stopped for a while, so the time alone says nothing
        self.missed = 0
        self._started = False
        #: Ray's reference to the answer that `Pulse` awaits
        self.pulse: Any = handle.ready.remote()
        self.idle_since = time.monotonic()
        #: the number of the map that it is still to be told to end; 0: none
        self.ended = 0

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method; return Ray's reference to the answer."""
        return getattr(self.handle, method).remote(*arguments)

    def take_dropped(self) -> tuple[int, ...]:
        """Return the numbers of arrays that it has and nobody refers to any more, once."""
        dropped = tuple(number for number in self.arrays if not arrays.is_placed(number))
        self.arrays.difference_update(dropped)
        return dropped

    def heard(self, pid: int = 0) -> None:
        """Note that it has answered."""
        self.missed, self._started = 0, True
        self.pid = pid or self.pid

    @property
    def has_answered(self) -> bool:
        """Return whether it has started."""
        return self._started

    @property
    def is_silent(self) -> bool:
        """Return whether it has not answered for so long that it counts as lost."""
        return self.missed >= (_SILENCE if self._started else _START)

    @property
    def silence(self) -> str:
        """Return its silence in words."""
        return f"it has not answered for {_SILENCE if self._started else _START} s"

    def kill(self) -> None:
        """End it and its workers, if it can still be reached."""
        import ray

        with contextlib.suppress(Exception):  # there is nothing to end, or nobody to ask
            ray.kill(self.handle)


class Connection:
    """This process's connection to a cluster, as the threads that carry out maps use it.

    Ray ends the process of who uses it after its end, or connects it to something else. So a thread
    uses it within `using`, for a moment at a time, and only while it is the one that its map began
    with.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._using = 0
        self._closing = False
        #: how often it has ended
        self.number = 0

    @contextlib.contextmanager
    def using(self, number: int) -> Iterator[None]:
        """Keep the connection open meanwhile. Raises Cancelled if it is another one by now."""
        with self._changed:
            if self._closing or number != self.number:
                raise Cancelled("the map was ended, as this process has left its cluster")
            self._using += 1
        try:
            yield
        finally:
            with self._changed:
                self._using -= 1
                self._changed.notify_all()

    def is_open(self, number: int) -> bool:
        """Return whether it is still the one of that number."""
        return number == self.number and not self._closing

    def end(self) -> None:
        """Let nobody use it any more, and wait for those that do."""
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._using, _END)
            self.number += 1
            self._closing = False


connection = Connection()

#: the actors of this process, and those that no map uses now
_everyone: set[Actor] = set()
_idle: list[Actor] = []
_lock = threading.Lock()
_jobs, _names = itertools.count(1), itertools.count()
_pulse: _Pulse | None = None
_process = os.getpid()


class Actors:
    """The hosts of one pool, and the actors on them that its maps use."""

    def __init__(
        self,
        reached: Cluster,
        places: Sequence[Place],
        joins: Callable[[Node], Place | None] = lambda node: None,
    ) -> None:
        """Use so much of each host; `joins` tells how much of one that joins later."""
        self.cluster, self.places = reached, tuple(places)
        self._joins = joins
        #: the answer of the cluster that `joined` has seen
        self._seen = 0

    def next_job(self) -> int:
        """Return a number for a map; connect this process, if it is not. Raises UsedAfterFork,
        EngineUnavailable."""
        if os.getpid() != _process:
            raise UsedAfterFork(
                f"these hosts are used by process {_process}, from which this process "
                f"{os.getpid()} was forked; use them there"
            )
        cluster.connect(self.cluster)
        _start_pulse(self.cluster)
        return next(_jobs)

    def take(self, place: Place) -> Actor:
        """Return an idle actor on a host, or start one."""
        with _lock:
            for actor in _idle[::-1]:
                if actor.node.node_id == place.node.node_id and not actor.is_silent:
                    _idle.remove(actor)
                    actor.ended = 0
                    return actor
        return self._start(place.node)

    def _start(self, node: Node) -> Actor:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        kind: Any = ray.remote(HostActor)
        handle = kind.options(
            num_cpus=0,
            max_concurrency=8,
            max_restarts=0,
            max_task_retries=0,
            name=f"weft {host_name()} {os.getpid()} {next(_names)}",
            namespace=cluster.NAMESPACE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        ).remote()
        actor = Actor(node, handle)
        _everyone.add(actor)
        return actor

    def lose(self, actor: Actor) -> None:
        """Forget an actor, and end it if it still lives."""
        _forget(actor)

    def give_back(self, number: int, used: Iterable[Actor]) -> None:
        """Keep actors, none of whose items of a map are left, for the next map, which ends this one
        there; if none comes, the pulse does."""
        for actor in used:
            actor.ended = number
            actor.idle_since = time.monotonic()
            with _lock:
                _idle.append(actor)

    def end_job(
        self, number: int, used: Iterable[Actor], seconds: float, say: Callable[..., None]
    ) -> None:
        """Make actors end a map, and keep them for the next one; end those that do not answer."""
        import ray

        waiting = {actor.call("end", number): actor for actor in used}
        deadline = time.monotonic() + seconds
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=min(left, _PULSE))
            for reference in ready:
                actor = waiting.pop(reference)
                try:
                    said = ray.get(reference)
                except Exception:
                    self.lose(actor)
                    continue
                actor.heard()
                say(actor, said)
                actor.idle_since = time.monotonic()
                with _lock:
                    _idle.append(actor)
            for reference in [one for one, actor in waiting.items() if actor.is_silent]:
                self.lose(waiting.pop(reference))
        for actor in waiting.values():
            self.lose(actor)

    def joined(self, used: Iterable[Place]) -> list[Place]:
        """Return the hosts that live and are not used."""
        if _pulse is None or _pulse.answers == self._seen:
            return []
        self._seen = _pulse.answers
        known = {place.node.node_id for place in used}
        found = (self._place(node) for node in _pulse.nodes if node.node_id not in known)
        return [place for place in found if place is not None]

    def living_places(self) -> list[Place]:
        """Return the hosts that live, also those of which an actor was lost."""
        found = (self._place(node) for node in cluster.living(self.cluster))
        return [place for place in found if place is not None]

    def _place(self, node: Node) -> Place | None:
        for place in self.places:
            if place.node.node_id == node.node_id:
                return place
        return self._joins(node)

    def check_head(self, *, now: bool = False) -> None:
        """Raise WorkerLost if the first host of the cluster does not answer; ask it `now`, or look
        at what it has answered. The connection ends when another map begins, or at shutdown: other
        threads use it."""
        if _pulse is not None and (_pulse.head_is_silent or (now and not _pulse.ask_head())):
            _pulse.lost = True
            loss = Loss(-1, -1, 0, None, 0, False, self.cluster.address)
            raise WorkerLost(
                f"the first host of the cluster, {self.cluster.address}, does not answer, and "
                "without it there is no cluster; start it anew:\n"
                f"    weft open --port {self.cluster.address.rpartition(':')[2]}",
                loss=loss,
            )

    def close(self) -> None:
        """End the idle actors on its hosts, and return when their workers have ended."""
        import ray

        nodes = {place.node.node_id for place in self.places}
        idle = _take_idle(lambda actor: actor.node.node_id in nodes)
        if idle and ray.is_initialized():
            closing = [actor.call("close_workers") for actor in idle]
            ray.wait(closing, num_returns=len(closing), timeout=_END)
        for actor in idle:
            _forget(actor)


def _take_idle(which: Callable[[Actor], bool]) -> list[Actor]:
    with _lock:
        taken = [actor for actor in _idle if which(actor)]
        _idle[:] = [actor for actor in _idle if actor not in taken]
    return taken


def _forget(actor: Actor) -> None:
    """End an actor, if it still lives."""
    _everyone.discard(actor)
    with _lock:
        if actor in _idle:
            _idle.remove(actor)
    actor.kill()


class _Pulse:
    """The threads that ask actors and the cluster whether they live."""

    def __init__(self, reached: Cluster) -> None:
        self._cluster = reached
        self.nodes: tuple[Node, ...] = reached.nodes
        #: how often the cluster has answered, and how often in a row it has not
        self.answers = 0
        self._unanswered = 0
        #: whether a map was ended because it did not answer
        self.lost = False
        self.ended = threading.Event()
        #: set to have the cluster asked now
        self._wanted = threading.Event()
        #: held while Ray is used: afterwards it ends the process of who uses it
        self._using = threading.Lock()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._ask_actors, "weft pulse"), (self._ask_nodes, "weft nodes"))
        ]
        for thread in self._threads:
            interruption.start(thread)

    @property
    def head_is_silent(self) -> bool:
        """Return whether the first host of the cluster counts as lost."""
        return self.lost or self._unanswered >= _UNANSWERED

    def end(self) -> None:
        """End the threads."""
        self.ended.set()
        self._wanted.set()
        for thread in self._threads:
            thread.join(_END)

    def _ask_actors(self) -> None:
        while not self.ended.wait(_PULSE):
            with self._using:
                if not self.ended.is_set():
                    self._look()
            for actor in _take_idle(lambda one: one.idle_since < time.monotonic() - _IDLE):
                _forget(actor)

    def _look(self) -> None:
        """Note which actors have answered since the last look, and ask these again."""
        import ray

        asked = {actor.pulse: actor for actor in list(_everyone)}
        if not asked or not ray.is_initialized():
            return
        ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=0, fetch_local=False)
        for reference in ready:
            actor = asked[reference]
            try:
                actor.heard(ray.get(reference))
                actor.pulse = actor.call("ready")
            except Exception:  # who uses it finds out the same way
                _everyone.discard(actor)
        for reference in silent:
            asked[reference].missed += 1
        with _lock:
            for actor in _idle:
                dropped = actor.take_dropped()
                if actor.ended or dropped:
                    actor.call("end", actor.ended, dropped)
                    actor.ended = 0

    def ask_head(self) -> bool:
        """Ask the first host of the cluster now. Return whether it has answered."""
        answers, unanswered = self.answers, self._unanswered
        deadline = time.monotonic() + _END
        while time.monotonic() < deadline:
            self._wanted.set()
            if self.answers != answers:
                return True
            if self._unanswered > unanswered:
                return False
            time.sleep(0.01)
        return False

    def _ask_nodes(self) -> None:
        while not self.ended.is_set():
            self._wanted.wait(_PULSE)
            self._wanted.clear()
            if self.ended.is_set():
                return
            try:
                self.nodes = cluster.living(self._cluster)
            except Exception:  # it does not answer
                self._unanswered += 1
            else:
                self._unanswered = 0
                self.answers += 1


#: seconds that the threads have to end
_END = 5.0


def _start_pulse(reached: Cluster) -> None:
    global _pulse
    if _pulse is None or _pulse.ended.is_set():
        _pulse = _Pulse(reached)
        atexit.unregister(close_all)
        atexit.register(close_all)  # now that Ray has been imported: it is called before Ray's own


def is_lost() -> bool:
    """Return whether the first host of the cluster did not answer when it was asked last."""
    return _pulse is not None and _pulse.head_is_silent


def is_up_to_date(reached: Cluster) -> bool:
    """Return whether the nodes of a cluster are those that live, as far as is known."""
    if _pulse is None or _pulse.ended.is_set() or _pulse.head_is_silent:
        return False
    living = {node.node_id for node in _pulse.nodes}
    return all(node.node_id in living for node in reached.nodes)


def close_all() -> None:
    """End all actors of this process, and the threads that ask them."""
    global _pulse
    if os.getpid() != _process:
        return
    connection.end()
    if _pulse is not None:
        _pulse.end()
        _pulse = None
    for actor in list(_everyone):
        _forget(actor)


def _in_child() -> None:
    global _pulse, _lock
    _pulse, _lock = None, threading.Lock()
    _everyone.clear()
    _idle.clear()


os.register_at_fork(after_in_child=_in_child)
