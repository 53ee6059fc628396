"""How long a call may wait."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weft._core.timeouts import checked, from_environment
from weft.errors import InvalidType, InvalidValue


@pytest.mark.parametrize("value", [0, 1, 0.5, math.inf])
def test_seconds(value: float) -> None:
    """Any number from 0 on, infinity too."""
    assert checked(value) == float(value)


@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, InvalidValue), (math.nan, InvalidValue), (None, InvalidType), ("1", InvalidType)],
)
def test_anything_else_is_named(value: Any, error: type[Exception]) -> None:
    """The error shows the value and the way to say "no deadline"."""
    with pytest.raises(error, match=rf"limit={value!r}: expected.*math\.inf"):
        checked(value, "limit")


def test_the_variable() -> None:
    """WEFT_TIMEOUT is a number of seconds; empty is unset."""
    assert from_environment({}) is None
    assert from_environment({"WEFT_TIMEOUT": ""}) is None
    assert from_environment({"WEFT_TIMEOUT": "2.5"}) == 2.5
    for wrong in ("soon", "-1", "nan"):
        with pytest.raises(InvalidValue, match="WEFT_TIMEOUT"):
            from_environment({"WEFT_TIMEOUT": wrong})
