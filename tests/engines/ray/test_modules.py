"""Which of the user's modules travel, and how a host imports them."""

from __future__ import annotations

import importlib
import io
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.engines.ray import modules
from weft.engines.ray.modules import Adopted, Archive, collect


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules, first in the path; what is imported from it is forgotten."""
    before = set(sys.modules)
    path = sys.path[:]
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("travels"):
            del sys.modules[name]
    sys.path[:] = path


def names_in(archive: Archive) -> set[str]:
    with zipfile.ZipFile(io.BytesIO(archive.data)) as files:
        return {name for name in files.namelist() if name.startswith("travels")}


def test_what_travels(folder: Path) -> None:
    """What is loaded, its packages, and what code imports anywhere; not what nobody names."""
    (folder / "travels.py").write_text("def f():\n    import travels_late\n")
    (folder / "travels_late.py").write_text("import travels_later.deep\n")
    (folder / "travels_later").mkdir()
    (folder / "travels_later" / "__init__.py").touch()
    (folder / "travels_later" / "deep.py").touch()
    (folder / "travels_later" / "unnamed.py").touch()
    (folder / "travels_hidden.py").touch()
    (folder / "travels_asked.py").touch()
    importlib.import_module("travels")
    found = names_in(collect({"travels_asked", "os"}))
    assert found == {
        "travels.py",
        "travels_late.py",
        "travels_later/__init__.py",
        "travels_later/deep.py",
        "travels_later/unnamed.py",
        "travels_asked.py",
    }
    assert modules.is_here("travels_hidden")
    assert not modules.is_here("travels_nowhere")
    assert not modules.is_here("numpy")


def test_an_edit_makes_another_archive(folder: Path) -> None:
    """By content: what is written again with the same text is the same."""
    source = folder / "travels.py"
    source.write_text("A = 1\n")
    importlib.import_module("travels")
    first = collect(())
    assert collect(()) is first
    source.write_text("A = 1\n")
    os.utime(source, (5, 5))
    assert collect(()).digest == first.digest
    source.write_text("A = 2\n")
    os.utime(source, (6, 6))
    assert collect(()).digest != first.digest


def test_a_host_imports_from_memory(folder: Path) -> None:
    """No file has a name; another archive takes the place of the first."""
    (folder / "travels.py").write_text("A = 1\n")
    importlib.import_module("travels")
    first = collect(())
    (folder / "travels.py").write_text("A = 2\n")
    os.utime(folder / "travels.py", (7, 7))
    second = collect(())
    del sys.modules["travels"]
    sys.path.remove(str(folder))
    adopted = Adopted()
    adopted.adopt(first)
    module = importlib.import_module("travels")
    assert module.A == 1
    assert str(module.__file__).startswith(f"/proc/{os.getpid()}/fd/")
    adopted.adopt(second)
    assert importlib.import_module("travels").A == 2
    os.close(adopted._descriptor)
