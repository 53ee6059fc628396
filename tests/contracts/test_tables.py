"""What every engine's tables do. Each test runs on every engine, launcher and size.

All bodies of a size run in one launch (`bodies.py`), in the session's group, which is where tables
are made. Every rank knows what the others add, and so what it should get.
"""

from __future__ import annotations

import gc
import hashlib
import os
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

import weft
from tests._core.test_checkpoint import FIRST, forged
from tests.contracts.bodies import Bodies
from weft.engines.base import Group
from weft.errors import (
    Disagreement,
    InvalidType,
    InvalidValue,
    NotInitialized,
    OutOfMemory,
    Stalled,
    UsedAfterFork,
)
from weft.resources import available_memory

BODIES = Bodies(each_in="session")
OVER_HOSTS = True
IDS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*IDS, "float16", "float32", "float64", "longdouble", "complex64", "complex128")


def given(rank: int, shape: Any, dtype: str = "float32", seed: int = 0) -> Any:
    """What a rank adds: small whole numbers, whose sums are the same in every order."""
    return np.random.default_rng((seed, rank)).integers(0, 9, shape).astype(dtype)


def uneven(rank: int, shape: Any, seed: int = 0) -> Any:
    """What a rank adds where the order matters to the last bit."""
    return np.random.default_rng((seed, rank)).normal(size=shape).astype("float32")


def total(group: Group, shape: Any, dtype: str = "float32", seed: int = 0) -> Any:
    """What all ranks add."""
    parts = [given(rank, shape, dtype, seed) for rank in range(group.size)]
    return np.sum(parts, axis=0, dtype=dtype)


def same(found: Any, expected: Any) -> bool:
    """The same type, dtype, shape and numbers."""
    expected = np.asarray(expected)
    return (
        type(found) is np.ndarray
        and (found.dtype, found.shape) == (expected.dtype, expected.shape)
        and bool(np.array_equal(found, expected))
    )


def usable(group: Group) -> bool:
    """Whether all ranks are in step, and can make and use a table."""
    table = weft.ArrayTable(2)
    table.add([group.rank, 1])
    group.barrier()
    return bool(table.get().tolist() == [sum(range(group.size)), group.size])


def folder() -> Path:
    return Path(os.environ["WEFT_TEST_FOLDER"])


def raised(call: Any, *kinds: type[BaseException]) -> str:
    """What a call says when it fails as it should."""
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError(f"expected one of {kinds}")


# all rows and some


@BODIES.of_all
def all_rows_and_some(group: Group) -> bool:
    size, rank = group.size, group.rank
    for shape in ((7,), (7, 3), (1,), (1, 1), (5, 1)):
        make = weft.ArrayTable if len(shape) == 1 else weft.MatrixTable
        table, row = make(*shape), shape[1:]
        assert same(table.get(), np.zeros(shape, "float32"))
        group.barrier()
        table.add(given(rank, shape))
        group.barrier()
        expected = total(group, shape)
        assert same(table.get(), expected)
        # some, in any order and as often as one likes
        last = shape[0] - 1
        for ids in ([0], [last, 0], [0, 0, last, 0], [last] * 9, [], range(shape[0])):
            assert same(
                table.get(ids), expected[list(ids)] if len(ids) else np.zeros((0, *row), "f4")
            )
            group.barrier()
            delta = given(rank, (len(ids), *row), seed=len(ids))
            table.add(delta, rows=ids)
            group.barrier()
            for other in range(size):
                np.add.at(expected, list(ids), given(other, (len(ids), *row), seed=len(ids)))
            assert same(table.get(), expected), (shape, ids)
        # one row by its number: without a dimension of its own
        assert same(table.get(last), expected[last])
        group.barrier()
        table.add(given(rank, row, seed=5), last)
        group.barrier()
        expected[last] += total(group, row, seed=5)
        assert same(table.get(), expected)
        # into memory of one's own
        for out in (np.empty(shape, "f4"), np.empty((2 * shape[0], *row), "f4")[::2]):
            assert table.get(out=out) is out
            assert np.array_equal(out, expected)
            part = out[:1]
            assert table.get([last], out=part) is part
            assert np.array_equal(part[0], expected[last])
        one = np.empty(row, "f4")
        assert table.get(last, out=one) is one
        assert np.array_equal(one, expected[last])
        # what is got is a copy, and what was added too
        table.get()[...] = -1
        mine = np.ones(shape, "f4")
        group.barrier()
        table.add(mine)
        mine[...] = -1
        group.barrier()
        assert same(table.get(), expected + size)
        assert table.interrupted == ()
    return usable(group)


def test_all_rows_and_some(outcome: Any) -> None:
    """get and add, of everything and of rows by their ids, agree with NumPy."""
    assert all(outcome(all_rows_and_some))


@BODIES.of_all
def adds_at_the_same_time(group: Group) -> bool:
    size, rank = group.size, group.rank
    for consistency in ("async", weft.ssp(3)):
        for shape in ((40,), (40, 5)):
            make = weft.ArrayTable if len(shape) == 1 else weft.MatrixTable
            table = make(*shape, dtype="int64", consistency=consistency)
            expected = np.zeros(shape, "int64")
            for who in range(size):
                random = np.random.default_rng(who)
                for turn in range(30):
                    ids = random.integers(0, 40, 25)
                    delta = random.integers(0, 9, (25, *shape[1:]))
                    np.add.at(expected, ids, delta)
                    expected += turn
                    if who == rank:
                        table.add(delta, ids)
                        table.add(np.full(shape, turn))
                        if turn % 10 == 0:
                            before = table.get([3, 3])
                            assert np.array_equal(before[0], before[1])
            group.barrier()
            assert same(table.get(), expected)
    return table.interrupted == () and usable(group)


def test_adds_at_the_same_time(outcome: Any) -> None:
    """No add is lost, whoever adds meanwhile to the same rows."""
    assert all(outcome(adds_at_the_same_time))


# as users have them


