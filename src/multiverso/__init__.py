"""Multiverso's names on top of weft, so that programs written for it run as they are.

So far the session: `init`, `shutdown`, `barrier` and who is who. Tables follow
with `weft.ArrayTable` and `weft.MatrixTable`.
"""

from __future__ import annotations

import weft

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


def init() -> None:
    """Join this program's group; alone without a launcher."""
    weft.init()


def shutdown() -> None:
    """Leave the group."""
    weft.shutdown()


def barrier() -> None:
    """Wait until every worker has come here."""
    weft.barrier()


def workers_num() -> int:
    """How many workers there are."""
    return weft.size()


def num_workers() -> int:
    """The same, as the Lua binding spelled it."""
    return weft.size()


def worker_id() -> int:
    """This worker's number, from 0 on."""
    return weft.rank()


def server_id() -> int:
    """This process's number as a server: every worker keeps its share of the tables."""
    return weft.rank()


def is_master_worker() -> bool:
    """Whether this is worker 0, which validates, prints and sets initial values."""
    return weft.is_master()


def __getattr__(name: str) -> object:
    raise AttributeError(f"multiverso.{name} is not in this release of weft; it comes later")
