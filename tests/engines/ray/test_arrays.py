"""Which arrays several items of a map use, and how these are pickled."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import weft
from weft.engines.local.pool.payload_arrays import RepeatedArray
from weft.engines.ray import arrays
from weft.engines.ray.arrays import AsTensor, Noting, Placed, Repeated, is_placed
from weft.engines.ray.wire import pack_values

LARGE = np.arange(20_000.0)


@pytest.fixture(autouse=True)
def _no_cycles() -> Iterator[None]:
    """What is dropped is gone at once: no collection is needed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Holder:
    def __init__(self, array: Any) -> None:
        self.array = array


def mentioned(items: list[Any], repeated: Repeated) -> list[Placed]:
    with Noting() as noting:
        pack_values(items, None, repeated)
    return list(noting.mentioned.values())


@pytest.mark.parametrize(
    "items",
    [
        [LARGE, 1, LARGE],
        [(LARGE, 1), (2, LARGE)],
        [{"deep": [LARGE]}] * 2,
        [Holder(LARGE), {1: (LARGE,)}],
        [lambda: LARGE, (lambda: 1, LARGE)],
    ],
)
def test_arrays_that_several_items_have(items: list[Any]) -> None:
    """Are found wherever they are, travel as a number, and are what they were."""
    repeated = Repeated()
    pack_values(items, None, repeated)
    assert repeated.met_others
    assert repeated.look(items)
    (placed,) = mentioned(items, repeated)
    assert not repeated.met_others
    assert pack_values(items, None, repeated)[0].nbytes < LARGE.nbytes
    assert placed.shape == LARGE.shape
    assert placed.array is LARGE
    assert is_placed(placed.number)
    number = placed.number
    del placed, repeated
    assert not is_placed(number)


def test_arrays_that_one_item_has() -> None:
    """Travel with it, and so do small ones, and those of objects."""
    small, objects = np.arange(10.0), np.array([None] * 20_000)
    copies = [LARGE.copy() for _ in range(3)]
    items = [*copies, *[(small, objects)] * 3, [LARGE, LARGE]]
    repeated = Repeated()
    assert not repeated.look(items)
    assert mentioned(items, repeated) == []
    assert repeated.look([copies[1]])  # of a stream: it comes a second time
    (placed,) = mentioned(items, repeated)
    assert placed.array is copies[1]


def test_an_array_that_nobody_has_any_more() -> None:
    """Of a stream, in which arrays come and go: its copies on hosts go, too."""
    array = LARGE.copy()
    repeated = Repeated()
    assert repeated.look([array, array])
    (placed,) = mentioned([array], repeated)
    number = placed.number
    del placed, array
    repeated.look([1])
    assert not is_placed(number)


def test_items_that_cannot_be_pickled() -> None:
    """Are not what this is to tell."""
    repeated = Repeated()
    assert not repeated.look([LARGE, threading.Lock(), LARGE])


def test_tensors_and_shared_arrays() -> None:
    """Are found as arrays are; a tensor comes back as one."""
    torch = pytest.importorskip("torch")
    tensor, shared = torch.arange(20_000.0), weft.share(LARGE)
    with_gradient = torch.zeros(20_000, requires_grad=True)
    items = [(tensor, shared, with_gradient)] * 2
    repeated = Repeated()
    assert repeated.look(items)
    with Noting() as noting:
        packed, _ = pack_values(items, None, repeated)
    assert len(noting.mentioned) == 2
    loaded = packed.load()
    assert isinstance(loaded[0][0], AsTensor)
    make, (array,) = loaded[0][0].__reduce__()
    assert torch.equal(make(array), tensor)
    assert loaded[1][1] is shared


def test_on_a_host() -> None:
    """Of a repeated array each worker gets one of its own, of the same values."""
    held = arrays._place(LARGE, arrays.SentArray([None], readonly=False, copied=True))
    assert type(held) is RepeatedArray

    def changes(item: Any) -> float:
        array = item[0] if isinstance(item, tuple) else item
        assert type(array) is np.ndarray
        array += 1
        return float(array[0])

    assert weft.map(changes, [held] * 4, n=2) == [1.0] * 4
    assert all(one >= 1 for one in weft.map(changes, [(held, k) for k in range(4)], n=2))
    assert held[0] == 0
    fixed = arrays._place(LARGE, arrays.SentArray([None], readonly=True, copied=True))
    assert weft.map(lambda one: one.flags.writeable, [fixed] * 2, n=2) == [False] * 2
