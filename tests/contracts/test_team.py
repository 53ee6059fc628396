"""What every engine's team does. Each test runs on every engine and size."""

from __future__ import annotations

import gc
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import weft
from tests.contracts.fakes import TeamOfTwoHosts, pack_apart
from weft._core.partition import RowSlice
from weft.engines.base import Member, Team
from weft.engines.local.pool.workers import workers as own_workers
from weft.engines.local.team import team as local_team
from weft.errors import UsedConcurrently

#: what a team of three does one of two does too: `make soak` has it
CASES = [
    pytest.param((name, size), marks=marks, id=f"{name}-{size}")
    for name, size, marks in (
        ("serial", 1, ()),
        ("local", 2, pytest.mark.soak),
        ("local", 3, ()),
        ("two hosts", 3, ()),
    )
]


@pytest.fixture(params=CASES)
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    with made_team(*request.param, monkeypatch) as made:
        yield made.backend


def made_team(engine: str, size: int, monkeypatch: pytest.MonkeyPatch) -> weft.Team:
    if engine != "two hosts":
        return weft.Team(size, engine=engine)
    monkeypatch.setattr(local_team, "pack_for_registration", pack_apart)
    made = weft.Team(1)
    made.backend = TeamOfTwoHosts(size, own_workers(), cores=size, timeout=60.0)
    return made


def everywhere(team: Team, function: Any, *arguments: Any) -> list[Any]:
    return team.call(function, [arguments] * team.size)


def everywhere_with(team: Team, common: Any, function: Any, *arguments: Any) -> list[Any]:
    return team.call(function, [arguments] * team.size, common=common)


# remote functions


def who(member: Member) -> tuple[int, int, tuple[str, int]]:
    return member.rank, member.size, (socket.gethostname(), os.getpid())


def give(member: Member, value: Any) -> Any:
    return value


def total(member: Member, value: Any) -> Any:
    return member.group.all_reduce(value, "sum")


def registered(member: Member) -> dict[int, Any]:
    return dict(member.registered)


def add_to(member: Member, rank: int, /, table: Any, step: Any) -> Any:
    table += rank * step
    return table


def taken(member: Member, rows: RowSlice) -> Any:
    return np.asarray(rows.take()).tolist()


def change(member: Member, number: int) -> None:
    member.registered[number] += member.rank + 1


def call_registered(member: Member, number: int) -> Any:
    return member.registered[number]()


def fail(member: Member, rank: int) -> int:
    if member.rank == rank:
        raise LookupError(f"in rank {rank}")
    return member.rank


def test_every_rank_runs_the_function(team: Team) -> None:
    """Results are in the order of ranks; rank 0 is this process."""
    found = everywhere(team, who)
    assert [(rank, size) for rank, size, _ in found] == [(r, team.size) for r in range(team.size)]
    assert found[0][2] == (socket.gethostname(), os.getpid())
    assert len({process for _, _, process in found}) == team.size
    assert len(team.hosts) == team.size
    assert everywhere(team, who) == found  # they stay


def test_each_has_arguments_of_its_own(team: Team) -> None:
    """A rank without arguments does nothing; large arrays go there and back."""
    large = [np.full(100_000, rank) for rank in range(team.size)]
    found = team.call(give, [(one,) for one in large])
    assert all((one == other).all() for one, other in zip(found, large, strict=True))
    last = [None] * (team.size - 1)
    assert team.call(give, [*last, ("x",)]) == [*last, "x"]
    assert team.call(give, [("x",), *last]) == ["x", *last]
    assert team.call(give, [None] * team.size) == [None] * team.size


def test_common_arguments_reach_every_rank(team: Team) -> None:
    """By name, large and small; what one rank changes of its own is nobody else's."""
    table = np.zeros(50_000)
    common = {"table": table, "step": 2}
    for _ in range(2):
        found = team.call(add_to, [(rank + 1,) for rank in range(team.size)], common=common)
        assert [(one[0], one[-1]) for one in found[1:]] == [
            (2 * (rank + 1),) * 2 for rank in range(1, team.size)
        ]
        table[:] = 0
    last = [None] * (team.size - 1)
    assert team.call(add_to, [*last, (1,)], common={"table": [1], "step": [2]}) == [*last, [1, 2]]


def test_common_arguments_are_named_in_errors(team: Team) -> None:
    """The first part that cannot be sent, before anybody has begun."""
    if team.size > 1:
        with pytest.raises(weft.InvalidType, match=r"table'?\]?\[1\] is a _thread\.lock"):
            everywhere_with(team, {"table": [1, threading.Lock()]}, give, 1)
    assert everywhere(team, total, 1) == [team.size] * team.size


@pytest.mark.parametrize("rows", [slice(1, 4), np.array([4, 0, 2])])
def test_row_slices_give_their_rows(team: Team, rows: Any) -> None:
    """Of arrays here or in shared memory, of lists: `take` has the rows that are meant."""
    array = np.arange(20.0).reshape(5, 4)
    for given in (array, weft.share(array), [[1], [2], [3], [4], [5]]):
        expected = np.asarray(given)[rows].tolist()
        found = everywhere(team, taken, RowSlice(given, rows))
        assert found == [expected] * team.size


