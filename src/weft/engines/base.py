"""The contracts an engine keeps. Few methods, and every engine keeps all of them.

`tests/contracts/` holds the suite that each implementation passes. The six collectives are here,
once: what they check, plan and return is in `_core/calls.py` and `_core/moves.py`; an engine only
carries a call out (`carry_out`), and those that can do so beside the caller's work say how
(`_start`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from weft._core.arguments import validate_seconds
from weft.errors import InvalidValue
from weft.resources import Plan, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from weft._core.arithmetic import Array
    from weft._core.calls import Call
    from weft._core.items import Finished, Job
    from weft._core.tables import Ids, Interrupted, TableSpec


NO_COMMON: Mapping[str, Any] = MappingProxyType({})


class Handle(Protocol):
    """A call that is under way. Its arrays are the call's until it is done: neither change what
    was given nor use `out=` before."""

    def done(self) -> bool:
        """Whether the call has ended, well or not."""

    def wait(self, timeout: float | None = None) -> Any:
        """The call's result, once it is there; raises what the call raised.

        Raises Stalled when `timeout` seconds have passed; the call goes on, and can be waited for
        again.
        """


class Done:
    """A Handle of a call that has ended."""

    def __init__(self, result: Any, error: Exception | None = None) -> None:
        self._result, self._error = result, error

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> Any:
        if timeout is not None:
            validate_seconds(timeout)
        if self._error is not None:
            raise self._error
        return self._result


class Group(ABC):
    """Peers that meet: each runs the same script, has a rank, and calls the same methods in the
    same order.

    A group is used by one thread at a time; for a second thread make a second group with
    `split`. A rank that ends or leaves breaks the group for the others: what waits for it raises
    `PeerLost`, and `survivors` makes the group of those who remain.
    """

    #: "world" for the group of `weft.init`, "world/1.7" for color 7 of its first split, ...
    name: str
    #: this process's place, 0 to size - 1
    rank: int
    size: int
    #: the host of each rank
    hosts: tuple[str, ...]
    #: counts the changes of membership; `survivors` adds one
    generation: int
    #: seconds that a call without `timeout=` may wait
    timeout: float
    #: whether this process has called `leave`
    has_left: bool = False
    #: what `survivors` returned; from then on this group is not used any more
    successor: Group | None = None

    @property
    def latest(self) -> Group:
        """This group, or the last of its successors."""
        group: Group = self
        while group.successor is not None:
            group = group.successor
        return group

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """This process's place among the ranks of its host, 0 to local_size - 1."""
        return self.hosts[: self.rank].count(self.hosts[self.rank])

    @property
    def local_size(self) -> int:
        """How many ranks are on this process's host."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def plan(self) -> Plan:
        """What this rank may use of its host's cores."""
        return plan(self.local_size)

    @abstractmethod
    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it.

        Raises PeerLost, Stalled, Disagreement. After Stalled, or an interrupt, calling it again
        goes on waiting for the same meeting: a peer that comes late finds this rank there.
        """

    @abstractmethod
    def split(
        self, color: int | None, *, key: int = 0, timeout: float | None = None
    ) -> Group | None:
        """The subgroup of the ranks that named the same color, ordered by key, then by rank.

        Every rank of the group calls it; one that passes None is in no subgroup and gets None.
        """

    @abstractmethod
    def survivors(self, *, timeout: float | None = None) -> Group:
        """The group of the ranks still here, one generation later. Every one of them calls it.

        It takes the place of this group, also for `weft.barrier()` and the like. An engine whose
        launcher ends the survivors of a loss raises EngineUnavailable.
        """

    @abstractmethod
    def leave(self) -> None:
        """Stop being a rank. Whoever waits for this one gets PeerLost. Does nothing twice."""

    @abstractmethod
    def make_store(self, spec: TableSpec, values: Array | None) -> Store:
        """Where a new table's rows are kept. Every rank calls it, with the same `spec`.

        The rows are the master's `values`, zeros if it has none; the others' are ignored. Raises
        Disagreement, which shows every rank's spec, and OutOfMemory.
        """

    @abstractmethod
    def refuse(self, name: str, error: Exception) -> None:
        """In place of a call that all ranks make: tell the others that this one's arguments were
        wrong, so that they do not wait for it. They get a Disagreement."""

    @abstractmethod
    def carry_out(self, call: Call, *, timeout: float) -> None:
        """Exchange `call.common` and `call.own`, settle the call, then move or combine.

        Raises Disagreement and InvalidValue on every rank alike, PeerLost, Stalled.
        """

    def allocate(self, shape: Any, dtype: Any, device: str = "cpu") -> Array:
        """Return zeros in memory that is best for repeated in-place all_reduce."""
        import numpy as np

        if device != "cpu":
            raise InvalidValue(f"allocate(device={device!r}): this engine has memory on 'cpu' only")
        return np.zeros(shape, dtype)

    def _collective(
        self,
        name: str,
        value: Any,
        options: dict[str, Any],
        *,
        async_op: bool,
        timeout: float | None,
    ) -> Any:
        """Make a call, carry it out, return its result; with `async_op` a Handle."""
        try:
            seconds = self.timeout if timeout is None else validate_seconds(timeout)
            call = make_call(self, name, value, options)
        except Exception as error:
            self.refuse(name, error)
            raise
        if async_op:
            return self._start(call, seconds)
        self.carry_out(call, timeout=seconds)
        return call.result()

    def _start(self, call: Call, seconds: float) -> Handle:
        """Begin a call, after those that were begun before. By default it is carried out here."""
        try:
            self.carry_out(call, timeout=seconds)
            return Done(call.result())
        except Exception as error:
            return Done(None, error)

    # the collectives: every rank calls the same one, with the same options

    def broadcast(
        self,
        value: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """`weft.broadcast` in this group."""
        options = {"root": root, "out": out}
        return self._collective("broadcast", value, options, async_op=async_op, timeout=timeout)

    def scatter(
        self,
        value: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """`weft.scatter` in this group."""
        options = {"root": root, "out": out}
        return self._collective("scatter", value, options, async_op=async_op, timeout=timeout)

    def gather(
        self,
        value: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """`weft.gather` in this group."""
        options = {"root": root, "out": out}
        return self._collective("gather", value, options, async_op=async_op, timeout=timeout)

    def all_gather(
        self, value: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """`weft.all_gather` in this group."""
        options = {"out": out}
        return self._collective("all_gather", value, options, async_op=async_op, timeout=timeout)

    def reduce(
        self,
        value: Any,
        op: str = "sum",
        root: int = 0,
        *,
        weight: float | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """`weft.reduce` in this group."""
        options = {"op": op, "root": root, "weight": weight, "out": out}
        return self._collective("reduce", value, options, async_op=async_op, timeout=timeout)

    def all_reduce(
        self,
        value: Any,
        op: str = "sum",
        *,
        weight: float | None = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """`weft.all_reduce` in this group."""
        options = {"op": op, "weight": weight, "out": out}
        return self._collective("all_reduce", value, options, async_op=async_op, timeout=timeout)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} rank {self.rank} of {self.size}, "
            f"generation {self.generation}>"
        )


class Store(ABC):
    """Where an engine keeps one table's rows and the state of its updater.

    Arguments have been checked: `ids` are within the table, `delta` and `out` have the right
    shape and the table's dtype. Calls of one rank take effect in the order in which they are made.
    """

    spec: TableSpec
    #: how many adds the slowest rank was behind this one at its last get
    staleness: int = 0

    @property
    @abstractmethod
    def steps(self) -> int:
        """Return how many adds the rows have had."""

    @abstractmethod
    def get(self, ids: Ids | None, out: Array | None, *, timeout: float | None = None) -> Array:
        """Copy all rows, or these, to `out` or, if None, to fresh memory. Raises Stalled."""

    @abstractmethod
    def add(self, delta: Array, ids: Ids | None, *, timeout: float | None = None) -> None:
        """Apply the updater to all rows, or to these. Raises Stalled."""

    @abstractmethod
    def interrupted(self) -> tuple[Interrupted, ...]:
        """List the adds that a rank had begun and not ended when it died."""

    # a table on disk: settle, then pieces, before anybody adds again

    @abstractmethod
    def settle(self, *, timeout: float | None = None) -> None:
        """Apply what the consistency holds back. Every rank calls it, between two barriers."""

    @abstractmethod
    def read_piece(self, name: str, start: int, stop: int) -> Array:
        """Copy some rows of "rows" or of a state array."""

    @abstractmethod
    def write_piece(self, name: str, start: int, values: Array) -> None:
        """Replace some rows, from `start` on, of "rows" or of a state array."""

    @abstractmethod
    def set_steps(self, steps: int) -> None:
        """Set how many adds the rows of a loaded table have had. One rank calls it."""

    def exclusive_rows(self) -> Array | None:
        """Return the rows themselves if no other process can use them, else None."""
        return None


class Pool(ABC):
    """A driver and workers for independent calls."""

    #: how many workers there are
    size: int

    @abstractmethod
    def prepare(self, function: Callable[[Any], Any]) -> Any:
        """A snapshot of a function, for a Job. Raises InvalidType if it cannot be sent."""

    @abstractmethod
    def forget(self, prepared: Any) -> None:
        """Drop the memory that a function holds, here and in the workers."""

    @abstractmethod
    def put(self, array: Array, *, readonly: bool = False) -> Any:
        """Store an array once for all workers. An item, or a prepared function, may hold the result
        in its place: workers get the array, to which nobody can write if it is `readonly`."""

    @abstractmethod
    def close(self) -> None:
        """End the workers; a later job starts new ones."""

    @abstractmethod
    def run(self, job: Job) -> Generator[Finished, None, None]:
        """Carry out a job; yields what has ended, in the order in which it ends.

        When the job fails, and when the generator is closed, what still runs is ended. An item
        that fails is among the failures of its chunk. Raises Stalled at the job's deadline,
        Cancelled, and what the items' iterator raises.
        """


class Member:
    """A process's part in a team."""

    def __init__(self, rank: int, size: int, group: Group) -> None:
        self.rank, self.size, self.group = rank, size, group
        #: what was registered, by number; the driver's own objects in the driver
        self.registered: dict[int, Any] = {}


