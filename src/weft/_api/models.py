"""`ModelTable`: any model's parameters as a table. A sync adds this rank's change and takes the
latest values.

    sync    the model's values   --copy, unless they live there-->   current
            current - last       --add-->                            the table
            the table            --get-->                            current, and last
            current              --copy, unless they live there-->   the model

The values are NumPy's arrays or, where a torch model is on a GPU, tensors there, and so is the
table. All values of one dtype lie in one flat array, so a sync is one add and one get, however many
parameters there are. Where the framework allows it, the parameters live in `current` and nothing is
copied. In a group of one they then live in the table itself, and a sync costs nothing.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import ModuleType
from typing import Any

import numpy as np

from weft._api import session
from weft._api.tables import ArrayTable, validate_device, validate_name
from weft._core import updaters
from weft._core.arguments import validate_seconds, whole
from weft._core.arithmetic import Array
from weft._core.failures import warn_caller
from weft._core.model_values import values_of
from weft._core.updaters import Updater
from weft.adapters import containers, lookup
from weft.engines.base import Store
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
    device       where the table is: by default on the GPU where a torch model is, else "cpu". With
                 "cpu" the values of a model on a GPU go through the host.
    name         for errors and files; by default "model" and a number.

    The arrays in a list or dict are read anew at every sync. Where a library makes new arrays
    instead of changing them (`partial_fit` of scikit-learn, or `w = w - step`), put those there
    first:

        model = {"coef": clf.coef_, "intercept": clf.intercept_}
        table = weft.ModelTable(model)
        ...
        clf.partial_fit(x, y)
        model.update(coef=clf.coef_, intercept=clf.intercept_)
        table.sync()

    Raises InvalidType, InvalidValue, OutOfMemory, and Disagreement if ranks have different models.
    """

    def __init__(
        self,
        model: Any,
        *,
        every: int = 1,
        updater: Any = "add",
        consistency: Any = "async",
        device: str | None = None,
        name: str | None = None,
    ) -> None:
        group = session.group()
        try:
            calls = whole(every)
            if calls is None:
                raise InvalidType(f"every={every!r}: expected a whole number of calls")
            if calls < 1:
                raise InvalidValue(f"every={every}: expected 1 or more calls for each exchange")
            adapter = _adapter(model)
            where = _device(adapter, model, device, default=group.has_device_tables)
            self._values = values_of(adapter, where)
            values = self._values.read(model)
            if not values:
                raise InvalidValue(f"a model of type {type(model).__name__} without parameters")
            rule = updaters.resolve(updater)
            described = [self._values.describe(value) for value in values]
            checksum = _checksum(adapter.names(model), described)
            label = f"{validate_name(name, 'model')} ({len(values)} arrays, {checksum:08x})"
        except Exception as error:
            group.refuse("ModelTable", error)
            raise
        self._model, self._adapter, self._every, self._calls = model, adapter, calls, 0
        self._forms = [self._values.form(value) for value in values]
        kinds = dict.fromkeys(self._values.stored_as(value) for value in values)
        options = {"consistency": consistency, "device": where}
        self._parts = [
            _Part(self._values, values, dtype, rule, {"name": f"{label} {dtype}", **options})
            for dtype in kinds
        ]
        group.barrier()  # nobody adds before all have their first values
        self._views = _in_order(self._parts, len(values))
        self._values.write(model, self._views, values)
        if not self._values.live_in(model, self._views, values):
            for part in self._parts:
                part.keep_apart()
            self._views = _in_order(self._parts, len(values))
        del values
        #: the places of arrays that nothing but the model refers to, which is nothing to warn of
        self._lone = set(dict(_lone_arrays(vars(self), "_model")))

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
        lone = dict(_lone_arrays(vars(self), "_model"))
        values = self._values.read(self._model)
        self._validate_forms(values)
        self._refuse_replaced(lone, values)
        apart = [
            (view, value)
            for view, value in zip(self._views, values, strict=True)
            if not self._values.same_memory(view, value)
        ]
        self._values.copy([view for view, _ in apart], [value for _, value in apart])
        changed = [part for part in self._parts if part.has_changes(timeout)]
        if changed:
            first = changed[0].table._store
            first.exchange([part.change() for part in changed], timeout=timeout)
        for part in changed:
            part.take()
        if apart:
            self._values.write(self._model, self._views, values)
        return True

    def _validate_forms(self, values: Sequence[Any]) -> None:
        """Raise InvalidValue if the model has other arrays than at first: another number of them,
        or others of another shape or kind of numbers."""
        forms = [self._values.form(value) for value in values]
        if forms != self._forms:
            pairs = enumerate(zip_longest(forms, self._forms))
            index, (now, before) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
            raise InvalidValue(
                f"array {index} of the model is {now} now, as (shape, kind of numbers), and was "
                f"{before} when its ModelTable was made; make a new ModelTable for another model"
            )

    def _refuse_replaced(self, lone: dict[str, bool], values: Sequence[Any]) -> None:
        """Raise InvalidValue for an array that the program cannot have changed, since only weft
        still has it. Warn once of one that something besides the model had, and has no more, if it
        has not changed since the last sync."""
        for place, in_reach in lone.items():
            if in_reach and place in self._lone:
                continue
            name = containers.parameter_name(place)
            remedy = (
                "if it was replaced by a new one (w = w - step, or partial_fit of scikit-learn), "
                "keep the model in a dict or list of your own, and put the new array there before "
                f"each sync: model{place or '[name]'} = array"
            )
            if not in_reach:
                raise InvalidValue(
                    f"sync() of an array ({name}) that nothing but this ModelTable refers to: it "
                    f"cannot have changed; {remedy}"
                )
            index = self._adapter.names(self._model).index(name)
            if np.array_equal(self._views[index], values[index]):
                self._lone.add(place)
                warn_caller(
                    f"sync() of an array ({name}) that has not changed since the last sync, and "
                    "that nothing but the model refers to, unlike when its ModelTable was made; "
                    + remedy
                )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Refuse: NumPy would make an array of one Python object. Raises InvalidType."""
        raise InvalidType(
            f"numpy.asarray() of a ModelTable of {len(self._forms)} arrays: read them from the "
            "model after sync(), or one after the other from numpy.asarray(table.tables[0])"
        )

    def __reduce__(self) -> Any:
        """Refuse to be copied or pickled. Raises InvalidType."""
        raise InvalidType(
            f"a ModelTable of {self._adapter.NAME} cannot be copied or sent, for it is memory that "
            "its ranks share: send the model itself, or keep its tables by table.save(path)"
        )

    def __repr__(self) -> str:
        return f"<ModelTable of {self._adapter.NAME}: {', '.join(map(repr, self.tables))}>"


class _Part:
    """The parameters of one dtype, side by side, and their table."""

    def __init__(
        self,
        library: Any,
        values: Sequence[Any],
        dtype: np.dtype[Any],
        updater: Updater,
        options: Mapping[str, Any],
    ) -> None:
        self._library = library
        mine = {i: one for i, one in enumerate(values) if library.stored_as(one) == dtype}
        flat = library.zeros(mine, dtype)
        self.views = library.cut(flat, mine)
        library.copy([self.views[index] for index in mine], list(mine.values()))
        if dtype.kind in "iu":
            updater = updaters.add()
        self.table = ArrayTable(flat, dtype=dtype, updater=updater, **options)
        #: whether the updater subtracts the deltas it is given, as optimizers do with gradients
        self._against = (
            updater.name != "add" and updaters.from_saved(updater.name, updater.options) is not None
        )
        rows = self.table._store.exclusive_rows() if updater.name == "add" else None
        self._alone = rows is not None
        if rows is not None:
            self._current: Any = rows
            self.views = library.cut(rows, mine)
            return
        self.table.get(out=flat)
        self._keep(flat)

    def _keep(self, current: Any) -> None:
        clone = self._library.clone
        self._current, self._last, self._change = current, clone(current), clone(current)

    def keep_apart(self) -> None:
        """Keep the model's values apart from the table, in which they cannot live, so that what is
        added to the table itself is not lost to the next exchange."""
        if self._alone:
            self._alone = False
            self._keep(self._library.clone(self._current))
            self.views = self._library.cut(self._current, self.views)

    def has_changes(self, timeout: float | None) -> bool:
        """Return whether there is anything to exchange: not where the values live in the table."""
        if not self._alone:
            return True
        if timeout is not None:
            validate_seconds(timeout)
        self.table._store.exclusive_rows()  # refuses after shutdown
        return False

    def change(self) -> tuple[Store, Array, Array]:
        """Return what has changed since the last exchange, the table that it is added to, and the
        array for the latest values."""
        self.table.finish()
        old, new = (self._current, self._last) if self._against else (self._last, self._current)
        self._library.subtract(new, old, self._change)
        return self.table._store, self._change, self._current

    def take(self) -> None:
        """Note the latest values."""
        self._library.copy([self._last], [self._current])


def _lone_arrays(
    holder: Any, key: Any, place: str = "", in_reach: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yield the place of each NumPy array in the model `holder[key]` that nothing but the model
    refers to, and whether the program can reach it there.

    The model is looked up wherever it is needed: a variable would be one more reference.
    """
    if isinstance(holder[key], np.ndarray):
        if _is_lone(holder, key):
            yield place, in_reach
        return
    if isinstance(holder[key], (dict, list, tuple)):
        in_reach = in_reach or sys.getrefcount(holder[key]) > _ONE
        keys = holder[key] if isinstance(holder[key], dict) else range(len(holder[key]))
        for part in keys:
            yield from _lone_arrays(holder[key], part, f"{place}[{part!r}]", in_reach)


