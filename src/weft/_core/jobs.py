"""What is asked of a team, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Job(NamedTuple):
    """Many calls of one function, as a team carries them out."""

    #: what the team's `prepare` returned
    function: Any
    items: Iterable[Any]
    #: seeds the random generators before each item; None leaves them alone
    seed: int | None = None
    #: how often an item may lose its worker and be run again
    retries: int = 0
    #: whether the rest is run when an item fails
    keep_going: bool = False
    #: whether every worker runs exactly one item
    one_each: bool = False
    #: seconds for all of it
    timeout: float | None = None
    #: whether somebody wants it to end; None where nobody can
    cancelled: Callable[[], bool] | None = None


class Finished(NamedTuple):
    """A chunk of items that has ended."""

    first: int
    #: the results; None in the place of an item that failed
    values: list[Any]
    #: what to raise for the items that failed, by index
    failures: dict[int, Exception]
    worker: int
    pid: int
    seconds: float = 0.0
    #: bytes there and back
    sent: int = 0
    received: int = 0
    #: where the worker runs; empty for items that reached none
    host: str = ""
