"""Rows of a table that are tensors on a device: what `rows.py` does with those of the host.

Row ids on the host are validated and searched for repeats there; the device gets a copy. Those on
the device are used there (`DeviceIds`), as long as nothing is wrong with them. Each function
returns when the device has done it, as others may use the rows then, however it ends.

A device adds to the rows of a list in any order, so ids that are repeated would have other sums in
each run. They are added turn by turn, each id once in a turn, in the order of the list:

    ids        7 5 7 7 5
    occurrence 0 0 1 2 1        turns: 7 5 | 7 5 | 7

What is left after many turns, as of an id that is there thousands of times, goes through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from weft._core import rows
from weft._core.arithmetic import Array
from weft._core.tables import Ids, TableSpec, as_delta, as_ids, as_out
from weft._core.updaters import RULES, Updater, call_user, computed_in
from weft.adapters import lookup, torch_row_ids, torch_rows
from weft.errors import InvalidType, InvalidValue

#: a tensor
Tensor = Any

#: how often an id is added to before the host adds the rest: a turn takes the time of a kernel
_TURNS = 64
#: elements that an updater changes at a time, so that it needs little memory beside the rows
_BLOCK = 16 << 20
#: rows of the largest table for which 4 bytes per row are kept to find repeated ids
_SCRATCH = 16 << 20


class DeviceIds:
    """Row ids on the device, which are validated as they are used. They have as much of an array of
    ids on the host as stores use."""

    ndim = 1

    def __init__(self, tensor: Tensor, n_rows: int) -> None:
        self.tensor, self._n_rows = tensor, n_rows
        self.size = int(tensor.numel())
        self.shape = (self.size,)
        self._names: Ids | None = None

    def copy(self) -> DeviceIds:
        return DeviceIds(self.tensor.clone(), self._n_rows)

    def __getitem__(self, some: slice) -> Ids:
        """Return the first ids, which are on the host once they were checked."""
        return self.on_host()[some] if self._names is None else self._names[some]

    def on_host(self) -> Ids:
        """Return a copy on the host. Raises InvalidValue for what is no row."""
        return as_ids(self.tensor, self._n_rows)

    def are_distinct(self, checker: torch_row_ids.Checker) -> bool:
        """Return whether none is repeated. Raises InvalidValue for what is no row."""
        valid, repeated, self._names = checker.check(self.tensor)
        if not valid:
            self.on_host()  # raises
        return not repeated


# memory


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], device: str) -> Tensor:
    zeros = torch_rows.zeros(shape, dtype.name, device)
    torch_rows.finish(device)
    return zeros


def cut(memory: Tensor, start: int, shape: tuple[int, ...], element: str) -> Tensor:
    """Return an array over a part of a device's memory."""
    return torch_rows.cut(memory, start, shape, element)


def clear(target: Tensor) -> None:
    """Fill rows with zeros."""
    torch_rows.words(target).zero_()
    torch_rows.finish(str(target.device))


def copy(target: Tensor, source: Tensor | Array) -> None:
    """Copy values of one shape and dtype, also from the host."""
    try:
        torch_rows.copy(target, source)
    finally:
        torch_rows.finish(str(target.device))


def to_host(tensor: Tensor) -> Array:
    """Return a copy as an array of NumPy's."""
    return np.array(torch_rows.fetch(tensor))


def await_ready(device: str) -> None:
    """Return when what the calling thread has queued on the device is done, so that it need not be
    waited for under a lock."""
    torch_rows.synchronize(device)


def await_done(device: str) -> None:
    """Do the same after an update. If it is interrupted, it goes on until the end, and raises."""
    torch_rows.finish(device)


# reading and updating


def read(table: Tensor, ids: Ids | DeviceIds | None, out: Tensor | None) -> Tensor:
    """Copy all rows of a table, or some."""
    device = str(table.device)
    if isinstance(ids, DeviceIds):
        return _read_by_device_ids(table, ids, out)
    try:
        if ids is None:
            copied = torch_rows.like(table) if out is None else out
            torch_rows.copy(copied, table)
            return copied
        index = torch_rows.send(ids.reshape(-1), device)
        shape = ids.shape + tuple(table.shape[1:])
        if out is not None:
            torch_rows.take(table, index, out.view((ids.size, *table.shape[1:])))
            return out
        return torch_rows.take(table, index).view(shape)
    finally:
        torch_rows.finish(device)


def _read_by_device_ids(table: Tensor, ids: DeviceIds, out: Tensor | None) -> Tensor:
    if out is None:
        out = torch_rows.empty((ids.size, *table.shape[1:]), table)
    if not torch_row_ids.take(table, ids.tensor, out):
        ids.on_host()  # raises
    return out


