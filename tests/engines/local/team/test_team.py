"""What a team keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weft
from weft.engines.base import Member
from weft.engines.local.team import team as local_team


def kept(member: Member, number: int) -> Any:
    """Remote function: what a rank keeps under a number."""
    return member.registered[number]


def test_keeping_many_costs_each_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that have parts are looked into, whatever else is kept."""
    looked: list[int] = []

    def part_ids(number: int, value: Any) -> Any:
        looked.append(number)
        return {}

    monkeypatch.setattr(local_team, "part_ids", part_ids)
    with weft.Team(2) as team:
        weights = np.zeros(2)
        number = team.backend.register([weights], "the weights")
        for index in range(20):
            team.backend.register((index,), "a number")
        assert looked == [number] * 20


def test_what_is_kept_twice_stays_when_one_is_dropped() -> None:
    """What mentions it gets the worker's own copy, also after a restart; once both are dropped it
    is sent by value."""
    shared = {"a": 1}
    with weft.Team(2) as team:
        engine: Any = team.backend
        first, second = engine.register(shared, "it"), engine.register(shared, "it again")
        engine.drop(first)
        mention = engine.register([shared], "what mentions it")
        assert engine.call(_same, [(second, mention)] * 2) == [True, True]
        team.restart()
        assert engine.call(_same, [(second, mention)] * 2) == [True, True]
        engine.drop(second)
        last = engine.register([shared], "what mentions it last")
        assert engine.call(kept, [(last,)] * 2) == [[shared], [shared]]
        assert engine.call(_numbers, [()] * 2) == [[mention, last]] * 2


def test_what_is_dropped_while_the_team_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finalizer may run at any time."""
    with weft.Team(2) as team:
        engine: Any = team.backend
        numbers = [engine.register([index], "a list") for index in range(3)]
        send = engine._send

        def send_and_drop(number: int, *kept: Any) -> None:
            if number == numbers[0]:
                engine.drop(numbers[2])
            send(number, *kept)

        monkeypatch.setattr(engine, "_send", send_and_drop)
        team.restart()
        assert engine.call(_numbers, [()] * 2) == [numbers[:2]] * 2


def _same(member: Member, number: int, mention: int) -> bool:
    return member.registered[mention][0] is member.registered[number]


def _numbers(member: Member) -> list[int]:
    return list(member.registered)
