"""Playdoh's names on top of weft, so that programs written for it run as they are.

    playdoh/
      _distributing.py   distribute, DistributedFunction, finished, shutdown
      _mapping.py        map, map_async and the run that it returns
      _resources.py      funworker; how many CPUs and GPUs there are

    from playdoh import *

    distinv = distribute(inv, max_cpu=2)
    invA, invB = distinv([A, B])

The star brings `map` too, in the built-in's place. A call with one of Playdoh's keywords uses
processes: `map(fun, xs, cpu=2)`; a call without is what it was: `list(builtins.map(fun, xs))`.
`distfun` is another name of this package. Errors are weft's: see `weft.errors`.
"""

from __future__ import annotations

from playdoh._distributing import DistributedFunction, distribute, finished, shutdown
from playdoh._mapping import JobRun, map, map_async
from playdoh._resources import (
    CANUSEGPU,
    DEFAULT_PORT,
    MAXCPU,
    MAXGPU,
    funworker,
    get_cpu_count,
    get_gpu_count,
)

__all__ = [
    "CANUSEGPU",
    "DEFAULT_PORT",
    "MAXCPU",
    "MAXGPU",
    "DistributedFunction",
    "JobRun",
    "distribute",
    "finished",
    "funworker",
    "get_cpu_count",
    "get_gpu_count",
    "map",
    "map_async",
    "shutdown",
]
