"""Every exception that weft raises, and the table of ranks that some of them carry.

    WeftError
    ├── UsageError                      the program is wrong; the message shows the right line
    │   ├── InvalidValue    (ValueError)      a value outside what the call takes
    │   ├── InvalidType     (TypeError)       a value of a kind the call does not take
    │   ├── NotInitialized  (RuntimeError)    a call before weft.init() or after weft.shutdown()
    │   ├── AlreadyInitialized (RuntimeError) weft.init() twice
    │   ├── UsedAfterFork   (RuntimeError)    a group used in a forked child
    │   ├── UsedConcurrently (RuntimeError)   one group used by two threads at once
    │   ├── NestedTooDeep   (RecursionError)  workers that would start workers without end
    │   ├── TeamBroken      (RuntimeError)    a team used after it was closed or lost a worker
    │   ├── AlreadyFinished (RuntimeError)    a distributed function called after its end
    │   └── Disagreement    (RuntimeError)    ranks made different calls; shows what each did
    ├── SetupError                      a group, engine or launch could not start
    │   ├── UnknownEngine   (ValueError)      lists the known ones
    │   ├── EngineUnavailable (RuntimeError)  this system cannot run it; says why
    │   ├── DeviceUnavailable (RuntimeError)  a GPU, or its driver, cannot be used; says why
    │   ├── MissingPackage  (ImportError)     prints the pip line
    │   ├── MissingRank     (TimeoutError)    names the ranks that never came
    │   ├── Refused         (ConnectionError) a peer of another user, version, job or size
    │   ├── NoSuchPipe      (ConnectionError) nobody serves a named pipe
    │   ├── MachineUnavailable (ConnectionError) machines that cannot take part, each with why
    │   └── LaunchError     (RuntimeError)    `weft run` was asked for something it cannot start
    ├── OutOfMemory         (MemoryError)     asked for more than this machine can give
    ├── OutOfDescriptors    (OSError)         the table of open files is full
    ├── SegmentGone         (RuntimeError)    a shared array's memory was given back too early
    ├── DamagedFile         (ValueError)      a saved table that is not as it was written
    ├── PeerLost            (ConnectionError) a peer died or left while it was waited for
    │   └── RowsLost                          rows of a table lay on a host that is lost
    ├── WorkerLost          (RuntimeError)    a worker died while it ran an item
    ├── RemoteError         (RuntimeError)    an exception in a worker that cannot travel itself
    ├── ModuleDiffers       (RuntimeError)    a worker's module cannot be made the driver's
    ├── RemoteTraceback                       the cause of one that can: where it was raised
    ├── Cancelled           (RuntimeError)    a map was cancelled
    ├── Mismatch            (ValueError)      a function's parts are not what it gives as a whole
    └── Stalled             (TimeoutError)    a deadline passed; everybody waited for is alive

`except WeftError` catches all of them; each is also the built-in error that a reader of the
traceback would expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial


class WeftError(Exception):
    """The root of all errors raised by weft."""


class UsageError(WeftError):
    """The calling program is wrong."""


class InvalidValue(UsageError, ValueError):
    """A value outside what the call takes."""


class InvalidType(UsageError, TypeError):
    """A value of a kind the call does not take."""


class NotInitialized(UsageError, RuntimeError):
    """A call that needs a group, before `weft.init()` or after `weft.shutdown()`."""


class AlreadyInitialized(UsageError, RuntimeError):
    """`weft.init()` was called a second time."""


class UsedAfterFork(UsageError, RuntimeError):
    """A group was used in a child that was forked from one of its ranks."""


class UsedConcurrently(UsageError, RuntimeError):
    """Two threads used one group at the same time."""


class NestedTooDeep(UsageError, RecursionError):
    """A worker would start workers while it imports a module, or too many levels deep."""


class AlreadyFinished(UsageError, RuntimeError):
    """A distributed function was called after `finished`, or a second time with endaftercall."""


class TeamBroken(UsageError, RuntimeError):
    """A team was used after it had been closed, had lost a worker, or in a forked child."""


class SetupError(WeftError):
    """A group, an engine or a launch could not start."""


class UnknownEngine(SetupError, ValueError):
    """An engine name that weft does not know."""


class EngineUnavailable(SetupError, RuntimeError):
    """An engine that cannot run on this system."""


class DeviceUnavailable(SetupError, RuntimeError):
    """A GPU that cannot be used here: no driver, no such service of it, or spoilt for this process
    by what ran before."""


class MissingPackage(SetupError, ImportError):
    """An engine or adapter whose package is not installed."""


class Refused(SetupError, ConnectionError):
    """A peer was turned away: another user, weft version, job or group size."""


class NoSuchPipe(SetupError, ConnectionError):
    """Nobody serves the named pipe that was asked for."""


class MachineUnavailable(SetupError, ConnectionError):
    """Machines cannot take part: unknown, unreachable, without the key, of another cluster, or with
    another version. The message has a line for each."""


class LaunchError(SetupError, RuntimeError):
    """`weft run` was asked for something it cannot start."""


class OutOfMemory(WeftError, MemoryError):
    """More memory was asked for than this machine or its cgroup can give."""


class OutOfDescriptors(WeftError, OSError):
    """The process's table of open files is full."""