@BODIES.of_all
def ids_and_deltas_of_every_kind(group: Group) -> bool:
    table = weft.MatrixTable(6, 2, dtype="int64")
    ids_of_all_kinds: list[Any] = [np.array([4, 1, 4], dtype) for dtype in IDS]
    ids_of_all_kinds += [[4, 1, 4], (4, 1, 4), np.array([4, 9, 1, 9, 4])[::2]]
    for times, ids in enumerate(ids_of_all_kinds, 1):
        table.add([[1, 2], [3, 4], [5, 6]], ids)
        group.barrier()
        assert (
            table.get(ids).tolist()
            == (np.array([[6, 8], [3, 4], [6, 8]]) * times * group.size).tolist()
        )
        group.barrier()
    floats = weft.MatrixTable(6, 2)
    deltas: list[Any] = [
        range(4),
        [0, 1, 2, 3],
        [[0, 1], [2, 3]],
        ((0.0, 1.0), (2.0, 3.0)),
        np.arange(4),
        np.arange(4.0).reshape(2, 2),
        np.arange(4, dtype=">f4").reshape(2, 2),
    ]
    for number, delta in enumerate(deltas):
        floats.add(delta, range(2, 4))
        group.barrier()
        expected = np.arange(4.0).reshape(2, 2) * (number + 1) * group.size
        assert np.array_equal(floats.get(range(2, 4)), expected), delta
        group.barrier()
    assert floats.get().sum() == floats.get([2, 3]).sum()
    return usable(group)


def test_ids_and_deltas_of_every_kind(outcome: Any) -> None:
    """Any integer dtype names rows; lists, ranges and arrays of all kinds are deltas."""
    assert all(outcome(ids_and_deltas_of_every_kind))


@BODIES.of_all
def dtypes(group: Group) -> bool:
    for dtype in DTYPES:
        table = weft.MatrixTable(4, 3, dtype=dtype)
        table.add(given(group.rank, (4, 3), dtype))
        group.barrier()
        assert table.dtype == np.dtype(dtype)
        expected = total(group, (4, 3), dtype)
        assert same(table.get(), expected), dtype
        assert same(table.get([3, 0]), expected[[3, 0]]), dtype
        group.barrier()
        table.add(given(group.rank, (3, 3), dtype, 1), [1, 1, 2])
        group.barrier()
        np.add.at(expected, [1, 1, 2], total(group, (3, 3), dtype, 1))
        assert same(table.get(), expected), dtype
    turned = weft.ArrayTable(2, dtype="complex64")
    turned.add([1j, 2])
    group.barrier()
    assert turned.get().tolist() == [1j * group.size, 2 * group.size]
    return usable(group)


def test_dtypes(outcome: Any) -> None:
    """Tables of integers, floats and complex numbers of every width."""
    assert all(outcome(dtypes))


# what it is, and how it starts


@BODIES.of_all
def what_it_is(group: Group) -> list[Any]:
    made = len(weft._api.session.tables()), weft._api.session.count_tables()
    assert made[0] <= made[1]
    first = weft.MatrixTable(3, 2, updater="sgd", consistency="bsp")
    second = weft.ArrayTable(
        range(4), dtype="int32", name="b", consistency=weft.ssp(2), exact=False
    )
    assert first.group is weft.group()
    assert (first.shape, first.dtype, len(first)) == ((3, 2), np.dtype("f4"), 3)
    assert (second.shape, second.dtype, len(second)) == ((4,), np.dtype("i4"), 4)
    assert first.name == f"table {made[1] + 1}"
    assert (first.staleness, first.interrupted) == (0, ())
    return [repr(first).replace(first.name, "NAME"), repr(second), second.name]


def test_what_it_is(outcome: Any) -> None:
    """A table tells its name, shape and options; without a name it has a number."""
    first = (
        "<MatrixTable(3, 2, dtype='float32', updater=sgd(lr=0.001), consistency=bsp, name='NAME')>"
    )
    second = (
        "<ArrayTable(4, dtype='int32', updater=add, consistency=ssp(2), exact=False, name='b')>"
    )
    assert outcome(what_it_is) == [[first, second, "b"]] * outcome.size


@BODIES.of_all
def the_masters_values_win(group: Group) -> bool:
    rank = group.rank
    for consistency in ("async", "bsp", weft.ssp(1)):
        for start in (
            np.full((3, 2), 0.1 + rank),
            [[0.1 + rank] * 2] * 3,
            np.asfortranarray(np.full((3, 2), 0.1 + rank)),
        ):
            table = weft.MatrixTable(start, consistency=consistency)
            assert (np.asarray(table.get()) == np.float32(0.1)).all()
        mine = np.arange(4) * (rank + 1)
        table = weft.ArrayTable(mine, dtype="float64", consistency=consistency)
        mine[...] = -1
        assert same(table.get(), np.arange(4.0))
    # the master alone, or all but the master, may have values
    table = weft.ArrayTable([1, 2, 3] if rank == 0 else 3)
    assert table.get().tolist() == [1, 2, 3]
    table = weft.ArrayTable([1, 2, 3] if rank else 3)
    assert table.get().tolist() == [0, 0, 0]
    return usable(group)


def test_the_masters_values_win(outcome: Any) -> None:
    """A table starts with rank 0's array, rounded to its dtype, whatever the others have."""
    assert all(outcome(the_masters_values_win))


# beside the caller's work


