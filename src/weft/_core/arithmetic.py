"""Arithmetic of arrays: combining what the ranks have, and adding.

Combining: which type totals are accumulated in.

    stored                   sum, prod            mean              min, max
    bool                     or, and              float64           as stored
    integers                 as stored (wraps)    float64           as stored
    float16, bfloat16        float32              float32           as stored (bfloat16: float32)
    float32 and wider        as stored            as stored         as stored
    complex                  as stored            as stored         as stored, NumPy's order

A weighted mean is accumulated in double precision at least. The result is cast back to the stored
type, as NumPy casts, once: after the totals of all hosts have been accumulated.

    parts of a host  --accumulate-->  its total, wide  --accumulate-->  total  --finish-->  result
                     in rank order                     in the order of hosts   divide, narrow

Sums of integers need no wider type: they wrap around to the same result in any width. NumPy has no
bfloat16, which is the upper half of a float32: arrays of it have the dtype uint16 here.

Adding: `add_to` and `sum_in_place` use a kernel in C where there is one and it is faster than
NumPy.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft import kernels

Array = NDArray[Any]

OPERATIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}

#: the kinds of dtypes that can be reduced
NUMERIC = "biufc"
BFLOAT16 = "bfloat16"


def combine(
    parts: Iterable[Array],
    out: Array,
    op: str,
    element: str,
    weights: Sequence[float] | None = None,
) -> None:
    """Combine the parts, which come in the order of their ranks, into `out`.

    A part may be overwritten once the one after the next is asked for, and may be `out` itself.
    `weights`, one per part, are for the mean; a part of weight 0 does not count at all. `element`
    names the kind of number, which the dtype does not tell for bfloat16. All may be tensors on a
    device.
    """
    where: Any = out
    if not isinstance(where, np.ndarray):
        importlib.import_module("weft.adapters.torch_arrays").combine(parts, out, op, weights)
        return
    wide = wide_type(out.dtype, op, element, weighted=weights is not None)
    total = out if weights is None and wide == out.dtype else np.empty(out.shape, wide)
    weight = accumulate(parts, total, op, element, weights)
    finish(total, out, op, element, weight)


def accumulate(
    parts: Iterable[Array],
    total: Array,
    op: str,
    element: str,
    weights: Sequence[float] | None = None,
) -> float:
    """Combine the parts into `total`, which has the `wide_type`; `finish` makes the result of it.

    Return the weight of the parts: their number, or the sum of their weights. If that is 0, `total`
    is left as it is. Totals of several hosts are accumulated likewise, in the order of hosts, with
    their dtype's name as `element` and without those of weight 0; their weights are added. If
    parts have the type of `total` and no weights, `combine` says when one may be overwritten.
    """
    function, iterator = OPERATIONS[op], iter(parts)
    first = next(iterator)
    if weights is None and first.dtype == total.dtype:
        result, count = first, 1
        for part in iterator:
            result = function(result, part, out=total)
            count += 1
        if result is not total:
            np.copyto(total, first)
        return count
    weight = 0.0
    for rank, part in enumerate(chain((first,), iterator)):
        share = 1.0 if weights is None else weights[rank]
        if share == 0:
            continue  # the mean of no rows is often NaN
        term = widen(part, total.dtype, element, out=None if weight else total)
        if weights is not None:
            term *= share
        if weight:
            function(total, term, out=total)
        weight += share
    return weight


def finish(total: Array, out: Array, op: str, element: str, weight: float) -> None:
    """Write the result of all parts to `out`, which may be `total` itself: a mean divides the total
    by their weight. Changes `total`."""
    if weight == 0:
        raise ValueError("all weights are 0")  # refused before any part is asked for
    if op == "mean" and weight != 1:
        np.true_divide(total, weight, out=total)
    if total is not out:
        narrow(total, out, element)


def wide_type(dtype: np.dtype[Any], op: str, element: str, *, weighted: bool) -> np.dtype[Any]:
    """Return the type in which totals are accumulated."""
    wide = _wide(dtype, op, element) or dtype
    return np.result_type(wide, np.float64) if weighted else wide


def accumulates_as_stored(dtype: np.dtype[Any], op: str) -> bool:
    """Return whether totals of this dtype, one of NumPy's own, are accumulated in it."""
    return _wide(dtype, op, dtype.name) is None


