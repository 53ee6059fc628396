"""Synkhronos's names on top of weft: functions over split data, collectives on shared variables.

    synkhronos/
      __init__.py      the names; fork, close
      _session.py      the team that fork made, and the variables that functions use
      _function.py     function: a PyTensor graph, computed by all ranks
      _graphs.py       what is compiled of it
      _orders.py       what one rank is to do for a call
      _inputs.py       its inputs: put in order, read, and cut for each rank
      _selections.py   the options of a call, validated; which rows are whose
      _data.py         Data: inputs in shared memory
      _values.py       what fits a variable
      _shareds.py      shared variables: found, and kept by every rank
      _collectives.py  broadcast, gather, ... on shared variables
      _names.py        other names of arguments, and those of February 2017
      _packages.py     PyTensor, loaded when it is used
      extensions/      updates of training methods, train functions

    import synkhronos as synk

    synk.fork()
    x, y = pt.matrix("x"), pt.vector("y")
    f = synk.function([x], x.dot(y).mean(axis=0), bcast_inputs=[y])
    synk.distribute()      # may be left out
    f(x_values, y_values)  # each rank computes some of the rows of x

Errors are weft's: see `weft.errors`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from synkhronos import _session
from synkhronos._collectives import (
    all_gather,
    all_reduce,
    broadcast,
    gather,
    get_lengths,
    get_shapes,
    get_value,
    reduce,
    scatter,
    set_value,
)
from synkhronos._data import Data, data
from synkhronos._function import Function, function
from synkhronos._names import also
from weft._core.arguments import explain_keywords, whole
from weft.resources import count_gpus

__all__ = [
    "Data",
    "Function",
    "all_gather",
    "all_reduce",
    "broadcast",
    "close",
    "data",
    "distribute",
    "fork",
    "function",
    "gather",
    "get_lengths",
    "get_n_gpu",
    "get_shapes",
    "get_value",
    "reduce",
    "scatter",
    "set_value",
]


def _has_rank(arguments: Sequence[Any]) -> bool:
    """Return whether these are February's arguments of `fork`, whose second one was a rank."""
    if len(arguments) != 2 or isinstance(arguments[1], bool):
        return False
    return whole(arguments[1]) is not None


@also(early=("n_parallel", "master_rank"), is_early=_has_rank, n_gpu="n_parallel")
def fork(  # noqa: PLR0917  they were all positional
    n_parallel: int | None = None,
    use_gpu: bool = True,
    master_rank: int = 0,
    profile_workers: bool = False,
    max_n_var: int = 1000,
    max_dim: int = 16,
    *,
    timeout: float | None = None,
) -> int:
    """Start the other processes, and return how many there are, this one included.

    n_parallel       how many in all: by default one for each GPU if there are several and `use_gpu`
                     is true, else one for each core, and two at least.
    use_gpu          whether each process sees one GPU alone, where there are several; more
                     processes than GPUs share them.
    master_rank      this process's rank; in February 2017 it was the second argument, and of two
                     by position is still taken so if it is a number.
    profile_workers, max_n_var, max_dim
                     have no effect: nothing here is limited by them.
    timeout          seconds that a call may take; by default WEFT_TIMEOUT, else 1800.

    Until `close`, Python's recursion limit is 50,000 at least: PyTensor's functions call themselves
    for each operation of a graph.

    Raises AlreadyInitialized when called twice without `close` between.
    """
    return _session.begin(n_parallel, bool(use_gpu), master_rank, timeout)


@explain_keywords
def close() -> None:
    """End the other processes. Also done at the end of the program; does nothing twice."""
    _session.end()


@explain_keywords
def distribute() -> None:
    """Send the functions built so far to all processes, with the present values of their shared
    variables.

    Otherwise a function is sent when it is first called. It may be called any number of times: what
    the processes have already stays as it is.
    """
    _session.send_all()


@explain_keywords
def get_n_gpu() -> int:
    """Return the number of GPUs that this program may use."""
    return count_gpus(os.environ)
