"""Joining and leaving the group, and who is who in it."""

from __future__ import annotations

from collections.abc import Sequence

import weft
from multiverso import _session
from multiverso._session import in_own_words

__all__ = [
    "barrier",
    "init",
    "is_master_worker",
    "num_workers",
    "server_id",
    "shutdown",
    "worker_id",
    "workers_num",
]


@in_own_words
def init(sync: bool | Sequence[str] = False, args: Sequence[str] | None = None) -> None:
    """Join this program's group; alone without a launcher.

    `sync=True`: a worker that has added j times to a table sees, when it next gets it, exactly
    everybody's first j adds. Otherwise workers do not wait for each other.

    `args`: the flags that the first releases took, here or in the place of `sync`: `init([])` or
    `init(["-sync=true"])`.

    Raises AlreadyInitialized, InvalidType, InvalidValue, MissingRank, PeerLost.
    """
    _session.begin(_session.validate_sync(sync, args))


@in_own_words
def shutdown() -> None:
    """Leave the group. Whoever waits for this worker's next add goes on without it."""
    _session.end()


@in_own_words
def barrier() -> None:
    """Wait until every worker has called it."""
    weft.barrier()


@in_own_words
def workers_num() -> int:
    """Return the number of workers."""
    return weft.size()


@in_own_words
def num_workers() -> int:
    """Return the number of workers, as the Lua binding spelled it."""
    return workers_num()


@in_own_words
def worker_id() -> int:
    """Return this worker's number, from 0 on."""
    return weft.rank()


@in_own_words
def server_id() -> int:
    """Return this process's number as a server: every worker keeps the tables with the others."""
    return worker_id()


@in_own_words
def is_master_worker() -> bool:
    """Return whether this is worker 0, which validates, prints and sets initial values."""
    return weft.is_master()
