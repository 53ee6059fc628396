"""How a distributed function is called with an item.

Some columns of an array, as an item. Apart from `columns.py`, because NumPy takes long to load
and is not needed here.

What is asked of a team, and what it answers.

Results in the order of their items, whatever the order in which they come.
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


class Nothing(Enum):
    """An item that is not passed to the function. An Enum: its pickle is the same object again."""

    NOTHING = 0


NOTHING = Nothing.NOTHING


@dataclass(frozen=True)
class Bound:
    """A user's function and what it gets besides the item."""

    function: Callable[..., Any]
    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *item: Any) -> Any:
        return self.function(*item, *self.positional, **self.keywords)


@dataclass(frozen=True)
class Unwrapping:
    """A function of items that stand for something else: a part of an array, or nothing."""

    function: Callable[..., Any]

    def __call__(self, item: Any) -> Any:
        if item is NOTHING:
            return self.function()
        return self.function(item.view() if isinstance(item, ColumnSlice) else item)


def bind(
    function: Callable[..., Any],
    *,
    shared_data: Mapping[str, Any] | None = None,
    use_gpu: bool | None = None,
) -> Callable[..., Any]:
    """The function with shared data, if any is given, and with `use_gpu`, if it asks for it."""
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


def takes_an_item(function: Callable[..., Any], besides: int) -> bool:
    """Whether a function has a place for an item, `besides` the places taken otherwise."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = _parameters(function).values()
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
        return True
    named = [one for one in parameters if one.kind in kinds and one.name != "use_gpu"]
    return len(named) > besides


def validate_callable(function: object, form: str) -> None:
    """Raise unless the first argument of a call of this form is a function."""
    if not callable(function):
        raise InvalidType(
            f"the first argument of {form} is {function!r} of type {type(function).__name__}; "
            "expected a function, or something else that can be called"
        )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some of the built-in ones have none
        one = inspect.Parameter("item", inspect.Parameter.VAR_POSITIONAL)
        return {one.name: one}


@dataclass(frozen=True)
class ColumnSlice:
    """The columns `start` to `stop` of an array. In the driver `array` may be a handle of
    `Pool.put`, which a worker gets as the array: a view has the whole array's strides, and what is
    computed from it the same bits."""

    array: Array | Any
    start: int
    stop: int

    def view(self) -> Array:
        view: Array = self.array[..., self.start : self.stop]
        return view


class Job(NamedTuple):
    """Many calls of one function, as a team carries them out."""

    #: what the team's `prepare` returned
    function: Any
    items: Iterable[Any]
    #: seeds the random generators before each item; None leaves them alone
    seed: int | None = None
    #: how often an item may lose its worker and be run again
    retries: int = 0
    #: whether the rest is run when an item fails
    keep_going: bool = False
    #: whether every worker runs exactly one item
    one_each: bool = False
    #: seconds for all of it
    timeout: float | None = None
    #: whether somebody wants it to end; None where nobody can
    cancelled: Callable[[], bool] | None = None


class Finished(NamedTuple):
    """A chunk of items that has ended."""

    first: int
    #: the results; None in the place of an item that failed
    values: list[Any]
    #: what to raise for the items that failed, by index
    failures: dict[int, Exception]
    worker: int
    pid: int
    seconds: float = 0.0
    #: bytes there and back
    sent: int = 0
    received: int = 0
    #: where the worker runs; empty for items that reached none
    host: str = ""


class Collected:
    """What has come of a job so far."""

    def __init__(self, total: int | None, *, keep_failures: bool) -> None:
        #: how many items there are; None while nobody knows
        self.total = total
        self.results: list[Any] = [None] * (total or 0)
        self._keep_failures = keep_failures
        #: how many items have ended, and how many of them failed
        self.finished = 0
        self.failed = 0

    def add(self, part: Finished) -> None:
        """Take a chunk in. Raises its first failure, unless failures are kept as results."""
        if part.failures and not self._keep_failures:
            raise part.failures[min(part.failures)]
        end = part.first + len(part.values)
        if end > len(self.results):
            self.results += [None] * (end - len(self.results))
        self.results[part.first : end] = part.values
        for index, error in part.failures.items():
            self.results[index] = error
        self.finished += len(part.values)
        self.failed += len(part.failures)
