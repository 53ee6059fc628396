"""Collectives: what only shows when ranks are at different places at once."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import run_ranks
from weft.engines.base import Group
from weft.engines.local.collectives.persistent import PersistentSum
from weft.errors import Disagreement, InvalidValue


@pytest.mark.parametrize("length", [4, 5000])
def test_a_refusal_does_not_overtake_a_reader(length: int) -> None:
    """A rank that refuses a call and makes the next one leaves alone what others still read."""

    def body(group: Group, length: int) -> Any:
        found = []
        for _ in range(2):  # the second time it is prepared
            found.append(group.all_reduce(np.full(length, 1.0)))
            try:
                group.all_reduce(np.ones(length), op="sum" if group.rank == 0 else "no such")
            except (InvalidValue, Disagreement):
                found.append(group.all_reduce(np.full(length, 100.0)))
        return found

    # rank 0 has met the others and reads late
    for turn in (1, 3):
        slow = {"WEFT_FAULT": f"collective.met@{turn}:0:delay=0.3"}
        for result in run_ranks(2, body, length, env=slow):
            assert [set(one.tolist()) for one in result] == [{2.0}, {200.0}] * 2


def test_bits_do_not_depend_on_where_the_result_goes() -> None:
    """A rank whose out= is not aligned gets the bits of the others, also where it was prepared."""

    def body(group: Group) -> list[bytes]:
        random = np.random.default_rng(group.rank)
        found = []
        for turn in range(40):
            value = random.normal(size=1) + 1j * random.normal(size=1)
            out = np.empty(1, complex)
            if group.rank == 1:
                out = np.empty(17, np.uint8)[1:].view(complex)
            found.append(group.all_reduce(value, "prod", out=out if turn else None).tobytes())
        return found

    one, two, three = run_ranks(3, body)
    assert one == two == three


#: more than passes through the slots, not a whole number of lines, and a small one beside it
LENGTHS = (600_011, 7)


#: each kind of number with one size of a group; `make soak` has the rest
KINDS = {"float32": 2, "float64": 3, "int32": 4, "int64": 2, "float16": 3}


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=() if size == of_make_test else pytest.mark.soak)
        for kind, of_make_test in KINDS.items()
        for size in (2, 3, 4)
    ],
)
def test_arrays_in_shared_memory_as_elsewhere(kind: str, size: int) -> None:
    """Whoever's arrays lie there, in place or not: the bits of arrays that lie elsewhere."""

    def body(group: Group, kind: str) -> list[list[bytes]]:
        random = np.random.default_rng(group.rank)
        numbers = [(random.normal(size=length) * 1000).astype(kind) for length in LENGTHS]
        found = []
        for op in ("sum", "max"):
            plain = group.all_reduce(numbers, op)
            found.append([one.tobytes() for one in plain])
            for shared in (True, group.rank == 0, group.rank > 0):
                own = [weft.share(one) if shared else one.copy() for one in numbers]
                out = [weft.share(np.zeros_like(one)) for one in numbers]
                group.all_reduce(own, op, out=out)
                assert all(map(np.array_equal, own, numbers))
                found.append([one.tobytes() for one in out])
                group.all_reduce(own, op, out=own)
                found.append([one.tobytes() for one in own])
                mine = np.array(numbers[0])
                into = own[0] if group.rank == 0 else mine  # in place on some ranks only
                own[0][...] = numbers[0]
                group.all_reduce(own[0], op, out=into)
                found.append([into.tobytes(), plain[1].tobytes()])
        return found

    results = run_ranks(size, body, kind)
    for found in results:
        half = len(found) // 2
        for first, *others in (found[:half], found[half:]):
            assert all(other == first for other in others)
    assert all(found == results[0] for found in results)
    mine = [np.random.default_rng(rank).normal(size=LENGTHS[0]) * 1000 for rank in range(size)]
    total = np.frombuffer(results[0][0][0], kind).astype(float)
    parts = [one.astype(kind).astype(float) for one in mine]
    np.testing.assert_allclose(total, sum(parts), rtol=2e-3, atol=2)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_in_place_again_and_again(size: int) -> None:
    """What is prepared for an array holds for it alone: other ranks may come with others, or with
    another call."""

    def body(group: Group, length: int) -> list[Any]:
        def shared() -> Any:
            return weft.share(np.zeros(length, np.float32)).view(np.ndarray)

        quickly: list[int] = []
        run = PersistentSum.run

        def counted(self: PersistentSum, *arguments: Any) -> Any:
            quickly.append(turn)
            return run(self, *arguments)

        PersistentSum.run = counted  # type: ignore[method-assign]
        first, found = shared(), []
        for turn in range(12):
            own = first
            if turn == 4 and group.rank == 1:
                first = own = shared()  # another from now on
            if turn == 6 and group.rank == 0:
                own = np.zeros(length, np.float32)  # for once
            own[:] = np.arange(length) % 7 + group.rank + turn
            op = "max" if turn == 8 and group.rank == 1 else "sum"
            try:
                group.all_reduce(own, op, out=own)
                found.append((own[0], own[-1], own.sum(dtype=float)))
            except Disagreement as error:
                found.append("max" in str(error) and "sum" in str(error))
        return [found, quickly]

    length = 700_001
    results, quickly = zip(*run_ranks(size, body, length), strict=True)
    if not os.environ.get("WEFT_KERNELS"):
        others = {0: [0, 6], 1: [0, 4, 8]}  # those for which nothing was prepared
        for rank, turns in enumerate(quickly):
            assert turns == [turn for turn in range(12) if turn not in others.get(rank, [0])]
    assert all(one == results[0] for one in results)
    for turn, found in enumerate(results[0]):
        expected = size * (np.arange(length) % 7 + turn) + sum(range(size))
        assert found is True if turn == 8 else found == (expected[0], expected[-1], expected.sum())