@BODIES.of_all
def async_forms(group: Group) -> bool:
    size, rank = group.size, group.rank
    shape = (1000, 50)
    table = weft.MatrixTable(*shape)
    handles = [table.add_async(given(rank, shape, seed=k)) for k in range(4)]
    handles.append(table.add_async(np.ones((2, 50)), [7, 7]))
    own = table.get_async()
    mine = sum(given(rank, shape, seed=k) for k in range(4))
    mine[7] += 2
    # in the order in which they were made: this rank's adds are in what it reads then
    assert (own.wait(timeout=30) >= mine).all()
    assert all(handle.done() for handle in handles)
    assert [handle.wait() for handle in handles] == [None] * 5
    assert own.wait() is own.wait()
    group.barrier()
    expected = np.sum([total(group, shape, seed=k) for k in range(4)], axis=0, dtype="f4")
    expected[7] += 2 * size
    assert same(table.get(), expected)
    group.barrier()
    # a blocking call comes after the pending ones
    for _ in range(20):
        handle = table.add_async(np.ones(shape))
        table.add(np.ones((1, 50)), [0])
        assert handle.done()
    handle = table.add_async(np.ones(shape))
    assert (table.get(0) >= expected[0] + 41).all()
    assert handle.done()
    group.barrier()
    out = np.empty((2, 50), "f4")
    assert table.get_async([3, 0], out=out).wait() is out
    assert same(out, expected[[3, 0]] + np.array([[21 * size], [41 * size]], "f4"))
    # wrong arguments are refused at once
    assert "row 1000" in raised(lambda: table.get_async([1000]), InvalidValue)
    assert "shape (3,)" in raised(lambda: table.add_async([1, 2, 3]), InvalidValue)
    assert "out= is" in raised(lambda: table.get_async(out=out), InvalidValue)
    group.barrier()
    # nobody waits, and it is carried out all the same
    handle = table.add_async(np.ones(shape))
    deadline = time.monotonic() + 30
    while not handle.done() and time.monotonic() < deadline:
        time.sleep(0.001)
    table.finish()
    return handle.done() and usable(group)


def test_async_forms(outcome: Any) -> None:
    """Handles: in order, beside the caller's work, before what blocks."""
    assert all(outcome(async_forms))


# what add does


@BODIES.of_all
def updaters_and_their_state(group: Group) -> bool:
    rank = group.rank
    for number, (name, make) in enumerate(weft.updaters.BUILT_IN.items()):
        for consistency in ("async", weft.ssp(50)):
            start = uneven(0, (9, 3))
            table = weft.MatrixTable(start, updater=name, consistency=consistency, name="w")
            updater = make()
            rows = start.copy()
            state = {key: np.zeros_like(rows) for key in updater.state}
            if rank == group.size - 1:  # all adds by one rank: their order is known
                table.add(uneven(0, (9, 3), 1))
                table.add(uneven(0, (3, 3), 2), [4, 1, 4])
                table.add(uneven(0, (3,), 3), 8)
                table.add([], [])
                table.add(uneven(0, (9, 3), 4))
            updater.update(rows, state, uneven(0, (9, 3), 1), 1)
            delta = uneven(0, (3, 3), 2)
            if name == "add":  # one row after the other, whatever their ids
                rows[4] += delta[0]
                twice = delta[2]
            else:  # the updater gets the sum
                twice = delta[2] + delta[0]
            for step, ids, part in (
                (2, [1, 4], np.stack([delta[1], twice])),
                (3, [8], uneven(0, (1, 3), 3)),
            ):
                some = {key: array[ids] for key, array in state.items()}
                some_rows = rows[ids]
                updater.update(some_rows, some, part, step)
                rows[ids] = some_rows
                for key, array in some.items():
                    state[key][ids] = array
            updater.update(rows, state, uneven(0, (9, 3), 4), 4)
            group.barrier()
            assert np.array_equal(table.get(), rows), (name, consistency)
            path = folder() / f"state {number} {consistency}"
            table.save(path)
            saved = safetensors.numpy.load_file(path)
            with safetensors.safe_open(path, "np") as file:
                header = file.metadata()
            assert {key: a.tobytes() for key, a in saved.items()} == {
                key: a.tobytes() for key, a in {"rows": rows, **state}.items()
            }, name
            assert name == "add" or header["steps"] == "4", (name, header)
    return usable(group)


def test_updaters_and_their_state(outcome: Any) -> None:
    """Each updater gives the bits of its rule; state changes only where rows were named."""
    assert all(outcome(updaters_and_their_state))


def keep_largest(rows: Any, state: Any, delta: Any) -> None:
    np.maximum(rows, delta, out=rows)
    state["seen"] += 1


def refuse_negative(rows: Any, state: Any, delta: Any) -> None:
    if (delta < 0).any():
        raise ArithmeticError("negative")
    rows += delta


@BODIES.of_all
def functions_of_users(group: Group) -> bool:
    size, rank = group.size, group.rank
    rule = weft.updaters.custom(keep_largest, state=["seen"])
    table = weft.MatrixTable(5, 2, updater=rule, dtype="int32")
    table.add(given(rank, (5, 2), "int32"))
    table.add([[100 + rank] * 2] * 2, [3, 1])
    group.barrier()
    expected = np.max([given(of, (5, 2), "int32") for of in range(size)], axis=0)
    expected[[3, 1]] = 99 + size
    assert same(table.get(), expected)
    path = folder() / "largest"
    table.save(path)
    arrays = safetensors.numpy.load_file(path)
    assert arrays["seen"].tolist() == [[c * size] * 2 for c in (1, 2, 1, 2, 1)]
    # it is needed again to load the table
    assert "updater" in raised(lambda: weft.load(path), InvalidValue)
    again = weft.load(path, updater=rule)
    assert same(again.get(), expected)
    # one that raises
    table = weft.MatrixTable(5, 2, updater=refuse_negative)
    group.barrier()
    for rows, delta in ((None, -np.ones((5, 2))), ([1, 1], -np.ones((2, 2)))):
        assert raised(lambda r=rows, d=delta: table.add(d, r), ArithmeticError) == "negative"
        assert (table.get() == 0).all()
    group.barrier()
    table.add(np.ones((5, 2)))
    group.barrier()
    return bool((table.get() == size).all()) and table.interrupted == () and usable(group)


def test_functions_of_users(outcome: Any) -> None:
    """A function over rows, state and delta; what it raises reaches who added, and all go on."""
    assert all(outcome(functions_of_users))


