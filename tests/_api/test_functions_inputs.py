"""Inputs of functions in shared memory: mapped once, and no longer than they are of use."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import wait_until
from weft.engines.local.memory import arrays
from weft.engines.local.pool import payload_arrays
from weft.errors import InvalidType


def still_seen(x: Any) -> list[bool]:
    """Whether what the call before was given is mapped here still, and this is the same."""
    from weft.engines.local.memory import arrays

    # in a module of weft's: the data of this one would be the driver's in workers, too
    last = vars(arrays).setdefault("seen_by_a_test", [])
    before, buffer = (last[0]() if last else None), arrays.buffer_of(x)
    last[:] = [] if buffer is None else [weakref.ref(buffer)]
    return [before is not None and before is buffer]


def questions(x: Any) -> list[str]:
    """How often this process has asked others for memory, as text."""
    from weft.engines.local.memory import blocks

    return [repr(blocks._here.client._numbers)]


def test_shared_arrays_are_asked_for_once() -> None:
    """Their memory stays mapped from call to call, also when two take turns."""
    arrays = [weft.share(np.zeros((4, 1000))) for _ in range(2)]
    with weft.Team(2) as team:
        asked = weft.function(questions, collect="gather", team=team, check=None)
        first = [asked(x)[1] for x in arrays][-1]
        assert [asked(x)[1] for x in arrays * 3] == [first] * 6


@pytest.mark.parametrize("make", [weft.share, np.array])
def test_an_array_is_let_go_at_once(make: Any) -> None:
    """The memory of a plain one is wanted for the next call's."""
    with weft.Team(2) as team:
        seen = weft.function(still_seen, collect="gather", team=team, check=None)
        assert [seen(make(np.zeros((4, 100_000))))[1] for _ in range(3)] == [False] * 3


def test_the_driver_holds_nothing() -> None:
    """An array lives no longer for having been an input."""
    with weft.Team(2) as team:
        total = weft.function(np.sum, collect="sum", team=team)
        x = weft.share(np.ones((4, 10)))
        assert total(x) == 40
        reference = weakref.ref(x)
        del x
        assert reference() is None


def test_references_to_what_is_mapped_hold_nothing() -> None:
    """However many there were, the memory is given back when its owner drops it."""
    from weft.engines.local.memory import blocks

    with weft.Team(2) as team:
        total = weft.function(np.sum, collect="sum", team=team)
        x = weft.share(np.ones((4, 10)))
        for _ in range(200):
            assert total(x) == 40
        del x
        total(np.zeros(2))
        wait_until(lambda: not blocks._here.server._entries)


def test_what_goes_whole_to_several_workers_is_packed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there are, and in whatever it lies; each may change what it got."""
    copies = []

    def copy_in(array: Any) -> Any:
        copies.append(array.nbytes)
        return arrays.copy_in(array)

    monkeypatch.setattr(payload_arrays, "copy_in", copy_in)

    def function(x: Any, tables: dict[str, Any], scale: float) -> Any:
        tables["w"] += x[0] * scale  # no two ranks have the same row
        return x * 0 + tables["w"].sum()

    with weft.Team(3) as team:
        f = weft.function(function, whole=["tables", "scale"], collect="gather", team=team)
        w = np.zeros(200_000)
        found = f(np.arange(1.0, 4.0), {"w": w}, scale=2.0)
        assert found.tolist() == [400_000, 800_000, 1_200_000]
        assert copies == [w.nbytes]
        lock = threading.Lock()
        with pytest.raises(InvalidType, match=r"^tables\['w'\] is a _thread\.lock"):
            f(np.arange(1.0, 4.0), {"w": lock}, 2.0)
        with pytest.raises(InvalidType, match=r"^tables\['w'\] is a _thread\.lock"):
            f(np.arange(1.0, 4.0), tables={"w": lock}, scale=2.0)
