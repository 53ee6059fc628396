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
    from weft._api.collectives import all_gather, all_reduce, broadcast, gather, reduce, scatter
    from weft._api.distributing import DistributedFunction, distribute
    from weft._api.functions import Function, function
    from weft._api.mapping import MapHandle, map, map_async
    from weft._api.models import ModelTable
    from weft._api.replicas import Replica, replicate, same
    from weft._api.session import barrier, device, group, init, is_master, rank, shutdown, size
    from weft._api.sharing import SharedArray, share
    from weft._api.streaming import imap
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
        DeviceUnavailable,
        Disagreement,
        EngineUnavailable,
        InvalidType,
        InvalidValue,
        LaunchError,
        MachineUnavailable,
        Mismatch,
        MissingPackage,
        MissingRank,
        ModuleDiffers,
        NestedTooDeep,
        NoSuchPipe,
        NotInitialized,
        OutOfDescriptors,
        OutOfMemory,
        PeerLost,
        Refused,
        RemoteError,
        RemoteTraceback,
        RowsLost,
        SegmentGone,
        SetupError,
        Stalled,
        TeamBroken,
        UnknownEngine,
        UsageError,
        UsedAfterFork,
        UsedConcurrently,
        WeftError,
        WorkerLost,
    )

__all__ = [
    "AlreadyFinished",
    "AlreadyInitialized",
    "ArrayTable",
    "Cancelled",
    "DamagedFile",
    "DeviceUnavailable",
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
    "LaunchError",
    "MachineUnavailable",
    "MapHandle",
    "MatrixTable",
    "Mismatch",
    "MissingPackage",
    "MissingRank",
    "ModelTable",
    "ModuleDiffers",
    "NestedTooDeep",
    "NoSuchPipe",
    "NotInitialized",
    "OutOfDescriptors",
    "OutOfMemory",
    "PeerLost",
    "Refused",
    "RemoteError",
    "RemoteTraceback",
    "Replica",
    "RowsLost",
    "SegmentGone",
    "SetupError",
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
    "imap",
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


#: the module of each public name; of errors `weft.errors`
_HOMES = dict.fromkeys(__all__, "weft.errors") | {
    name: home
    for home, names in {
        "weft._version": "__version__",
        "weft._api.collectives": "all_gather all_reduce broadcast gather reduce scatter",
        "weft._api.distributing": "DistributedFunction distribute",
        "weft._api.functions": "Function function",
        "weft._api.mapping": "MapHandle map map_async",
        "weft._api.streaming": "imap",
        "weft._api.models": "ModelTable",
        "weft._api.replicas": "Replica replicate same",
        "weft._api.session": "barrier device group init is_master rank shutdown size",
        "weft._api.sharing": "SharedArray share",
        "weft._api.tables": "ArrayTable MatrixTable load save_all",
        "weft._api.team": "Team",
        "weft._api.training": "train_step",
        "weft._core": "updaters",
        "weft._core.tables": "Interrupted ssp",
        "weft.adapters.holder": "Holder",
        "weft.engines.base": "Group Handle",
    }.items()
    for name in names.split()
}


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