@lru_cache(maxsize=256)
def _wide(dtype: np.dtype[Any], op: str, element: str) -> np.dtype[Any] | None:
    """Return the type to accumulate in, or None for the stored one."""
    if element == BFLOAT16:
        return np.dtype(np.float32)
    if op in ("min", "max"):
        return None
    if dtype == np.float16:
        return np.dtype(np.float32)
    if op == "mean" and dtype.kind in "biu":
        return np.dtype(np.float64)
    return None


def widen(stored: Array, wide: np.dtype[Any], element: str, *, out: Array | None = None) -> Array:
    """Return a copy in a wider type, in `out` if it is given."""
    if element == BFLOAT16:
        bits: Array = stored.astype(np.uint32) << np.uint32(16)
        stored = bits.view(np.float32)
    if out is None:
        return stored.astype(wide, copy=element != BFLOAT16)
    np.copyto(out, stored)
    return out


def narrow(wide: Array, out: Array, element: str) -> None:
    """Cast what was computed in a wider type to `out`. Rounds bfloat16 as all floats are rounded:
    to nearest, ties to even."""
    if element != BFLOAT16:
        np.copyto(out, wide, casting="unsafe")
        return
    wide = np.ascontiguousarray(wide, np.float32)
    bits = wide.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    # rounding could carry a NaN over to infinity, so it keeps its upper bits, one of them set
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    np.copyto(out, np.where(np.isnan(wide), nan, rounded), casting="unsafe")


#: bytes from which on arrays are assumed not to be cached: there the kernel is faster on some
#: processors
_LARGE_ADD = 2 << 20


def add_to(array: Array, delta: Array) -> None:
    """Add in place: array += delta."""
    faster = array.nbytes >= _LARGE_ADD and kernels.adding_side_by_side_pays()
    kernel = kernels.add_kernel(array.dtype.name) if faster else None
    if kernel is not None and kernel_applies(array, delta):
        kernel(address(array), address(delta), array.size)
    else:
        np.add(array, delta, out=array)


def can_sum_in_place(array: Array, element: str) -> bool:
    """Return whether `sum_in_place` takes arrays like this one. `element` names the kind of number:
    bfloat16 has the dtype uint16."""
    native = array.dtype.isnative and array.dtype.name == element
    return native and kernels.sum_in_place_kernel(element) is not None


def sum_in_place(arrays: Sequence[Array]) -> None:
    """Replace each of several arrays by the sum of all, in their order, in one pass over memory.
    They are contiguous and alike. Raises TypeError if there is no kernel for them."""
    kernel = kernels.sum_in_place_kernel(arrays[0].dtype.name)
    if kernel is None:
        raise TypeError(f"there is no kernel that sums arrays of {arrays[0].dtype} in place")
    kernel([address(array) for array in arrays], arrays[0].size)


def same_buffer(source: Array, target: Array) -> bool:
    """Return whether two flat arrays are the same memory."""
    return source.nbytes == target.nbytes and address(source) == address(target)


def kernel_applies(array: Array, given: Array) -> bool:
    """Return whether a kernel, which goes through memory element by element, can change `array` by
    `given` as NumPy would: same dtype and shape, both contiguous, no overlap."""
    alike = array.dtype == given.dtype and array.shape == given.shape and array.dtype.isnative
    contiguous = array.flags.carray and given.flags.c_contiguous and given.flags.aligned
    return alike and contiguous and not np.may_share_memory(array, given)


def address(array: Array) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])
