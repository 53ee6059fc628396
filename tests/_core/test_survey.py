"""What hosts have, side by side, and what follows."""

from __future__ import annotations

from typing import Any

from weft._core.survey import Answer, differences, refusals, table

FACTS = {"name": "a", "python": "3.12.1", "weft": "0.1.0", "numpy": "2.4.6", "mpi4py": "4.1.2"}


def answer(host: str, **facts: Any) -> Answer:
    return Answer(host, "", {**FACTS, "name": host, **facts}, f"boot-{host}")


def test_hosts_that_agree() -> None:
    """Nothing is told, and no row is marked."""
    answers = [answer("a"), answer("b", python="3.12.9")]
    assert refusals([answers[0], answer("b")]) == differences(answers) == []
    assert refusals(answers) == []
    lines = table([answer("a"), answer("node-b")]).splitlines()
    assert lines[0].split() == ["a", "node-b"]
    assert lines[2] == "  Python  3.12.1  3.12.1"
    assert not any(line.endswith("<") for line in lines)


def test_a_host_that_did_not_answer() -> None:
    """Is named with the reason, and is no difference."""
    answers = [answer("a"), Answer("b", "cannot be reached: no route")]
    assert refusals(answers) == ["b: cannot be reached: no route"]
    assert table(answers).splitlines()[2] == "  Python  3.12.1  -"


def test_versions_that_ranks_must_share() -> None:
    """Python's first two numbers, and the versions of weft and NumPy; marked in the table."""
    answers = [answer("a"), answer("b", python="3.11.7", weft="0.2.0", numpy="1.26.4")]
    python, weft, numpy = refusals(answers)
    assert numpy.startswith("NumPy is not the same on all hosts (1.26.4, 2.4.6)")
    assert python.startswith("Python is not the same on all hosts (3.11, 3.12)")
    assert weft.startswith("weft is not the same on all hosts (0.1.0, 0.2.0)")
    marked = [line.split()[0] for line in table(answers).splitlines() if line.endswith("<")]
    assert marked == ["Python", "weft", "NumPy"]


def test_versions_that_may_differ() -> None:
    """Are told, and do not stop ranks."""
    answers = [answer("a"), answer("b", mpi4py="4.0.0")]
    assert refusals(answers) == []
    (told,) = differences(answers)
    assert told.startswith("mpi4py differs: 4.1.2 on a, 4.0.0 on b; install the same")


def test_two_hosts_of_one_name() -> None:
    """Are an error; and so is one host under two names."""
    (told,) = refusals([answer("a", name="node"), answer("b", name="node")])
    assert told.startswith("a and b are different hosts that are both called 'node'")
    one = answer("a", name="node")
    (told,) = refusals([one, Answer("10.0.0.1", "", one.facts, one.identity)])
    assert told.startswith("a and 10.0.0.1 are one host, of which mpirun would run")
    assert told.endswith("name it once, with the number of its ranks, as a:2")
