"""Distributed functions: weft's, with Playdoh's defaults and order of arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import weft
from playdoh._resources import elsewhere, validate_port
from weft._core.arguments import explain_keywords
from weft.errors import InvalidType


class DistributedFunction(weft.DistributedFunction):
    """A function over many items, which takes the arguments of `distribute`.

    `port` is that of other machines, and has no effect where there are none.

    >>> from playdoh import DistributedFunction
    >>> DistributedFunction(abs, max_cpu=2)([-1, -2])
    [1, 2]
    """

    @explain_keywords
    def __init__(  # noqa: PLR0917  they were all positional
        self,
        fun: Callable[..., Any] | None = None,
        shared_data: Mapping[str, Any] | None = None,
        max_cpu: int | None = None,
        max_gpu: int | None = None,
        gpu_policy: str = "no_gpu",
        machines: Sequence[str] = [],
        named_pipe: bool | str | None = None,
        port: int | None = None,
        accept_lists: bool = False,
        endaftercall: bool = True,
        verbose: bool = False,
    ) -> None:
        others = elsewhere(machines)
        if port is not None:
            validate_port(port, "distribute")
        super().__init__(
            fun,  # type: ignore[arg-type]  # None is refused there
            shared_data=some(shared_data),
            max_cpu=max_cpu,
            max_gpu=max_gpu,
            gpu_policy=gpu_policy,
            machines=others,
            named_pipe=named_pipe,
            port=port if others else None,
            accept_lists=accept_lists,
            endaftercall=endaftercall,
            verbose=verbose,
        )

    @explain_keywords
    def __call__(self, x: Any = None) -> Any:
        """Call the function on every item of a list, on an array, or, without an argument, once in
        each worker. So it is called for an array without axes too, and the results are joined.

        Raises what `weft.distribute` raises.
        """
        numpy = sys.modules.get("numpy")
        if numpy is None or not isinstance(x, numpy.ndarray) or x.ndim > 0:
            return super().__call__(x)
        results = super().__call__(None)
        return numpy.concatenate([numpy.atleast_1d(result) for result in results], axis=-1)


@explain_keywords
def distribute(  # noqa: PLR0917  they were all positional
    fun: Callable[..., Any] | None = None,
    shared_data: Mapping[str, Any] | None = None,
    max_cpu: int | None = None,
    max_gpu: int | None = None,
    gpu_policy: str = "no_gpu",
    machines: Sequence[str] = [],
    named_pipe: bool | str | None = None,
    port: int | None = None,
    accept_lists: bool = False,
    endaftercall: bool = True,
    verbose: bool = False,
) -> DistributedFunction:
    """Return what `weft.distribute` returns, for one call only, unless `endaftercall` is False.

    An empty `shared_data` is none: `fun` gets the item alone.

    >>> from playdoh import distribute
    >>> distribute(abs)([-1, -2])
    [1, 2]
    """
    return DistributedFunction(
        fun,
        shared_data,
        max_cpu,
        max_gpu,
        gpu_policy,
        machines,
        named_pipe,
        port,
        accept_lists,
        endaftercall,
        verbose,
    )


@explain_keywords
def finished(dfun: weft.DistributedFunction) -> None:
    """Clean up after a distributed function. Workers behind a named pipe stay."""
    _validate_function(dfun, "finished").finished()


@explain_keywords
def shutdown(dfun: weft.DistributedFunction) -> None:
    """Clean up after a distributed function, and end the workers, also those behind a pipe."""
    _validate_function(dfun, "shutdown").shutdown()


def some(shared_data: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the shared data, None if there are none in it."""
    return None if isinstance(shared_data, Mapping) and not shared_data else shared_data


def _validate_function(dfun: weft.DistributedFunction, where: str) -> weft.DistributedFunction:
    if not isinstance(dfun, weft.DistributedFunction):
        raise InvalidType(
            f"{where} got a {type(dfun).__name__}; expected what distribute returned:\n"
            f"    dfun = distribute(fun, endaftercall=False)\n    {where}(dfun)"
        )
    return dfun
