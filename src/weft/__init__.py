"""weft: one Python program over many processes.

    weft/
      errors.py      every exception
      resources.py   the plan: cores, threads and memory for each worker
      faults.py      named points at which tests make things fail
      kernels.py     loops in C, if they were compiled
      cli.py         the command `weft`
      doctor/        what the machine offers, and what would go wrong
      _api/          what you call
      _core/         what a call passes through: pure functions of values
      engines/       where it runs: serial, local
      adapters/      whose arrays and models: NumPy, PyTorch, JAX, Keras, PyTensor

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
    from weft._api.functions import Function, function
    from weft._api.mapping import MapHandle, map, map_async
    from weft._api.models import ModelTable
    from weft._api.replicas import Replica, replicate, same
    from weft._api.session import barrier, device, group, init, is_master, rank, shutdown, size
    from weft._api.sharing import SharedArray, share
    from weft._api.tables import ArrayTable, MatrixTable, load, save_all
    from weft._api.team import Team
    from weft._api.training import train_step
    from weft._core import updaters
    from weft._core.tables import Interrupted, ssp
    from weft.adapters.holder import Holder
    from weft.engines.base import Group, Handle
    from weft.errors import (
        AlreadyFinished,
        AlreadyInitialized,
        Cancelled,
        DamagedFile,
        Disagreement,
        EngineUnavailable,
        InvalidType,
        InvalidValue,
        Mismatch,
        MissingPackage,
        MissingRank,
        ModuleDiffers,
        NotInitialized,
        OutOfMemory,
        PeerLost,
        Refused,
        RemoteError,
        RemoteTraceback,
        Stalled,
        TeamBroken,
        UnknownEngine,
        UsageError,
        UsedAfterFork,
        UsedConcurrently,
        WeftError,
        WorkerLost,
    )

_HOMES = {
    "AlreadyFinished": "weft.errors",
    "AlreadyInitialized": "weft.errors",
    "ArrayTable": "weft._api.tables",
    "Cancelled": "weft.errors",
    "DamagedFile": "weft.errors",
    "Disagreement": "weft.errors",
    "DistributedFunction": "weft._api.distributing",
    "EngineUnavailable": "weft.errors",
    "Function": "weft._api.functions",
    "Group": "weft.engines.base",
    "Handle": "weft.engines.base",
    "Holder": "weft.adapters.holder",
    "Interrupted": "weft._core.tables",
    "InvalidType": "weft.errors",
    "InvalidValue": "weft.errors",
    "MapHandle": "weft._api.mapping",
    "MatrixTable": "weft._api.tables",
    "Mismatch": "weft.errors",
    "MissingPackage": "weft.errors",
    "MissingRank": "weft.errors",
    "ModuleDiffers": "weft.errors",
    "ModelTable": "weft._api.models",
    "NotInitialized": "weft.errors",
    "OutOfMemory": "weft.errors",
    "PeerLost": "weft.errors",
    "Refused": "weft.errors",
    "RemoteError": "weft.errors",
    "RemoteTraceback": "weft.errors",
    "Replica": "weft._api.replicas",
    "SharedArray": "weft._api.sharing",
    "Stalled": "weft.errors",
    "Team": "weft._api.team",
    "TeamBroken": "weft.errors",
    "UnknownEngine": "weft.errors",
    "UsageError": "weft.errors",
    "UsedAfterFork": "weft.errors",
    "UsedConcurrently": "weft.errors",
    "WeftError": "weft.errors",
    "WorkerLost": "weft.errors",
    "all_gather": "weft._api.collectives",
    "all_reduce": "weft._api.collectives",
    "barrier": "weft._api.session",
    "broadcast": "weft._api.collectives",
    "device": "weft._api.session",
    "distribute": "weft._api.distributing",
    "function": "weft._api.functions",
    "gather": "weft._api.collectives",
    "group": "weft._api.session",
    "init": "weft._api.session",
    "is_master": "weft._api.session",
    "load": "weft._api.tables",
    "map": "weft._api.mapping",
    "map_async": "weft._api.mapping",
    "rank": "weft._api.session",
    "reduce": "weft._api.collectives",
    "replicate": "weft._api.replicas",
    "same": "weft._api.replicas",
    "save_all": "weft._api.tables",
    "scatter": "weft._api.collectives",
    "share": "weft._api.sharing",
    "shutdown": "weft._api.session",
    "size": "weft._api.session",
    "ssp": "weft._core.tables",
    "train_step": "weft._api.training",
    "updaters": "weft._core",
}

__all__ = [
    "AlreadyFinished",
    "AlreadyInitialized",
    "ArrayTable",
    "Cancelled",
    "DamagedFile",
    "Disagreement",
    "DistributedFunction",
    "EngineUnavailable",
    "Function",
    "Group",
    "Handle",
    "Holder",
    "Interrupted",
    "InvalidType",
    "InvalidValue",
    "MapHandle",
    "MatrixTable",
    "Mismatch",
    "MissingPackage",
    "MissingRank",
    "ModelTable",
    "ModuleDiffers",
    "NotInitialized",
    "OutOfMemory",
    "PeerLost",
    "Refused",
    "RemoteError",
    "RemoteTraceback",
    "Replica",
    "SharedArray",
    "Stalled",
    "Team",
    "TeamBroken",
    "UnknownEngine",
    "UsageError",
    "UsedAfterFork",
    "UsedConcurrently",
    "WeftError",
    "WorkerLost",
    "__version__",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "device",
    "distribute",
    "function",
    "gather",
    "group",
    "init",
    "is_master",
    "load",
    "map",
    "map_async",
    "rank",
    "reduce",
    "replicate",
    "same",
    "save_all",
    "scatter",
    "share",
    "shutdown",
    "size",
    "ssp",
    "train_step",
    "updaters",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    # `updaters` is a module: no attribute of its package before it is imported
    value = getattr(home, name, None) or importlib.import_module(f"{_HOMES[name]}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