class SegmentGone(WeftError, RuntimeError):
    """The memory behind a shared array's pickle no longer exists."""


class DamagedFile(WeftError, ValueError):
    """A file that is not exactly a saved table as it was written, or that a newer weft wrote."""


@dataclass(frozen=True)
class RankState:
    """One line of the table in `PeerLost` and `Stalled`: where a rank is."""

    rank: int
    pid: int
    #: "alive", "stopped", "left", "ending after an exception", or how it ended: "killed by
    #: SIGKILL", "exit code 3", ...
    status: str
    #: the operation that it is in ("barrier"), or was in last ("after barrier")
    operation: str
    #: seconds since that operation began, or since it ended
    seconds: float
    #: file:line in the user's program
    line: str
    host: str = ""

    @property
    def alive(self) -> bool:
        return self.status in ("alive", "stopped")


def states_as_text(states: Sequence[RankState]) -> str:
    """Return a table of the states, one rank per line, with their hosts if these differ."""
    rows: list[tuple[str, ...]] = [("rank", "host", "pid", "status", "operation", "since", "line")]
    rows += [
        (str(s.rank), s.host, str(s.pid), s.status, s.operation, f"{s.seconds:.2f} s", s.line)
        for s in states
    ]
    if len({state.host for state in states}) < 2:
        rows = [(row[0], *row[2:]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


class _WithRanks(WeftError):
    """An error about certain ranks, with the state of every rank as a field and as text."""

    def __init__(
        self, message: str, ranks: Sequence[int] = (), states: Sequence[RankState] = ()
    ) -> None:
        #: the ranks that the error is about
        self.ranks = tuple(ranks)
        #: the state of every rank of the group
        self.states = tuple(states)
        self.message = message
        super().__init__(message + ("\n" + states_as_text(states) if states else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.ranks, self.states)


class MissingRank(_WithRanks, SetupError, TimeoutError):
    """A group could not start because some of its ranks never came."""


class Disagreement(_WithRanks, UsageError, RuntimeError):
    """Ranks of one group made different calls where all must make the same one."""


class PeerLost(_WithRanks, ConnectionError):
    """A peer died or left while this rank was waiting for it."""


class RowsLost(PeerLost):
    """Rows of a table lay on a host that is lost; the ranks are those of that host."""

    def __init__(
        self,
        message: str,
        ranks: Sequence[int] = (),
        states: Sequence[RankState] = (),
        *,
        host: str = "",
        rows: Sequence[int] = (),
    ) -> None:
        super().__init__(message, ranks, states)
        #: the name of the host, and the rows that it had
        self.host, self.rows = host, rows

    def __reduce__(self) -> tuple[object, ...]:
        again = partial(type(self), host=self.host, rows=self.rows)
        return again, (self.message, self.ranks, self.states)


class Stalled(_WithRanks, TimeoutError):
    """A deadline passed while peers were alive but did not come."""


class RemoteError(WeftError, RuntimeError):
    """An exception in a worker that cannot be pickled, or that would end this process.

    Its message begins with the name of the class; its cause is the RemoteTraceback.
    """


class ModuleDiffers(WeftError, RuntimeError):
    """A module of the user's is another in a worker than in the driver, and cannot be changed."""


class RemoteTraceback(WeftError):
    """The cause of an exception that another process raised: its traceback there."""

    def __init__(self, text: str, where: str, item: int | None = None, host: str = "") -> None:
        #: the traceback, as Python prints it
        self.text = text
        #: the worker, in words
        self.where = where
        #: the index of the item, None if the exception was not about one
        self.item = item
        #: the host of the worker
        self.host = host
        what = where if item is None else f"item {item}, {where}"
        super().__init__(f"raised in {what}:\n{text.rstrip()}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text, self.where, self.item, self.host)


class WorkerLost(WeftError, RuntimeError):
    """A worker died: while it ran an item of a map, or as a rank of a team."""

    def __init__(self, message: str, *, loss: Loss) -> None:
        self.message = message
        self.loss = loss
        super().__init__(message)

    @property
    def item(self) -> int:
        """Return the index of the item; of a team's worker, its rank."""
        return self.loss.item

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), loss=self.loss), (self.message,)


@dataclass(frozen=True)
class Loss:
    """Tell how a worker ended."""

    #: the index of the item; of a team's worker, its rank
    item: int
    worker: int
    pid: int
    #: its exit code, or minus the signal that killed it; None if unknown
    code: int | None
    #: its peak memory in bytes
    memory: int
    #: whether the kernel's out-of-memory killer ended it
    out_of_memory: bool
    host: str = ""


class Cancelled(WeftError, RuntimeError):
    """The results of a map were waited for after it had been cancelled; or, as a value, an item had
    not begun when the time was over."""


class Mismatch(WeftError, ValueError):
    """A function or a loss gives another result in parts than as a whole."""


def format_bytes(size: int) -> str:
    """Return a number of bytes in words: 512 bytes, 64 MB, 8.0 GB."""
    if size < 10_000_000:
        return f"{size:,} bytes"
    if size < 1_000_000_000:
        return f"{size // 1_000_000} MB"
    whole, tenths = divmod(size // 100_000_000, 10)  # not a float: it may be too large for one
    return f"{whole}.{tenths} GB"