def _is_lone(holder: Any, key: Any) -> bool:
    """Return whether nothing but its holder refers to an array, nor to the one whose memory it
    has. Of memory that is not NumPy's own nobody knows."""
    if sys.getrefcount(holder[key]) > _ONE:
        return False
    if holder[key].base is None:
        return bool(holder[key].flags.owndata)
    if not isinstance(holder[key].base, np.ndarray) or not holder[key].base.flags.owndata:
        return False
    return sys.getrefcount(holder[key].base) <= _ONE


_HOLDER = {"array": np.empty(0)}

#: how many references Python counts of an object that only one holder has
_ONE = sys.getrefcount(_HOLDER["array"])


def _device(adapter: ModuleType, model: Any, given: Any, *, default: bool) -> str:
    """Return the device of a model's tables: the given one, or where the model is. Raises
    InvalidValue if the model is elsewhere."""
    on_devices = hasattr(adapter, "device_of")
    if given is None:
        return str(adapter.device_of(model)) if on_devices and default else "cpu"
    device = validate_device(given)
    if device != "cpu":
        if not on_devices:
            raise InvalidValue(
                f"ModelTable(device={given!r}) of a model of {adapter.NAME}: only torch's are kept "
                "on a device; leave device= out"
            )
        adapter.validate_on(model, device)
    return device


def _adapter(model: Any) -> ModuleType:
    adapter = lookup.of_model(model)
    if adapter is None:
        raise InvalidType(
            f"a model {_describe(model)}: expected a torch Module, a Keras model, "
            "PyTensor shared variables, a weft.Holder of a JAX pytree, NumPy arrays or tensors, or "
            "a list, tuple or dict of these"
        )
    return adapter


def _describe(model: Any) -> str:
    """Return what is wrong with a model: its type, or that of the first part that is no model."""
    for place, leaf in containers.leaves(model):
        if lookup.of_model(leaf) is None:
            return f"of type {type(leaf).__name__}" + (f" at {place}" if place else "")
    parts = "with parts of several libraries" if containers.leaves(model) else "without parts"
    return f"of type {type(model).__name__} {parts}"


def _checksum(names: Sequence[str], described: Sequence[tuple[Any, str]]) -> int:
    """Return a checksum of the parameters' names, shapes and dtypes."""
    pairs = zip(names, described, strict=True)
    return zlib.crc32(repr([(name, *one) for name, one in pairs]).encode())


def _in_order(parts: Sequence[_Part], count: int) -> list[Any]:
    views = {index: view for part in parts for index, view in part.views.items()}
    return [views[index] for index in range(count)]
