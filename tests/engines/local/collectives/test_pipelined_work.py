"""What several processes do together: here all ranks are in one process, in any order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from weft._core.arithmetic import address
from weft.engines.local.collectives import pipelined
from weft.engines.local.collectives.pipelined import Memory, PipelinedWork, bytes_for, kernels_apply

pytestmark = pytest.mark.skipif(
    os.environ.get("WEFT_KERNELS") == "0", reason="the kernels are switched off"
)

KINDS = ("float32", "float64", "int32", "uint32", "int64", "uint64")
Array = NDArray[Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few numbers are many chunks."""
    monkeypatch.setattr(pipelined, "_CHUNK", 2048)


class Ranks:
    """Several ranks and the memory that they work in."""

    def __init__(self, count: int) -> None:
        self.count, self._before = count, [0] * count
        whole = np.zeros(bytes_for(count) + 64, np.uint8)
        self._memory = whole[-address(whole) % 64 :]

    def sum(
        self, rank: int, source: Array, target: Array | None, *, mean: bool = False
    ) -> PipelinedWork:
        work = PipelinedWork.sum(*self._where(rank), source=source, target=target, mean=mean)
        self._before[rank] = work.after
        return work

    def broadcast(self, rank: int, root: int, array: Array) -> PipelinedWork:
        source, target = (array, None) if rank == root else (None, array)
        work = PipelinedWork.broadcast(*self._where(rank), root=root, source=source, target=target)
        self._before[rank] = work.after
        return work

    def _where(self, rank: int) -> tuple[Memory, int]:
        return Memory(address(self._memory), rank, self.count), self._before[rank]


def unlike_64(count: int, kind: str, offset: int, seed: int) -> Array:
    """Numbers that begin somewhere in a line of memory."""
    generator = np.random.default_rng(seed)
    if kind.startswith("float"):
        numbers = generator.normal(size=count + offset)
    else:
        numbers = generator.integers(0, 2**31, count + offset)
    return numbers.astype(kind)[offset:]


def carry_out(works: list[Iterator[PipelinedWork]], order: np.random.Generator) -> None:
    """Some steps of some rank after the other, whoever's turn it is; each goes on to its next work
    when it is done with one, whatever the others do."""
    left = {rank: next(one) for rank, one in enumerate(works)}
    for _ in range(100_000):
        rank = int(order.choice(list(left)))
        if left[rank].advance(int(order.integers(1, 4)), 1):
            following = next(works[rank], None)
            if following is None:
                del left[rank]
            else:
                left[rank] = following
        if not left:
            return
    raise AssertionError(f"ranks {list(left)} do not come to an end")


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
    group = Ranks(ranks)
    sources = [
        [unlike_64(count, kind, offset, seed + rank + turn) for turn, count in enumerate(counts)]
        for rank in range(ranks)
    ]
    given_before = [[one.copy() for one in own] for own in sources]
    expected = [reduce(np.add, of_all) for of_all in zip(*given_before, strict=True)]
    if mean:
        expected = [one / np.array(ranks, kind) for one in expected]
    targets = sources
    if not in_place:
        targets = [[unlike_64(count, kind, 15 - offset, 0) for count in counts] for _ in sources]

    def works(rank: int) -> Iterator[PipelinedWork]:
        for source, target in zip(sources[rank], targets[rank], strict=True):
            yield group.sum(rank, source, target, mean=mean)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelined, "_SLOW", 0 if past_cache else 1 << 20)
        carry_out([works(rank) for rank in range(ranks)], np.random.default_rng(seed))
    for own, target, before in zip(sources, targets, given_before, strict=True):
        assert [one.tobytes() for one in target] == [one.tobytes() for one in expected]
        if not in_place:
            assert [one.tobytes() for one in own] == [one.tobytes() for one in before]


@settings(deadline=None, max_examples=100)
@given(
    ranks=st.integers(2, 5),
    counts=st.lists(st.integers(0, 60_000), min_size=1, max_size=4),
    past_cache=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_whoever_comes_first_all_get_the_roots(
    ranks: int, counts: list[int], past_cache: bool, seed: int
) -> None:
    """In any order of steps, broadcast after broadcast, and nothing beside the targets changes."""
    group, root = Ranks(ranks), seed % ranks
    given = [
        unlike_64(count, "uint32", turn, seed).view(np.uint8) for turn, count in enumerate(counts)
    ]
    wholes = [[np.full(len(one) + 9, 7, np.uint8) for one in given] for _ in range(ranks)]
    before = [one.copy() for one in given]

    def works(rank: int) -> Iterator[PipelinedWork]:
        for one, whole in zip(given, wholes[rank], strict=True):
            yield group.broadcast(rank, root, one if rank == root else whole[4:-5])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelined, "_SLOW", 0 if past_cache else 1 << 20)
        carry_out([works(rank) for rank in range(ranks)], np.random.default_rng(seed))
    assert all(map(np.array_equal, given, before))
    for rank, own in enumerate(wholes):
        for one, whole in zip(given, own, strict=True):
            assert whole[:4].tolist() + whole[-5:].tolist() == [7] * 9
            assert rank == root or np.array_equal(whole[4:-5], one)


def test_only_some_get_a_result() -> None:
    """A rank without a target takes part, and what it gives is counted."""
    group, target = Ranks(3), np.zeros(5000)
    works = [
        iter([group.sum(rank, np.arange(5000.0) * (rank + 1), target if rank == 1 else None)])
        for rank in range(3)
    ]
    carry_out(works, np.random.default_rng(0))
    assert np.array_equal(target, np.arange(5000.0) * 6)


def test_a_rank_waits_for_the_others() -> None:
    """Alone it does what it can, says that it is not done, and whom it waits for."""
    group = Ranks(2)
    arrays = [np.ones(5000), np.ones(5000)]
    first, second = (group.sum(rank, array, array) for rank, array in enumerate(arrays))
    assert not first.advance(100, 10)
    given = first.progress
    assert given == 4  # chunks
    assert not first.advance(100, 10)
    assert first.progress == given
    assert not first.is_done_by(1)
    while not second.advance(100, 1):
        first.advance(100, 1)
    assert first.is_done_by(1)
    assert first.advance(100, 1)
    assert arrays[0].tolist() == arrays[1].tolist() == [2.0] * 5000


def test_nothing_beside_the_arrays_is_touched() -> None:
    """What lies before and behind a target stays."""
    group = Ranks(2)
    wholes = [np.full(5010, 7.0, np.float32) for _ in range(2)]
    works = [
        iter([group.sum(rank, np.full(5003, rank + 1, np.float32), wholes[rank][3:-4])])
        for rank in range(2)
    ]
    carry_out(works, np.random.default_rng(1))
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
def test_what_can_be_pipelined(op: str, dtype: str, element: str, joins: bool) -> None:
    """Numbers that are combined as they are stored, by sum and mean."""
    assert kernels_apply(op, [np.zeros(3, dtype)], [element]) is joins


def test_an_array_without_a_loop_is_refused() -> None:
    with pytest.raises(TypeError, match="no kernel for complex128"):
        Ranks(2).sum(0, np.zeros(2, complex), None)


def test_many_ranks_get_smaller_chunks() -> None:
    """The memory does not grow with the square of the ranks, nor without bound."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelined, "_CHUNK", 512 << 10)
        assert bytes_for(2) < 5 << 20
        assert bytes_for(256) < 160 << 20
