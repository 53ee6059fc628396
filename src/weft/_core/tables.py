"""What a table is, what may be given to it, and which rank waits for which.

Each rank counts its own adds. A rule says how many adds every other rank must have made before this
one may go on; nobody waits for a rank that has left or died.

                before this rank's next add    before its get
    async       nothing                        nothing
    ssp(k)      own + 1 - k                    nothing
    bsp         own                            own, and everybody's first `own` adds are applied

Under ssp(k) nobody is ever more than k adds ahead of the slowest. Under bsp a rank's delta is
staged until its turn. Each rank has room for one, so its next add waits until the last has been
applied, which happens once every rank has made that add.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft._core.arguments import whole
from weft._core.arithmetic import Array
from weft._core.updaters import BUILT_IN, Updater
from weft.adapters import lookup
from weft.errors import InvalidType, InvalidValue

Ids = NDArray[np.intp]
_NUMBERS = "iufc"
_INDEX, _UNSIGNED = np.dtype(np.intp), np.dtype(np.uintp)


@dataclass(frozen=True)
class TableSpec:
    """The description of a table, which must be the same on every rank."""

    kind: str
    #: (elements,) or (rows, columns)
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    updater: Updater
    consistency: Consistency
    exact: bool
    name: str
    #: "cpu", or the device of this process on which the rows are, as torch names it: "cuda:0". With
    #: "cpu:0" they are tensors in memory of the host
    device: str = "cpu"

    def __str__(self) -> str:
        updater = str(self.updater)
        if self.updater.state and self.updater.name not in BUILT_IN:
            updater += f"(state={[*self.updater.state]})"
        options = [
            f"dtype={self.dtype.name!r}",
            f"updater={updater}",
            f"consistency={self.consistency}",
        ]
        options += [] if self.exact else ["exact=False"]
        options += [f"device={_kind(self.device)!r}"] if self.on_device else []
        options += [f"name={self.name!r}"]
        return f"{self.kind}({', '.join([*map(str, self.shape), *options])})"

    @property
    def on_device(self) -> bool:
        """Return whether the rows are tensors on a device, and not arrays of NumPy."""
        return self.device != "cpu"

    @property
    def n_rows(self) -> int:
        return self.shape[0]

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Return the shape of one row: () for an array's element."""
        return self.shape[1:]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the rows alone."""
        return prod(self.shape) * self.dtype.itemsize


def _kind(device: str) -> str:
    """Return a device without its number, which may be another on each rank."""
    return "cuda" if device.startswith("cuda") else device


@dataclass(frozen=True)
class Interrupted:
    """An add that a rank had begun when it died: these rows may be half updated."""

    rank: int
    #: row ids; a range where a whole part of the table was being updated
    rows: Sequence[int]
    #: of the group that the table was made in
    generation: int


def validate_size(what: str, value: object) -> int:
    """Return a number of rows, columns or elements as an int. Raise unless it is 1 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidType(f"{what}={value!r}: expected a whole number, or an array to start from")
    if value < 1:
        raise InvalidValue(f"{what}={value}: a table has 1 or more; expected a positive number")
    return int(value)


def validate_dtype(value: Any) -> np.dtype[Any]:
    """Return the dtype of a table. Raise InvalidType unless its elements are numbers."""
    dtype = None
    if value is not None:  # None is float64 to NumPy
        # which of these NumPy raises for an invalid dtype depends on what it is given
        with contextlib.suppress(TypeError, ValueError, SyntaxError):
            of_torch = type(value).__module__ == "torch"
            dtype = np.dtype(str(value).removeprefix("torch.") if of_torch else value)
    if dtype is None or dtype.kind not in _NUMBERS:
        raise InvalidType(
            f"dtype={value!r}: expected integers, floats or complex numbers, as NumPy names them, "
            "such as 'float32'"
        )
    return np.dtype(dtype.type)  # NumPy's singleton, which arrays in native byte order have too


def as_array(value: Any, what: str) -> Array:
    """Return numbers as users give them (a list, a range, an array) as a NumPy array. Raises
    InvalidType and InvalidValue for anything else; they call it `what`."""
    adapter = lookup.of(value)
    if adapter is not None:
        view, element = adapter.view(value)
        if element == "bfloat16":
            raise InvalidType(f"{what} of bfloat16, which tables do not have; pass x.float()")
        array: Array = view
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise InvalidValue(
                f"{what} is ragged: {error}; expected one number per element"
            ) from None
    if array.dtype.kind not in _NUMBERS + "b" and array.size:
        of = " of at most 64 bits" if array.dtype.hasobject and array.ndim else ""
        raise InvalidType(f"{what} is {_named(value)}; expected numbers{of}, as a list or an array")
    return array