class Team(ABC):
    """A driver, rank 0, which computes too, and workers that stay and form a group with it."""

    size: int
    member: Member  #: this process's

    @abstractmethod
    def register(self, value: Any, name: str, *, by_value: bool = False) -> int:
        """Give every worker a copy of an object; return its number.

        What is registered later and mentions the object gets each worker's own copy of it, or, if
        it is registered `by_value`, a copy as it is then. Raises InvalidType, which names it, if it
        cannot be sent.
        """

    @abstractmethod
    def drop(self, number: int) -> None:
        """Forget it when the next is registered. Safe in finalizers."""

    @abstractmethod
    def call(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        *,
        common: Mapping[str, Any] = NO_COMMON,
    ) -> list[Any]:
        """Run `function(member, *own[rank], **common)` in each rank, this process too.

        Return the results in the order of the ranks; a rank whose own arguments are None does not
        run it. Of a RowSlice a worker gets at least the rows that are meant. What is `common` is
        sent once for all workers, and named by its keys in errors; each worker may change what it
        gets. Raises what a rank raised, WorkerLost, Stalled; then what still runs is ended.
        """

    def shares(self, value: Any) -> bool:
        """Return whether later changes of a value here reach the workers unsent."""
        return False

    @abstractmethod
    def restart(self) -> None:
        """Start fresh workers, with copies of the driver's objects as they are now."""

    @abstractmethod
    def close(self) -> None:
        """End the workers. Does nothing twice."""


