"""Exceptions that signal handlers raise."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from weft.engines.interruption import by_signal_handler


@pytest.fixture(autouse=True)
def handler_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def press(*_: object) -> None:
    raise TimeoutError("pressed")


class Presser:
    def press(self, *_: object) -> None:
        raise TimeoutError("pressed")

    def __call__(self, *_: object) -> None:
        raise TimeoutError("pressed")


@pytest.mark.parametrize(
    "handler",
    [press, Presser().press, Presser(), functools.partial(press, 1), lambda *_: press()],
    ids=["function", "method", "object", "partial", "lambda"],
)
def test_a_handlers_exception_is_known(handler: Any) -> None:
    """Whatever kind of handler it is. The same exception raised by somebody else is not one."""
    signal.signal(signal.SIGUSR1, handler)
    with pytest.raises(TimeoutError) as caught:
        signal.raise_signal(signal.SIGUSR1)
    assert by_signal_handler(caught.value)
    with pytest.raises(ZeroDivisionError) as other:
        _ = 1 // 0
    assert not by_signal_handler(other.value)


class PressedWhilePickled:
    """The handler's exception comes while it is packed, as often as it is."""

    times = 0

    def __reduce__(self) -> Any:
        PressedWhilePickled.times += 1
        signal.raise_signal(signal.SIGUSR1)
        return str, ("packed",)


@pytest.mark.parametrize("place", ["item", "function", "argument", "kept"])
def test_a_handlers_exception_is_raised_and_not_taken_for_an_items(place: str) -> None:
    """A signal that comes while something is packed says nothing of what is packed: no second
    pickler tries, and no item fails."""
    signal.signal(signal.SIGUSR1, press)
    value, PressedWhilePickled.times = PressedWhilePickled(), 0
    with pytest.raises(TimeoutError, match="pressed"):
        pack_as(place, value)
    assert PressedWhilePickled.times == 1
    assert weft.map(len, [[1]], n=1) == [1]


def pack_as(place: str, value: Any) -> None:
    if place == "item":
        weft.map(len, [[1], [value]], n=1, on_error="return")
    elif place == "function":
        weft.map(lambda x: value, [1], n=1)
    else:
        with weft.Team(2) as team:
            if place == "argument":
                weft.function(len, team=team, collect="sum")([[1], [value]])
            else:
                weft.replicate([value], team=team)
