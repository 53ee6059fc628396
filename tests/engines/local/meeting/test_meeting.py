"""Meetings: disagreement, survivors, and the limits of a mailbox."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import launch, run_ranks
from weft.engines.local.group import LocalGroup, ranks_of_color
from weft.engines.local.meeting.meeting import CALLS, MAILBOX_BYTES
from weft.errors import Disagreement, InvalidValue


def test_different_calls_are_shown_to_everyone() -> None:
    """Ranks that call different things all learn what each called and where; then they go on."""

    def body(group: LocalGroup) -> Any:
        group.barrier()
        errors = []
        for turn in range(3):
            try:
                if group.rank == turn:
                    group.split(0)
                else:
                    group.barrier()
            except Disagreement as error:
                errors.append(str(error))
            group.barrier()
        return errors

    for errors in run_ranks(3, body):
        for turn, text in enumerate(errors):
            assert f"rank {turn} called split at " in text
            assert f"rank {(turn + 1) % 3} called barrier at " in text
            assert text.count("test_meeting.py:") >= 3
        assert len(errors) == 3


def test_mailboxes_carry_a_message_each_step() -> None:
    """Messages of every length up to the limit arrive whole, step after step."""

    def body(group: LocalGroup) -> bool:
        call = CALLS.index("table")
        for length in (0, 1, 7, 8, 500, MAILBOX_BYTES, 3, 0):
            message = bytes([group.rank + 1]) * length
            answers = group._meeting.exchange(call, message, 30.0)
            assert answers == [bytes([rank + 1]) * length for rank in range(group.size)]
        try:
            group._meeting.exchange(call, bytes(MAILBOX_BYTES + 1), 30.0)
        except InvalidValue:
            return True
        return False

    assert all(run_ranks(3, body))


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("order", ["at once", "one after another", "during agreement"])
def test_survivors_agree_whoever_dies(size: int, order: str) -> None:
    """Whatever the order of deaths, the survivors end up in the same group and can use it."""
    outcome = launch(
        f"""
import os, signal, time
import weft
group = weft.init()
me, order = group.rank, {order!r}
group.barrier()

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if me == 0 and order != "during agreement":
    die()
if me == 1 and order == "at once":
    die()
deaths = 0
while True:
    try:
        for step in range(30):
            group.barrier()
            if me == 1 and order == "one after another" and group.generation == 1 and step == 5:
                die()
            if me == 2 and order == "during agreement" and group.generation == 0 and step == 5:
                die()
        break
    except weft.PeerLost:
        deaths += 1
        if me == 0 and order == "during agreement":
            die()  # the one that would decide, while the others wait for its decision
        group = group.survivors()
print("size", group.size, "rank", group.rank)
""",
        size,
        options=("--keep-going", "--no-prefix", "--timeout", "20"),
    )
    left = size - 2
    expected = [f"size {left} rank {rank}" for rank in range(left)]
    assert sorted(outcome.out.splitlines()) == expected, outcome
    assert outcome.code == 137


def test_a_leaver_is_not_a_survivor() -> None:
    """shutdown() before the others are done releases them, and they can go on without."""

    def body(group: LocalGroup) -> Any:
        import weft

        group.barrier()
        if group.rank == 1:
            weft.shutdown()
            return "left"
        try:
            group.barrier()
        except weft.PeerLost as error:
            again = group.survivors()
            again.barrier()
            return error.ranks, again.size, again.rank
        return "no error"

    results = run_ranks(3, body)
    assert results == [((1,), 2, 0), "left", ((1,), 2, 1)]


def test_who_is_in_a_part() -> None:
    """Parts are ordered by key, then by rank; who named nothing is in none."""
    answers = [(True, 5, 0), (True, 5, -1), (False, 5, 0), (True, 0, 0), (True, 5, 0)]
    assert ranks_of_color(5, answers) == [1, 0, 4]
    assert ranks_of_color(0, answers) == [3]
    assert ranks_of_color(1, answers) == []


def test_a_subgroup_loses_only_its_own() -> None:
    """The death of a rank outside a subgroup does not disturb it."""
    outcome = launch(
        """
import os, signal, weft
group = weft.init()
part = group.split(0 if group.rank < 2 else 1)
group.barrier()
if group.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(200):
    part.barrier()
try:
    group.barrier()
except weft.PeerLost as error:
    print("lost", error.ranks)
""",
        3,
        options=("--keep-going", "--no-prefix"),
    )
    assert outcome.out == "lost (2,)\n" * 2, outcome
