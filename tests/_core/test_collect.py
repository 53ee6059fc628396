"""Results in the order of their items."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft._core.items import Collected, Finished


def part(first: int, values: list[Any], failures: dict[int, Exception] | None = None) -> Finished:
    return Finished(first, values, failures or {}, 0, 1, 0.0, 0, 0)


@given(st.lists(st.integers(1, 5), max_size=20), st.booleans(), st.randoms())
def test_order_is_that_of_the_items(sizes: list[int], known: bool, random: Any) -> None:
    """Whatever the order in which batches come, known in number or not."""
    parts, first = [], 0
    for size in sizes:
        parts.append(part(first, list(range(first, first + size))))
        first += size
    random.shuffle(parts)
    collected = Collected(first if known else None, keep_failures=False)
    for one in parts:
        collected.add(one)
    assert collected.results == list(range(first))
    assert (collected.finished, collected.failed) == (first, 0)


def test_the_first_failure_of_a_batch_is_raised() -> None:
    """Without keeping failures, the one of the lowest index; nothing of the batch is taken in."""
    early, late = KeyError("early"), ValueError("late")
    collected = Collected(4, keep_failures=False)
    with pytest.raises(KeyError, match="early"):
        collected.add(part(1, [1, None, None], {3: late, 2: early}))
    assert collected.finished == 0


def test_failures_are_kept_in_their_places() -> None:
    """With keeping, an exception stands where its result would."""
    error = ValueError("no")
    collected = Collected(None, keep_failures=True)
    collected.add(part(2, [None, 3], {2: error}))
    collected.add(part(0, [0, 1]))
    assert collected.results == [0, 1, error, 3]
    assert (collected.finished, collected.failed) == (4, 1)
