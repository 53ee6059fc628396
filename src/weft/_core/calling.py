"""How a distributed function is called with an item."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from weft._core.part import ColumnSlice
from weft.errors import InvalidType


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
