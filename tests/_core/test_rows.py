"""Some rows of a table, against loops that take one row after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft._core import rows, updaters
from weft._core.arithmetic import Array
from weft._core.tables import Ids

#: ids of a few rows, so that many repeat, and of any; the largest leave no bits for positions
few, any_ids = st.integers(0, 4), st.integers(0, 2**63 - 1)
ids_of_few = st.lists(few, max_size=30)


def indexes(ids: list[int]) -> Ids:
    return np.array(ids, dtype=np.intp)


def deltas(ids: list[int], columns: int, dtype: Any = np.int64) -> Array:
    """One row for each id, no two alike; without columns, single numbers."""
    whole = np.arange(1, 1 + len(ids) * max(columns, 1)).astype(dtype)
    return whole.reshape(len(ids), columns) if columns else whole


def sums(ids: list[int], delta: Array) -> dict[int, Any]:
    """What each id gets in all."""
    totals: dict[int, Any] = {}
    for one, row in zip(ids, delta, strict=True):
        totals[one] = totals[one] + row if one in totals else row
    return totals


def table_of(columns: int, dtype: Any = np.int64) -> Array:
    shape = (5, columns) if columns else (5,)
    return np.full(shape, 1000, dtype)


def test_rows_are_added_one_after_the_other() -> None:
    """Also those of one id: the sum is rounded as in a loop, to the bit."""
    generator = np.random.default_rng(0)
    for count in (2, 3, 20, 200):
        ids = generator.integers(0, 7, count)
        sizes = 10.0 ** generator.integers(-3, 8, (count, 1))
        delta = (generator.normal(size=(count, 5)) * sizes).astype(np.float32)
        for columns in (None, 5):
            given_ = delta if columns else np.ascontiguousarray(delta[:, 0])
            table = np.ones((7, 5) if columns else 7, np.float32)
            expected = table.copy()
            for one, row in zip(ids, given_, strict=True):
                expected[one] += row
            added(table, ids.tolist(), given_)
            assert table.tobytes() == expected.tobytes()


def added(table: Array, ids: list[int], delta: Array) -> None:
    """By NumPy's loops; tests/test_kernels.py has those in C."""
    adder, named = rows.NumpyAdder(len(table), table.dtype), indexes(ids)
    adder.add(table, named, delta, adder.prepare(table, named, delta, touch=True))


# where ids are named again


@given(st.lists(few, max_size=40) | st.lists(any_ids | few, max_size=20))
def test_repeats_are_found(ids: list[int]) -> None:
    """Each position whose id a later one names, with the last that does; by sorting either way,
    and with scratch memory, whatever it holds."""
    last = {one: position for position, one in enumerate(ids)}
    expected = {p: last[one] for p, one in enumerate(ids) if last[one] != p}
    given_ = indexes(ids)
    ways = [None] if max(ids, default=0) > 4 else [None, np.arange(5, dtype=np.int32)]
    for scratch in ways:
        found = rows.repeats(given_, scratch)
        assert given_.tolist() == ids
        if found is None:
            assert expected == {}
            continue
        assert len(found.earlier) == len(expected)
        assert dict(zip(found.earlier.tolist(), found.last.tolist(), strict=True)) == expected


