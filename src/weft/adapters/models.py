"""An object's values, whichever library it is from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from weft.adapters import lookup
from weft.errors import InvalidType


def read(model: Any) -> list[NDArray[Any]]:
    """Return a model's values, in the order of its parameters. Raises InvalidType for no model."""
    return list(_adapter(model).read(model))


def assign(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    """Set a model's values, which may have other shapes where its library allows it."""
    adapter = _adapter(model)
    shapes = [array.shape for array in adapter.read(model)]
    if shapes == [array.shape for array in arrays]:
        adapter.write(model, arrays)
    else:
        adapter.reshape(model, arrays)


def validate(model: Any) -> None:
    """Raise InvalidType for what is no model."""
    _adapter(model).names(model)


def parts(value: Any) -> list[Any]:
    """Return the objects that a model's parameters are; none for what is no model."""
    adapter = lookup.of_model(value)
    return [] if adapter is None else adapter.parts(value)


def reduce(value: Any, ordered: set[Any] | None = None) -> Any:
    """Return how to pickle an object so that in a worker it uses the worker's own replicas, and
    however deep its graph is; None where its library's way does that. `ordered` is what earlier
    calls for the same pickle have left there, at first an empty set."""
    if type(value).__module__.partition(".")[0] != "pytensor":
        return None
    return lookup.named("pytensor").reduce(value, set() if ordered is None else ordered)


def _adapter(value: Any) -> Any:
    adapter = lookup.of_model(value)
    if adapter is None:
        raise InvalidType(
            f"a {type(value).__name__} has no values that could be moved; expected an array, a "
            "tensor, a shared variable, a model, or a list or dict of these"
        )
    return adapter
