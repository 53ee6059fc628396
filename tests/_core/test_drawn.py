"""Items of iterators that go on using what they have yielded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import weft
from weft._core.drawn import draw

SHARES = True  # one pool for the whole file


def filled(make: Callable[[], Any], fill: Callable[[Any, int], None], count: int) -> Iterator[Any]:
    """One object again and again, with another number in it each time."""
    one = make()
    for number in range(count):
        fill(one, number)
        yield one


def set_first(one: Any, number: int) -> None:
    one[0] = number


def set_deep(one: Any, number: int) -> None:
    one["a"][1][0] = number


REUSED: dict[str, tuple[Callable[[], Any], Callable[[Any, int], None], Callable[[Any], Any]]] = {
    "array": (lambda: np.zeros(3), set_first, lambda one: float(one[0])),
    "view": (lambda: np.zeros(9)[2:5], set_first, lambda one: float(one[0])),
    "large array": (lambda: np.zeros(20_000), set_first, lambda one: float(one[0])),
    "list": (lambda: [0], set_first, lambda one: one[0]),
    "long list": (lambda: [0] * 100, set_first, lambda one: one[0]),
    "bytearray": (lambda: bytearray(2), set_first, lambda one: one[0]),
    "nested": (lambda: {"a": (1, [0, 2])}, set_deep, lambda one: one["a"][1][0]),
    "object": (
        lambda: SimpleNamespace(x=0),
        lambda one, number: setattr(one, "x", number),
        lambda one: one.x,
    ),
}


@pytest.mark.parametrize("kind", REUSED)
@pytest.mark.parametrize("how", ["map", "imap", "timeout", "pairs"])
def test_each_item_is_what_it_was_when_it_was_drawn(kind: str, how: str) -> None:
    make, fill, read = REUSED[kind]
    items = filled(make, fill, 60)
    if how == "map":
        found = weft.map(read, items, n=2)
    elif how == "imap":
        found = list(weft.imap(read, items, n=2))
    elif how == "timeout":
        found = weft.map(read, items, n=2, timeout=100)
    else:
        found = weft.map(lambda pair: read(pair[1]), enumerate(items), n=2)
    assert found == list(range(60))


def test_what_nobody_else_has_is_kept_as_it_is() -> None:
    """Without a copy, and any number may be drawn before they are sent."""
    fresh: list[tuple[Callable[[], Any], type]] = [
        (lambda: np.zeros(3), np.ndarray),
        (lambda: np.float64(1), np.float64),
        (lambda: [1, "a", (2, None)], list),
        (lambda: {"a": [1], "b": np.ones(2)}, dict),
        (lambda: SimpleNamespace(x=1), SimpleNamespace),
        (lambda: weft.share(np.zeros(3)), np.ndarray),
    ]
    for make, kind in fresh:
        addresses = []

        def one(make: Callable[[], Any] = make, addresses: list[int] = addresses) -> Any:
            made = make()
            addresses.append(id(made))
            return made

        item, safe = draw(one() for _ in range(1))
        assert safe, item
        assert isinstance(item, kind)
        assert id(item) == addresses[0], item


def test_constants_are_kept_whoever_has_them() -> None:
    held = [1, "text", b"bytes", None, 2.5, (1, "a"), frozenset((1,)), range(3)]
    items = iter(held)
    for one in held:
        found, safe = draw(items)
        assert safe
        assert found is one


def test_arrays_in_shared_memory_stay_shared() -> None:
    shared = weft.share(np.zeros(4))

    def add(array: Any) -> None:
        array[0] += 1

    weft.map(add, (shared for _ in range(3)), n=1)
    assert shared[0] == 3
