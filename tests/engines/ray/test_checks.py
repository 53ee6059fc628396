"""What is wrong with machines: by what they answered, what their cluster says, and versions."""

from __future__ import annotations

import pytest

from weft.engines.ray import status
from weft.engines.ray.checks import (
    Answer,
    Member,
    Problem,
    disagreement,
    find,
    labels_of,
    problems,
    table,
)
from weft.engines.ray.status import RunningMap

OWN = {"python": "3.11.7", "weft": "0.1.0+abc.d", "ray": "2.60.0", "numpy": "2.4.6"}


def member(k: int, **versions: str) -> Member:
    labels = labels_of({**OWN, **versions})
    return Member(f"id{k}", f"host{k}.lab", f"10.0.0.{k}", 4, 1, labels)


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ({}, ""),
        ({"python": "3.11.99"}, ""),
        ({"numpy": "1.26.0"}, ""),
        ({"python": "3.12.7"}, "has Python 3.12.7, this machine has Python 3.11.7; install"),
        ({"weft": "0.2.0"}, "has weft 0.2.0, this machine has weft 0.1.0+abc.d; install"),
        ({"ray": "2.61.0", "python": "3.1.1"}, "has Python 3.1.1, Ray 2.61.0, this machine has"),
    ],
)
def test_versions(versions: dict[str, str], told: str) -> None:
    """Another patch of Python and another NumPy may be; labels cannot have every character."""
    found = disagreement(member(1, **versions).versions, OWN)
    assert found.startswith(told)
    assert bool(found) == bool(told)


def test_a_node_that_weft_did_not_start() -> None:
    foreign = Member("id", "host1", "10.0.0.1", 4, 0, {"ray.io/node-id": "x"})
    assert disagreement(foreign.versions, OWN) == "runs a node of Ray that weft open did not start"


def test_the_node_of_a_machine() -> None:
    """By its address, else by its own name; not if it does not answer."""
    members = [member(1), member(2)]
    assert find(members, Answer("any", "10.0.0.2")) == members[1]
    assert find(members, Answer("host1", "192.168.7.1")) == members[0]
    assert find(members, Answer("host1.other", "192.168.7.1")) == members[0]
    assert find(members, Answer("host3", "192.168.7.1")) is None
    assert find(members, Answer("host1", "10.0.0.1", "is off")) is None


def test_all_problems_are_listed() -> None:
    """Those of machines that are right are not; without a cluster only what they answer is."""
    answers = [
        Answer("host1", "10.0.0.1"),
        Answer("nobody", "", "unknown name (x)"),
        Answer("host2", "10.0.0.2"),
        Answer("host9", "10.0.0.9"),
    ]
    found = problems(answers, [member(1), member(2, weft="7")], OWN, "10.0.0.1:2718")
    assert [problem.machine for problem in found] == ["nobody", "host2", "host9"]
    assert "weft open --join 10.0.0.1:2718" in found[2].reason
    assert problems(answers, None, OWN, "") == [Problem("nobody", "", "unknown name (x)")]
    assert table(found[:2]).splitlines()[0] == "  nobody  -         unknown name (x)"


def test_the_table_of_status() -> None:
    """What maps use is not free; what a node did not say is unknown."""
    maps = [
        RunningMap("10.0.0.1", "host2.lab pid 7", "fun", 3, 1, 12, 2.6),
        RunningMap("10.0.0.1", "host1.lab pid 8", "big", 3, 0, 0, 0.1),
    ]
    bare = Member("id3", "host3", "10.0.0.3", 2, 0)
    title, first, third = status.table([member(1), bare], {"id1": 20_000_000_000}, maps)
    assert title.split()[:7] == ["machine", "address", "cores", "free", "GPUs", "free", "memory"]
    assert first.split()[:8] == ["host1.lab", "10.0.0.1", "4", "0", "1", "0", "20.0", "GB"]
    assert third.split() == ["host3", "10.0.0.3", "2", "2", "0", "0", *"?????"]
    lines = list(status.lines_of_maps([member(1)], maps))
    assert lines[0] == "fun of host2.lab pid 7: 3 workers on host1.lab, 12 items in 3 s"
    assert list(status.lines_of_maps([], [])) == ["no map runs on these machines"]