def as_delta(
    value: Any,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    *,
    check_finite: bool = False,
    what: str = "delta",
) -> Array:
    """Return a delta as an array of the table's dtype and of this shape; it may be given flat.
    Raises InvalidType where numbers would lose more than their last digits, InvalidValue for
    another size and, with `check_finite`, for NaN and infinity."""
    if type(value) is np.ndarray and value.dtype is dtype:
        array = value  # the usual case
    else:
        array = _cast(as_array(value, what), dtype, what, given=hasattr(value, "dtype"))
    if array.shape != tuple(shape):
        if array.size != prod(shape) or array.ndim != 1:
            raise InvalidValue(
                f"a delta of shape {array.shape} was added where {tuple(shape)} was expected"
                + ("" if len(shape) < 2 else f", or {prod(shape)} numbers in one row")
                + ("" if array.ndim else f"; for one number everywhere, numpy.full({shape}, x)")
            )
        array = array.reshape(tuple(shape))
    if check_finite and dtype.kind in "fc" and not np.isfinite(array).all():
        first = np.argwhere(~np.isfinite(array))[0].tolist()
        where = first[0] if len(first) == 1 else tuple(first)
        raise InvalidValue(
            f"the delta has {array[tuple(first)]} at {where}; this table was made with "
            "check_finite=True, so nothing was added"
        )
    return array if array.flags.c_contiguous and array.flags.aligned else np.array(array, order="C")


def _cast(array: Array, dtype: np.dtype[Any], what: str, *, given: bool) -> Array:
    """Cast numbers to the table's dtype. Rounding is allowed, as in NumPy's `+=`; another kind of
    number, or one out of range, is not. Lists, which were not `given` with a dtype, only need
    values that fit."""
    if array.dtype == dtype:
        return array
    if not given and not array.size:
        return array.astype(dtype)
    kinds = f"{what} of {array.dtype} for a table of {dtype}"
    if given and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise InvalidType(
            f"{kinds}: the cast would lose values; convert it yourself, or make the "
            f"table with dtype='{np.result_type(array.dtype, dtype)}'"
        )
    if array.dtype.kind in "fc" and dtype.kind in "iu":
        raise InvalidType(f"{kinds}: fractions would be lost; pass whole numbers")
    if array.dtype.kind == "c" and dtype.kind != "c":
        raise InvalidType(f"{kinds}: imaginary parts would be lost")
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    exact = dtype.kind in "iu"
    fits = cast == array if exact else np.isfinite(cast) | ~np.isfinite(array)
    if not fits.all():
        limits = np.iinfo(dtype) if exact else np.finfo(dtype)
        raise InvalidValue(
            f"{kinds}: {array[~fits].flat[0]} is out of range; expected {limits.min} to "
            f"{limits.max}"
        )
    return cast


def as_ids(value: Any, n_rows: int) -> Ids:
    """Return row ids as an array of indexes: those of a slice as NumPy takes it, else the given
    ones. Raise unless all are within 0 to n_rows - 1."""
    if type(value) is np.ndarray and value.dtype is _INDEX and value.ndim < 2:
        ids = value  # the usual case
    else:
        ids = _indexes(value, n_rows)
    # as unsigned numbers the negative ids are the largest; argmax takes half the time of max
    unsigned = ids.view(_UNSIGNED)
    if ids.size and unsigned.item(unsigned.argmax()) >= n_rows:
        wrong = ids.reshape(-1)
        raise _out_of_range_error(int(wrong[(wrong < 0) | (wrong >= n_rows)][0]), n_rows)
    return ids


def _indexes(value: Any, n_rows: int) -> Ids:
    if isinstance(value, slice):
        return _sliced(value, n_rows)
    array = as_array(value, "rows")
    if array.dtype.kind not in "iu" and array.size:
        mask = "; for a mask pass numpy.flatnonzero(mask)" if array.dtype.kind == "b" else ""
        raise InvalidType(f"rows is {_named(value)}; expected whole numbers{mask}")
    if array.ndim > 1:
        raise InvalidValue(f"rows has shape {array.shape}; expected one row id, or a list of them")
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(_INDEX).max:
        raise _out_of_range_error(int(array.max()), n_rows)
    return array.astype(_INDEX)