@BODIES.of_all
def inexact(group: Group) -> bool:
    table = weft.MatrixTable(50, 4, exact=False)
    for turn in range(group.size):
        if turn == group.rank:
            table.add(given(turn, (50, 4)))
            table.add(given(turn, (3, 4), seed=1), [9, 0, 9])
        group.barrier()
    expected = total(group, (50, 4))
    np.add.at(expected, [9, 0, 9], total(group, (3, 4), seed=1))
    assert same(table.get(), expected)
    assert same(table.get([9, 1]), expected[[9, 1]])
    group.barrier()
    for _ in range(50):  # at the same time: some may be lost, nothing else happens
        table.add(np.ones((50, 4)))
        table.add(np.ones((2, 4)), [3, 4])
    found = table.get()
    group.barrier()
    assert (table.get([3]) <= expected[3] + 100 * group.size).all()
    return bool((found >= expected + 1).all()) and usable(group)


def test_inexact(outcome: Any) -> None:
    """exact=False does the same without locks; one after the other, nothing is lost."""
    assert all(outcome(inexact))


# consistency


@BODIES.of_all
def bsp_gives_everybody_the_same_bits(group: Group) -> list[str]:
    size, rank = group.size, group.rank
    shape, hashes = (33, 7), []
    random = np.random.default_rng(rank)
    for updater in ("add", "adam"):
        table = weft.MatrixTable(uneven(0, shape), consistency="bsp", updater=updater)
        rule = weft.updaters.resolve(updater)
        expected, step = uneven(0, shape), 0
        state = {key: np.zeros_like(expected) for key in rule.state}
        assert same(table.get(), expected)  # before the first add
        for clock in range(12):
            time.sleep(random.random() * 0.004)
            for who in range(size):
                step += 1
                if (clock + who) % 3:
                    delta = uneven(who, shape, clock)
                    rule.update(expected, state, delta, step)
                    ids = None
                else:
                    ids = np.random.default_rng((clock, who)).permutation(33)[:9]
                    delta = uneven(who, (9, 7), clock)
                    some = {key: array[ids] for key, array in state.items()}
                    part = expected[ids]
                    rule.update(part, some, delta, step)
                    expected[ids] = part
                    for key, array in some.items():
                        state[key][ids] = array
                if who == rank:
                    table.add(delta, ids)
            if clock % 4 != 2:  # not after every add
                found = table.get()
                assert np.array_equal(found, expected), (updater, clock)
                assert table.staleness == 0
                hashes.append(hashlib.sha256(found.tobytes()).hexdigest())
        assert np.array_equal(table.get([3, 3, 0]), expected[[3, 3, 0]])
        group.barrier()
    return hashes


def test_bsp_gives_everybody_the_same_bits(outcome: Any) -> None:
    """After j adds every rank reads NumPy's sum of everybody's first j, in the order of ranks."""
    first, *others = outcome(bsp_gives_everybody_the_same_bits)
    assert len(first) == 18
    assert all(other == first for other in others)


@BODIES.of_several
def bsp_shows_what_one_has_added_oneself(group: Group) -> bool:
    size, rank = group.size, group.rank
    table = weft.ArrayTable(3, consistency="bsp")
    if rank == 0:
        table.add([1, 1, 1])
    group.barrier()
    if rank:
        assert table.get().tolist() == [0, 0, 0]  # rank 0's add is there, and not to be seen
    group.barrier()
    if rank == 0:
        # who is ahead waits: for its get, and for its next add, which is not made then
        for call in (table.get, lambda timeout: table.add([50, 50, 50], timeout=timeout)):
            began = time.monotonic()
            text = raised(lambda c=call: c(timeout=0.1), Stalled)
            assert 0.1 <= time.monotonic() - began < 20
            assert "rank 0 has made 1 adds and waits until every rank has made 1" in text
            assert all(f"rank {other} has made 0" in text for other in range(1, size))
            assert table.name in text
            assert "weft.shutdown()" in text
    group.barrier()
    if rank:
        table.add([1, 1, 1])
    assert table.get(timeout=30).tolist() == [size] * 3
    # handles wait too, beside the caller
    handles = [table.add_async([1, 0, 0]) for _ in range(5)]
    assert table.get_async().wait().tolist() == [6 * size, size, size]
    return all(handle.done() for handle in handles) and usable(group)


def test_bsp_shows_what_one_has_added_oneself(outcome_of_several: Any) -> None:
    """Nobody sees more adds of others than it has made; who is ahead waits, or is told for whom."""
    assert all(outcome_of_several(bsp_shows_what_one_has_added_oneself))


@BODIES.of_all
def ssp_keeps_ranks_together(group: Group) -> list[int]:
    size, rank = group.size, group.rank
    worst = []
    for k in (1, 3):
        table = weft.MatrixTable(size, 2, dtype="int64", consistency=weft.ssp(k))
        random = np.random.default_rng(rank)
        seen = np.zeros(size, int)
        for turn in range(1, 26):
            if random.random() < 0.2:
                time.sleep(random.random() * 0.01)
            table.add([[1, turn]], [rank])
            made = table.get()
            counts = made[:, 0]
            assert counts[rank] == turn
            assert (counts >= seen).all()
            assert np.abs(counts - turn).max() <= k, (k, counts)
            assert table.staleness <= k
            worst.append(table.staleness)
            seen = counts
        group.barrier()
        assert table.get()[:, 1].tolist() == [sum(range(26))] * size
    return worst


def test_ssp_keeps_ranks_together(outcome: Any) -> None:
    """Nobody is more than k adds ahead of the slowest, and nobody's adds are lost."""
    assert all(
        max(worst) <= 3 and max(worst[:25]) <= 1 for worst in outcome(ssp_keeps_ranks_together)
    )


