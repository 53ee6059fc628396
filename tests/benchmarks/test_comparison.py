"""How benchmarks compare, show and keep what they found. Nothing is measured here."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import command
import comparison
import peers
import pytest
from comparison import BYTES, CORES, Line, Results, lines_of

LABELS = {"weft": "weft", "pool": "Pool", "best": "best schedule"}


def test_a_ratio_is_the_median_of_those_within_rounds() -> None:
    """A slow round counts for both, and so does not count."""
    line = Line("", "call", ours=[1.0, 10.0, 2.0], beside="Pool", theirs=[3.0, 20.0, 8.0])
    assert line.ratio == 3.0
    assert line.ratio_in_words == "3 x"
    assert (line.our_median, line.their_median) == ("2 s", "8 s")


@pytest.mark.parametrize(
    ("asked", "words", "holds"),
    [(None, "", None), (1, "as fast", True), (1 / 1.3, "within 1.3 x", True), (2.5, None, False)],
)
def test_what_was_asked_holds_or_not(
    asked: float | None, words: str | None, holds: bool | None
) -> None:
    """weft is twice as fast here."""
    line = Line("", "call", [1.0], "Pool", [2.0], asked=asked)
    assert line.asked_in_words == ("2.5 x faster" if words is None else words)
    assert line.holds is holds


def test_a_limit_is_about_wefts_number_alone() -> None:
    """Where there is a limit there is no ratio: a peer that needs nothing would make it zero."""
    line = Line("", "memory", [5e5], "Pool", [0.0], unit=BYTES, limit=20e6)
    assert line.ratio is None
    assert line.holds is True
    assert line.asked_in_words == "under 20.0 MB"
    assert Line("", "memory", [3e7], unit=BYTES, limit=20e6).holds is False


def test_without_weft_nothing_is_compared() -> None:
    """`--peers pool` shows Pool's times."""
    line = Line("", "call", (), "Pool", [2.0], asked=4)
    assert (line.ratio, line.holds, line.our_median, line.their_median) == (None, None, "", "2 s")


def test_nothing_is_no_multiple_of_something() -> None:
    """Memory that is not needed at all is shown, and not compared."""
    assert Line("", "memory", [1e6], "Pool", [0.0], unit=BYTES).ratio is None
    assert Line("", "memory", [0.0], "Pool", [1e6], unit=BYTES).ratio is None


def test_a_line_for_each_that_is_beside_weft() -> None:
    """And one where nobody is."""
    row = {"pool": [2.0], "weft": [1.0], "best": [0.5]}
    pool, best = lines_of(
        "2 workers", "call", row, labels=LABELS, asked={"pool": 4, "ray": 9}, yardsticks=["best"]
    )
    assert pool == Line("2 workers", "call", [1.0], "Pool", [2.0], asked=4)
    assert best == Line("2 workers", "call", [1.0], "best schedule", [0.5], yardstick=True)
    assert lines_of("", "lock", {"weft": [1.0]}, labels=LABELS) == [Line("", "lock", [1.0])]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(27.0, "27 s"), (123.4, "123 s"), (0.00099999, "1 ms"), (9.4e-6, "9.4 us"), (5e-7, "500 ns")],
)
def test_times_have_a_unit_that_fits(seconds: float, shown: str) -> None:
    """Three digits are enough."""
    assert comparison.shown_seconds(seconds) == shown


def test_the_table_for_a_terminal() -> None:
    """One head for each section; a thing is named once."""
    lines = [
        Line("1 worker", "get", [1e-3], "Pool", [4e-3], asked=2),
        Line("1 worker", "get", [1e-3], "Ray", [5e-4], asked=1),
        Line("2 workers", "wait", [0.0086], unit=CORES),
    ]
    table = comparison.table(lines).splitlines()
    assert " ".join(table[0].split()) == "1 worker weft beside it ratio asked"
    assert " ".join(table[1].split()) == "get 1 ms Pool 4 ms 4 x 2 x faster yes"
    assert " ".join(table[2].split()) == "1 ms Ray 500 us 0.5 x as fast no"
    assert table[3] == ""
    assert table[4].startswith("2 workers")
    assert table[5].split() == ["wait", "0.86", "%"]


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    """Every number, and all that was recorded."""
    results = Results(
        lines=[
            Line("1 worker", "get", [1e-3, 2e-3], "Pool", [4e-3, 1 / 3], asked=2),
            Line("", "memory", [1.0], unit=BYTES, limit=2.0, yardstick=True),
        ],
        date="2020-01-02 03:04 UTC",
        machine={"cores": 2},
        versions={"weft": "1"},
        quick=True,
        skipped=["Ray: ray is not installed"],
    )
    comparison.save(tmp_path / "new" / "one.json", results)
    assert comparison.load(tmp_path / "new" / "one.json") == results


def test_a_benchmark_keeps_when_and_where_it_ran(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is printed; date, machine and versions are those of the run."""
    given = argparse.Namespace(results=tmp_path, quick=False)
    line = Line("", "call", [1.0], "Pool", [2.0])
    command.finish("one", [line], given, packages=["nothing-like-it"], skipped=["Ray: not here"])
    printed = capsys.readouterr().out
    assert "Pool" in printed
    assert "skipped: Ray: not here" in printed
    kept = comparison.load(tmp_path / "one.json")
    assert kept.lines == [line]
    assert kept.date.endswith(" UTC")
    assert set(kept.machine) == {"cores", "processor", "memory", "system", "python"}
    assert set(kept.versions) == {"weft", "numpy"}


def test_rounds_have_other_orders() -> None:
    """All are measured in every round, and none always comes after the same."""
    order: list[str] = []

    def measured(name: str) -> int:
        order.append(name)
        return len(order)

    found = peers.interleaved(12, {name: partial(measured, name) for name in "abc"})
    rounds = [order[start : start + 3] for start in range(0, 36, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    for name, places in found.items():
        assert [order[place - 1] for place in places] == [name] * 12
        assert len({order[place - 2] for place in places if place > 1} - {name}) == 2


def test_which_peers_are_here() -> None:
    """Nobody is left out without a word."""
    known = {
        "weft": ("weft", "weft"),
        "pool": ("Pool", "multiprocessing"),
        "none": ("None such", "no_such_module"),
    }
    present, skipped = peers.looked_for(known, ["weft", "none"])
    assert present == ["weft"]
    assert skipped == ["Pool: not asked for", "None such: no_such_module is not installed"]
