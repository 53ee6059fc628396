"""Multiverso's names on top of weft, so that programs written for it run as they are.

    multiverso/
      __init__.py      init, shutdown, barrier, who is who
      tables.py        ArrayTableHandler, MatrixTableHandler
      torch_ext.py     the same names with torch's tensors, as the Lua binding had them
      theano_ext/      shared variables of PyTensor, parameters of Lasagne's and Keras's models
      _session.py      what `init(sync=...)` chose
      _packages.py     frameworks, loaded when something of theirs is used

    import multiverso as mv

    mv.init()
    table = mv.ArrayTableHandler(10)
    table.add(range(10))
    mv.barrier()
    table.get()      # everybody's adds
    mv.shutdown()

Errors are weft's: see `weft.errors`.
"""

from __future__ import annotations

import weft
from multiverso import _session
from multiverso.tables import ArrayTableHandler, MatrixTableHandler

__all__ = [
    "ArrayTableHandler",
    "MatrixTableHandler",
    "barrier",
    "init",
    "is_master_worker",
    "num_workers",
    "server_id",
    "shutdown",
    "worker_id",
    "workers_num",
]


def init(sync: bool = False) -> None:
    """Join this program's group; alone without a launcher.

    `sync=True`: a worker that has added j times to a table sees, when it next gets it, exactly
    everybody's first j adds. Otherwise workers do not wait for each other.
    """
    _session.begin(sync)


def shutdown() -> None:
    """Leave the group. Whoever waits for this worker's next add goes on without it."""
    _session.end()


def barrier() -> None:
    """Wait until every worker has called it."""
    weft.barrier()


def workers_num() -> int:
    """Return the number of workers."""
    return weft.size()


def num_workers() -> int:
    """Return the number of workers, as the Lua binding spelled it."""
    return weft.size()


def worker_id() -> int:
    """Return this worker's number, from 0 on."""
    return weft.rank()


def server_id() -> int:
    """Return this process's number as a server: every worker keeps the tables with the others."""
    return weft.rank()


def is_master_worker() -> bool:
    """Return whether this is worker 0, which validates, prints and sets initial values."""
    return weft.is_master()