@BODIES.of_several
def ssp_waits_for_the_slowest(group: Group) -> bool:
    size, rank = group.size, group.rank
    table = weft.ArrayTable(1, consistency=weft.ssp(2))
    if rank == 0:
        table.add([1])
        table.add([1])
        assert table.get().tolist() == [2]
        assert table.staleness == 2
        text = raised(lambda: table.add([1], timeout=0.1), Stalled)
        assert "ssp(2)" in text
        assert "waits until every rank has made 1" in text
        assert all(f"rank {other} has made 0" in text for other in range(1, size))
        assert table.get().tolist() == [2]  # nothing was added
    group.barrier()
    if rank:
        table.add([1])
    else:
        table.add([1], timeout=30)
    group.barrier()
    assert table.get().tolist() == [size + 2]
    assert table.staleness == (2 if rank == 0 else 0)
    return usable(group)


def test_ssp_waits_for_the_slowest(outcome_of_several: Any) -> None:
    """Who is k ahead waits before the next add; staleness says how far ahead it was."""
    assert all(outcome_of_several(ssp_waits_for_the_slowest))


@BODIES.of_all
def staleness(group: Group) -> bool:
    size, rank = group.size, group.rank
    table = weft.ArrayTable(2)
    for _ in range(3 * rank):
        table.add([1, 1])
    assert table.staleness == 0  # of the last get, and there was none
    group.barrier()
    table.get()
    assert table.staleness == (3 * rank if size > 1 else 0)
    table.get([0])
    assert table.staleness == (3 * rank if size > 1 else 0)
    group.barrier()
    return usable(group)


def test_staleness(outcome: Any) -> None:
    """How many adds the slowest was behind at the last get."""
    assert all(outcome(staleness))


@BODIES.of_all
def rows_that_may_be_older(group: Group) -> bool:
    size, rank = group.size, group.rank
    for consistency in ("async", "bsp", weft.ssp(2)):
        table = weft.MatrixTable(9, size, dtype="int64", consistency=consistency)
        delta = np.zeros((9, size), "int64")
        delta[:, rank] = 1
        before = np.zeros((9, size), "int64")
        for turn in range(1, 8):
            table.add(delta)
            for accepted in (weft.ssp(2), weft.ssp(1)):
                for ids in (None, [8, 0, 8], [4]):
                    found = table.get(ids, consistency=accepted)
                    rows = before[range(9) if ids is None else ids]
                    assert found.dtype == "int64"
                    assert (found >= rows).all(), "rows never get older"
                    # who has not added as often cannot be seen to have
                    assert (found[:, rank] >= turn - accepted.slack).all(), (turn, found)
                    assert (found[:, rank] <= turn).all()
                    assert table.staleness <= max(accepted.slack, turn)
            group.barrier()
            found = table.get(consistency=weft.ssp(2))
            assert (found >= turn - 2).all(), (turn, found)
            assert table.staleness <= 2
            assert (table.get() == turn).all()
            before = found
            group.barrier()
        out = np.empty((2, size), "int64")
        assert table.get([1, 7], out=out, consistency=weft.ssp(9)) is out
        assert (out == before[[1, 7]]).all() or (out > before[[1, 7]]).any()
    for wrong, kind in (("bsp", InvalidValue), (weft.ssp, InvalidType), (3, InvalidType)):
        assert "weft.ssp(k)" in raised(lambda w=wrong: table.get(consistency=w), kind)
    return usable(group)


def test_rows_that_may_be_older(outcome: Any) -> None:
    """get(consistency=ssp(k)) has everybody's adds but for the last k, on every engine."""
    assert all(outcome(rows_that_may_be_older))


# saved and loaded


@BODIES.of_all
def saved_and_loaded(group: Group) -> bool:
    size, rank = group.size, group.rank
    options: list[dict[str, Any]] = [
        {"updater": name} for name in ("add", "momentum", "adagrad", "rmsprop")
    ]
    options += [{"updater": weft.updaters.adam(lr=0.02, beta1=0.5), "consistency": "bsp"}]
    options += [{"updater": "sgd", "consistency": weft.ssp(7), "exact": False, "name": "s/d"}]
    options += [{"dtype": dtype} for dtype in ("int8", "float16", "float64", "complex128")]
    for number, option in enumerate(options):
        make = weft.MatrixTable if number % 2 else weft.ArrayTable
        shape = (6, 4) if number % 2 else (6,)
        table = make(given(0, shape, "int8").tolist(), **option)
        for turn in range(3):
            table.add(given(rank, shape, "int8", turn))
            group.barrier()
        path = folder() / f"table {number}"
        table.save(path)
        again = weft.load(str(path))
        assert type(again) is type(table)
        assert repr(again) == repr(table)
        assert np.array_equal(again.get(), table.get()), option
        group.barrier()
        # the state is there too: both go on alike
        for turn in range(2):
            for one in (table, again):
                if rank == size - 1 or one._spec.consistency.name == "bsp":
                    one.add(given(rank, shape, "int8", 9 + turn))
                    one.add(given(rank, shape[1:], "int8", 10 + turn)[None], [2])
            group.barrier()
            assert np.array_equal(again.get(), table.get()), option
            group.barrier()
        assert again.interrupted == ()
        # into a table that is there
        table.add(given(rank, shape, "int8", 30))
        group.barrier()
        assert weft.load(path, into=table) is table
        third = weft.load(path)
        assert np.array_equal(table.get(), third.get())
        assert table._store.steps == third._store.steps
        group.barrier()
    other = weft.ArrayTable(6, dtype="int16")
    for wrong, kind in ((other, InvalidValue), ("table", InvalidType)):
        assert "into=" in raised(lambda w=wrong: weft.load(folder() / "table 0", into=w), kind)
    # what cannot be read or written is told to everybody
    missing = folder() / "nobody" / "table"
    assert "nobody" in raised(lambda: weft.load(missing), FileNotFoundError)
    assert "nobody" in raised(lambda: table.save(missing), FileNotFoundError)
    broken = folder() / "broken"
    if group.is_master:
        broken.write_bytes((folder() / "table 1").read_bytes()[:-1])
    group.barrier()
    assert "broken" in raised(lambda: weft.load(broken), weft.DamagedFile)
    assert "path=7" in raised(lambda: weft.load(7), InvalidType)
    assert "path=None" in raised(lambda: table.save(None), InvalidType)
    return usable(group)


