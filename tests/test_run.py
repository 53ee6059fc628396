"""What `make test` does with what fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import run


def test_every_test_is_run_once() -> None:
    """Beside something else, or alone if it has the marker; files whose tests all have it are in
    no other part."""
    beside, alone = run.parts()
    parts = [part for part in beside + alone if any(".py" in word for word in part.command)]
    found = {"not alone and not soak": [], "alone and not soak": []}
    for part in parts:
        if part is not run.WITHOUT_KERNELS:
            where = part.command.index("-m", 3)
            found[part.command[where + 1]] += part.command[where + 2 :]
    marked = {
        str(path.relative_to(run.ROOT)): path.read_text() for path in run.TESTS.rglob("test_*.py")
    }
    mark = "pytest.mark" + ".alone"
    assert sorted(found["alone and not soak"]) == sorted(
        n for n, text in marked.items() if mark in text
    )
    wholly = f"pytestmark = {mark}"
    assert sorted(found["not alone and not soak"]) == sorted(
        n for n, text in marked.items() if wholly not in text
    )
    assert all(len(part.command) == len(run.PYTEST) + 3 for part in alone)


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