def merge(ids: Ids | DeviceIds, delta: Tensor) -> tuple[Ids, Tensor]:
    """Return each id once, with the sum of its deltas, added in the order of `rows.merge`."""
    if isinstance(ids, DeviceIds):
        ids = ids.on_host()
    repeated = rows.repeats(ids)
    if repeated is None:
        return ids, delta
    device = str(delta.device)
    once = np.ones(ids.size, bool)
    once[repeated.earlier] = False
    kept = once.nonzero()[0]
    into = (np.cumsum(once) - 1)[repeated.last]
    try:
        total = torch_rows.take(delta, torch_rows.send(kept, device))
        earlier = torch_rows.take(delta, torch_rows.send(repeated.earlier, device))
        _add(total, _in_turns(into, earlier))
    finally:
        torch_rows.finish(device)
    return ids[kept], total


def update(
    arrays: tuple[Tensor, Mapping[str, Tensor]],
    ids: Ids | slice,
    delta: Tensor,
    updater: Updater,
    step: int,
    *,
    out: Tensor | None = None,
) -> None:
    """Update some rows of a table, given with its state: those of a range, which are then copied to
    `out`, or with these ids, none of which is repeated."""
    table, state = arrays
    device = str(table.device)
    try:
        if isinstance(ids, slice):
            beside = {name: array[ids] for name, array in state.items()}
            some = table[ids]
            _apply(updater, some, beside, delta, step)
            if out is not None:
                torch_rows.copy(out, some)
            return
        index = torch_rows.send(ids, device)
        some = torch_rows.take(table, index)
        beside = {name: torch_rows.take(array, index) for name, array in state.items()}
        _apply(updater, some, beside, delta, step)
        torch_rows.put(table, index, some)
        for name, array in beside.items():
            torch_rows.put(state[name], index, array)
    finally:
        torch_rows.finish(device)


def _apply(
    updater: Updater, table: Tensor, state: dict[str, Tensor], delta: Tensor, step: int
) -> None:
    """Do what `Updater.update` does. A user's function gets all rows at once."""
    if updater.fun is not None:
        call_user(updater, updater.fun, table, state, delta.clone())
    elif updater.name == "add":
        torch_rows.add_all(table, delta)
    else:
        rule = RULES[updater.name]
        factors = rule.factors(step, **dict(updater.options))
        wide = computed_in(np.dtype(torch_rows.element_of(table))).name
        flat = [array.view(-1) for array in (table, *(state[name] for name in updater.state))]
        given = delta.reshape(-1)
        for start in range(0, given.numel(), _BLOCK):
            stored = [array[start : start + _BLOCK] for array in flat]
            part = given[start : start + _BLOCK]
            torch_rows.change(rule.change, stored, part, wide, factors)


def prepare_addition(table: Tensor, where: Ids | slice, delta: Tensor) -> Callable[[], object]:
    """Return what adds a delta to some rows, none of them named twice, when it is called. It has no
    code in Python, so no signal handler runs between the store before the call and its effect. The
    caller waits with `await_done`."""
    if isinstance(where, slice):
        return torch_rows.prepare_addition(table[where], None, delta)
    device = str(table.device)
    index = torch_rows.send(where, device)
    torch_rows.synchronize(device)
    return torch_rows.prepare_addition(table, index, delta)


class _Turns(NamedTuple):
    """Rows to add, turn by turn, and those that the host adds after that."""

    turns: Sequence[tuple[Tensor, Tensor]]
    rest: _Rest | None


class _Rest(NamedTuple):
    #: the rows that change, where they are on the device and where in this list each delta belongs
    index: Tensor
    into: Ids
    delta: Array


def _in_turns(ids: Ids, delta: Tensor) -> _Turns:
    """Return rows to add, in turns of which each has no id twice."""
    device = str(delta.device)
    occurrence = rows.occurrences(ids)
    order = np.argsort(occurrence, kind="stable")
    ends = np.cumsum(np.bincount(occurrence))
    within = order[: ends[min(len(ends), _TURNS) - 1]]
    index = torch_rows.send(ids[within], device)
    ordered = torch_rows.take(delta, torch_rows.send(within, device))
    cuts = [0, *ends[:_TURNS].tolist()]
    turns = [(index[a:b], ordered[a:b]) for a, b in pairwise(cuts)]
    if len(ends) <= _TURNS:
        return _Turns(turns, None)
    left = np.flatnonzero(occurrence >= _TURNS)
    named, into = np.unique(ids[left], return_inverse=True)
    some = torch_rows.fetch(torch_rows.take(delta, torch_rows.send(left, device)))
    return _Turns(turns, _Rest(torch_rows.send(named, device), into, some))


def _add(table: Tensor, turns: _Turns) -> None:
    for index, delta in turns.turns:
        torch_rows.add_some(table, index, delta)
    if turns.rest is not None:
        index, into, delta = turns.rest
        some = to_host(torch_rows.take(table, index))
        with np.errstate(all="ignore"):
            np.add.at(some, into, delta)
        torch_rows.put(table, index, torch_rows.send(some, str(table.device)))


def make_adder(n_rows: int, dtype: np.dtype[Any]) -> DeviceAdder:
    """Return what adds to some rows."""
    return DeviceAdder(n_rows)


