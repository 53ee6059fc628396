"""A map's job: what is asked of a pool, its results, and how a function is called with an item.

    Job  --a pool-->  Finished, chunk by chunk, in any order  --Collected.add-->  results in order

In this order: `Job`, `Finished`, `Collected`; `bind` and the callables that it makes of a user's
function; the items that stand for something else, `NOTHING` and `ColumnSlice`. NumPy takes long to
load and is not needed here, so the code that cuts arrays is in `partition.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.errors import InvalidType

if TYPE_CHECKING:
    from weft._core.arithmetic import Array


class Job(NamedTuple):
    """Calls of one function with many items, as a pool carries them out."""

    #: what the pool's `prepare` returned
    function: Any
    items: Iterable[Any]
    #: random generators are seeded from it before each item; None leaves them alone
    seed: int | None = None
    #: how often an item may lose its worker and be run again
    retries: int = 0
    #: whether the rest is run when an item fails
    keep_going: bool = False
    #: whether every worker runs exactly one item
    one_each: bool = False
    #: seconds for the whole job
    timeout: float | None = None
    #: tells whether the job was cancelled; None if it cannot be
    cancelled: Callable[[], bool] | None = None


class Finished(NamedTuple):
    """A chunk of items that has ended."""

    first: int
    #: the results; None for an item that failed
    values: list[Any]
    #: the exceptions of the items that failed, by index
    failures: dict[int, Exception]
    worker: int
    pid: int
    seconds: float = 0.0
    #: bytes to the worker and back
    sent: int = 0
    received: int = 0
    #: where the worker runs; empty for items that reached none
    host: str = ""


class Collected:
    """The results of a job so far, in the order of its items."""

    def __init__(self, total: int | None, *, keep_failures: bool) -> None:
        #: how many items there are; None while that is not known
        self.total = total
        self.results: list[Any] = [None] * (total or 0)
        self._keep_failures = keep_failures
        #: how many items have ended, and how many of them failed
        self.finished = 0
        self.failed = 0

    def add(self, chunk: Finished) -> None:
        """Add a chunk. Raises its first failure, unless failures are kept as results."""
        if chunk.failures and not self._keep_failures:
            raise chunk.failures[min(chunk.failures)]
        end = chunk.first + len(chunk.values)
        if end > len(self.results):
            self.results += [None] * (end - len(self.results))
        self.results[chunk.first : end] = chunk.values
        for index, error in chunk.failures.items():
            self.results[index] = error
        self.finished += len(chunk.values)
        self.failed += len(chunk.failures)


def validate_callable(function: object, form: str) -> None:
    """Raise InvalidType unless the first argument of a call like `form` can be called."""
    if not callable(function):
        raise InvalidType(
            f"the first argument of {form} is {function!r} of type {type(function).__name__}; "
            "expected a function, or something else that can be called"
        )


def takes_an_item(function: Callable[..., Any], besides: int) -> bool:
    """Return whether a function has a parameter for an item `besides` so many others."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = _parameters(function).values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return True
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in kinds and parameter.name != "use_gpu"
    ]
    return len(positional) > besides


def bind(
    function: Callable[..., Any],
    *,
    shared_data: Mapping[str, Any] | None = None,
    use_gpu: bool | None = None,
) -> Callable[..., Any]:
    """Bind a function to shared data, if given, and to `use_gpu`, if it has such a parameter."""
    parameters = _parameters(function)
    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if shared_data is not None:
        if "shared_data" in parameters:
            keywords["shared_data"] = shared_data
        else:
            positional = (shared_data,)
    if use_gpu is not None and "use_gpu" in parameters:
        keywords["use_gpu"] = use_gpu
    if not positional and not keywords:
        return function
    return Bound(function, positional, keywords)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        any_items = inspect.Parameter("item", inspect.Parameter.VAR_POSITIONAL)
        return {any_items.name: any_items}


@dataclass(frozen=True)
class Bound:
    """A user's function with what it gets besides the item."""

    function: Callable[..., Any]
    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *item: Any) -> Any:
        return self.function(*item, *self.positional, **self.keywords)


@dataclass(frozen=True)
class Unwrapping:
    """A user's function, called with what an item stands for: columns of an array, or nothing."""

    function: Callable[..., Any]

    def __call__(self, item: Any) -> Any:
        if item is NOTHING:
            return self.function()
        return self.function(item.view() if isinstance(item, ColumnSlice) else item)


class Nothing(Enum):
    """An item that is not passed to the function. An Enum: unpickled, it is the same object."""

    NOTHING = 0


NOTHING = Nothing.NOTHING


@dataclass(frozen=True)
class ColumnSlice:
    """The columns `start` to `stop` of an array.

    In the driver `array` may be a handle from `Pool.put`; a worker gets the array in its place. A
    view has the strides of the whole array, so that what is computed from it has the same bits.
    """

    array: Array | Any
    start: int
    stop: int

    def view(self) -> Array:
        view: Array = self.array[..., self.start : self.stop]
        return view
