"""Whole numbers and timeouts, as users give them."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

import weft
from weft._core.arguments import (
    deadline_after,
    explain_keywords,
    from_environment,
    seconds_until,
    validate_keywords,
    validate_seconds,
    whole,
)
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


def test_a_wrong_keyword_is_named_with_the_nearest() -> None:
    """Also where nothing is near; the error lists what there is."""
    known = ("inputs", "outputs", "mode")
    validate_keywords({"mode": 1, "inputs": 2}, known, "function")
    message = r"function\(modes=\.\.\.\): .* the nearest is mode=.* inputs, outputs, mode"
    with pytest.raises(InvalidType, match=message):
        validate_keywords(["inputs", "modes"], known, "function")
    with pytest.raises(InvalidType, match=r"function\(z=\.\.\.\): .* the nearest is \w+="):
        validate_keywords(["z"], known, "function")


def test_a_wrong_keyword_of_any_call() -> None:
    """Is told so where calls, methods and classes are decorated; other errors stay."""

    class Table:
        @explain_keywords
        def __init__(self, size: int, init_value: object = None) -> None:
            if init_value == "wrong":
                raise TypeError("within")

        @explain_keywords
        def add(self, data: object, *more: object, sync: bool = False) -> object:
            return data

        @explain_keywords
        def nothing(self) -> None:
            pass

        @explain_keywords
        def train(self, loss: object, params: object, **options: object) -> object:
            return options

    message = r"^Table\(sise=\.\.\.\): .* the nearest is size=\. Table takes size, init_value$"
    with pytest.raises(InvalidType, match=message.replace("Table", r"\S*Table")) as caught:
        Table(sise=3)  # type: ignore[call-arg]
    assert caught.value.__cause__ is caught.value.__context__ is None
    table: Any = Table(size=3)
    assert table.add(data=1) == table.add(1, 2, sync=True) == 1
    for call, words in (
        (
            lambda: table.add(1, snyc=True),
            r"add\(snyc=\.\.\.\): .* is sync=\. .* takes data, sync$",
        ),
        (lambda: table.nothing(now=1), r"nothing\(now=\.\.\.\): it takes no arguments"),
        (
            lambda: table.train(1, parms=2, lr=3),
            r"train\(parms=\.\.\.\): .* the nearest is params=",
        ),
    ):
        with pytest.raises(InvalidType, match=words):
            call()
    assert table.train(1, 2, parms=3) == {"parms": 3}
    for call, words in (
        (lambda: Table(1, "wrong"), "^within$"),
        (Table, "missing 1 required"),
        (lambda: table.train(1, learning_rate=3), "missing 1 required .* 'params'"),
    ):
        with pytest.raises(TypeError, match=words) as other:
            call()
        assert not isinstance(other.value, InvalidType)


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


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), np.array(2)])
def test_whole_numbers(value: Any) -> None:
    """Those of NumPy become Python's own."""
    assert whole(value) == 2
    assert type(whole(value)) is int


@pytest.mark.parametrize("value", [True, np.True_, np.array(True), 2.0, np.float64(2), "2", None])
def test_what_is_none(value: Any) -> None:
    assert whole(value) is None


def test_numpys_numbers_are_numbers_everywhere() -> None:
    """Programs compute how many workers, items and seconds they want."""
    one, two = np.int64(1), np.int64(2)
    found = weft.map(
        abs, [-1, -2], n=two, gpus=np.int64(0), retries=one, seed=two, timeout=np.float32(60)
    )
    assert found == [1, 2]
    assert weft.map_async(abs, [-1], n=two, timeout=two * 10).wait(two * 10) == [1]
    assert weft.distribute(abs, max_cpu=two, max_gpu=one, retries=one, seed=one)([-1]) == [1]
    with weft.Team(two, timeout=np.int64(60)) as team:
        f = weft.function(
            lambda x, w: x * w, split=one - 1, whole=[one], collect="gather", team=team
        )
        assert f(np.arange(5), 2, num_slices=two, batch=two).tolist() == [0, 2]
        copies = weft.replicate(np.zeros(2), team=team)
        copies.set(one, [3.0, 4.0])
        assert copies.get(one).tolist() == [3, 4]
    assert weft.ssp(two) == weft.ssp(2)


@pytest.mark.parametrize("wrong", [True, np.True_, 2.0])
def test_what_is_no_whole_number_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidType, match="whole number"):
        weft.map(abs, [1], n=wrong)
    with pytest.raises(InvalidType, match="whole number"):
        weft.map(abs, [1], retries=wrong)
    with pytest.raises(InvalidType, match="whole number"):
        weft.distribute(abs, max_cpu=wrong)
