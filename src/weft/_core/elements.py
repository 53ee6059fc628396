"""What the numbers of an array are, and in what they are summed.

    stored                   sum, prod            mean              min, max
    bool                     or, and              float64           as stored
    integers                 as stored (wraps)    float64           as stored
    float16, bfloat16        float32              float32           as stored (bfloat16: float32)
    float32 and wider        as stored            as stored         as stored
    complex                  as stored            as stored         as stored, NumPy's order

A weighted mean is taken in double precision at the least. The result is cast back to what is
stored, as NumPy casts. Sums of integers wrap around in any width to the same result, so they need
no wider one. NumPy has no bfloat16: it is stored in the upper half of a float32, here as uint16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
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
    function = OPERATIONS[op]
    wide = _wide(out.dtype, op, element)
    if weights is not None:
        wide = np.result_type(wide or out.dtype, np.float64)
    if wide is None:
        total, count = _fold(function, parts, out)
        if count == 1 and total is not out:
            np.copyto(out, total)
        if op == "mean" and count > 1:
            np.true_divide(out, count, out=out)
        return
    result, divisor = _fold_wide(function, parts, weights, wide, element)
    if op == "mean":
        np.true_divide(result, divisor, out=result)
    narrow(result, out, element)


def _fold(function: np.ufunc, parts: Iterable[Array], out: Array) -> tuple[Array, int]:
    iterator = iter(parts)
    total, count = next(iterator), 1
    for part in iterator:
        total = function(total, part, out=out)
        count += 1
    return total, count


def _fold_wide(
    function: np.ufunc,
    parts: Iterable[Array],
    weights: Sequence[float] | None,
    wide: np.dtype[Any],
    element: str,
) -> tuple[Array, float]:
    result: Array | None = None
    divisor = 0.0
    for rank, part in enumerate(parts):
        weight = 1 if weights is None else weights[rank]
        if weight == 0:
            continue  # the mean of no rows is often NaN
        term = widen(part, wide, element)
        if weights is not None:
            term *= weight
        result = term if result is None else function(result, term, out=result)
        divisor += weight
    if result is None:
        raise ValueError("all weights are 0")  # refused before any part is asked for
    return result, divisor


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


def widen(stored: Array, wide: np.dtype[Any], element: str) -> Array:
    """A copy in another type."""
    if element == BFLOAT16:
        bits: Array = stored.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).astype(wide, copy=False)
    return stored.astype(wide)


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