class DeviceAdder:
    """An Adder for rows on a device."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._scratch: Array | None = None
        self._checker: torch_row_ids.Checker | None = None

    def prepare(self, table: Tensor, ids: Ids | DeviceIds, delta: Tensor, *, touch: bool) -> _Turns:
        """Bring to the device what `add` needs, in turns in which no id is repeated."""
        if isinstance(ids, DeviceIds):
            if self._checker is None:
                self._checker = torch_row_ids.Checker(self._n_rows, str(table.device))
            if ids.are_distinct(self._checker):
                return _Turns([(ids.tensor, delta)], None)
            ids = ids.on_host()
        if self._scratch is None and self._n_rows <= _SCRATCH:
            self._scratch = np.zeros(self._n_rows, np.int32)
        device = str(table.device)
        if rows.repeats(ids, self._scratch) is None:
            turns = _Turns([(torch_rows.send(ids, device), delta)], None)
        else:
            turns = _in_turns(ids, delta)
        torch_rows.synchronize(device)
        return turns

    def add(self, table: Tensor, ids: Ids, delta: Tensor, prepared: _Turns) -> None:
        try:
            _add(table, prepared)
        finally:
            torch_rows.finish(str(table.device))


# what users give


def as_row_ids(rows: Any, spec: TableSpec) -> Ids | DeviceIds:
    """Return row ids: those on the device as they are, if the table has so few rows that each can
    have a stamp there. Raises what `as_ids` raises."""
    adapter = lookup.of(rows)
    if adapter is not None and adapter.NAME == "torch" and spec.n_rows <= _SCRATCH:
        ids = rows.detach()
        if torch_row_ids.are_ids(ids, spec.device):
            return DeviceIds(ids, spec.n_rows)
    return as_ids(rows, spec.n_rows)


def as_tensor(
    value: Any, shape: tuple[int, ...], spec: TableSpec, *, check_finite: bool = False
) -> Tensor:
    """Return a delta as a tensor on the table's device: what lies there with the table's dtype as
    it is, and anything else by way of the host. Raises what `as_delta` raises."""
    given = _on(spec.device, value, spec.dtype.name)
    if given is None or given.numel() != np.prod(shape, dtype=np.int64):
        return _sent(as_delta(value, shape, spec.dtype, check_finite=check_finite), spec.device)
    if given.shape != shape and given.dim() != 1:
        as_delta(value, shape, spec.dtype)  # raises
    if check_finite and spec.dtype.kind in "fc" and not torch_rows.is_finite(given):
        as_delta(value, shape, spec.dtype, check_finite=True)  # raises
    return given.contiguous().view(shape)


def _sent(array: Array, device: str) -> Tensor:
    sent = torch_rows.send(array, device)
    torch_rows.synchronize(device)
    return sent


def _on(device: str, value: Any, element: str) -> Tensor | None:
    """Return a value that is a dense tensor on a device, with these numbers, without its gradient;
    None for anything else."""
    adapter = lookup.of(value)
    if adapter is None or adapter.NAME != "torch" or not torch_rows.is_on(value, device):
        return None
    dense = torch_rows.dense(value)
    return dense if torch_rows.element_of(dense) == element else None


def as_room(value: Any, shape: tuple[int, ...], spec: TableSpec) -> Tensor | None:
    """Return the tensor given as `out=`, if rows can be written to it on the device; None if they
    have to be copied there. Raises unless it can take the result."""
    adapter = lookup.of(value)
    if adapter is None:
        raise InvalidType(f"out= is a {type(value).__name__}; expected a tensor or an array")
    element, _, form, _ = adapter.describe(value)
    if form != shape or element != spec.dtype.name:
        raise InvalidValue(
            f"out= is {element}{list(form)}; the result is {spec.dtype}{list(shape)}"
        )
    if adapter.NAME != "torch":
        as_out(value, shape, spec.dtype)  # whether it can be written to
        return None
    room = _on(spec.device, value, spec.dtype.name)
    return room if room is not None and room.is_contiguous() else None


def deliver(tensor: Tensor, out: Any) -> Any:
    """Return rows in what was given as `out=`, if anything was."""
    if out is None:
        return tensor
    adapter: Any = lookup.of(out)
    if adapter.NAME == "torch":
        if not torch_rows.same_memory(tensor, out):
            torch_rows.deliver(tensor, out)
    else:
        view, _ = adapter.view(out)
        view[...] = torch_rows.fetch(tensor)
    return out


def on_this_stream(device: str, work: Callable[[], Any]) -> Callable[[], Any]:
    """Return what another thread does on the stream that is current here."""
    stream = torch_rows.stream(device)

    def go_on() -> Any:
        with stream.current():
            return work()

    return go_on


def validate_dtype(dtype: np.dtype[Any]) -> None:
    """Raise InvalidType for numbers that the device does not have."""
    torch_rows.validate_element(dtype.name)
