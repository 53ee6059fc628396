"""A whole beside its combined parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weft
from weft._core.checks import Trial, compare, is_close, isolate, sample
from weft._core.functions import Partial


@pytest.mark.parametrize("rows", [slice(10, 12), slice(0, 7), slice(5, 1000), np.array([4, 4, 0])])
def test_a_sample_is_spread_and_has_two_parts(rows: Any) -> None:
    """The first and the last row are in it; no part is empty."""
    few, parts = sample(rows)
    all_rows = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
    assert 2 <= len(few) <= 8
    assert (few[0], few[-1]) == (all_rows[0], all_rows[-1])
    assert [len(part) > 0 for part in parts] == [True, True]
    assert np.concatenate(parts).tolist() == few.tolist()
    if len(few) > 2:
        assert len(parts[0]) != len(parts[1])


def test_what_fits_is_known() -> None:
    """For each output apart; a single mode that fits settles it."""
    parts = [Partial((1.0, np.ones(2), 3), 3), Partial((5.0, np.zeros(1), 4), 5)]
    trial = [Trial((3.5, np.array([1, 1, 0.0]), 7), parts)]
    right = compare(trial, ["mean", "gather", "sum"])
    assert (right.difference, right.settled) == (None, True)
    wrong = compare(trial, ["mean", "gather", "max"]).difference
    assert wrong is not None
    assert (wrong.name, wrong.mode, wrong.joined, wrong.fitting) == (
        "the output[2]",
        "max",
        4,
        ["sum"],
    )
    zeros = compare([Trial(0.0, [Partial(0.0, 3), Partial(0.0, 5)])], "sum")
    assert (zeros.difference, zeros.settled) == (None, False)
    ones = Trial(np.ones(3), [Partial(np.ones(1), 1), Partial(np.ones(2), 2)])
    alike = compare([ones], "gather")
    assert (alike.difference, alike.settled) == (None, False)
    anything = Trial("any", [Partial("thing", 1), Partial(3, 2)])
    assert compare([anything], None).difference is None
    with pytest.raises(weft.InvalidValue, match=r"the output\['b'\] is there for all rows"):
        compare([Trial({"a": 1, "b": 2}, [Partial({"a": 1}, 1), Partial({"a": 0}, 1)])], "sum")


def test_what_fits_random_numbers() -> None:
    """One output that parts make on average does not hide another that they do not."""
    rng = np.random.default_rng(0)

    def trial() -> Trial:
        parts = [rng.normal(10.0, 3.0, size) for size in (3, 5)]
        whole = rng.normal(10.0, 3.0, 8)
        each = [Partial((part.mean(), part.sum(), part), len(part)) for part in parts]
        return Trial((whole.mean(), whole.sum(), whole), each)

    trials = [trial() for _ in range(40)]
    assert compare(trials, ["mean", "sum", "gather"]).difference is None
    wrong = compare(trials, ["mean", "mean", "gather"]).difference
    assert wrong is not None
    assert (wrong.name, wrong.fitting) == ("the output[1]", ["sum"])


def test_rounding_is_allowed_for() -> None:
    """As much as the numbers' kind and size have of it, and no more."""
    large = np.full(3, 1e6, np.float32)
    assert is_close(np.float32(0.01), np.float32(0.02), [large])
    assert not is_close(np.float64(0.01), np.float64(0.02), [large.astype(float)])
    assert not is_close(1.0, 1.001)
    assert is_close(np.array([np.nan, np.inf]), np.array([np.nan, np.inf]))
    assert is_close([1, {"a": (2.0, None)}], [1, {"a": (2.0, None)}])
    assert not is_close([1], (1, 2))
    assert is_close(10**30, 10**30)
    assert not is_close(10**30, 10**30 + 1)


def test_a_copy_shares_nothing_that_it_could_change() -> None:
    """Arrays are the same memory, and read-only; what is shared on purpose is itself."""
    array, shared, kept, seen = np.zeros(5), weft.share(np.zeros(5)), object(), [1]

    def function(at: int) -> Any:
        seen.append(at)
        return array, shared, kept, seen

    copy = isolate(function, [kept])
    one, other, same, own = copy(2)
    assert same is kept
    assert (seen, own) == ([1], [1, 2])
    array[0] = shared[1] = 7
    assert (one[0], other[1]) == (7, 7)
    for constant in (one, other):
        with pytest.raises(ValueError, match="read-only"):
            constant[0] = 1