def test_what_is_shared_shows_later_changes(team: Team) -> None:
    """An array that has a persistent id without being registered changes in the workers by
    itself."""
    for array in (np.zeros(3), weft.share(np.zeros(3))):
        shared = team.persistent_ids()(array) is not None
        number = team.register([array], "the array", by_value=True)
        array[:] = 1
        fresh = [one[number][0].tolist() == [1, 1, 1] for one in everywhere(team, registered)]
        assert all(fresh) or not shared
        team.drop(number)
    team.register(None, "nothing")  # nobody holds the arrays now


@pytest.mark.parametrize("case", CASES)
def test_a_function_sees_what_its_closure_has_now(
    case: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of arrays in shared memory, where the team does not share them."""
    size = case[1]
    array = weft.share(np.ones(2))
    with made_team(*case, monkeypatch) as made:
        total = weft.function(lambda x: x * array[0], collect="gather", team=made)
        rows = np.ones(size)
        for value in (1, 2, 3):
            array[:] = value
            assert total(rows).tolist() == [value] * size
        del total
        gc.collect()
        made.backend.register(None, "nothing")  # nobody holds the array now


def test_ranks_form_a_group(team: Team) -> None:
    """Collectives in a remote function meet all ranks."""
    found = team.call(total, [(np.full(3, rank),) for rank in range(team.size)])
    assert all((one == sum(range(team.size))).all() for one in found)


@pytest.mark.parametrize("length", [2, 50_000])
def test_what_is_registered_is_each_ranks_own(team: Team, length: int) -> None:
    """In the driver it is the object itself, elsewhere a copy, of any size."""
    array = np.zeros(length)
    number = team.register(array, "the array")
    everywhere(team, change, number)
    assert [one[number][-1] for one in everywhere(team, registered)] == [
        rank + 1 for rank in range(team.size)
    ]
    assert array[0] == 1
    assert team.member.registered[number] is array


def test_what_mentions_something_registered_has_the_ranks_own(team: Team) -> None:
    """The object itself, or an array in it, through lists, dicts and closures."""
    tree = {"a": np.zeros(2), "b": [np.zeros(1)]}
    inner = tree["b"]
    first = team.register(tree, "the tree")
    second = team.register(lambda: (tree["a"], inner[0], tree), "the function")

    def same(member: Member) -> bool:
        values = member.registered[first]
        a, b, whole = member.registered[second]()
        return a is values["a"] and b is values["b"][0] and whole is values

    assert everywhere(team, same) == [True] * team.size


def test_what_is_dropped_goes(team: Team) -> None:
    """Here and in the workers, at the latest when they are given the next."""

    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    team.drop(team.register(thing, "a thing"))
    team.register("another", "a text")
    del thing
    gc.collect()
    assert gone() is None
    assert [list(one.values()) for one in everywhere(team, registered)] == [["another"]] * team.size


def test_what_cannot_be_sent(team: Team) -> None:
    """A failure of register leaves the team as it was."""
    if team.size > 1:
        with pytest.raises(weft.InvalidType, match=r"the thing\.gi_frame|the thing is a generator"):
            team.register((one for one in ()), "the thing")
    number = team.register([1], "a list")
    assert [one[number] for one in everywhere(team, registered)] == [[1]] * team.size


def test_what_a_rank_raises(team: Team) -> None:
    """The last rank's or the driver's: its own class; the team goes on, collectives too."""
    for rank in (team.size - 1, 0):
        with pytest.raises(LookupError, match=f"in rank {rank}"):
            everywhere(team, fail, rank)
        assert everywhere(team, fail, -1) == list(range(team.size))
        assert everywhere(team, total, 1) == [team.size] * team.size


def test_restart_has_the_drivers_values(team: Team) -> None:
    """Whatever the copies were: fresh workers keep what the driver's objects are now."""
    array = np.zeros(2)
    number = team.register(array, "the array")
    reader = team.register(lambda: array * 1, "the function")
    everywhere(team, change, number)
    array[:] = 7
    for _ in range(2):
        team.restart()
        assert all((one == 7).all() for one in everywhere(team, call_registered, reader))
    assert everywhere(team, total, 1) == [team.size] * team.size


def test_after_close(team: Team) -> None:
    """Everything but restart says that it is closed."""
    number = team.register([1], "a list")
    team.close()
    team.close()
    with pytest.raises(weft.TeamBroken, match="closed"):
        everywhere(team, who)
    with pytest.raises(weft.TeamBroken, match="closed"):
        team.register(1, "one")
    team.restart()
    assert [one[number] for one in everywhere(team, registered)] == [[1]] * team.size


def test_a_call_in_the_middle_of_another(team: Team) -> None:
    """It is refused, and the outer one fails with that."""

    def again(member: Member) -> None:
        if member.rank == 0:
            everywhere(team, who)

    with pytest.raises(UsedConcurrently, match="in the middle of another"):
        team.call(again, [(), *[None] * (team.size - 1)])
    assert len(everywhere(team, who)) == team.size
