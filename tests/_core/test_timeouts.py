"""How long a call may wait."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from weft._core.arguments import deadline_after, from_environment, seconds_until, validate_seconds
from weft.errors import InvalidType, InvalidValue


@pytest.mark.parametrize("value", [0, 1, 0.5, math.inf])
def test_seconds(value: float) -> None:
    """Any number from 0 on, infinity too."""
    assert validate_seconds(value) == float(value)


@pytest.mark.parametrize(
    ("value", "error"),
    [(-1, InvalidValue), (math.nan, InvalidValue), (None, InvalidType), ("1", InvalidType)],
)
def test_anything_else_is_named(value: Any, error: type[Exception]) -> None:
    """The error shows the value and the way to say "no deadline"."""
    with pytest.raises(error, match=rf"limit={value!r}: expected.*math\.inf"):
        validate_seconds(value, "limit")


def test_deadlines() -> None:
    """A call's own timeout counts before the default; none is left when it has passed."""
    assert 0 < seconds_until(deadline_after(None, 5.0)) <= 5
    assert seconds_until(deadline_after(0, 5.0)) == 0
    assert seconds_until(time.monotonic() - 1) == 0
    assert deadline_after(math.inf, 5.0) == seconds_until(math.inf) == math.inf
    with pytest.raises(InvalidValue, match="timeout=-1"):
        deadline_after(-1, 5.0)


def test_the_variable() -> None:
    """WEFT_TIMEOUT is a number of seconds; empty is unset."""
    assert from_environment({}) is None
    assert from_environment({"WEFT_TIMEOUT": ""}) is None
    assert from_environment({"WEFT_TIMEOUT": "2.5"}) == 2.5
    for wrong in ("soon", "-1", "nan"):
        with pytest.raises(InvalidValue, match="WEFT_TIMEOUT"):
            from_environment({"WEFT_TIMEOUT": wrong})
