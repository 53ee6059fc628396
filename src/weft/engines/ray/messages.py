"""What a driver and the actors on its hosts send to each other.

    driver                  host
    Request, with Begin ->                  begins a job, and runs the items that it is given
                        <-  Report          what has ended, what has not begun, what was printed
    Request             ->                  more items, or none
    take_back           ->                  gives back what it has not begun
    end                 ->                  ends a job and what still runs of it

An actor has one job at a time. A Report comes when all items have ended, when the host has fewer
items to begin than workers, some time after the first result, and once a second whatever happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.engines.local.pool.messages import Modules, Update
from weft.engines.ray.modules import Archive
from weft.engines.ray.wire import Packed, Sent


class Begin(NamedTuple):
    """A job, as an actor begins it."""

    #: the function's name, whose map it is, and the host's address, for who asks what runs
    name: str
    driver: str
    address: str

    #: the function, and the exceptions after which an item is run again
    #: a large one in a list, as Ray's reference
    function: Packed | list[Any]
    retry_on: Packed
    #: how many workers run it, and the numbers among the host's GPUs of those that have one each
    workers: int
    gpus: int
    cores: int
    seed: int | None
    retries: int
    keep_going: bool
    one_each: bool
    timeout: float | None
    #: of `timeout`, the seconds that have passed
    elapsed: float
    timeout_each: float | None
    #: the driver's state (driver_state.py), whether the host is the driver's own, and else which
    #: variables of the environment the program has set itself
    state: bytes
    is_driver: bool
    variables: dict[bytes, bytes]
    #: the digest of the modules that it is to be run with, and these, unless they are there
    modules: str
    archive: Archive | None
    #: bytes of the smallest of Ray's stores
    store: int


class Batch(NamedTuple):
    """Items for a host."""

    #: their indexes, and how often those of each span were run before
    spans: tuple[tuple[range, int], ...]
    items: Packed


class SentArray(NamedTuple):
    """An array that a host fetches once."""

    #: Ray's reference to it, in a list so that Ray leaves it alone
    reference: list[Any]
    #: whether nobody may write to it
    readonly: bool
    #: whether each item has an array of its own
    copied: bool


class Request(NamedTuple):
    """Describe what an actor is to do next. It is answered by a Report."""

    #: the number of the job, and the job itself until it has begun
    job: int
    begin: Begin | None
    batches: tuple[Batch, ...] = ()
    #: messages about the state of modules
    modules: tuple[Modules | Update, ...] = ()
    #: arrays that it has not, by number
    arrays: dict[int, SentArray] = {}  # noqa: RUF012  nobody changes it
    #: the numbers of arrays that nobody refers to any more
    dropped: tuple[int, ...] = ()
    #: whether the host may get more items when it has few left to begin
    more: bool = False
    #: seconds from the first result to the report
    patience: float = 0.05


class Part(NamedTuple):
    """A chunk of items that has ended; its values are elsewhere in the Report."""

    first: int
    length: int
    failures: tuple[tuple[int, Sent], ...]
    worker: int
    pid: int
    seconds: float
    sent: int
    received: int
    host: str


class Report(NamedTuple):
    """Tell how far a host is."""

    parts: tuple[Part, ...]
    #: the values of each part
    values: Packed | None
    #: the items that it has not begun
    unbegun: tuple[range, ...]
    #: attributes of modules that are not the driver's: it begins when it has these
    outdated: dict[str, list[str]]
    #: what was printed and logged: "stdout", "stderr" or "", the worker, and the text or message
    output: Sequence[tuple[str, int, Any]]
    #: what ended the job, if anything did
    error: Sent | None
    #: whether the job has ended
    ended: bool
