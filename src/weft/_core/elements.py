"""What the numbers of an array are, and in what they are summed.

    stored                   sum, prod            mean              min, max
    bool                     or, and              float64           as stored
    integers                 as stored (wraps)    float64           as stored
    float16, bfloat16        float32              float32           as stored (bfloat16: float32)
    float32 and wider        as stored            as stored         as stored
    complex                  as stored            as stored         as stored, NumPy's order

A weighted mean is taken in double precision at the least. The result is cast back to what is
stored, as NumPy casts: once, after the totals of all hosts have been accumulated.

    parts of a host  --accumulate-->  its total, wide  --accumulate-->  total  --finish-->  result
                     in rank order                     in the order of hosts   divide, narrow

Sums of integers wrap around in any width to the same result, so they need no wider one. NumPy
has no bfloat16: it is stored in the upper half of a float32, here as uint16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """Write to `out` what the parts, in the order of their ranks, come to.

    A part may be overwritten once the one after the next is asked for, and may be `out` itself.
    `weights`, one per part, are for the mean; a part of weight 0 does not count at all. `element`
    names the kind of number, which the dtype does not tell for bfloat16.
    """
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
    """Write to `total`, which has the `wide_type`, what the parts come to before `finish`.

    Returns their weight: their number, or the sum of their weights. Where that is 0, `total` is
    left as it is. Totals of several hosts are accumulated likewise, in the order of hosts, with
    their dtype's name as `element` and without those of weight 0; their weights are added.
    Of parts that have the type of `total` and no weights `combine` says what may be overwritten.
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
    """Write to `out`, which may be `total` itself, the result of all parts: of a mean the total
    divided by their weight. Changes `total`."""
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
    """Whether numbers of a dtype of NumPy's are combined in that dtype."""
    return _wide(dtype, op, dtype.name) is None


@lru_cache(maxsize=256)
def _wide(dtype: np.dtype[Any], op: str, element: str) -> np.dtype[Any] | None:
    """In what to accumulate; None for what is stored."""
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
    """Return a copy in another type, in `out` if it is given."""
    if element == BFLOAT16:
        bits: Array = stored.astype(np.uint32) << np.uint32(16)
        stored = bits.view(np.float32)
    if out is None:
        return stored.astype(wide, copy=element != BFLOAT16)
    np.copyto(out, stored)
    return out


def narrow(wide: Array, out: Array, element: str) -> None:
    """Write to `out` what was computed in another type; bfloat16 is rounded to the nearest, ties
    to even, as every conversion to floats rounds."""
    if element != BFLOAT16:
        np.copyto(out, wide, casting="unsafe")
        return
    wide = np.ascontiguousarray(wide, np.float32)
    bits = wide.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    # rounding could carry a NaN into infinity: it keeps its upper bits, one of them set
    nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    np.copyto(out, np.where(np.isnan(wide), nan, rounded), casting="unsafe")
