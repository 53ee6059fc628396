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
      adapters/      whose arrays: NumPy's, PyTorch's

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
    from weft._api.session import barrier, group, init, is_master, rank, shutdown, size
    from weft._api.sharing import SharedArray, share
    from weft.engines.base import Group, Handle
    from weft.errors import (
        Disagreement,
        InvalidType,
        InvalidValue,
        PeerLost,
        Stalled,
        WeftError,
    )

_HOMES = {
    "Disagreement": "weft.errors",
    "Group": "weft.engines.base",
    "Handle": "weft.engines.base",
    "InvalidType": "weft.errors",
    "InvalidValue": "weft.errors",
    "PeerLost": "weft.errors",
    "SharedArray": "weft._api.sharing",
    "Stalled": "weft.errors",
    "WeftError": "weft.errors",
    "all_gather": "weft._api.collectives",
    "all_reduce": "weft._api.collectives",
    "barrier": "weft._api.session",
    "broadcast": "weft._api.collectives",
    "gather": "weft._api.collectives",
    "group": "weft._api.session",
    "init": "weft._api.session",
    "is_master": "weft._api.session",
    "rank": "weft._api.session",
    "reduce": "weft._api.collectives",
    "scatter": "weft._api.collectives",
    "share": "weft._api.sharing",
    "shutdown": "weft._api.session",
    "size": "weft._api.session",
}

__all__ = [
    "Disagreement",
    "Group",
    "Handle",
    "InvalidType",
    "InvalidValue",
    "PeerLost",
    "SharedArray",
    "Stalled",
    "WeftError",
    "__version__",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather",
    "group",
    "init",
    "is_master",
    "rank",
    "reduce",
    "scatter",
    "share",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
