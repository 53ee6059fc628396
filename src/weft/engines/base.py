"""The contracts that engines keep.

    Group    ranks that run the same script and meet: barriers, collectives, tables
    Store    where a group keeps one table
    Pool     a driver and workers for independent calls
    Team     a driver and workers that stay and form a group; a Member is one process's part in it

An engine that offers a contract keeps all of it; `tests/contracts/` holds the suite that each
implementation passes. The six collectives are written here, once: `_core/calls.py` and
`_core/moves.py` validate their arguments, plan what moves and build their results, and an engine
only carries a call out (`Group.carry_out`). Below the contracts stand the options that engines are
started with, and `make_call`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from weft._core.arguments import validate_seconds
from weft.errors import InvalidType, InvalidValue
from weft.resources import Plan, host_name, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Hashable, Mapping, Sequence

    from weft._core.arithmetic import Array
    from weft._core.calls import Call
    from weft._core.hosts import Host
    from weft._core.items import Finished, Job
    from weft._core.tables import Ids, Interrupted, TableSpec
    from weft.engines.turns import Turns


class Group(ABC):
    """Peers that meet: each runs the same script, has a rank, and calls the same methods in the
    same order.

    One thread at a time uses a group; for a second thread form a second group with `split`. A rank
    that ends or leaves breaks the group for the others: calls that wait for it raise `PeerLost`,
    and `survivors` forms the group of the ranks that remain.
    """

    #: "world" for the group of `weft.init`, "world/1.7" for color 7 of its first split, ...
    name: str
    #: this process's number, 0 to size - 1
    rank: int
    #: how many ranks there are
    size: int
    #: the host of each rank
    hosts: tuple[str, ...]
    #: how often the membership has changed; `survivors` adds one
    generation: int
    #: seconds that a call without `timeout=` may wait
    timeout: float
    #: whether tables may lie on a GPU
    has_device_tables: bool = False
    #: whether this process has called `leave`
    has_left: bool = False
    #: the group that `survivors` returned, which replaces this one
    successor: Group | None = None

    @property
    def latest(self) -> Group:
        """Return this group, or the last of its successors."""
        group: Group = self
        while group.successor is not None:
            group = group.successor
        return group

    @property
    def is_master(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    @property
    def local_rank(self) -> int:
        """Return this process's number among the ranks of its host, 0 to local_size - 1."""
        return self.hosts[: self.rank].count(self.hosts[self.rank])

    @property
    def local_size(self) -> int:
        """Return how many ranks are on this process's host."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def plan(self) -> Plan:
        """Return how many of its host's cores and threads this rank may use."""
        return plan(self.local_size)

    @abstractmethod
    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it.

        Raises PeerLost, Stalled, Disagreement. Called again after Stalled or an interrupt, it
        goes on waiting in the same barrier, so that a late peer still finds this rank there.
        """

    @abstractmethod
    def split(
        self, color: int | None, *, key: int = 0, timeout: float | None = None
    ) -> Group | None:
        """Form the subgroup of the ranks that named this color, ordered by key, then by rank.

        Every rank calls it; a rank that passes None joins no subgroup and gets None.
        """

    @abstractmethod
    def survivors(self, *, timeout: float | None = None) -> Group:
        """Form the group of the ranks that remain, one generation later. Each of them calls it.

        It replaces this group, also as the default group of `weft.barrier()` and the other
        functions. Raises EngineUnavailable where the launcher ends all ranks when one is lost.
        """

    @abstractmethod
    def leave(self) -> None:
        """Stop being a rank: peers that wait for this one get PeerLost. Idempotent."""

    @abstractmethod
    def make_store(self, spec: TableSpec, values: Array | None) -> Store:
        """Allocate a table. Every rank calls it with the same `spec`.

        The rows are rank 0's `values`, or zeros where these are None; other ranks' values are
        ignored. Raises Disagreement, which shows every rank's spec, and OutOfMemory.
        """

    @abstractmethod
    def refuse(self, name: str, error: Exception) -> None:
        """Take part in a collective whose arguments were wrong here, so that nobody waits for this
        rank: the others get a Disagreement."""

    @abstractmethod
    def carry_out(self, call: Call, *, timeout: float) -> None:
        """Exchange `call.common` and `call.own`, settle the call, then move or combine its arrays.

        Raises Disagreement and InvalidValue, on all ranks alike; PeerLost, Stalled.
        """

    def place_of(self, call: Call) -> str | None:
        """Return where this engine takes the arrays of a call that are on a device: there, or on
        the host (None), as any engine can."""
        return None

    def allocate(self, shape: Any, dtype: Any, device: str = "cpu") -> Array:
        """Return zeros in the memory that suits repeated in-place all_reduce best."""
        import numpy as np

        if device != "cpu":
            raise InvalidValue(f"allocate(device={device!r}): this engine has memory on 'cpu' only")
        return np.zeros(shape, dtype)

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
        """Do what `weft.broadcast` does, in this group."""
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
        """Do what `weft.scatter` does, in this group."""
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
        """Do what `weft.gather` does, in this group."""
        options = {"root": root, "out": out}
        return self._collective("gather", value, options, async_op=async_op, timeout=timeout)

    def all_gather(
        self, value: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Do what `weft.all_gather` does, in this group."""
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
        """Do what `weft.reduce` does, in this group."""
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
        """Do what `weft.all_reduce` does, in this group."""
        options = {"op": op, "weight": weight, "out": out}
        return self._collective("all_reduce", value, options, async_op=async_op, timeout=timeout)

    def _collective(
        self,
        name: str,
        value: Any,
        options: dict[str, Any],
        *,
        async_op: bool,
        timeout: float | None,
    ) -> Any:
        """Make a call, carry it out and return its result, or with `async_op` a Handle."""
        try:
            seconds = self.timeout if timeout is None else validate_seconds(timeout)
            call = make_call(self, name, value, options)
        except Exception as error:
            self.refuse(name, error)
            raise
        if async_op:
            call.note_stream()
            return self._start(call, seconds)
        self.carry_out(call, timeout=seconds)
        return call.result()

    def _start(self, call: Call, seconds: float) -> Handle:
        """Start a call after those started before. By default carry it out at once."""
        try:
            self.carry_out(call, timeout=seconds)
            return Done(call.result())
        except Exception as error:
            return Done(None, error)

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled. Raises InvalidType."""
        raise InvalidType(
            f"{self!r} cannot be copied or sent: it is this process's place in a group; join one "
            "in each process by weft.init(), and form subgroups with split()"
        )

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} rank {self.rank} of {self.size}, "
            f"generation {self.generation}>"
        )


class Handle(Protocol):
    """A call that is under way. Until it is done its arrays belong to the call: do not change its
    arguments, and do not use `out=`."""

    def done(self) -> bool:
        """Return whether the call has ended, with a result or an error."""

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the call and return its result, or raise what the call raised.

        Raises Stalled after `timeout` seconds; the call goes on, and can be waited for again.
        """


