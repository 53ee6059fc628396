"""A model's values: as arrays of NumPy's, by way of its adapter, or as tensors where they lie.

`HostValues` is the first; the second, for a model whose parameters are all on one device, is
`DeviceValues` of `adapters/torch_values.py`, which has the same methods. Either is used with values
side by side in flat arrays: `zeros` makes one, and `cut` a view of it for each value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from weft._core.arithmetic import Array, address


def values_of(adapter: ModuleType, device: str) -> Any:
    """Return how to read and write values of models of this adapter, on a device or the host."""
    return HostValues(adapter) if device == "cpu" else adapter.values_on(device)


class HostValues:
    """Read and write models' values as arrays of NumPy's."""

    def __init__(self, adapter: ModuleType) -> None:
        self._adapter = adapter

    def read(self, model: Any) -> list[Array]:
        """Return a model's values, not to be written to, valid until the model changes."""
        return list(self._adapter.read(model))

    def write(self, model: Any, views: Sequence[Array], like: Sequence[Array]) -> None:
        """Set a model's values; `like` is what it has."""
        pairs = zip(views, like, strict=True)
        arrays = [view.astype(array.dtype, copy=False) for view, array in pairs]
        self._adapter.write(model, arrays)

    def live_in(self, model: Any, views: Sequence[Array], values: Sequence[Array]) -> bool:
        """Make a model's values live in these arrays, which hold them already. Return False, with
        nothing done, if they cannot."""
        alike = all(view.dtype == one.dtype for view, one in zip(views, values, strict=True))
        return alike and bool(self._adapter.live_in(model, views))

    def form(self, value: Array) -> tuple[tuple[int, ...], str]:
        """Return what must not change of a value: its shape and its kind of numbers."""
        return value.shape, value.dtype.kind

    def describe(self, value: Array) -> tuple[tuple[int, ...], str]:
        """Return what must be the same on all ranks: a value's shape and its dtype."""
        return value.shape, value.dtype.name

    def stored_as(self, value: Array) -> np.dtype[Any]:
        """Return the dtype of a table for such values: int8 for booleans."""
        return np.dtype(np.int8) if value.dtype.kind == "b" else value.dtype

    def zeros(self, values: Mapping[int, Array], dtype: np.dtype[Any]) -> Array:
        """Return a flat array with room for these values, and for one element at least."""
        return np.zeros(max(1, sum(value.size for value in values.values())), dtype)

    def cut(self, flat: Array, values: Mapping[int, Array]) -> dict[int, Array]:
        """Return views of a flat array, one for each value, of its shape."""
        views, start = {}, 0
        for index, value in values.items():
            views[index] = flat[start : start + value.size].reshape(value.shape)
            start += value.size
        return views

    def copy(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        """Copy values, of other numbers as they are rounded."""
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source, casting="unsafe")

    def clone(self, flat: Array) -> Array:
        return flat.copy()

    def subtract(self, new: Array, old: Array, out: Array) -> None:
        np.subtract(new, old, out=out)

    def same_memory(self, one: Array, other: Array) -> bool:
        """Return whether two arrays of one form are the same."""
        return address(one) == address(other)
