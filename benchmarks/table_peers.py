"""Tables as weft's peers have them, each used as its own documents advise.

    Shared    weft: rows in memory that all workers map
    Private   NumPy: every worker has rows of its own; nobody can be faster
    Window    Open MPI by mpi4py: rank 0's shared window, one lock per operation
    Remote    torch.distributed.rpc: a process more, which keeps the rows
    Acted     Ray: an actor keeps the rows

A worker makes the same two tables whoever its peer: one of 10 M elements, one of 100,000 rows.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from peers import Meeting

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Array = npt.NDArray[np.floating[Any]]


class Table(Protocol):
    """What is measured. `get` and `get_rows` return what they got, in `out` where a peer can."""

    #: whose adds this worker will see
    adders: Sequence[int]

    def given(self, array: Any) -> Any:
        """An array in the form that the peer takes, made before the clock runs."""

    def get(self, out: Any) -> Any: ...

    def add(self, delta: Any) -> None: ...

    def get_rows(self, rows: Any, out: Any) -> Any: ...

    def add_rows(self, delta: Any, rows: Any) -> None: ...


class Shared:
    def __init__(self, values: Array) -> None:
        import weft

        self.adders = range(weft.size())
        self.table = (weft.ArrayTable if values.ndim == 1 else weft.MatrixTable)(values)

    def given(self, array: Any) -> Any:
        return array

    def get(self, out: Array) -> Array:
        return self.table.get(out=out)

    def add(self, delta: Array) -> None:
        self.table.add(delta)

    def get_rows(self, rows: Any, out: Array) -> Array:
        return self.table.get(rows, out=out)

    def add_rows(self, delta: Array, rows: Any) -> None:
        self.table.add(delta, rows)


class Private:
    def __init__(self, values: Array, rank: int) -> None:
        import numpy as np

        self.np, self.values, self.adders = np, values.copy(), [rank]

    def given(self, array: Any) -> Any:
        return array

    def get(self, out: Array) -> Array:
        self.np.copyto(out, self.values)
        return out

    def add(self, delta: Array) -> None:
        self.np.add(self.values, delta, out=self.values)

    def get_rows(self, rows: Any, out: Array) -> Array:
        # "raise" would take them to a buffer first, at half the speed
        return self.values.take(rows, axis=0, out=out, mode="clip")

    def add_rows(self, delta: Array, rows: Any) -> None:
        self.values[rows] += delta


class Window:
    """Accumulate is atomic for each element, so that a shared lock is enough for adding too."""

    def __init__(self, values: Array) -> None:
        from mpi4py import MPI

        self.mpi, world = MPI, MPI.COMM_WORLD
        self.adders = range(world.Get_size())
        mine = values.nbytes if world.Get_rank() == 0 else 0
        self.window = MPI.Win.Allocate_shared(mine, disp_unit=values.itemsize, comm=world)
        self.row = MPI.FLOAT.Create_contiguous(values[0].size).Commit()
        if mine:
            self._write(values)
        world.Barrier()

    def _write(self, values: Array) -> None:
        import numpy as np

        memory, _ = self.window.Shared_query(0)
        self.window.Lock(0, self.mpi.LOCK_EXCLUSIVE)
        np.frombuffer(memory, values.dtype)[:] = values.reshape(-1)
        self.window.Unlock(0)

    def given(self, array: Any) -> Any:
        return array.astype("int32") if array.dtype.kind == "i" else array

    def get(self, out: Array) -> Array:
        self.window.Lock(0, self.mpi.LOCK_SHARED)
        self.window.Get(out, 0)
        self.window.Unlock(0)
        return out

    def add(self, delta: Array) -> None:
        self.window.Lock(0, self.mpi.LOCK_SHARED)
        self.window.Accumulate(delta, 0, op=self.mpi.SUM)
        self.window.Unlock(0)

    # The rows are others in every call, so the type that names them belongs to the operation.

    def get_rows(self, rows: Any, out: Array) -> Array:
        named = self.row.Create_indexed_block(1, rows).Commit()
        self.window.Lock(0, self.mpi.LOCK_SHARED)
        self.window.Get(out, 0, target=(0, 1, named))
        self.window.Unlock(0)
        named.Free()
        return out

    def add_rows(self, delta: Array, rows: Any) -> None:
        named = self.row.Create_indexed_block(1, rows).Commit()
        self.window.Lock(0, self.mpi.LOCK_SHARED)
        self.window.Accumulate(delta, 0, target=(0, 1, named), op=self.mpi.SUM)
        self.window.Unlock(0)
        named.Free()


class Remote:
    """The worker's side; the server's is below. There is no `out`: a result is a new tensor."""

    SERVER = "server"

    def __init__(self, values: Array, meeting: Meeting) -> None:
        import torch
        from torch.distributed import rpc

        self.torch, self.call, self.key = torch, rpc.rpc_sync, values.ndim
        self.adders = range(meeting.size)
        if meeting.rank == 0:
            self.call(self.SERVER, serve_values, (self.key, torch.from_numpy(values)))
        meeting.barrier()

    def given(self, array: Any) -> Any:
        return self.torch.from_numpy(array)

    def get(self, out: Any) -> Any:
        return self.call(self.SERVER, serve_get, (self.key,))

    def add(self, delta: Any) -> None:
        self.call(self.SERVER, serve_add, (self.key, delta))

    def get_rows(self, rows: Any, out: Any) -> Any:
        return self.call(self.SERVER, serve_get_rows, (self.key, rows))

    def add_rows(self, delta: Any, rows: Any) -> None:
        self.call(self.SERVER, serve_add_rows, (self.key, delta, rows))


def joined_rpc(rank: int, processes: int, meet: str) -> None:
    """The last process is the server; in it calls run while it waits in `left_rpc`."""
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch.distributed")  # its own use of what it gave up
    rpc.init_rpc(
        Remote.SERVER if rank == processes - 1 else f"worker-{rank}",
        rank=rank,
        world_size=processes,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meet}"),
    )


def left_rpc() -> None:
    from torch.distributed import rpc

    rpc.shutdown()


#: the server's tables, and what keeps its threads from adding at the same moment
served: dict[int, torch.Tensor] = {}
adding = threading.Lock()


def serve_values(key: int, values: torch.Tensor) -> None:
    served[key] = values.clone()


def serve_get(key: int) -> torch.Tensor:
    return served[key]


def serve_add(key: int, delta: torch.Tensor) -> None:
    with adding:
        served[key].add_(delta)


def serve_get_rows(key: int, rows: torch.Tensor) -> torch.Tensor:
    return served[key].index_select(0, rows)


def serve_add_rows(key: int, delta: torch.Tensor, rows: torch.Tensor) -> None:
    with adding:
        served[key].index_add_(0, rows, delta)


class Acted:
    """There is no `out`: a result is read where Ray's object store has it."""

    def __init__(self, values: Array, meeting: Meeting) -> None:
        import ray

        self.result, self.adders = ray.get, range(meeting.size)
        name = f"{values.ndim} dimensions"
        if meeting.rank == 0:
            self.actor = ray.remote(Actor).options(name=name, num_cpus=0).remote(values)
            self.result(self.actor.ready.remote())
        meeting.barrier()
        if meeting.rank != 0:
            self.actor = ray.get_actor(name)

    def given(self, array: Any) -> Any:
        return array

    def get(self, out: Any) -> Array:
        return self.result(self.actor.get.remote())

    def add(self, delta: Array) -> None:
        self.result(self.actor.add.remote(delta))

    def get_rows(self, rows: Any, out: Any) -> Array:
        return self.result(self.actor.get_rows.remote(rows))

    def add_rows(self, delta: Array, rows: Any) -> None:
        self.result(self.actor.add_rows.remote(delta, rows))


