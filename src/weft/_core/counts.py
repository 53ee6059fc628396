"""Whole numbers as users give them."""

from __future__ import annotations

import operator
from typing import Any


def whole(value: Any) -> int | None:
    """A whole number as Python's own; None for what is none.

    NumPy's integers are whole numbers. True and 2.0 are not.

    >>> import numpy
    >>> whole(numpy.int64(2)), whole(2.0), whole(True)
    (2, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
