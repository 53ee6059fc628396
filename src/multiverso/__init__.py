"""Multiverso's names on top of weft, so that programs written for it run as they are.

    multiverso/
      api.py           init, shutdown, barrier, who is who
      tables.py        ArrayTableHandler, MatrixTableHandler
      torch_ext.py     the same names with torch's tensors, as the Lua binding had them
      theano_ext/      shared variables of PyTensor, parameters of Lasagne's and Keras's models
      utils.py         Loader, convert_data
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

from multiverso.api import (
    barrier,
    init,
    is_master_worker,
    num_workers,
    server_id,
    shutdown,
    worker_id,
    workers_num,
)
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