def _shared(number: float, shape: Any = 300_001) -> Any:
    return weft.share(np.full(shape, number, np.float32)).view(np.ndarray)


def test_ranks_that_go_different_ways_keep_step() -> None:
    """One has a sum prepared, the other not; meanwhile other blocks have taken the array's place
    among those that are mapped."""

    def body(group: Group) -> list[float]:
        array, held = _shared(1.0), []
        for _ in range(2):
            group.all_reduce(array, out=array)
        for number in range(12):
            held.append(_shared(number))
            group.all_reduce(held[-1], "max", out=held[-1])
        group.all_reduce(array, out=array, timeout=None if group.rank == 0 else 60.0)
        return [float(array[0]), float(array[-1]), float(group.all_reduce(np.ones(1))[0])]

    assert run_ranks(2, body) == [[8.0, 8.0, 2.0]] * 2


def test_what_is_prepared_is_the_same_call() -> None:
    """Not that of an array of another shape over the same memory, nor of a list, nor of one that
    has become read-only."""

    def body(group: Group) -> list[Any]:
        square = _shared(1.0, (600, 600))
        group.all_reduce(square, out=square)
        flat = square.reshape(-1) if group.rank == 0 else _shared(2.0, 360_000)
        found: list[Any] = [float(group.all_reduce(flat, out=flat)[0])]
        array = _shared(1.0)
        group.all_reduce([array], out=[array])
        given: Any = array if group.rank == 0 else [array]
        try:
            group.all_reduce(given, out=given)
        except Disagreement as error:
            found.append(type(error).__name__)
        for _ in range(2):
            group.all_reduce(array, out=array)
        array.flags.writeable = False
        try:
            group.all_reduce(array, out=array)
        except InvalidValue as error:
            found.append("cannot be written to" in str(error))
        return [*found, float(array[0])]

    assert run_ranks(2, body) == [[4.0, "Disagreement", True, 8.0]] * 2
