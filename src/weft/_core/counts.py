"""Whole numbers as users give them."""

from __future__ import annotations

import operator
from typing import Any

from weft.errors import InvalidType, InvalidValue


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


def checked(value: Any, where: str, name: str, *, least: int | None = None) -> int:
    """A whole number, and not below the least: the option `name` of `where`. Raises InvalidType,
    InvalidValue."""
    rule = "a whole number" + ("" if least is None else f", {least} or more")
    number = whole(value)
    if number is None:
        got = type(value).__name__
        raise InvalidType(f"{where}({name}={value!r}): expected {rule}, got {got}")
    if least is not None and number < least:
        raise InvalidValue(f"{where}({name}={value!r}): expected {rule}")
    return number