def test_saved_and_loaded(outcome: Any) -> None:
    """A loaded table is the one that was saved, with its options and its updater's state."""
    assert all(outcome(saved_and_loaded))


@BODIES.of_all
def saved_in_pieces(group: Group) -> bool:
    table = weft.MatrixTable(300_000, 9, dtype="float64", updater="momentum", consistency="bsp")
    table.add(np.full((300_000, 9), group.rank + 1.0))
    table.add(np.arange(2_700_000.0))  # the last clock is nobody's until all settle
    path = folder() / "pieces"
    table.save(path)
    again = weft.load(path)
    saved = safetensors.numpy.load_file(path)
    assert saved["rows"].nbytes > 16 << 20
    assert np.array_equal(again.get(), table.get())
    assert np.array_equal(saved["rows"], again.get())
    assert saved["velocity"].all()
    assert again._store.steps == table._store.steps == 2 * group.size
    # engines that share no memory: every rank has settled, one copies
    store = again._store
    store.settle()
    group.barrier()
    if group.is_master:
        store.write_piece("velocity", 7, np.full((2, 9), 5.0))
        assert store.read_piece("velocity", 6, 10)[:, 0].tolist() == [
            saved["velocity"][6, 0],
            5.0,
            5.0,
            saved["velocity"][9, 0],
        ]
        piece = store.read_piece("rows", 0, 1)
        piece[:] = -1  # which is a copy
        assert np.array_equal(store.read_piece("rows", 0, 1), saved["rows"][:1])
        store.set_steps(100)
    group.barrier()
    assert store.steps == 100
    rows = store.exclusive_rows()
    if group.size > 1:
        assert rows is None
    else:
        assert rows is not None
        rows[3] = 3.0
        assert again.get([3]).tolist() == [[3.0] * 9]
    return usable(group)


def test_saved_in_pieces(outcome: Any) -> None:
    """A table larger than a piece is saved with what all ranks have added, and comes back so."""
    assert all(outcome(saved_in_pieces))


@BODIES.of_all
def refused_alike(group: Group) -> list[str]:
    good = weft.MatrixTable([[1.0, 2.0]], updater="sgd")
    path = folder() / "refused"
    good.save(path)
    with safetensors.safe_open(path, "np") as file:
        said = {k: v for k, v in file.metadata().items() if k not in ("weft_format", "checksum")}
    del said["header_checksum"]
    data = path.read_bytes()
    group.barrier()
    size = 2**40 * 8
    entry = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
    huge = {"dtype": "F32", "shape": [2**40, 2], "data_offsets": [0, size]}
    files: list[tuple[type[Exception], bytes, int]] = [
        (OutOfMemory, forged({"rows": huge}, **said), size),  # all of it a hole
        (weft.DamagedFile, data[:-1], 0),
        (weft.DamagedFile, data[:-1] + b"x", 0),
        (weft.DamagedFile, bytes.fromhex(FIRST), 0),
        (weft.DamagedFile, safetensors.numpy.save({"rows": np.zeros((1, 2))}), 0),
    ]
    for lie in (
        {"kind": "Table"},
        {"kind": "ArrayTable"},
        {"steps": "-1"},
        {"steps": "1.5"},
        {"steps": str(2**70)},
        {"slack": "[]"},
        {"exact": "1"},
        {"options": "[]"},
        {"state": '["velocity"]'},
        {"state": "rows"},
        {"state": "[" * 9999},
        {"name": ""},
        {"consistency": "eventual"},
        {"consistency": "ssp", "slack": "0"},
        {"options": '{"lr": "fast"}'},
        {"options": '{"momentum": 0.9}'},
    ):
        files.append((weft.DamagedFile, forged({"rows": entry}, bytes(8), **{**said, **lie}), 0))
    other = forged({"rows": entry, "velocity": {**entry, "data_offsets": [8, 16]}}, bytes(16))
    files.append((weft.DamagedFile, other, 0))
    columns = int(available_memory()[0] * 0.6) // 4  # one row, read in one piece
    row = {"dtype": "F32", "shape": [1, columns], "data_offsets": [0, columns * 4]}
    files.append((OutOfMemory, forged({"rows": row}, **said), columns * 4))
    texts = []
    for error, content, hole in files:
        if group.is_master:
            path.write_bytes(content)
            os.truncate(path, path.stat().st_size + hole)
        group.barrier()
        texts.append(raised(lambda: weft.load(path), error))
        group.barrier()
    if group.is_master:
        path.write_bytes(data)
    group.barrier()
    assert weft.load(path).get().tolist() == [[1.0, 2.0]]
    assert usable(group)
    return texts


def test_refused_alike(outcome: Any) -> None:
    """Who cannot be loaded is told to every rank in the same words: no memory is taken, nobody
    waits."""
    first, *others = outcome(refused_alike)
    assert all(texts == first for texts in others)
    assert "is not a saved table of weft, but perhaps another safetensors file" in first[4]
    assert all("holds no table that this release knows" in text for text in first[5:-1])


@BODIES.of_all
def every_table_is_saved(group: Group) -> list[Any]:
    gc.collect()  # tables of the tests before
    before = len(weft._api.session.tables())
    one = weft.ArrayTable([1, 2], name="a/b")
    two = weft.MatrixTable([[3]], name="a/b")
    three = weft.ArrayTable([4], dtype="int32", name=".")
    four = weft.ArrayTable([5])
    raised(lambda: weft.ArrayTable(0), InvalidValue)
    where = folder() / "deep" / "all"
    saved = weft.save_all(where)
    assert sorted(os.listdir(where)) == sorted(Path(path).name for path in saved)
    group.barrier()
    names = [Path(path).name for path in saved[before:]]
    loaded = [weft.load(path) for path in saved[before:]]
    found = [table.get().tolist() for table in loaded]
    assert [table.name for table in loaded] == [one.name, two.name, three.name, four.name]
    return [names[:3], names[3] == f"{four.name}.weft", found]