class Done:
    """The Handle of a call that has ended."""

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


class Store(ABC):
    """One table as an engine keeps it: its rows, and the state of its updater.

    Arguments are valid already: `ids` are within the table, `delta` and `out` have the right shape
    and the table's dtype. The calls of one rank take effect in the order in which they are made.
    """

    spec: TableSpec
    #: how many adds the slowest rank was behind this one at its last get
    staleness: int = 0

    @property
    @abstractmethod
    def steps(self) -> int:
        """Return how many adds have been applied to the rows."""

    @abstractmethod
    def get(
        self,
        ids: Ids | None,
        out: Array | None,
        *,
        timeout: float | None = None,
        slack: int | None = None,
    ) -> Array:
        """Copy all rows, or these, into `out` or, if that is None, a new array. With `slack` they
        may be so many clocks old: where rows are elsewhere, a copy may do. Raises Stalled."""

    @abstractmethod
    def add(self, delta: Array, ids: Ids | None, *, timeout: float | None = None) -> None:
        """Apply the updater to all rows, or to these. Raises Stalled."""

    @classmethod
    def exchange(
        cls, parts: Sequence[tuple[Store, Array, Array]], *, timeout: float | None = None
    ) -> None:
        """Add a delta to all rows of each of several tables, then copy all rows of each into an
        array. Raises Stalled."""
        for store, delta, _ in parts:
            store.add(delta, None, timeout=timeout)
        for store, _, out in parts:
            store.get(None, out, timeout=timeout)

    @abstractmethod
    def interrupted(self) -> tuple[Interrupted, ...]:
        """List the adds that ranks had begun, and not finished, when they died."""

    # for saving and loading: every rank settles, then pieces are copied before anybody adds

    @abstractmethod
    def settle(self, *, timeout: float | None = None) -> None:
        """Apply the adds that the consistency holds back. Every rank calls it, between barriers."""

    @abstractmethod
    def read_piece(self, name: str, start: int, stop: int) -> Array:
        """Copy some rows of "rows", or of the state array of that name."""

    @abstractmethod
    def write_piece(self, name: str, start: int, values: Array) -> None:
        """Replace rows from `start` on in "rows", or in the state array of that name."""

    @abstractmethod
    def set_steps(self, steps: int) -> None:
        """Set the count of adds of a loaded table. One rank calls it."""

    def exclusive_rows(self) -> Array | None:
        """Return the rows themselves if no other process can use them, else None (the default)."""
        return None


