"""`ModelTable`: any model's parameters as a table. A sync adds this rank's change and takes the
latest values.

    sync    the model's values   --copy, unless they live there-->   current
            current - last       --add-->                            the table
            the table            --get-->                            current, and last
            current              --copy, unless they live there-->   the model

All values of one dtype lie in one flat array, so a sync is one add and one get, however many
parameters there are. Where the framework allows it, the parameters live in `current` and nothing is
copied. In a group of one they live in the table itself, and a sync costs nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from weft import adapters
from weft._api import session
from weft._api.tables import ArrayTable
from weft._core import updaters
from weft._core.arguments import whole
from weft._core.arithmetic import Array, address
from weft._core.updaters import Updater
from weft.errors import InvalidType, InvalidValue


class ModelTable:
    """A model that the ranks of the group train together, each at its own pace.

    Every rank makes the table from a model of its own, and all start with the master's values.
    `sync()` adds what this rank has changed since its last sync, and takes the latest values.

    >>> import numpy, weft
    >>> weft.init().size
    1
    >>> model = {"w": numpy.zeros(3), "b": numpy.zeros(1)}
    >>> table = weft.ModelTable(model)
    >>> model["w"] += 1  # train
    >>> table.sync()
    True
    >>> weft.shutdown()

    model        a torch Module, a Keras model, PyTensor shared variables, a `weft.Holder` of a JAX
                 pytree, arrays, or lists and dicts of these.
    every        only every so many-th call of `sync` exchanges anything.
    updater      what is done with a change. An optimizer's rule takes it for a step against the
                 gradient; integers are always added.
    consistency  as in `ArrayTable`.
    name         for errors and files; by default "model" and a number.

    Raises InvalidType, InvalidValue, OutOfMemory, and Disagreement if ranks have different models.
    """

    def __init__(
        self,
        model: Any,
        *,
        every: int = 1,
        updater: Any = "add",
        consistency: Any = "async",
        name: str | None = None,
    ) -> None:
        group = session.group()
        try:
            calls = whole(every)
            if calls is None:
                raise InvalidType(f"every={every!r}: expected a whole number of calls")
            if calls < 1:
                raise InvalidValue(f"every={every}: expected 1 or more calls for each exchange")
            adapter, values = _read(model)
            rule = updaters.resolve(updater)
            label = name or f"model {session.count_tables() + 1}"
            label = f"{label} ({len(values)} arrays, {_checksum(adapter.names(model), values):08x})"
        except Exception as error:
            group.refuse("ModelTable", error)
            raise
        self._model, self._adapter, self._every, self._calls = model, adapter, calls, 0
        kinds = list(dict.fromkeys(_stored_as(value.dtype) for value in values))
        self._parts = [
            _Part(values, dtype, f"{label} {dtype}", rule, consistency) for dtype in kinds
        ]
        group.barrier()  # nobody adds before all have their first values
        self._views = _in_order(self._parts, len(values))
        self._write(values)
        if all(view.dtype == value.dtype for view, value in zip(self._views, values, strict=True)):
            adapter.live_in(model, self._views)

    @property
    def tables(self) -> list[ArrayTable]:
        """Return one table for each dtype of the model's parameters."""
        return [part.table for part in self._parts]

    def sync(self, *, timeout: float | None = None) -> bool:
        """Add this rank's change since its last sync, and take the latest values.

        Returns whether it did: with `every=n` only every n-th call does. Raises what a table's
        `add` and `get` raise.
        """
        self._calls += 1
        if self._calls % self._every:
            return False
        values = self._adapter.read(self._model)
        apart = [
            (view, value)
            for view, value in zip(self._views, values, strict=True)
            if address(view) != address(value)
        ]
        for view, value in apart:
            np.copyto(view, value, casting="unsafe")
        for part in self._parts:
            part.exchange(timeout)
        if apart:
            self._write(values)
        return True

    def _write(self, like: Sequence[Array]) -> None:
        """Write the current values to the model."""
        pairs = zip(self._views, like, strict=True)
        self._adapter.write(self._model, [view.astype(a.dtype, copy=False) for view, a in pairs])

    def __repr__(self) -> str:
        return f"<ModelTable of {self._adapter.NAME}: {', '.join(map(repr, self.tables))}>"


class _Part:
    """The parameters of one dtype, side by side, and their table."""

    def __init__(
        self,
        values: Sequence[Array],
        dtype: np.dtype[Any],
        name: str,
        updater: Updater,
        consistency: Any,
    ) -> None:
        mine = {i: value for i, value in enumerate(values) if _stored_as(value.dtype) == dtype}
        sizes = [value.size for value in mine.values()]
        flat = np.zeros(max(1, sum(sizes)), dtype)  # a table has at least one element
        self.views = _cut(flat, mine)
        for index, value in mine.items():
            np.copyto(self.views[index], value, casting="unsafe")
        if dtype.kind in "iu":
            updater = updaters.add()
        self.table = ArrayTable(
            flat, dtype=dtype, updater=updater, consistency=consistency, name=name
        )
        #: whether the updater subtracts the deltas it is given, as optimizers do with gradients
        self._against = (
            updater.name != "add" and updaters.from_saved(updater.name, updater.options) is not None
        )
        rows = self.table._store.exclusive_rows() if updater.name == "add" else None
        self._alone = rows is not None
        if rows is not None:
            self._current = rows
            self.views = _cut(rows, mine)
            return
        self._current, self._last, self._change = flat, flat.copy(), np.empty_like(flat)
        self.table.get(out=self._current)
        np.copyto(self._last, self._current)

    def exchange(self, timeout: float | None) -> None:
        """Add what has changed since the last exchange, and take the latest values."""
        if self._alone:
            self.table._store.exclusive_rows()  # refuses after shutdown
            return
        old, new = (self._current, self._last) if self._against else (self._last, self._current)
        np.subtract(new, old, out=self._change)
        self.table.add(self._change, timeout=timeout)
        self.table.get(out=self._current, timeout=timeout)
        np.copyto(self._last, self._current)


def _read(model: Any) -> tuple[ModuleType, list[Array]]:
    adapter = adapters.of_model(model)
    if adapter is None:
        raise InvalidType(
            f"a model of type {type(model).__name__}: expected a torch Module, a Keras model, "
            "PyTensor shared variables, a weft.Holder of a JAX pytree, NumPy arrays or tensors, or "
            "a list, tuple or dict of these"
        )
    values = adapter.read(model)
    if not values:
        raise InvalidValue(f"a model of type {type(model).__name__} without parameters")
    return adapter, values


def _stored_as(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the table for parameters of this dtype: int8 for booleans."""
    return np.dtype(np.int8) if dtype.kind == "b" else dtype


def _checksum(names: Sequence[str], values: Sequence[Array]) -> int:
    """Return a checksum of the parameters' names, shapes and dtypes."""
    described = [(n, v.shape, v.dtype.name) for n, v in zip(names, values, strict=True)]
    return zlib.crc32(repr(described).encode())


def _cut(flat: Array, values: dict[int, Array]) -> dict[int, Array]:
    """Return views of a flat array, one for each value, of its shape."""
    views, start = {}, 0
    for index, value in values.items():
        views[index] = flat[start : start + value.size].reshape(value.shape)
        start += value.size
    return views


def _in_order(parts: Sequence[_Part], count: int) -> list[Array]:
    views = {index: view for part in parts for index, view in part.views.items()}
    return [views[index] for index in range(count)]