def test_every_table_is_saved(outcome: Any) -> None:
    """save_all writes each table that is still there to a file of its name, none over another."""
    names = ["a_b.weft", "a_b 2.weft", "table.weft"]
    for found in outcome(every_table_is_saved):
        assert found == [names, True, [[1, 2], [[3]], [4], [5]]]


# ranks that do different things


def noted(rows: Any, state: Any, delta: Any) -> None:
    rows += delta


@BODIES.of_several
def different_tables(group: Group) -> bool:
    rank, odd = group.rank, group.rank == group.size - 1
    custom = weft.updaters.custom
    long = "n" * 1500
    cases: list[tuple[Any, Any, str, str]] = [
        (lambda: weft.ArrayTable(3), lambda: weft.ArrayTable(4), "ArrayTable(3,", "ArrayTable(4,"),
        (
            lambda: weft.ArrayTable(3, dtype="float32"),
            lambda: weft.ArrayTable(3, dtype="float64"),
            "dtype='float32'",
            "dtype='float64'",
        ),
        (
            lambda: weft.MatrixTable(3, 2, updater="sgd"),
            lambda: weft.MatrixTable(3, 2, updater=weft.updaters.sgd(lr=0.5)),
            "updater=sgd(lr=0.001)",
            "updater=sgd(lr=0.5)",
        ),
        (
            lambda: weft.ArrayTable(3, updater=keep_largest),
            lambda: weft.ArrayTable(3, updater="adam"),
            "keep_largest",
            "updater=adam(",
        ),
        (
            lambda: weft.ArrayTable(3, updater=custom(noted, state=["a"], name="mine")),
            lambda: weft.ArrayTable(3, updater=custom(noted, state=["a", "b"], name="mine")),
            "state=['a']",
            "state=['a', 'b']",
        ),
        (
            lambda: weft.ArrayTable(3, consistency="bsp"),
            lambda: weft.ArrayTable(3, consistency=weft.ssp(2)),
            "consistency=bsp",
            "consistency=ssp(2)",
        ),
        (lambda: weft.ArrayTable(3), lambda: weft.ArrayTable(3, exact=False), "add", "exact=False"),
        (lambda: weft.ArrayTable(3, name="a"), lambda: weft.ArrayTable(3, name="b"), "'a'", "'b'"),
        (
            lambda: weft.ArrayTable(3),
            lambda: weft.MatrixTable(3, 1),
            "ArrayTable(3,",
            "MatrixTable(3, 1,",
        ),
        (
            # more than fits a message of a step
            lambda: weft.ArrayTable(3, updater=custom(noted, name=long), name="a"),
            lambda: weft.ArrayTable(3, updater=custom(noted, name=long), name="b"),
            "nnn",
            "nnn",
        ),
        (lambda: weft.ArrayTable(3), group.barrier, "ArrayTable", "barrier"),
        (lambda: weft.ArrayTable(3), lambda: group.all_reduce(1), "ArrayTable", "all_reduce"),
    ]
    for turn, (ours, theirs, first, last) in enumerate(cases):
        text = raised(theirs if odd else ours, Disagreement)
        assert "rank 0 called" in text, text
        assert first in text.split("rank 0 called")[1].split("; rank")[0], text
        assert last in text.split(f"rank {group.size - 1} called")[1], text
        assert text.count("test_tables.py:") >= group.size, text
        if turn % 3 == 0:
            assert usable(group)
    # in another order: both are refused, on every rank
    small, large = (lambda: weft.ArrayTable(3)), (lambda: weft.MatrixTable(5, 2))
    for call in (small, large) if odd else (large, small):
        assert "MatrixTable(5, 2" in raised(call, Disagreement)
    assert rank < group.size
    return usable(group)


def test_different_tables(outcome_of_several: Any) -> None:
    """Ranks that make different tables, or none, all see what each did, and can go on."""
    assert all(outcome_of_several(different_tables))


@BODIES.of_several
def one_rank_refuses(group: Group) -> tuple[int, int]:
    wrong: list[tuple[Any, str]] = [
        (lambda: weft.ArrayTable(0), "size=0"),
        (lambda: weft.ArrayTable(3, dtype="text"), "dtype='text'"),
        (lambda: weft.MatrixTable(3), "number of columns"),
        (lambda: weft.ArrayTable(3, updater="sdg"), "updater='sdg'"),
        (lambda: weft.ArrayTable([1e39, 1]), "1e+39"),
        (lambda: weft.ArrayTable(3, consistency="ssp"), "consistency='ssp'"),
    ]
    refused = heard = 0
    for turn, (call, reason) in enumerate(wrong):
        if group.rank == turn % group.size:
            assert reason in raised(call, InvalidValue, InvalidType)
            refused += 1
        else:
            text = raised(lambda: weft.ArrayTable(3), Disagreement)
            assert f"rank {turn % group.size} called" in text
            assert "which refused: Invalid" in text, text
            assert reason in text, text
            heard += 1
        if turn % 2:
            assert usable(group)
    for call, reason in wrong:  # all at once
        assert reason in raised(call, InvalidValue, InvalidType)
    assert usable(group)
    table = weft.ArrayTable(3)
    # what is wrong with an add or a get concerns nobody else
    for turn in range(group.size):
        if turn == group.rank:
            raised(lambda: table.add([1, 2]), InvalidValue)
            raised(lambda: table.get([3]), InvalidValue)
        table.add([1, 1, 1])
    group.barrier()
    assert table.get().tolist() == [group.size**2] * 3
    # nor need others wait for who cannot save
    if group.rank == group.size - 1:
        raised(lambda: table.save(None), InvalidType)
    else:
        assert "path=None" in raised(lambda: table.save(folder() / "x"), Disagreement)
    if group.rank == 0:
        raised(lambda: weft.load(3.5), InvalidType)
    else:
        assert "path=3.5" in raised(lambda: weft.load(folder() / "x"), Disagreement)
    assert usable(group)
    return refused, heard