class Pool(ABC):
    """A driver and workers for independent calls."""

    #: how many workers there are
    size: int
    #: whether `run` computes in the thread that asks it for the next chunk, and only then
    computes_here = False
    #: whether each worker has a GPU
    uses_gpus = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the host of each worker, by default this one."""
        return (host_name(),) * self.size

    @abstractmethod
    def prepare(self, function: Callable[[Any], Any]) -> Any:
        """Take a snapshot of a function for a Job. Raises InvalidType if it cannot be sent."""

    @abstractmethod
    def forget(self, prepared: Any) -> None:
        """Drop what a prepared function holds, here and in the workers."""

    @abstractmethod
    def put(self, array: Array, *, readonly: bool = False) -> Any:
        """Store an array once for all workers; an item or a prepared function may hold the result
        in its place. Workers get the array; if it is `readonly`, nobody can write to it."""

    @abstractmethod
    def run(self, job: Job) -> Generator[Finished, None, None]:
        """Carry out a job; yield its chunks as they end, each with worker, process and host.

        An item that fails is among the failures of its chunk: with what it raised; with Stalled if
        it ran for longer than `timeout_each`. It is run again first, as often as `retries` says, if
        it has raised one of `retry_on`, run for too long, or lost its worker. Items that still run
        are ended when the job fails and when the generator is closed. With a `window` no more items
        are drawn than it has room for.

        Raises Stalled at the job's deadline, Cancelled, and what the iterator of the items raises.
        A job that keeps going does not raise at its deadline: results that are ready are yielded;
        of the other items those that ran have failed with Stalled, the rest with Cancelled. Where
        nobody knows how many there are, one more Stalled stands for those that were not drawn.
        """

    @abstractmethod
    def close(self) -> None:
        """End the workers; a later job starts new ones."""

    def shut_down(self) -> None:
        """End the workers, also those that were opened for several programs."""
        self.close()


#: what `Team.call` gives every rank unless it is told something else
NO_COMMON: Mapping[str, Any] = MappingProxyType({})


class Team(ABC):
    """A driver, rank 0, which computes too, and workers that stay and form a group with it."""

    #: how many ranks there are, the driver among them
    size: int
    #: the driver's own part
    member: Member
    #: by which threads use it one after the other
    turns: Turns

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the host of each rank, by default this one."""
        return (host_name(),) * self.size

    @abstractmethod
    def register(self, value: Any, name: str, *, by_value: bool = False) -> int:
        """Give every worker a copy of an object; return its number.

        Objects that are registered later and refer to this one refer to the worker's copy in each
        worker; to a new copy of this one, as it is then, if it was registered `by_value`. Raises
        InvalidType, which names the object, if it cannot be sent.
        """

    @abstractmethod
    def drop(self, number: int) -> None:
        """Forget an object at the next call. Safe in finalizers."""

    @abstractmethod
    def call(
        self,
        function: Callable[..., Any],
        own: Sequence[tuple[Any, ...] | None],
        *,
        common: Mapping[str, Any] = NO_COMMON,
    ) -> list[Any]:
        """Run `function(member, *own[rank], **common)` in each rank, this process too.

        Return the results in rank order; a rank whose `own` is None does not run the function. Of a
        RowSlice a worker gets at least the rows that it names. The values of `common` are sent once
        for all workers, errors name them by their keys, and each worker may change what it gets.
        Raises what a rank raised, WorkerLost, Stalled; ranks that still run are ended then. Waits
        for other threads' calls; raises UsedConcurrently within a call of this thread.
        """

    def persistent_ids(self) -> Callable[[Any], Hashable]:
        """Return a function that gives what stands for a value in what is sent to the workers now:
        of replicas and their parts, which each worker has, and of what shows later changes there.
        It gives None for what is sent by its contents (by default everything)."""
        return lambda _: None

    @abstractmethod
    def restart(self) -> None:
        """Start fresh workers with copies of the driver's objects as they are now."""

    @abstractmethod
    def close(self) -> None:
        """End the workers. Idempotent."""