class Actor:
    def __init__(self, values: Array) -> None:
        self.values = values.copy()  # what Ray hands over is read-only

    def ready(self) -> None: ...

    def get(self) -> Array:
        return self.values

    def add(self, delta: Array) -> None:
        self.values += delta

    def get_rows(self, rows: Any) -> Array:
        return self.values.take(rows, axis=0)

    def add_rows(self, delta: Array, rows: Any) -> None:
        self.values[rows] += delta


def joined_ray(meeting: Meeting, folder: Path) -> None:
    """Every worker is a driver; rank 0's starts the cluster, in the job's own folder."""
    import ray

    address = folder / "address"
    common = {"namespace": "tables", "log_to_driver": False, "logging_level": "error"}
    if meeting.rank == 0:
        ray.init(
            num_cpus=meeting.size,
            include_dashboard=False,
            object_store_memory=2_000_000_000,
            _temp_dir=str(folder),
            **common,
        )
        address.write_text(ray.get_runtime_context().gcs_address)
    meeting.barrier()
    if meeting.rank != 0:
        ray.init(address=address.read_text(), **common)


def left_ray(meeting: Meeting) -> None:
    import ray

    if meeting.rank != 0:
        ray.shutdown()
    meeting.barrier()  # the cluster ends last
    if meeting.rank == 0:
        ray.shutdown()