def test_one_rank_refuses(outcome_of_several: Any) -> None:
    """Who refuses its arguments raises its own error, the others hear the reason; all go on."""
    results = outcome_of_several(one_rank_refuses)
    assert all(refused + heard == 6 for refused, heard in results)
    assert sum(refused for refused, _ in results) == 6


@BODIES.of_several
def early_leavers(group: Group) -> bool:
    size, rank = group.size, group.rank
    together = weft.ArrayTable(size, consistency="bsp")
    loosely = weft.ArrayTable(size, consistency=weft.ssp(1))
    mine = np.eye(size)[rank]
    for turn in range(1, 2 * rank + 2):  # the first ranks leave first
        together.add(mine)
        found = together.get().tolist()
        assert found == [min(turn, 2 * other + 1) for other in range(size)], (turn, found)
        loosely.add(mine)
    assert loosely.get()[rank] == 2 * rank + 1
    assert together.interrupted == loosely.interrupted == ()
    weft.shutdown()
    return usable(weft.init())


def test_early_leavers(outcome_of_several: Any) -> None:
    """Who has finished and leaves releases those who go on, who keep what it has added."""
    assert all(outcome_of_several(early_leavers))


# what cannot be


@BODIES.of_all
def tables_larger_than_memory(group: Group) -> list[str]:
    texts = []
    for make in (
        lambda: weft.ArrayTable(10**13),
        lambda: weft.MatrixTable(10**9, 10**9, dtype="float64", name="embeddings"),
        lambda: weft.ArrayTable(2**70),
        lambda: weft.MatrixTable(10**200, 10**200),
    ):
        began = time.monotonic()
        texts.append(raised(make, OutOfMemory))
        raised(make, MemoryError)
        assert time.monotonic() - began < 20
    assert usable(group)
    return texts


def test_tables_larger_than_memory(outcome: Any) -> None:
    """They are a MemoryError on every rank, before anything is touched, and all can go on."""
    for array, matrix, *_ in outcome(tables_larger_than_memory):
        assert "ArrayTable" in array
        assert "40000.0 GB was asked for" in array
        assert "are free" in array
        assert "MatrixTable 'embeddings'" in matrix
        assert "make it smaller" in matrix


@BODIES.of_all
def bad_timeouts(group: Group) -> bool:
    for consistency in ("async", "bsp", weft.ssp(1)):
        table = weft.MatrixTable(3, 2, consistency=consistency)
        for wrong, kind in ((-1, InvalidValue), ("1", InvalidType), (True, InvalidType)):
            for rows in (None, [1]):
                get = raised(lambda t=table, r=rows, w=wrong: t.get(r, timeout=w), kind)
                delta = np.ones((3 if rows is None else 1, 2))
                add = raised(lambda t=table, r=rows, w=wrong, d=delta: t.add(d, r, timeout=w), kind)
                assert f"timeout={wrong!r}" in get
                assert f"timeout={wrong!r}" in add
        assert (table.get(timeout=5) == 0).all()
        group.barrier()
    return usable(group)


def test_bad_timeouts(outcome: Any) -> None:
    """They are refused where nobody would have waited, too."""
    assert all(outcome(bad_timeouts))


@BODIES.of_all
def forked_children(group: Group) -> list[Any]:
    tables = [weft.ArrayTable(3, consistency=c) for c in ("async", "bsp", weft.ssp(1))]
    handle = tables[0].get_async()
    handle.wait()
    group.barrier()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads
        child = os.fork()
    if child == 0:
        found = []
        for table in tables:
            for call in (
                table.get,
                lambda t=table: t.get([0]),
                lambda t=table: t.add([1, 1, 1]),
                lambda t=table: t.add([1], [0]),
                lambda t=table: t.save("x"),
                lambda: weft.ArrayTable(3),
            ):
                try:
                    call()
                    found.append("nothing was raised")
                except UsedAfterFork as error:
                    found.append("" if "weft.init()" in str(error) else str(error))
                except BaseException as error:
                    found.append(repr(error))
        os.write(writing, "\n".join(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    for table in tables:
        table.add([1, 1, 1])
        group.barrier()
        assert table.get().tolist() == [group.size] * 3
    return [found.split("\n"), usable(group)]


def test_forked_children(outcome: Any) -> None:
    """A table belongs to the process that made it: a forked child is told so, nothing changes."""
    assert outcome(forked_children) == [[[""] * 18, True]] * outcome.size


@BODIES.of_all
def after_shutdown(group: Group) -> list[str]:
    engine = "serial" if type(group).__name__ == "SerialGroup" else None
    tables = [weft.ArrayTable([1, 2, 3], consistency=c) for c in ("async", "bsp", weft.ssp(1))]
    pending = tables[0].add_async([1, 1, 1])
    group.barrier()
    weft.shutdown()
    assert pending.done()
    found = []
    for again in (False, True):
        if again:  # another session does not bring them back
            weft.init(engine=engine)
        for table in tables:
            for call in (
                table.get,
                lambda t=table: t.get([0]),
                lambda t=table: t.add([1, 1, 1]),
                lambda t=table: t.add([1], [0]),
                lambda t=table: t.get_async().wait(),
                lambda t=table: t.add_async([1, 1, 1]).wait(),
                lambda t=table: t.save("x"),
            ):
                text = raised(call, NotInitialized)
                found.append("" if "weft.init()" in text else text)
            assert table.interrupted == ()
            assert (table.shape, table.staleness) == ((3,), 0)
            assert "ArrayTable(3" in repr(table)
        if not again:
            assert "weft.init()" in raised(lambda: weft.ArrayTable(3), NotInitialized)
            assert "weft.init()" in raised(lambda: weft.save_all("x"), NotInitialized)
            assert "weft.init()" in raised(lambda: weft.load("x"), NotInitialized)
    assert usable(weft.group())
    assert weft.ArrayTable(1).name == "table 2"
    return found


def test_after_shutdown(outcome: Any) -> None:
    """Every use of a table whose group was left says so, also in the next session."""
    assert outcome(after_shutdown) == [[""] * 42] * outcome.size
