"""Sums that several processes make together: here all ranks are in one process, in any order."""

from __future__ import annotations

import os
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weft._core import joint_sum
from weft._core.joint_sum import JointSum, bytes_for, can_join
from weft._core.values import address

pytestmark = pytest.mark.skipif(
    os.environ.get("WEFT_KERNELS") == "0", reason="the loops are left away"
)

KINDS = ("float32", "float64", "int32", "uint32", "int64", "uint64")
Array = NDArray[Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few numbers are many chunks."""
    monkeypatch.setattr(joint_sum, "_CHUNK", 2048)


class Ranks:
    """Several ranks and the memory that they sum in."""

    def __init__(self, count: int) -> None:
        self.count, self.before = count, 0
        whole = np.zeros(bytes_for(count) + 64, np.uint8)
        self._memory = whole[-address(whole) % 64 :]

    def begin(
        self, sources: list[Array], targets: list[Array | None], **how: Any
    ) -> list[JointSum]:
        sums = [
            JointSum(
                address(self._memory),
                self.before,
                rank=rank,
                ranks=self.count,
                source=sources[rank],
                target=targets[rank],
                **how,
            )
            for rank in range(self.count)
        ]
        self.before = sums[0].after
        return sums


def unlike_64(count: int, kind: str, offset: int, seed: int) -> Array:
    """Numbers that begin somewhere in a line of memory."""
    generator = np.random.default_rng(seed)
    if kind.startswith("float"):
        numbers = generator.normal(size=count + offset)
    else:
        numbers = generator.integers(0, 2**31, count + offset)
    return numbers.astype(kind)[offset:]


def carry_out(sums: list[JointSum], order: np.random.Generator) -> None:
    """One step of some rank after the other, whoever's turn it is."""
    left = list(range(len(sums)))
    for _ in range(100_000):
        rank = int(order.choice(left))
        if sums[rank].go_on(int(order.integers(1, 4)), 1, 0):
            left.remove(rank)
        if not left:
            return
    raise AssertionError(f"ranks {left} do not come to an end")


@settings(deadline=None, max_examples=150)
@given(
    ranks=st.integers(2, 5),
    kind=st.sampled_from(KINDS),
    counts=st.lists(st.integers(0, 6000), min_size=1, max_size=3),
    offset=st.integers(0, 15),
    in_place=st.booleans(),
    mean=st.booleans(),
    past_cache=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_whoever_comes_first_all_get_the_sum(  # noqa: PLR0917  what Hypothesis varies
    ranks: int,
    kind: str,
    counts: list[int],
    offset: int,
    in_place: bool,
    mean: bool,
    past_cache: bool,
    seed: int,
) -> None:
    """In any order of steps, sum after sum in the same memory, every rank has NumPy's bits."""
    mean = mean and kind.startswith("float")
    order, group = np.random.default_rng(seed), Ranks(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_sum, "_SLOW", -1 if past_cache else 1 << 40)
        for turn, count in enumerate(counts):
            sources = [unlike_64(count, kind, offset, seed + rank) for rank in range(ranks)]
            given_before = [source.copy() for source in sources]
            expected = reduce(np.add, given_before)
            if mean:
                expected = expected / np.array(ranks, kind)
            targets: list[Array] = sources
            if not in_place:
                targets = [unlike_64(count, kind, 15 - offset, turn) for _ in range(ranks)]
            carry_out(group.begin(sources, [*targets], mean=mean), order)
            for target in targets:
                assert target.tobytes() == expected.tobytes()
            if not in_place:
                for source, before in zip(sources, given_before, strict=True):
                    assert source.tobytes() == before.tobytes()


def test_only_some_get_a_result() -> None:
    """A rank without a target takes part, and what it gives is counted."""
    group = Ranks(3)
    sources = [np.arange(5000.0) * (rank + 1) for rank in range(3)]
    target = np.zeros(5000)
    carry_out(group.begin(sources, [None, target, None]), np.random.default_rng(0))
    assert np.array_equal(target, np.arange(5000.0) * 6)


def test_a_rank_waits_for_the_others() -> None:
    """Alone it does what it can, says that it is not done, and whom it waits for."""
    group = Ranks(2)
    arrays = [np.ones(5000), np.ones(5000)]
    first, second = group.begin(arrays, [*arrays])
    assert not first.go_on(100, 10, 5)
    given = first.progress
    assert given == 4  # chunks
    assert not first.go_on(100, 10, 0)
    assert first.progress == given
    assert not first.is_done_by(1)
    while not second.go_on(100, 1, 0):
        first.go_on(100, 1, 0)
    assert first.is_done_by(1)
    assert first.go_on(100, 1, 0)
    assert arrays[0].tolist() == arrays[1].tolist() == [2.0] * 5000


def test_nothing_beside_the_arrays_is_touched() -> None:
    """What lies before and behind a target stays."""
    group = Ranks(2)
    wholes = [np.full(5010, 7.0, np.float32) for _ in range(2)]
    sources = [np.full(5003, rank + 1, np.float32) for rank in range(2)]
    targets: list[Array | None] = [whole[3:-4] for whole in wholes]
    carry_out(group.begin(sources, targets), np.random.default_rng(1))
    for whole in wholes:
        assert whole[:3].tolist() == [7, 7, 7]
        assert whole[-4:].tolist() == [7, 7, 7, 7]
        assert whole[3:-4].tolist() == [3.0] * 5003


@pytest.mark.parametrize(
    ("op", "dtype", "element", "joins"),
    [
        ("sum", "float32", "float32", True),
        ("sum", "uint64", "uint64", True),
        ("mean", "float64", "float64", True),
        ("mean", "int64", "int64", False),  # in double precision
        ("max", "float32", "float32", False),
        ("sum", "float16", "float16", False),  # in single precision
        ("sum", "uint16", "bfloat16", False),
        ("sum", "complex64", "complex64", False),
        ("sum", ">f4", "float32", False),
    ],
)
def test_what_can_be_summed_jointly(op: str, dtype: str, element: str, joins: bool) -> None:
    """Numbers that are combined as they are stored, by sum and mean."""
    assert can_join(op, [np.zeros(3, dtype)], [element]) is joins


def test_an_array_without_a_loop_is_refused() -> None:
    with pytest.raises(TypeError, match="no loop that sums arrays of complex128"):
        Ranks(2).begin([np.zeros(2, complex)] * 2, [None, None])


def test_many_ranks_get_smaller_chunks() -> None:
    """The memory does not grow with the square of the ranks, nor without bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_sum, "_CHUNK", 512 << 10)
        assert bytes_for(2) < 5 << 20
        assert bytes_for(256) < 160 << 20
