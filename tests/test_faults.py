"""Fault points: asked for by a variable, free when off."""

from __future__ import annotations

import pytest

from tests.support import run_python
from weft import faults
from weft.errors import InvalidValue


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nonsense", "expected point"),
        ("meet.before:0", "expected point"),
        ("nowhere:0:kill", "there is no point 'nowhere', known are join.start"),
        ("meet.before:0:explode", "there is no action 'explode', known are kill, segv"),
        ("meet.before:zero:kill", "invalid literal"),
        ("meet.before@x:0:kill", "invalid literal"),
        ("meet.before:0:delay=x", "could not convert"),
    ],
)
def test_wrong_faults_are_named(text: str, told: str) -> None:
    """The error shows the value and the known points and actions."""
    with pytest.raises(InvalidValue, match="WEFT_FAULT=") as caught:
        faults.parse(text)
    assert told in str(caught.value)


def test_several_faults_with_counts() -> None:
    """point@count:rank:action=argument, separated by commas; * is every rank."""
    one, two = faults.parse("meet.before@3:1:exit=5, wait.block:*:delay=0.25")
    assert (one.point, one.rank, one.action, one.argument, one.countdown) == (
        "meet.before",
        1,
        "exit",
        5.0,
        3,
    )
    assert (two.rank, two.argument) == (None, 0.25)


def test_a_fault_acts_on_the_counted_time_and_rank() -> None:
    """The third time, in rank 1 only."""
    outcome = run_python(
        """
from weft import faults
for rank in (0, 1):
    faults.set_rank(rank)
    for time in range(1, 5):
        try:
            faults.reach("meet.after")
        except faults.InjectedFault:
            print("raised", rank, time)
""",
        env={"WEFT_FAULT": "meet.after@3:1:raise"},
    )
    assert outcome.out == "raised 1 3\n"


def test_off_by_default() -> None:
    """Without the variable nothing is armed, and an unknown point is a mistake of ours."""
    assert not faults.armed
    with pytest.raises(InvalidValue, match="POINTS"):
        faults.reach("no.such.point")
