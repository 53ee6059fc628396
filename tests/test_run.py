"""What `make test` does with what fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import run


def test_every_file_of_tests_has_one_part() -> None:
    """Files that measure times are alone, and no file is left out or run twice."""
    beside, alone = run.parts()
    named = [[name for name in part.command if name.endswith(".py")] for part in beside + alone]
    assert all(len(one) == 1 for one in named[len(beside) :])
    files = sorted(str(path.relative_to(run.ROOT)) for path in run.TESTS.rglob("test_*.py"))
    assert sorted(name for one in named for name in one) == files


def test_files_have_the_names_of_what_they_test() -> None:
    """Below src/weft: the module or the folder, and then perhaps what of it."""
    for path in run.TESTS.rglob("*/test_*.py"):
        folder = path.parent.relative_to(run.TESTS)
        source = run.ROOT / "src" / "weft" / folder
        if source.is_dir():
            beside = [*source.iterdir(), *path.parent.iterdir(), folder]
            names = {one.stem for one in beside if not one.name.startswith("test_")}
            tested = path.stem.removeprefix("test_")
            assert any(f"{tested}_".startswith(f"{name}_") for name in names), path


def part_of(folder: Path, text: str) -> run.Part:
    path = folder / "test_something.py"
    path.write_text(text)
    return run.Part("something", (*run.PYTEST, "--rootdir", str(folder), str(path)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def test_one(): pass", []),
        (
            "import pytest\n"
            "@pytest.mark.parametrize('name', ['a b', 'c'])\n"
            "def test_one(name): assert name == 'c', 'why - not'\n"
            "def test_two(): raise OSError",
            ["::test_one[a b]'", "::test_two"],
        ),
        (
            "import pytest\n@pytest.fixture\ndef wrong(): raise OSError\ndef test_one(wrong): pass",
            ["::test_one"],
        ),
        ("import nothing_of_this_name", [""]),
        ("import os\ndef test_one(): os._exit(7)", [""]),
    ],
)
def test_what_fails_can_be_repeated(tmp_path: Path, text: str, told: list[str]) -> None:
    """Each test by itself; all of them if pytest did not come to its end."""
    found = run.run(part_of(tmp_path, text)).failures
    for one, name in zip(found, told, strict=True):
        assert one.startswith(sys.executable)
        assert one.endswith(f"/test_something.py{name}")


def test_a_failure_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything runs; the end lists all that failed, and so does the exit status."""
    good = run.Part("good", (sys.executable, "-c", "print('fine')"))
    bad = run.Part("bad", (sys.executable, "-c", "print('oh'); raise SystemExit(3)"))
    monkeypatch.setattr(run, "parts", lambda: ([bad, good], [bad, good]))
    assert run.main() == 1
    out = capfd.readouterr().out
    assert out.count(" s  good: fine") == 2
    assert out.count(" s  bad: oh") == 2
    assert out.splitlines()[-2:] == [f"    {bad.repeat()}"] * 2
    monkeypatch.setattr(run, "parts", lambda: ([good], [good]))
    assert run.main() == 0
    assert capfd.readouterr().out.endswith(": all passed\n")
