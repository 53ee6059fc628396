"""weft: one Python program over many processes.

    weft/
      errors.py      every exception
      resources.py   the plan: cores, threads and memory for each worker
      faults.py      named points at which tests make things fail
      cli.py         the command `weft`
      doctor/        the machine as weft sees it, and what would go wrong
      _api/          what you call
      _core/         what a call passes through; knows no processes
      engines/       where it runs: serial, local
      adapters/      whose arrays and models: NumPy's, PyTorch's, JAX's, Keras's, PyTensor's

Names are loaded when they are first used: `import weft` alone loads no engine,
no framework, and not even NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weft._version import __version__

if TYPE_CHECKING:
    from weft._api.collectives import (
        all_gather,
        all_reduce,
        broadcast,
        gather,
        reduce,
        scatter,
    )
    from weft._api.distributing import DistributedFunction, distribute
    from weft._api.mapping import MapHandle, map, map_async
    from weft._api.models import ModelTable
    from weft._api.saving import load, save_all
    from weft._api.session import barrier, device, group, init, is_master, rank, shutdown, size
    from weft._api.sharing import share
    from weft._api.tables import ArrayTable, MatrixTable
    from weft._core import updaters
    from weft._core.consistency import ssp
    from weft._core.tables import Interrupted
    from weft.adapters.holder import Holder
    from weft.engines.base import Group, Handle
    from weft.engines.local.shared_arrays import SharedArray
    from weft.errors import (
        AlreadyFinished,
        Cancelled,
        DamagedFile,
        Disagreement,
        InvalidType,
        InvalidValue,
        PeerLost,
        RemoteError,
        RemoteTraceback,
        Stalled,
        WeftError,
        WorkerLost,
    )

_HOMES = {
    "AlreadyFinished": "weft.errors",
    "ArrayTable": "weft._api.tables",
    "Cancelled": "weft.errors",
    "DamagedFile": "weft.errors",
    "Disagreement": "weft.errors",
    "DistributedFunction": "weft._api.distributing",
    "Group": "weft.engines.base",
    "Handle": "weft.engines.base",
    "Holder": "weft.adapters.holder",
    "Interrupted": "weft._core.tables",
    "InvalidType": "weft.errors",
    "InvalidValue": "weft.errors",
    "MapHandle": "weft._api.mapping",
    "MatrixTable": "weft._api.tables",
    "ModelTable": "weft._api.models",
    "PeerLost": "weft.errors",
    "RemoteError": "weft.errors",
    "RemoteTraceback": "weft.errors",
    "SharedArray": "weft.engines.local.shared_arrays",
    "Stalled": "weft.errors",
    "WeftError": "weft.errors",
    "WorkerLost": "weft.errors",
    "all_gather": "weft._api.collectives",
    "all_reduce": "weft._api.collectives",
    "barrier": "weft._api.session",
    "broadcast": "weft._api.collectives",
    "device": "weft._api.session",
    "distribute": "weft._api.distributing",
    "gather": "weft._api.collectives",
    "group": "weft._api.session",
    "init": "weft._api.session",
    "is_master": "weft._api.session",
    "load": "weft._api.saving",
    "map": "weft._api.mapping",
    "map_async": "weft._api.mapping",
    "rank": "weft._api.session",
    "reduce": "weft._api.collectives",
    "save_all": "weft._api.saving",
    "scatter": "weft._api.collectives",
    "share": "weft._api.sharing",
    "shutdown": "weft._api.session",
    "size": "weft._api.session",
    "ssp": "weft._core.consistency",
    "updaters": "weft._core",
}

__all__ = [
    "AlreadyFinished",
    "ArrayTable",
    "Cancelled",
    "DamagedFile",
    "Disagreement",
    "DistributedFunction",
    "Group",
    "Handle",
    "Holder",
    "Interrupted",
    "InvalidType",
    "InvalidValue",
    "MapHandle",
    "MatrixTable",
    "ModelTable",
    "PeerLost",
    "RemoteError",
    "RemoteTraceback",
    "SharedArray",
    "Stalled",
    "WeftError",
    "WorkerLost",
    "__version__",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "device",
    "distribute",
    "gather",
    "group",
    "init",
    "is_master",
    "load",
    "map",
    "map_async",
    "rank",
    "reduce",
    "save_all",
    "scatter",
    "share",
    "shutdown",
    "size",
    "ssp",
    "updaters",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    value = getattr(home, name, None) or importlib.import_module(f"{_HOMES[name]}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
