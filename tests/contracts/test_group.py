"""What every engine's group does. Each test runs on every engine, launcher and size.

All bodies of a size run in one launch (`bodies.py`), each in a round of its own.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.contracts.bodies import Bodies
from weft.engines.base import Group
from weft.engines.serial.group import SerialGroup
from weft.errors import InvalidType, InvalidValue, NotInitialized

BODIES = Bodies(each_in="round")
OVER_HOSTS = True


@BODIES.of_all
def ranks_count_from_zero(group: Group) -> Any:
    return group.rank, group.size, group.generation, group.is_master, group.name


def test_ranks_count_from_zero(outcome: Any) -> None:
    """Each process has its own rank, in a group of the right size, generation 0."""
    expected = [(rank, outcome.size, 0, rank == 0, "world") for rank in range(outcome.size)]
    assert outcome(ranks_count_from_zero) == expected


@BODIES.of_all
def groups_know_their_hosts(group: Group) -> Any:
    parity = group.split(group.rank % 2, key=-group.rank)
    assert parity is not None
    later = group.survivors()
    return [(part.hosts, part.local_rank, part.local_size) for part in (group, parity, later)]


def test_groups_know_their_hosts(outcome: Any) -> None:
    """Each rank's host, and this rank's place among those of its own; also in subgroups and in
    the next generation."""
    everybody = list(range(outcome.size))
    for rank, groups in enumerate(outcome(groups_know_their_hosts)):
        same_parity = everybody[rank % 2 :: 2][::-1]
        for ranks, placed in zip((everybody, same_parity, everybody), groups, strict=True):
            hosts, own = placed[0], ranks.index(rank)
            assert hosts == tuple(outcome.hosts[rank] for rank in ranks)
            assert placed[1:] == (hosts[:own].count(hosts[own]), hosts.count(hosts[own]))


def test_places_on_several_hosts() -> None:
    """A rank is counted among those of its own host, in the order of the ranks."""
    group = SerialGroup(timeout=1.0)
    group.hosts = ("alder", "birch", "alder", "alder", "birch")
    places = []
    for group.rank in range(5):
        places.append((group.local_rank, group.local_size))
    assert places == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]


@BODIES.of_all
def barrier_waits_for_the_slowest(group: Group) -> list[tuple[float, float]]:
    times = []
    for step in range(20):
        if step % group.size == group.rank:
            time.sleep(0.002)
        before = time.monotonic()
        group.barrier()
        times.append((before, time.monotonic()))
    return times


def test_barrier_waits_for_the_slowest(outcome: Any) -> None:
    """Nobody passes a barrier before everybody has come to it."""
    for step in zip(*outcome(barrier_waits_for_the_slowest), strict=True):
        last_arrival = max(before for before, _ in step)
        assert min(after for _, after in step) >= last_arrival


@BODIES.of_all
def split_orders_by_key_then_rank(group: Group) -> Any:
    backwards = group.split(7, key=-group.rank)
    parity = group.split(np.int64(group.rank % 2))  # NumPy's are whole numbers too
    first_only = group.split(0 if group.is_master else None)
    found = []
    for part in (backwards, parity, first_only):
        if part is not None:
            part.barrier()
        found.append(part and (part.rank, part.size, part.name))
    group.barrier()
    return found


def test_split_orders_by_key_then_rank(outcome: Any) -> None:
    """Subgroups hold who named the same color; keys reverse the order; None is in none."""
    n = outcome.size
    for rank, (backwards, parity, first_only) in enumerate(outcome(split_orders_by_key_then_rank)):
        assert backwards == (n - 1 - rank, n, "world/1.7")
        members = list(range(rank % 2, n, 2))
        assert parity == (members.index(rank), len(members), f"world/2.{rank % 2}")
        assert first_only == ((0, 1, "world/3.0") if rank == 0 else None)


@BODIES.of_all
def subgroups_nest_and_work_side_by_side(group: Group) -> list[int]:
    pair = group.split(group.rank // 2)
    assert pair is not None
    single = pair.split(pair.rank)
    assert single is not None
    for level in (group, pair, single, pair, group) * 10:
        level.barrier()
    return [group.size, pair.size, single.size]


def test_subgroups_nest_and_work_side_by_side(outcome: Any) -> None:
    """A subgroup can be split again, and all levels stay usable in turn."""
    n = outcome.size
    assert outcome(subgroups_nest_and_work_side_by_side) == [
        [n, min(2, n - rank // 2 * 2), 1] for rank in range(n)
    ]


@BODIES.of_all
def survivors_of_an_unhurt_group_are_all(group: Group) -> Any:
    for _ in range(3):
        group = group.survivors()
        group.barrier()
    return group.rank, group.size, group.generation


def test_survivors_of_an_unhurt_group_are_all(outcome: Any) -> None:
    """Without a loss, survivors() is the same group one generation later, time after time."""
    assert outcome(survivors_of_an_unhurt_group_are_all) == [
        (rank, outcome.size, 3) for rank in range(outcome.size)
    ]


@BODIES.of_all
def a_left_group_says_so(group: Group) -> int:
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


def test_a_left_group_says_so(outcome: Any) -> None:
    """After leave() every method raises NotInitialized; leaving twice is nothing."""
    assert outcome(a_left_group_says_so) == [3] * outcome.size


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


@BODIES.of_all
def wrong_values_cost_nothing(group: Group) -> bool:
    for wrong in (lambda: group.barrier(timeout=-1), lambda: group.split(2**70)):
        try:
            wrong()
        except InvalidValue:
            continue
        return False
    group.barrier()
    return True


def test_wrong_values_cost_nothing(outcome: Any) -> None:
    """A refused argument changes nothing: the group goes on."""
    assert all(outcome(wrong_values_cost_nothing))
