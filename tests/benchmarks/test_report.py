"""The page on benchmarks, from made-up results and from those that are kept."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import comparison
import pytest
import report
from comparison import BYTES, Line, Results
from pictures import picture

ROOT = Path(__file__).parents[2]


def page_of(*lines: Line) -> str:
    return report.page({"map": Results(lines=lines)})


def part(page: str, title: str) -> str:
    """What stands under a title."""
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_page_says_where_a_peer_is_faster() -> None:
    """By how much, and with both times; peers that are slower are not in the list."""
    page = page_of(
        Line("2 workers", "start", [0.4], "Pool", [0.1]),
        Line("2 workers", "start", [0.4], "Ray", [4.0]),
        Line("2 workers", "read", [1.03], "joblib", [1.0]),
        Line("memory", "read", [2e6], "Dask", [1e6], unit=BYTES),
    )
    told = part(page, "Where a peer is faster")
    assert "In 3 of 4 comparisons with a peer:" in told
    assert (
        "Map, 2 workers:\n\n- start: Pool is 4 times faster, 100 ms beside weft's 400 ms\n" in told
    )
    assert "- read: joblib is 3 % faster, 1 s beside weft's 1.03 s\n" in told
    assert "Map, memory:\n\n- read: Dask needs 2 times less, 1.0 MB beside weft's 2.0 MB\n" in told
    assert "Ray" not in told


def test_what_is_no_peer_is_listed_apart() -> None:
    """A yardstick that is faster does not count as a peer."""
    page = page_of(
        Line("2 workers", "uneven", [1.2], "best schedule", [1.0], yardstick=True),
        Line("2 workers", "uneven", [1.2], "Pool", [2.4]),
    )
    told, apart = part(page, "Where a peer is faster").split("### Beside yardsticks")
    assert "In none of 1 comparison with a peer." in told
    assert "In 1 of 1 comparison weft needs more" in apart
    row = "| Map, 2 workers | uneven | 1.2 s | best schedule | 1 s | 1.2 times as much |"
    assert row in apart


def test_the_page_says_what_was_asked_and_does_not_hold() -> None:
    """What holds is counted and not listed."""
    page = page_of(
        Line("", "start", [2.0], "Pool", [1.0], asked=1),
        Line("", "in", [1.0], "Ray", [2.0], asked=4),
        Line("", "out", [2.0], "Ray", [1.0], asked=1 / 1.2),
        Line("", "memory", [3e7], "Ray", [0.0], unit=BYTES, limit=2e7),
        Line("", "items", [1.0], "Pool", [5.0], asked=4),
        Line("", "more items", [1.0], "Pool", [5.0]),
    )
    told = part(page, "What was asked and does not hold")
    assert "4 of 5 things that were asked and measured:" in told
    assert "| Map | start | as fast as Pool | 0.5 x (2 times as much) |" in told
    assert "| Map | in | 4 x faster than Ray | 2 x |" in told
    assert "| Map | out | within 1.2 x of Ray | 0.5 x (2 times as much) |" in told
    assert "| Map | memory | under 20.0 MB | 30.0 MB |" in told
    assert "items" not in told


def test_what_is_good_is_said_as_plainly() -> None:
    """No lists without entries."""
    page = page_of(Line("", "items", [1.0], "Pool", [5.0], asked=4))
    assert "In none of 1 comparison with a peer." in page
    assert "All 1 things that were asked and measured hold." in page
    assert "yardstick" not in page
    assert "No peer was measured." in report.page({})
    assert "Nothing that was asked has been measured." in report.page({})


def test_each_section_says_when_and_where_it_was_measured() -> None:
    """And with which versions, how long, and without whom."""
    results = Results(
        lines=[Line("2 workers", "items", [1.0, 1.2], "Pool", [5.0, 6.0], asked=4)],
        date="2020-01-02 03:04 UTC",
        machine={
            "cores": 2,
            "processor": "Abacus 9",
            "memory": 2**34,
            "system": "Linux-1",
            "python": "3.10.1",
        },
        versions={"weft": "0.1", "ray": "2.9"},
        quick=True,
        skipped=["Dask: distributed is not installed"],
    )
    told = part(report.page({"map": results}), "Map")
    assert "- date: 2020-01-02 03:04 UTC\n" in told
    assert "- machine: 2 cores, Abacus 9, 16 GiB of memory, Linux-1, Python 3.10.1\n" in told
    assert "- versions: weft 0.1, ray 2.9\n" in told
    assert "- a quick run: fewer rounds and repetitions than usual\n" in told
    assert "- not measured: Dask: distributed is not installed\n" in told
    assert "](pictures/benchmark-map.svg)" in told
    assert "### Map: 2 workers" in told
    assert "| items | 1.1 s | Pool | 5.5 s | 5 x | 4 x faster | yes |" in told


def test_what_was_not_recorded_is_not_invented() -> None:
    """Neither a date nor a machine; a benchmark without results has a title all the same."""
    page = page_of(Line("", "lock", [1.0]))
    told = part(page, "Map")
    assert "- date: not recorded\n- machine: not recorded\n- versions: not recorded\n" in told
    assert "a quick run" not in told
    assert "pictures/" not in told
    assert part(page, "Tables").endswith("- program: `benchmarks/tables.py`\n- not measured\n")
    known = Results(lines=[], machine={"cores": 2})
    assert "2 cores, processor not recorded, memory not recorded" in report.page({"map": known})


def test_a_thing_is_named_in_the_first_of_its_rows() -> None:
    """The others follow below it; other sections name it anew."""
    page = page_of(
        Line("1 worker", "get", [1.0], "Pool", [2.0]),
        Line("1 worker", "get", [1.0], "Ray", [3.0]),
        Line("2 workers", "get", [1.0], "Ray", [3.0]),
    )
    assert "| get | 1 s | Pool | 2 s | 2 x |  |  |\n|  | 1 s | Ray | 3 s | 3 x |  |  |\n" in page
    assert page.count("| get |") == 2


def test_a_picture_shows_on_which_side_of_one_a_ratio_lies() -> None:
    """It is XML, with one mark for each ratio and one in the legend for each other."""
    drawn = picture(
        "a <title>",
        [
            Line("2 workers", "start", [2.0], "Pool & co", [1.0], asked=1.5),
            Line("2 workers", "start", [1.0], "Ray", [100.0]),
            Line("2 workers", "lock", [1.0]),
        ],
    )
    tree = ElementTree.fromstring(drawn)
    name = "{http://www.w3.org/2000/svg}"
    marks = {
        group.find(f"{name}path/{name}title").text: float(group.get("transform")[10:].split(",")[0])
        for group in tree.iter(f"{name}g")
        if group.find(f"{name}path/{name}title") is not None
    }
    line = next(path for path in tree.iter(f"{name}path") if path.get("class") == "one")
    one = float(line.get("d")[1:].split(",")[0])
    assert marks["start, Pool & co: 0.5 x"] < one < marks["start, Ray: 100 x"]
    texts = [text.text for text in tree.iter(f"{name}text")]
    assert {"2 workers", "start", "Pool & co", "Ray", "asked, in the same colour"} <= set(texts)
    assert "lock" not in texts
    assert "prefers-color-scheme: dark" in drawn


def test_no_picture_without_a_ratio() -> None:
    """Then the page does not link to one either."""
    assert picture("title", [Line("", "lock", [1.0])]) == ""
    made = report.files({"map": Results(lines=[Line("", "lock", [1.0])])})
    assert set(made) == {"benchmarks.md", *report.MARKED}


def test_the_report_says_what_the_kept_results_say() -> None:
    """docs/benchmarks.md and its pictures are what report.py makes of benchmarks/results."""
    made = report.files(report.kept())
    for path, content in made.items():
        there = ROOT / "docs" / path
        assert there.exists(), f"run benchmarks/report.py: there is no {path}"
        assert there.read_text() == content, f"run benchmarks/report.py: {path} is not up to date"
    pictures = {f"pictures/{file.name}" for file in (ROOT / "docs/pictures").glob("benchmark-*")}
    assert pictures == set(made) - {"benchmarks.md", *report.MARKED}


def test_what_was_asked_stands_between_the_marks_of_a_page() -> None:
    """Only that, and the rest of the page stays; before it was measured the page says so."""
    text = "before\n<!-- asked: gpu -->\nold\n<!-- end -->\nafter\n"
    unmeasured = "before\n<!-- asked: gpu -->\nNot measured.\n<!-- end -->\nafter\n"
    assert report.filled(text, {}) == unmeasured
    lines = [
        Line("2 ranks", "sum", [1e-3], limit=2e-3),
        Line("2 ranks", "sum", [1e-3], "gloo", [0.1], asked=60),
        Line("2 ranks", "copy", [1e-3], "gloo", [0.1]),
    ]
    made = report.filled(text, {"gpu": Results(lines=lines, machine={"gpu": "Abacus (driver 1)"})})
    assert "| 2 ranks | sum | 1 ms |  |  |  | under 2 ms | yes |\n" in made
    assert "| 2 ranks | sum | 1 ms | gloo | 100 ms | 100 x | 60 x faster | yes |\n" in made
    assert "Abacus (driver 1)" in made
    assert "copy" not in made
    assert made.startswith("before\n")
    assert made.endswith("<!-- end -->\nafter\n")
    assert report.filled(made, {}) == unmeasured


def test_main_writes_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into docs/, which need not have a folder for pictures yet."""
    monkeypatch.setattr(report, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(comparison, "RESULTS", tmp_path)
    line = Line("", "call", [1.0], "Pool", [2.0])
    comparison.save(tmp_path / "map.json", Results(lines=[line]))
    report.main()
    written = sorted(file.name for file in (tmp_path / "docs").rglob("*.*"))
    assert written == ["benchmark-map.svg", "benchmarks.md"]