def _sliced(rows: slice, n_rows: int) -> Ids:
    try:
        return np.arange(*rows.indices(n_rows), dtype=_INDEX)
    except TypeError:
        raise InvalidType(
            f"rows={rows}: expected whole numbers, such as slice(0, {n_rows})"
        ) from None
    except ValueError:
        raise InvalidValue(f"rows={rows}: expected a step other than 0") from None


def _out_of_range_error(wrong: int, n_rows: int) -> InvalidValue:
    return InvalidValue(f"row {wrong} is not in this table; expected 0 to {n_rows - 1}")


def as_out(value: Any, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return a view of the array given as `out=`. Raise unless it can take the result."""
    adapter = lookup.of(value)
    if adapter is None:
        raise InvalidType(f"out= is {_named(value)}; expected an array")
    view, element = adapter.view(value)
    # by their names: NumPy has no bfloat16
    if view.shape != tuple(shape) or element != dtype.name:
        raise InvalidValue(
            f"out= is {element}{list(view.shape)}; the result is {dtype}{list(shape)}"
        )
    if not view.flags.writeable:
        raise InvalidValue("out= cannot be written to; pass an array of your own")
    array: Array = view
    return array


def _named(value: object) -> str:
    text = repr(value)
    dtype = getattr(value, "dtype", None)
    what = type(value).__name__ if dtype is None else f"{type(value).__name__} of {dtype}"
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({what})"


@dataclass(frozen=True)
class Consistency:
    """One of the three rules, given by its name or by `ssp(k)`."""

    name: str
    #: of ssp: how many adds a rank may be ahead of the slowest
    slack: int = 0

    def __str__(self) -> str:
        return f"ssp({self.slack})" if self.name == "ssp" else self.name

    def before_add(self, own: int) -> int:
        """Return how many adds every other rank must have made before a rank that has made `own`
        makes the next."""
        if self.name == "ssp":
            return max(0, own + 1 - self.slack)
        return own if self.name == "bsp" else 0

    def before_get(self, own: int) -> int:
        """Return how many adds every other rank must have made before a rank that has made `own`
        reads."""
        return own if self.name == "bsp" else 0


ASYNC = Consistency("async")
BSP = Consistency("bsp")


def ssp(k: int) -> Consistency:
    """Return a consistency: nobody is more than `k` adds ahead of the slowest rank.

    A rank that would be waits, before its add, until the slowest has caught up, has left or has
    died.

    >>> import weft
    >>> weft.init().size
    1
    >>> table = weft.ArrayTable(10, consistency=weft.ssp(3))
    >>> weft.shutdown()

    Raises InvalidType, InvalidValue for anything but a whole number of at least 1.
    """
    adds = whole(k)
    if adds is None:
        raise InvalidType(f"ssp({k!r}): expected a whole number of adds")
    if adds < 1:
        raise InvalidValue(
            f"ssp({k}): expected 1 or more; where nobody may be ahead at all, use consistency='bsp'"
        )
    return Consistency("ssp", adds)


def resolve(value: object) -> Consistency:
    """Return the rule that `consistency=` names. Raises InvalidType and InvalidValue."""
    if isinstance(value, Consistency):
        return value
    for known in (ASYNC, BSP):
        if value == known.name:
            return known
    kind = InvalidValue if isinstance(value, str) else InvalidType
    raise kind(f"consistency={value!r}: expected 'async', 'bsp' or weft.ssp(k)")


def slack_of(value: object) -> int:
    """Return by how many clocks rows may be older, as `get(consistency=ssp(k))` says. Raises
    InvalidType and InvalidValue for anything else."""
    if isinstance(value, Consistency) and value.name == "ssp":
        return value.slack
    kind = InvalidValue if isinstance(value, (str, Consistency)) else InvalidType
    raise kind(f"get(consistency={value!r}): expected weft.ssp(k), or None for the latest rows")


def behind(counts: Mapping[int, int], needed: int) -> list[int]:
    """List the ranks that have made fewer adds than needed, given how many each has made."""
    return [rank for rank, count in counts.items() if count < needed]


def staleness(own: int, others: Mapping[int, int]) -> int:
    """Return how many adds the slowest of the others is behind a rank that has made `own`."""
    return max(0, own - min(others.values(), default=own))
