"""The documents as a site: it builds without a warning, and has every name that there is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weft
from tests.support import HANGS
from weft import errors

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

#: methods that engines and weft itself call, not users
NOT_FOR_USERS = {
    "weft.Group.make_store",
    "weft.Group.refuse",
    "weft.MapHandle.end",
    "weft.Team.call",
    "weft.Team.has_replica",
    "weft.Team.track",
    "weft.Team.replica_number",
}
#: classes whose methods are their library's, or that nobody calls
WITHOUT_METHODS = {"SharedArray"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # an advertisement, not a warning
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    """Each document is a page, and each page but those that show a file is in the navigation."""
    index = (site / "index.html").read_text()
    for page in DOCS.glob("*.md"):
        assert (site / page.with_suffix(".html").name).exists()
        assert f'href="{page.with_suffix(".html").name}"' in index, f"{page.name}: add it to nav"


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """No font, script, style or picture of another host."""
    for page in site.rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img|iframe)[^>]*\"(https?:[^\"]*)", page.read_text())
        assert not fetched, page


def test_links_out_of_the_folder_lead_to_pages(site: Path) -> None:
    """A link to a file of the repository leads to a page that shows it, in the site."""
    shown = (site / "source" / "src" / "weft" / "_api" / "mapping.py.html").read_text()
    assert "map_async" in shown
    assert 'href="source/src/weft/_api/mapping.py.html"' in (site / "journey.html").read_text()


def test_the_reference_has_every_public_name(site: Path) -> None:
    """And of every public class, every public method and property."""
    found = set(re.findall(r'id="(weft\.[\w.]+)"', (site / "api.html").read_text()))
    expected = set()
    for name in set(weft.__all__) - {"__version__"}:
        expected.add(f"weft.{name}")
        value = getattr(weft, name)
        if inspect.isclass(value) and name not in WITHOUT_METHODS:
            expected |= {f"weft.{name}.{method}" for method in methods_of(value)}
    assert expected - found - NOT_FOR_USERS == set()
    assert not found & NOT_FOR_USERS


def methods_of(kind: type[Any]) -> list[str]:
    """The public methods and properties that weft gives a class."""
    return [
        name
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property))
        and any(name in vars(base) for base in kind.__mro__ if base.__module__.startswith("weft"))
    ]


def test_every_error_has_its_cause_and_remedy() -> None:
    """Each class of weft.errors begins a line of a table, with the built-in class that it is."""
    page = (DOCS / "errors.md").read_text()
    lines = dict(re.findall(r"^\| `(\w+)`([^|]*)\| [^|]+ \| [^|]+ \|$", page, re.MULTILINE))
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if not issubclass(kind, errors.WeftError) or name.startswith("_"):
            continue
        if kind is errors.WeftError:  # the root of all: the first sentence is about it
            assert f"`{name}`" in page
            continue
        built_in = next(base for base in kind.__mro__ if base.__module__ == "builtins")
        named = "" if built_in is Exception else f" (`{built_in.__name__}`)"
        assert lines.get(name, "missing").rstrip() == named, name


@pytest.mark.parametrize("package", ["multiverso", "playdoh", "synkhronos"])
def test_the_pages_for_older_programs_have_every_name(package: str) -> None:
    """Every public name of the packages that stand for them, with all their modules."""
    page = (DOCS / f"from-{package}.md").read_text()
    made_here = {"TrainFunction", "KnownModelManager"}  # what weft's own code returns or builds on
    for module in modules_of(package):
        for name in names_of(module) - made_here:
            assert re.search(rf"\b{name}\b", page), f"{module.__name__}.{name}"


def modules_of(package: str) -> list[ModuleType]:
    """A package and what is in it, but for what would load Keras here."""
    root = importlib.import_module(package)
    below = pkgutil.walk_packages(root.__path__, f"{package}.")
    names = [one.name for one in below if "._" not in one.name and "keras" not in one.name]
    return [root, *map(importlib.import_module, names)]


def names_of(module: ModuleType) -> set[str]:
    """What a module offers: its __all__, or the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


def test_drawings_are_made_from_their_sources() -> None:
    """`python docs/drawings/draw.py` would change nothing; what has no source is no drawing."""
    draw = load(DOCS / "drawings" / "draw.py")
    sources = sorted((DOCS / "drawings").glob("*.txt"))
    assert [one.stem for one in sources] == sorted(
        one.stem for one in (DOCS / "drawings").glob("*.svg")
    )
    for source in sources:
        assert draw.draw(source.read_text()) == source.with_suffix(".svg").read_text(), source


def test_drawings_name_files_that_exist() -> None:
    """A second file of a step is in the folder of the first, unless it says another."""
    draw = load(DOCS / "drawings" / "draw.py")
    for source in (DOCS / "drawings").glob("*.txt"):
        for row in draw.parse(source.read_text()).rows:
            folder = Path()
            for name in re.findall(r"[\w/]+\.py", getattr(row, "file", "")):
                folder = Path(name).parent if "/" in name else folder
                path = ROOT / "src" / "weft" / folder / Path(name).name
                assert path.exists(), f"{source.name}: {path}"


def test_a_wrong_line_of_a_drawing_is_refused() -> None:
    """It is named."""
    draw = load(DOCS / "drawings" / "draw.py")
    with pytest.raises(ValueError, match="'nonsense' is none of"):
        draw.parse("A title\nlane one blue: somebody\nnonsense\n")


def test_docstrings_become_markdown() -> None:
    """Examples are fenced, columns are lists, and what stands above an attribute is its text."""
    docstrings = load(DOCS / "docstrings.py")
    text = "What.\n\n>>> 1 + 1\n2\n\nn     how many\n      of them\nseed, x  where\n\nThe end."
    assert docstrings.as_markdown(text) == (
        "What.\n\n```pycon\n>>> 1 + 1\n2\n```\n\n- `n`: how many of them\n- `seed, x`: where"
        "\n\nThe end."
    )
    assert docstrings.comment_above(["x = 1", "#: the name,", "    #: or None"]) == (
        "The name, or None"
    )


def load(path: Path) -> Any:
    """A file outside the package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