@dataclass(frozen=True)
class PoolOptions:
    """What a pool of workers is made of."""

    #: how many workers; None for one per core
    size: int | None
    #: the cores that they share
    cores: int
    #: one worker for each of these GPUs, as CUDA_VISIBLE_DEVICES names them
    gpus: Sequence[str] = ()
    #: the name behind which they are served, True for the usual one; None, False: of this process
    named_pipe: bool | str | None = None


@dataclass(frozen=True)
class TeamOptions:
    """What a team is made of."""

    #: how many ranks, the driver among them; None for one per core
    size: int | None
    #: the cores that they share
    cores: int
    #: seconds that a call may take after the driver's own part
    timeout: float
    #: the GPUs of the first workers, one each
    gpus: Sequence[str] = ()
    #: what the user writes to have it started again
    restart_hint: str = "team.restart()"


@dataclass(frozen=True)
class Command:
    """What `weft run` was asked for."""

    ranks: int
    #: the interpreter's arguments: a script or -m module, and what it is given
    program: tuple[str, ...]
    timeout: float | None = None
    prefix: bool = True
    #: whether the other ranks go on when one fails
    keep_going: bool = False


_kinds: dict[str, Any] = {}


def make_call(group: Group, name: str, value: Any, options: dict[str, Any]) -> Call:
    """A collective as this rank of the group makes it. Raises InvalidValue, InvalidType."""
    if not _kinds:  # only now: programs without collectives do without NumPy
        from weft._core import calls, moves

        _kinds.update(
            all_reduce=calls.Reduce,
            reduce=calls.Reduce,
            broadcast=moves.Broadcast,
            scatter=moves.Scatter,
            gather=moves.Gather,
            all_gather=moves.Gather,
        )
    call: Call = _kinds[name](name, group.rank, group.size, value, **options)
    return call
