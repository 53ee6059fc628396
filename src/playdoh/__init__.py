"""Playdoh's names on top of weft, so that programs written for it run as they are.

    from playdoh import *

    distinv = distribute(inv, max_cpu=2)
    invA, invB = distinv([A, B])

`from playdoh import *` gives `distribute`, `finished`, `shutdown` and `DistributedFunction`. The
later spelling, `playdoh.map` and `playdoh.map_async`, has to be written out: the built-in `map`
stays what it is. `distfun` is another name of this package. Errors are weft's: see `weft.errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import weft
from weft import DistributedFunction
from weft._core.arguments import validate_count
from weft.errors import EngineUnavailable, InvalidType, InvalidValue

__all__ = ["DistributedFunction", "distribute", "finished", "shutdown"]


def distribute(  # noqa: PLR0917  they were all positional
    fun: Callable[..., Any],
    shared_data: Mapping[str, Any] | None = None,
    max_cpu: int | None = None,
    max_gpu: int | None = None,
    gpu_policy: str = "no_gpu",
    machines: Sequence[str] = [],  # the default of old; nobody changes it
    named_pipe: bool | str | None = None,
    port: int | None = None,
    accept_lists: bool = False,
    endaftercall: bool = True,
    verbose: bool = False,
) -> DistributedFunction:
    """Return what `weft.distribute` returns, for one call only, unless `endaftercall` is False.

    >>> from playdoh import distribute
    >>> distribute(abs)([-1, -2])
    [1, 2]
    """
    return weft.distribute(
        fun,
        shared_data=shared_data,
        max_cpu=max_cpu,
        max_gpu=max_gpu,
        gpu_policy=gpu_policy,
        machines=machines,
        named_pipe=named_pipe,
        port=port,
        accept_lists=accept_lists,
        endaftercall=endaftercall,
        verbose=verbose,
    )


def finished(dfun: DistributedFunction) -> None:
    """Clean up after a distributed function. Workers behind a named pipe stay."""
    _validate_function(dfun, "finished").finished()


def shutdown(dfun: DistributedFunction) -> None:
    """Clean up after a distributed function, and end the workers, also those behind a pipe."""
    _validate_function(dfun, "shutdown").shutdown()


def map(
    fun: Callable[..., Any],
    *lists: Iterable[Any],
    cpu: int | None = None,
    gpu: int | None = None,
    machines: Sequence[str] = (),
    shared_data: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Return the results of `fun` on the elements of a list, or of several lists in step.

    >>> import operator, playdoh
    >>> playdoh.map(operator.add, [1, 2], [10, 20], cpu=2)
    [11, 22]
    """
    _validate_options(cpu, gpu, machines, "map")
    _validate_lists(lists, "map")
    return weft.map(fun, *lists, n=cpu, gpus=gpu, shared_data=shared_data)


def map_async(
    fun: Callable[..., Any],
    *lists: Iterable[Any],
    cpu: int | None = None,
    gpu: int | None = None,
    machines: Sequence[str] = (),
    shared_data: Mapping[str, Any] | None = None,
) -> weft.MapHandle:
    """Start a `map` and return a handle: `status`, `progress`, `results()`, `wait()`."""
    _validate_options(cpu, gpu, machines, "map_async")
    _validate_lists(lists, "map_async")
    return weft.map_async(fun, *lists, n=cpu, gpus=gpu, shared_data=shared_data)


def _validate_function(dfun: DistributedFunction, where: str) -> DistributedFunction:
    if not isinstance(dfun, DistributedFunction):
        raise InvalidType(
            f"{where} got a {type(dfun).__name__}; expected what distribute returned:\n"
            f"    dfun = distribute(fun, endaftercall=False)\n    {where}(dfun)"
        )
    return dfun


def _validate_options(
    cpu: int | None, gpu: int | None, machines: Sequence[str], where: str
) -> None:
    if cpu is not None:
        validate_count(cpu, where, "cpu", least=1)
    if gpu is not None:
        validate_count(gpu, where, "gpu", least=0)
    if machines:
        raise EngineUnavailable(
            f"{where}(machines={machines!r}): other machines come with a later release of weft; "
            "leave it out to use this one"
        )


def _validate_lists(lists: tuple[Iterable[Any], ...], where: str) -> None:
    if not lists:
        raise InvalidType(f"{where} got a function and no list; expected {where}(fun, list, ...)")
    lengths = [len(one) for one in lists if isinstance(one, Sized)]
    if len(set(lengths)) > 1:
        raise InvalidValue(
            f"{where} got lists of {', '.join(str(length) for length in lengths)} elements; "
            "expected lists of one length"
        )
