"""Values for a variable: casts that lose nothing are made, others refused unless asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.errors import InvalidType, InvalidValue


def fit(value: Any, dtype: Any, ndim: int | None, what: str, *, force_cast: bool = False) -> Any:
    """Return a value as an array of this dtype and number of axes.

    Numbers and lists have no dtype of their own: they take this one if it is of their kind. An
    array of the right form is returned as it is.
    """
    wanted = None if dtype is None else np.dtype(dtype)
    array = _as_array(value, what)
    if ndim is not None and array.ndim != ndim:
        raise InvalidValue(
            f"{what} has {array.ndim} axes (shape {array.shape}); expected an array with {ndim}"
        )
    if wanted is None or array.dtype == wanted:
        return array
    own = hasattr(value, "dtype")
    if not force_cast and not np.can_cast(array.dtype, wanted, "safe" if own else "same_kind"):
        raise InvalidType(
            f"{what} has dtype {array.dtype}; expected {wanted}, or what becomes that without "
            f"loss: convert it with .astype({wanted.name!r}), or make it Data with force_cast=True"
        )
    return array.astype(wanted)


def _as_array(value: Any, what: str) -> Any:
    try:
        array = np.asanyarray(value)
    except ValueError as error:
        raise InvalidValue(f"{what} is no array ({error}); expected numbers in rows") from None
    if array.dtype.kind not in "biufc":
        raise InvalidType(
            f"{what} is a {type(value).__name__} of dtype {array.dtype}; expected numbers"
        )
    return array