class Member:
    """A process's part in a team: what a remote function gets as its first argument."""

    def __init__(self, rank: int, size: int, group: Group) -> None:
        self.rank, self.size, self.group = rank, size, group
        #: the copies of what was registered, by number; in the driver the objects themselves
        self.registered: dict[int, Any] = {}


@dataclass(frozen=True)
class PoolOptions:
    """Tell how a pool is to be made."""

    #: how many workers; None for one per core
    size: int | None
    #: how many cores they share
    cores: int
    #: one worker for each of these GPUs, as CUDA_VISIBLE_DEVICES names them
    gpus: Sequence[str] = ()
    #: the pipe that serves the workers, True for the default one; None, False: this process does
    named_pipe: bool | str | None = None
    #: of an engine over hosts: the other machines, or all of a cluster, and the cluster's port
    machines: Sequence[str] = ()
    port: int | None = None
    #: the most cores and GPUs of this machine
    max_cpu: int | None = None
    max_gpu: int | None = None
    #: those GPUs of this machine that this process may use, if CUDA_VISIBLE_DEVICES says it
    visible: Sequence[str] | None = None
    #: the most GPUs of all machines
    most_gpus: int | None = None
    #: "no_gpu", "prefer_gpu" or "require_all": of all machines
    gpu_policy: str = "no_gpu"


@dataclass(frozen=True)
class TeamOptions:
    """Tell how a team is to be made."""

    #: how many ranks, the driver among them; None for one per core
    size: int | None
    #: how many cores they share
    cores: int
    #: seconds that a call may wait for workers after the driver's own part
    timeout: float
    #: the GPUs that the workers take in turn, one each; none: they see what the driver sees
    gpus: Sequence[str] = ()
    #: whether they share GPUs under MPS
    mps: bool = False
    #: what the user writes to restart it, for error messages
    restart_hint: str = "team.restart()"


@dataclass(frozen=True)
class Command:
    """The arguments of `weft run`."""

    ranks: int
    #: the interpreter's arguments: a script or `-m module`, then the program's own
    program: tuple[str, ...]
    #: seconds that a rank may wait for another; None for the default
    timeout: float | None = None
    #: whether each line of output begins with its rank
    prefix: bool = True
    #: whether the other ranks go on when one fails
    keep_going: bool = False
    #: the hosts, with their numbers of ranks; none for ranks on this host
    hosts: tuple[Host, ...] = ()
    #: the GPUs that the ranks take in turn, as CUDA_VISIBLE_DEVICES names them; none: all of them
    gpus: tuple[str, ...] = ()
    #: whether the ranks share GPUs under MPS
    mps: bool = False


#: the class of each collective's calls
_kinds: dict[str, Any] = {}


def make_call(group: Group, name: str, value: Any, options: dict[str, Any]) -> Call:
    """Return a collective as this rank calls it. Raises InvalidValue, InvalidType."""
    if not _kinds:  # imported late: programs without collectives do without NumPy
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
    if call.device is not None:
        call.place(group.place_of(call))
    return call
