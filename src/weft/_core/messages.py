"""What crosses a process border: named tuples, carried as JSON.

JSON and not pickle, because these are read before a peer has been checked.
Arrays never travel in messages; descriptors go beside them (see `channel.py`
of the local engine).

    joining a group             attaching a shared array
    member      rank 0          process     keeper
    Hello   ->                  Attach  ->
            <-  Welcome                 <-  Attached (+ descriptor) | Gone
            <-  Rejected        Pin     ->
                                        <-  Pinned | Gone
                                Release | Unpin ->

    starting workers
    driver      fork server
    Start   ->                  (+ descriptors: its connection, its stdout and stderr)
            <-  Started         (+ descriptor: tells when it ends)
            <-  Ended
            <-  Pool            (behind a named pipe: the first message)
    Close   ->
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, get_args

from weft.errors import Refused


class Process(NamedTuple):
    """A process, told apart from a later one with the same pid by its start time."""

    pid: int
    start: int


class Ancestor(NamedTuple):
    """A process above this one, and the environment that it was started with. Stays here."""

    process: Process
    #: None where this process may not see it
    environ: dict[str, str] | None


class Hello(NamedTuple):
    """A rank says who it is; its pid the kernel says."""

    version: str
    job: str
    rank: int
    size: int
    start: int


class Welcome(NamedTuple):
    """Rank 0 says that all are here; the job's memory comes beside it."""

    #: the process that started the ranks and publishes how they end; 0 where there is none
    launcher: int


class Rejected(NamedTuple):
    """Rank 0 says why there is no group, or why the caller is not let in."""

    #: the name of the error to raise
    error: str
    reason: str
    #: the ranks that are missing or lost
    ranks: list[int]


class Attach(NamedTuple):
    """A process asks for the memory behind a shared array."""

    #: counts the questions of a process; an answer repeats it
    request: int
    block: int
    #: the pin to release, which kept the memory since the array was pickled; 0 for none
    pin: int


class Pin(NamedTuple):
    """A process about to pickle somebody's shared array asks to keep it until it is attached."""

    request: int
    block: int


class Pinned(NamedTuple):
    """The keeper agrees."""

    request: int
    pin: int


class Attached(NamedTuple):
    """The keeper says where the block lies; the segment's descriptor comes beside it."""

    request: int
    block: int
    segment: int
    size: int
    offset: int
    length: int


class Gone(NamedTuple):
    """The keeper no longer has the block."""

    request: int


class Release(NamedTuple):
    """A process has dropped its last views of what these requests attached. Not answered."""

    requests: list[int]


class Unpin(NamedTuple):
    """A process that was given a reference to a block sees it already. Not answered."""

    block: int
    pin: int


class Start(NamedTuple):
    """A driver asks for a worker; its end of their connection and its outputs come beside it."""

    worker: int


class Started(NamedTuple):
    """The fork server has one; a pidfd comes beside it."""

    worker: int
    pid: int


class Ended(NamedTuple):
    """A worker has ended."""

    worker: int
    #: an exit code, or minus a signal
    code: int
    #: the index of the last item that it began; -1 if it began none
    item: int
    #: the most memory it had, in bytes
    memory: int
    #: 1 if the kernel killed it for want of memory
    out_of_memory: int


class Pool(NamedTuple):
    """A server behind a named pipe says who it is, and how busy."""

    version: str
    python: str
    pid: int
    #: workers for one driver, at most
    size: int
    #: at this moment
    drivers: int
    workers: int


class Close(NamedTuple):
    """Somebody wants a server behind a named pipe to end."""


Message = (
    Hello
    | Welcome
    | Rejected
    | Attach
    | Pin
    | Pinned
    | Attached
    | Gone
    | Release
    | Unpin
    | Start
    | Started
    | Ended
    | Pool
    | Close
)


def _written(kind: type[Any], name: str) -> str:
    """The type of a field, as it is written above."""
    written = kind.__annotations__[name]
    return str(getattr(written, "__forward_arg__", written))


#: each kind by its name, with the types of its fields
_KINDS: dict[str, tuple[type[Any], tuple[type[Any], ...]]] = {
    kind.__name__: (
        kind,
        tuple({"int": int, "str": str}.get(_written(kind, name), list) for name in kind._fields),
    )
    for kind in get_args(Message)
}


def encode(message: Message) -> bytes:
    return json.dumps([type(message).__name__, *message]).encode()


def decode(data: bytes, *expected: type[Message]) -> Any:
    """The message in `data`, one of the expected kinds; anything else is refused."""
    try:
        name, *values = json.loads(data)
        kind, types = _KINDS[name]
        if tuple(map(type, values)) != types:
            raise TypeError(name)
    except (ValueError, TypeError, KeyError):
        wanted = " or ".join(kind.__name__ for kind in expected)
        raise Refused(f"a peer sent {data[:60]!r} where a message {wanted} was expected") from None
    if kind not in expected:
        wanted = " or ".join(kind.__name__ for kind in expected)
        raise Refused(f"a peer sent {name} where {wanted} was expected")
    return kind(*values)
