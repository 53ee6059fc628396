"""Inputs of functions in shared memory: mapped once, and no longer than they are of use."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import wait_until
from weft.engines.local import large_arrays, shared_arrays
from weft.errors import InvalidType

_last: list[Any] = []


def still_seen(x: Any) -> list[bool]:
    """Whether what the call before was given is mapped here still, and this is the same."""
    from weft.engines.local.mapped import buffer_of

    before, buffer = (_last[0]() if _last else None), buffer_of(x)
    _last[:] = [] if buffer is None else [weakref.ref(buffer)]
    return [before is not None and before is buffer]


def mapped_before(x: Any) -> list[bool]:
    """Whether what the call before the last was given is mapped here still."""
    return [bool(_last) and _last[0]() is not None]


def test_a_shared_array_stays_mapped_from_call_to_call() -> None:
    """The worker sees the same memory, and need not map it again."""
    x = weft.share(np.zeros((4, 1000)))
    with weft.Team(2) as team:
        seen = weft.function(still_seen, collect="gather", team=team)
        assert seen(x)[1] is False
        assert [seen(x)[1] for _ in range(3)] == [True] * 3


def test_a_shared_array_that_is_used_no_more_is_let_go() -> None:
    """With the next call."""
    with weft.Team(2) as team:
        seen = weft.function(still_seen, collect="gather", team=team)
        other = weft.function(mapped_before, collect="gather", team=team)
        x = weft.share(np.zeros((4, 1000)))
        seen(x)
        assert seen(weft.share(np.zeros((4, 1000))))[1] is False
        seen(x)
        other(np.zeros(2))
        assert seen(x)[1] is False


def test_a_plain_array_is_let_go_at_once() -> None:
    """Its memory is wanted for the next call's."""
    with weft.Team(2) as team:
        seen = weft.function(still_seen, collect="gather", team=team)
        assert [seen(np.zeros((4, 100_000)))[1] for _ in range(3)] == [False] * 3


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
    from weft.engines.local import blocks

    with weft.Team(2) as team:
        total = weft.function(np.sum, collect="sum", team=team)
        x = weft.share(np.ones((4, 10)))
        for _ in range(200):
            assert total(x) == 40
        del x
        total(np.zeros(2))
        wait_until(lambda: not blocks._here.keeper._kept)


def test_what_goes_whole_to_several_workers_is_packed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there are, and in whatever it lies; each may change what it got."""
    copies = []

    def copy_in(array: Any) -> Any:
        copies.append(array.nbytes)
        return shared_arrays.copy_in(array)

    monkeypatch.setattr(large_arrays, "copy_in", copy_in)

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
