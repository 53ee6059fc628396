"""What a driver and its workers say to each other.

    driver               worker
    Settings       ->                  takes over folder, paths, environment, threads
    CacheFunction  ->                  keeps a function under its digest
    Work           ->                  calls it on some consecutive items
                   <-  Done            the results in order, and what failed
                   <-  Unreadable      the function or the items could not be loaded there
                   <-  Stopped         a SIGINT of the driver's ended it
                   <-  Logged          what was logged meanwhile
    Cancel         ->                  gives up the memory of its last answer
                   <-  CancelAcknowledged       it has answered all that came before
    DropFunction   ->                  drops a function, and what it holds

These are pickled, so they pass only between processes that know each other. Functions, items and
results are bytes here, packed by the engine: it knows which arrays need not be in them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from weft._core.failures import Failure

#: added to the index of a chunk's first item while a worker loads the chunk
LOADING = 1 << 62


class Settings(NamedTuple):
    """How a worker sees the world: as its driver does."""

    folder: str
    paths: list[str]
    threads: int
    #: from which level on the driver wants to hear what is logged
    log_level: int
    #: None: leave it as it is
    environment: dict[str, str] | None


class CacheFunction(NamedTuple):
    digest: bytes
    function: bytes


class DropFunction(NamedTuple):
    digest: bytes


class Work(NamedTuple):
    #: which function
    digest: bytes
    #: the index of the first item
    first: int
    items: bytes
    seed: int | None
    #: whether the items after one that fails are run
    keep_going: bool


class Done(NamedTuple):
    #: the results; None in the place of an item that failed. Fewer than items where one failed and
    #: the rest is not run
    values: bytes
    #: the position of each item that failed, and how
    failures: list[tuple[int, Failure]]
    #: how long the calls took, all together
    seconds: float
    #: bytes of arrays that went through shared memory
    shared: int


class Unreadable(NamedTuple):
    failure: Failure
    #: or about the items
    about_function: bool


class Stopped(NamedTuple):
    """The driver has interrupted it and wants no results."""


class Cancel(NamedTuple):
    """The driver wants no more results: something failed, or it was interrupted, perhaps before it
    had sent Work or after it had received the answer. An answer may still come, and
    CancelAcknowledged after it."""


class CancelAcknowledged(NamedTuple):
    """All that came before is answered, and the memory of the last answer is given up."""


class Logged(NamedTuple):
    """Something was logged in the worker; comes at any time."""

    record: dict[str, Any]


#: what is said, by the number that stands for its kind on the way
KINDS = (
    Settings,
    CacheFunction,
    DropFunction,
    Work,
    Done,
    Unreadable,
    Stopped,
    Cancel,
    CancelAcknowledged,
    Logged,
)
_NUMBERS: dict[type, int] = {kind: number for number, kind in enumerate(KINDS)}


def as_tuple(message: Message) -> tuple[Any, ...]:
    """A message as a plain tuple, which pickles three times faster."""
    return (_NUMBERS[type(message)], *message)


def from_tuple(values: tuple[Any, ...]) -> Message:
    """The mirror of `as_tuple`."""
    return KINDS[values[0]]._make(values[1:])


Answer = Done | Unreadable | Stopped
Message = (
    Settings | CacheFunction | DropFunction | Work | Answer | Cancel | CancelAcknowledged | Logged
)
