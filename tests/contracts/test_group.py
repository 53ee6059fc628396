"""What every engine's group does. Each test runs on every engine, launcher and size."""

from __future__ import annotations

import time
from typing import Any

import pytest

from weft.engines.base import Group
from weft.engines.serial import SerialGroup
from weft.errors import InvalidType, InvalidValue, NotInitialized


def test_ranks_count_from_zero(ranks: Any) -> None:
    """Each process has its own rank, in a group of the right size, generation 0."""

    def body(group: Group) -> Any:
        return group.rank, group.size, group.generation, group.is_master, group.name

    expected = [(rank, ranks.size, 0, rank == 0, "world") for rank in range(ranks.size)]
    assert ranks(body) == expected


def test_barrier_waits_for_the_slowest(ranks: Any) -> None:
    """Nobody passes a barrier before everybody has come to it."""

    def body(group: Group) -> list[tuple[float, float]]:
        times = []
        for step in range(20):
            if step % group.size == group.rank:
                time.sleep(0.002)
            before = time.monotonic()
            group.barrier()
            times.append((before, time.monotonic()))
        return times

    for step in zip(*ranks(body), strict=True):
        last_arrival = max(before for before, _ in step)
        assert min(after for _, after in step) >= last_arrival


def test_split_orders_by_key_then_rank(ranks: Any) -> None:
    """Subgroups hold who named the same color; keys reverse the order; None is in none."""

    def body(group: Group) -> Any:
        backwards = group.split(7, key=-group.rank)
        parity = group.split(group.rank % 2)
        first_only = group.split(0 if group.is_master else None)
        found = []
        for part in (backwards, parity, first_only):
            if part is not None:
                part.barrier()
            found.append(part and (part.rank, part.size, part.name))
        group.barrier()
        return found

    n = ranks.size
    for rank, (backwards, parity, first_only) in enumerate(ranks(body)):
        assert backwards == (n - 1 - rank, n, "world/1.7")
        members = list(range(rank % 2, n, 2))
        assert parity == (members.index(rank), len(members), f"world/2.{rank % 2}")
        assert first_only == ((0, 1, "world/3.0") if rank == 0 else None)


def test_subgroups_nest_and_work_side_by_side(ranks: Any) -> None:
    """A subgroup can be split again, and all levels stay usable in turn."""

    def body(group: Group) -> list[int]:
        pair = group.split(group.rank // 2)
        assert pair is not None
        single = pair.split(pair.rank)
        assert single is not None
        for level in (group, pair, single, pair, group) * 10:
            level.barrier()
        return [group.size, pair.size, single.size]

    n = ranks.size
    assert ranks(body) == [[n, min(2, n - rank // 2 * 2), 1] for rank in range(n)]


def test_survivors_of_an_unhurt_group_are_all(ranks: Any) -> None:
    """Without a loss, survivors() is the same group one generation later, time after time."""

    def body(group: Group) -> Any:
        for _ in range(3):
            group = group.survivors()
            group.barrier()
        return group.rank, group.size, group.generation

    assert ranks(body) == [(rank, ranks.size, 3) for rank in range(ranks.size)]


def test_a_left_group_says_so(ranks: Any) -> None:
    """After leave() every method raises NotInitialized; leaving twice is nothing."""

    def body(group: Group) -> int:
        group.barrier()
        group.leave()
        group.leave()
        refused = 0
        for call in (group.barrier, group.survivors, lambda: group.split(0)):
            try:
                call()
            except NotInitialized as error:
                assert "weft.init()" in str(error)
                refused += 1
        return refused

    assert ranks(body) == [3] * ranks.size


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(-1, InvalidValue), (float("nan"), InvalidValue), ("5", InvalidType), (True, InvalidType)],
)
def test_wrong_timeouts_are_refused(timeout: Any, error: type[Exception]) -> None:
    """A timeout is a number of seconds, 0 or more; the error names the value."""
    group = SerialGroup(timeout=60.0)
    with pytest.raises(error, match="timeout="):
        group.barrier(timeout=timeout)


@pytest.mark.parametrize("color", ["a", 1.5, True])
def test_wrong_colors_are_refused(color: Any) -> None:
    """A color is a whole number or None."""
    with pytest.raises(InvalidType, match="color="):
        SerialGroup(timeout=60.0).split(color)


def test_wrong_values_cost_nothing(ranks: Any) -> None:
    """A refused argument changes nothing: the group goes on."""

    def body(group: Group) -> bool:
        for wrong in (lambda: group.barrier(timeout=-1), lambda: group.split(2**70)):
            try:
                wrong()
            except InvalidValue:
                continue
            return False
        group.barrier()
        return True

    assert all(ranks(body))
