"""What the ranks' outputs come to: each mode says what one output of the function is.

    mean             a mean over rows: weighted by the rows of each part
    sum, prod        a sum or product over rows
    min, max         the smallest or largest of all rows
    gather           one row for each row: joined along the first axis
    None             whatever: the driver's own is kept

Outputs may be arrays and numbers, or tuples, lists and dicts of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from weft import adapters
from weft._core.elements import NUMERIC, combine
from weft.errors import InvalidType, InvalidValue

MODES = ("mean", "sum", "prod", "min", "max", "gather", None)
Modes = Any


class Partial(NamedTuple):
    """The outputs of a function on some rows."""

    outputs: Any
    rows: int


def check_modes(modes: Modes) -> None:
    """Raise unless this is a mode, or a sequence or dict of modes."""
    if isinstance(modes, (list, tuple)):
        found: Sequence[Any] = modes
    elif isinstance(modes, Mapping):
        found = list(modes.values())
    else:
        found = [modes]
    for mode in found:
        if isinstance(mode, (list, tuple, Mapping)):
            check_modes(mode)
        elif mode not in MODES:
            known = ", ".join(map(repr, MODES))
            raise InvalidValue(f"collect={mode!r}: expected one of {known}")


def join(parts: Sequence[Partial], modes: Modes, name: str = "the output") -> Any:
    """The outputs of all parts as one."""
    if len(parts) == 1 and modes != "mean":
        return parts[0].outputs
    if isinstance(modes, (list, tuple, Mapping)):
        return _join_each(parts, modes, name)
    first = parts[0].outputs
    if isinstance(first, Mapping):
        return {key: join(_pick(parts, key, name), modes, f"{name}[{key!r}]") for key in first}
    if isinstance(first, (tuple, list)) and not (modes == "gather" and isinstance(first, list)):
        values = [join(_pick(parts, i, name), modes, f"{name}[{i}]") for i in range(len(first))]
        return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)
    return _join_leaf(parts, modes, name)


def _join_each(parts: Sequence[Partial], modes: Modes, name: str) -> Any:
    """Each output by a mode of its own."""
    first = parts[0].outputs
    keyed = isinstance(modes, Mapping)
    fits = isinstance(first, Mapping) if keyed else isinstance(first, (tuple, list))
    if not fits or len(first) != len(modes) or (keyed and set(first) != set(modes)):
        raise InvalidValue(
            f"collect has modes for {len(modes)} outputs, {list(modes)}; the function returned "
            f"{_shape_of(first)}"
        )
    keys = list(modes) if keyed else list(range(len(modes)))
    values = [join(_pick(parts, key, name), modes[key], f"{name}[{key!r}]") for key in keys]
    if keyed:
        return dict(zip(keys, values, strict=True))
    return type(first)(*values) if hasattr(first, "_fields") else type(first)(values)


def _pick(parts: Sequence[Partial], key: Any, name: str) -> list[Partial]:
    try:
        return [Partial(part.outputs[key], part.rows) for part in parts]
    except (KeyError, IndexError, TypeError):
        raise InvalidValue(
            f"{name} has other parts in some workers than in others: {_shape_of(parts[0].outputs)}"
        ) from None


def _join_leaf(parts: Sequence[Partial], mode: str | None, name: str) -> Any:
    values = [part.outputs for part in parts]
    if mode is None:
        return values[0]
    if mode == "gather" and isinstance(values[0], list):
        return [row for value in values for row in value]
    adapter = adapters.of_array_or_number(values[0])
    if adapter is None:
        raise InvalidType(
            f"{name} is a {type(values[0]).__name__}, which collect={mode!r} cannot combine; "
            "expected arrays or numbers; collect=None keeps the driver's own"
        )
    arrays = [adapter.view(value)[0] for value in values]
    element = adapter.view(values[0])[1]
    if mode == "gather":
        joined = np.concatenate(
            [array[np.newaxis] if array.ndim == 0 else array for array in arrays]
        )
        return _delivered(adapter, joined, element, was_number=arrays[0].ndim == 0)
    _check_alike(arrays, name, mode)
    weights = [float(part.rows) for part in parts] if mode == "mean" else None
    if weights is not None and not any(weights):
        weights = None  # no rows at all: what the function made of that
    if mode == "mean" and arrays[0].dtype.kind in "biu":
        arrays, element = [array.astype(np.float64) for array in arrays], "float64"
    out = np.empty_like(arrays[0])
    combine(arrays, out, mode, element, weights)
    return _delivered(adapter, out, element)


def _delivered(adapter: Any, array: Any, element: str, *, was_number: bool = False) -> Any:
    return array if was_number else adapter.deliver(array, element)


def _check_alike(arrays: Sequence[Any], name: str, mode: str) -> None:
    if arrays[0].dtype.kind not in NUMERIC:
        raise InvalidType(
            f"{name} has dtype {arrays[0].dtype}, which collect={mode!r} cannot combine; expected "
            "numbers"
        )
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        found = ", ".join(map(str, sorted(shapes)))
        raise InvalidValue(
            f"{name} has other shapes in some parts than in others: {found}; collect={mode!r} "
            "needs one shape: a value over all rows. For one row per row use collect='gather'"
        )


def _shape_of(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a dict with {list(outputs)}"
    if isinstance(outputs, (tuple, list)):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return f"a {type(outputs).__name__}"
