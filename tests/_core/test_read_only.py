"""Arrays to which nothing can be written, here and in workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import weft
from weft._core.arrays import read_only

Array = np.ndarray[Any, Any]


class Own(Array):
    """A user's own class."""


def subjects() -> dict[str, Array]:
    some = np.ma.masked_less(np.arange(50_000.0), 10)
    some.fill_value = -1
    hard = np.ma.array(np.arange(3), mask=[0, 1, 0], hard_mask=True)
    return {
        "plain": np.arange(50_000.0),
        "small": np.arange(3),
        "objects": np.array([[1], "a", None] * 10, dtype=object),
        "structured": np.zeros(3, dtype=[("a", "i4"), ("b", object)]),
        "masked": some,
        "hard mask": hard,
        "no mask": np.ma.array(np.arange(3.0)),
        "masked objects": np.ma.array(np.array([1, "a", None], dtype=object), mask=[1, 0, 0]),
        "another class": np.arange(3).view(Own),
    }


def refuses_all(array: Any, expected: Any) -> list[str]:
    """What is wrong with an array that was to be read-only: empty if nothing."""
    wrong = [] if type(array) is type(expected) else [f"it is a {type(array)}"]
    if array.tolist() != expected.tolist():
        wrong.append("it has other values")

    def change(part: Any) -> None:
        part[0] = part[-1]

    attempts: list[Callable[[], Any]] = [lambda: change(array)]
    if isinstance(array, np.ma.MaskedArray):
        if array.fill_value != expected.fill_value or array.hardmask != expected.hardmask:
            wrong.append("it fills or hardens otherwise")
        attempts += [
            lambda: change(array.mask),
            lambda: array.__setitem__(0, np.ma.masked),
            lambda: change(array.data),
        ]
    for number, attempt in enumerate(attempts):
        try:
            attempt()
            wrong.append(f"attempt {number} to change it succeeded")
        except ValueError:
            pass
    return wrong


@pytest.mark.parametrize("name", subjects())
def test_nothing_can_be_written(name: str) -> None:
    """The array itself is as writable as it was."""
    array = subjects()[name]
    assert not refuses_all(read_only(array), array)
    array[0] = array[-1]


@pytest.mark.parametrize("engine", ["local", "serial"])
def test_no_shared_data_can_be_written(engine: str) -> None:
    """Of every kind of array, in every engine."""
    data = subjects()

    def function(name: str, shared_data: dict[str, Any]) -> list[str]:
        return refuses_all(shared_data[name], subjects()[name])

    found = weft.map(function, list(data), n=2, engine=engine, shared_data=data)
    assert dict(zip(data, found, strict=True)) == {name: [] for name in data}


def test_a_masked_arrays_data_is_not_copied() -> None:
    """They lie in shared memory like those of any other."""
    array = np.ma.array(np.arange(2_000_000.0), mask=np.arange(2_000_000) % 2)

    def function(_: int, shared_data: dict[str, Any]) -> tuple[float, bool]:
        values = shared_data["array"]
        return float(values.sum()), values.data.base is None

    assert weft.map(function, [0], n=1, shared_data={"array": array}) == [(array.sum(), False)]