@pytest.mark.parametrize("largest", [1, 2**30, 2**59, 2**60, 2**61, 2**62, 2**63 - 1])
def test_repeats_of_large_ids(largest: int) -> None:
    """Also where an id and a position just fit, or do not fit, one number."""
    for count in (2, 3, 4, 7, 8, 9):
        ids = indexes([largest, largest - 1] * (count // 2) + [largest] * (count % 2))
        found = rows.repeats(ids)
        last = {int(one): position for position, one in enumerate(ids)}
        expected = {p: last[int(one)] for p, one in enumerate(ids) if last[int(one)] != p}
        if found is None:
            assert not expected
        else:
            assert dict(zip(found.earlier.tolist(), found.last.tolist(), strict=True)) == expected


@pytest.mark.parametrize("ids", [[], [7], [3, 1, 2], [2**63 - 1, 0]])
def test_ids_that_are_named_once(ids: list[int]) -> None:
    """There is nothing to say of them, and nothing is copied."""
    given_, delta = indexes(ids), deltas(ids, 2)
    assert rows.repeats(given_) is None
    merged, total = rows.merge(given_, delta)
    assert merged is given_
    assert total is delta


def test_an_id_a_thousand_times() -> None:
    """One row may get everything."""
    ids = [3] * 1000
    found = rows.repeats(indexes(ids))
    assert found is not None
    assert set(found.last.tolist()) == {999}
    merged, total = rows.merge(indexes(ids), deltas(ids, 0))
    assert (merged.tolist(), total.tolist()) == ([3], [sum(range(1, 1001))])


# what is done with them


@given(ids_of_few | st.lists(any_ids | few, max_size=12), st.integers(0, 3))
def test_merge_adds_up_what_belongs_together(ids: list[int], columns: int) -> None:
    """Each id once, with the sum of its deltas; what was given stays."""
    given_, delta = indexes(ids), deltas(ids, columns)
    merged, total = rows.merge(given_, delta)
    expected = sums(ids, delta)
    assert sorted(merged.tolist()) == sorted(expected)
    assert total.shape == (len(expected), *delta.shape[1:])
    for one, row in zip(merged.tolist(), total, strict=True):
        assert np.array_equal(row, expected[one])
    assert given_.tolist() == ids
    assert np.array_equal(delta, deltas(ids, columns))


@given(ids_of_few, st.integers(0, 3), st.sampled_from(["int8", "uint64", "float32", "complex64"]))
def test_add_is_the_loop_over_rows(ids: list[int], columns: int, dtype: str) -> None:
    """Rows that are named get all their deltas, the others stay as they are."""
    table, expected = table_of(columns, "int64").astype(dtype), table_of(columns).astype(dtype)
    delta = deltas(ids, columns, dtype)
    with np.errstate(over="ignore"):
        for one, row in zip(ids, delta, strict=True):
            expected[one] += row
    added(table, ids, delta)
    assert np.array_equal(table, expected)
    assert np.array_equal(delta, deltas(ids, columns, dtype))


@given(ids_of_few, st.integers(0, 3))
@settings(max_examples=50)
def test_update_touches_the_rows_named(ids: list[int], columns: int) -> None:
    """The updater sees exactly the rows and the state of the ids; nothing else changes."""
    seen: list[int] = []

    def rule(rows: Array, state: dict[str, Array], delta: Array) -> None:
        seen.append(len(rows))
        state["sum"] += delta
        state["count"] += 1
        rows -= 2 * state["sum"]

    updater = updaters.custom(rule, state=["sum", "count"])
    table = table_of(columns)
    state = {name: np.zeros_like(table) for name in updater.state}
    state["sum"] += 5
    delta = deltas(ids, columns)
    merged, total = rows.merge(indexes(ids), delta)
    rows.update((table, state), merged, total, updater, 1)
    expected = sums(ids, delta)
    for one in range(5):
        change = expected.get(one)
        if change is None:
            assert np.array_equal(table[one], table_of(columns)[one])
            assert (state["sum"][one] == 5).all()
            assert (state["count"][one] == 0).all()
        else:
            assert np.array_equal(table[one], 1000 - 2 * (5 + change))
            assert np.array_equal(state["sum"][one], 5 + change)
            assert (state["count"][one] == 1).all()
    assert seen == ([len(expected)] if expected else [])


@pytest.mark.parametrize("columns", [0, 2])
def test_infinities_pass_without_warning(columns: int) -> None:
    """Sums that are too large are infinite, also where NumPy is asked to raise."""
    table = np.full((5, columns) if columns else 5, 3e38, np.float32)
    ids = [1, 2, 2, 3]
    delta = np.full((4, *table.shape[1:]), 2e38, np.float32)
    delta[3] = -np.inf
    with np.errstate(all="raise"):
        added(table, ids, delta)
        merged, total = rows.merge(indexes(ids), delta)
    first = table.reshape(5, -1)[:, 0]
    assert first.tolist() == [np.float32(3e38), np.inf, np.inf, -np.inf, np.float32(3e38)]
    assert np.isinf(total[merged == 2]).all()


def test_an_updater_that_fails_changes_nothing() -> None:
    """Rows and state are written when the rule has ended."""

    def rule(rows: Array, state: dict[str, Array], delta: Array) -> None:
        rows += 1
        state["kept"] += 1
        raise ZeroDivisionError

    table = table_of(2)
    state = {"kept": np.zeros_like(table)}
    updater = updaters.custom(rule, state=["kept"])
    with pytest.raises(ZeroDivisionError):
        rows.update((table, state), indexes([1]), deltas([1], 2), updater, 1)
    assert (table == 1000).all()
    assert (state["kept"] == 0).all()


@given(ids_of_few, st.integers(0, 3))
def test_read_copies_in_the_order_of_ids(ids: list[int], columns: int) -> None:
    """As often as a row is named, and into the memory given."""
    table = deltas([0, 1, 2, 3, 4], columns)
    out = np.zeros((len(ids), *table.shape[1:]), table.dtype)
    rows.read(table, indexes(ids), out)
    assert np.array_equal(out, table[ids] if ids else out)
    one = np.zeros(table.shape[1:], table.dtype)
    rows.read(table, np.array(3), one)
    assert np.array_equal(one, table[3])
