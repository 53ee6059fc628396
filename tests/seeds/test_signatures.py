"""What the pages "from ..." say of the old systems' names is what there is.

    signatures/NAME.txt   the old signatures, and where each one's results are compared
    docs/from-NAME.md     the tables under "Every name": "the same", or what is different

Each line of a list is held against the package, by names, order and defaults of its arguments; each
call on a page is held against the list.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import run_python
from weft.errors import InvalidType

SEEDS = Path(__file__).parent
ROOT = SEEDS.parent.parent
DOCS = ROOT / "docs"
LISTS = sorted((SEEDS / "signatures").glob("*.txt"))
SYSTEMS = [path.stem for path in LISTS]


@dataclass(frozen=True)
class Old:
    """A line of a list: a name with its arguments, if it can be called, and its comparison."""

    name: str
    #: None for what is not called
    arguments: str | None
    #: the file of tests/seeds that compares the results, and the function in it
    file: str
    function: str
    #: whether arguments are found by their names only: those of an older generation, whose order
    #: a later one has changed
    by_name: bool

    def __str__(self) -> str:
        return self.name if self.arguments is None else f"{self.name}({self.arguments})"


@dataclass(frozen=True)
class OldSystem:
    """A list: its lines, and what its page calls an object of a class."""

    lines: tuple[Old, ...]
    objects: dict[str, str]


@cache
def read_list(system: str) -> OldSystem:
    """Read signatures/SYSTEM.txt, whose form its first lines explain."""
    lines, objects, by_name = [], {}, False
    for text in (SEEDS / "signatures" / f"{system}.txt").read_text().splitlines():
        if not text.strip() or text.startswith("#"):
            continue
        if text.startswith("["):
            by_name = text.endswith("by name]")
            continue
        if " is " in text:
            name, _, kind = text.partition(" is ")
            objects[name.strip()] = kind.strip()
            continue
        signature, _, comparison = text.rpartition(" | ")
        match = re.fullmatch(r"([\w.]+)(?:\((.*)\))?", signature.strip())
        assert match is not None, f"{system}.txt: {text}"
        file, _, function = comparison.strip().partition(": ")
        lines.append(Old(match[1], match[2], file, function, by_name))
    return OldSystem(tuple(lines), objects)


def resolve(name: str) -> tuple[Any, Any]:
    """Return what a dotted name stands for, and what it is an attribute of."""
    parts = name.split(".")
    found, owner = importlib.import_module(parts[0]), None
    for position, part in enumerate(parts[1:], 1):
        if inspect.ismodule(found) and not hasattr(found, part):
            importlib.import_module(".".join(parts[: position + 1]))
        owner, found = found, getattr(found, part)
    return found, owner


def parameters_of(name: str) -> list[inspect.Parameter]:
    """Return the parameters of what a name stands for, without `self`."""
    found, owner = resolve(name)
    parameters = list(inspect.signature(found).parameters.values())
    return parameters[1:] if inspect.isclass(owner) and inspect.isfunction(found) else parameters


def parse(arguments: str) -> list[inspect.Parameter]:
    """Return the parameters that a list or a page writes out."""
    return list(inspect.signature(eval(f"lambda {arguments}: None")).parameters.values())


def differences(old: list[inspect.Parameter], new: list[inspect.Parameter]) -> Iterator[str]:
    """Yield what an old call would miss. The new one may have more arguments, all with defaults."""
    kinds = {parameter.kind for parameter in new}
    by_name = {parameter.name: parameter for parameter in new}
    in_order = [one for one in new if one.kind is one.POSITIONAL_OR_KEYWORD]
    place = 0
    for one in old:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            if one.kind not in kinds:
                yield f"{one} is missing"
            continue
        if one.kind is one.POSITIONAL_OR_KEYWORD:
            found = in_order[place] if place < len(in_order) else None
            place += 1
        else:
            found = by_name.get(one.name)
        if found is None or found.name != one.name:
            yield f"{one.name} is expected where there is {found}"
        elif one.default is not one.empty and repr(found.default) != repr(one.default):
            yield f"{one.name} has the default {found.default!r}, not {one.default!r}"
    names = {one.name for one in old}
    for one in new:
        variable = one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if one.name not in names and one.default is one.empty and not variable:
            yield f"{one.name} must be given"


def missing_names(old: list[inspect.Parameter], new: list[inspect.Parameter]) -> Iterator[str]:
    """Yield the arguments that cannot be given by name."""
    names, kinds = {one.name for one in new}, {one.kind for one in new}
    for one in old:
        variable = one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if not variable and one.name not in names and one.VAR_KEYWORD not in kinds:
            yield f"{one.name} is missing"


def print_differences(system: str) -> None:
    """Print what each line of a list misses in the package, and how many lines there are."""
    lines = read_list(system).lines
    for old in lines:
        try:
            if old.arguments is None:
                resolve(old.name)
                continue
            compare = missing_names if old.by_name else differences
            for one in compare(parse(old.arguments), parameters_of(old.name)):
                print(f"{old}: {one}")
        except (AttributeError, ImportError, TypeError) as error:
            print(f"{old}: {error}")
    print(f"{len(lines)} lines")


def print_unexplained(system: str) -> None:
    """Print the calls of a list for which a wrong keyword is not told with the nearest one."""
    for old in read_list(system).lines:
        found, owner = resolve(old.name)
        users_own = inspect.isabstract(found) or hasattr(found, "__isabstractmethod__")
        if old.arguments is None or users_own:
            continue
        names = [one.name for one in parse(old.arguments)]
        kinds = [one.kind for one in inspect.signature(found).parameters.values()]
        if not names or inspect.Parameter.VAR_KEYWORD in kinds:  # these have tests of their own
            continue
        is_method = inspect.isclass(owner) and inspect.isfunction(found)
        this = [object.__new__(owner)] if is_method else []
        for name in names:
            try:
                found(*this, **{f"{name}_": None})
            except InvalidType as error:
                if f"({name}_=...): " in str(error) and f"the nearest is {name}=" in str(error):
                    continue
                print(f"{old}: {name}_: {error}")
            except TypeError as error:
                print(f"{old}: {name}_: {error!r}")


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_old_signature_is_there(system: str, tmp_path: Path) -> None:
    """Names, order and defaults of arguments, and what a wrong keyword is told; all that is wrong
    at once. In a process of its own, which frameworks may change as they are loaded."""
    program = "import sys; from tests.seeds import test_signatures as t; "
    program += "t.print_differences(sys.argv[1]); t.print_unexplained(sys.argv[1])"
    env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "KERAS_BACKEND": "numpy"}
    outcome = run_python(program, system, env=env)
    assert outcome.code == 0, outcome
    assert outcome.out == f"{len(read_list(system).lines)} lines\n", outcome
    assert len(read_list(system).lines) > 10


@pytest.mark.parametrize("system", SYSTEMS)
def test_results_are_compared_where_the_list_says(system: str) -> None:
    """The function is in the file, and uses the name."""
    wrong = []
    for old in read_list(system).lines:
        path = SEEDS / old.file
        source = source_of(path, old.function) if path.is_file() else None
        word = old.name.split(".")[-1].replace("__call__", "")
        if source is None or not re.search(rf"(?<![A-Za-z]){word}\b", source):
            wrong.append(f"{old}: not in {old.file}: {old.function}")
    assert not wrong, "\n".join(wrong)


@cache
def source_of(path: Path, function: str) -> str | None:
    """Return the source of a function with its decorators; of the file where none is named."""
    text = path.read_text()
    if not function:
        return text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == function:
            first = min(one.lineno for one in (*node.decorator_list, node))
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return None


# the pages


def rows(system: str) -> Iterator[tuple[str, str]]:
    """Yield the cells of the tables under "Every name": the old names, and what they are here."""
    page = (DOCS / f"from-{system}.md").read_text()
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        if section.startswith("Every name"):
            for line in section.splitlines():
                cells = [cell.strip() for cell in line.strip("|").split(" | ")]
                if line.startswith("|") and len(cells) == 2 and not cells[0].startswith("--"):
                    yield cells[0], cells[1]


def calls(cell: str) -> Iterator[str]:
    """Yield what a cell has in code."""
    yield from re.findall(r"`([^`]+)`", cell)


def known(system: str) -> dict[str, list[Old]]:
    """Return the lines of a list by the ways in which a page may write them: with any part of the
    modules before, and with what it calls an object."""
    ways: dict[str, list[Old]] = {}
    for old in read_list(system).lines:
        arguments = "" if old.arguments is None else f"({old.arguments})"
        names = old.name.split(".")
        shown = [".".join(names[start:]) for start in range(len(names))]
        for name, kind in read_list(system).objects.items():
            if old.name.startswith(f"{kind}."):
                shown.append(name + old.name.removeprefix(kind).replace(".__call__", ""))
        for name in shown:
            ways.setdefault(name + arguments, []).append(old)
    return ways


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_same_is_said_of_what_is_compared(system: str) -> None:
    """Each call in a row that says "the same" is a line of the list, argument by argument."""
    ways = known(system)
    found = [(one, text) for cell, text in rows(system) for one in calls(cell)]
    wrong = [one for one, text in found if text.startswith("the same") and one not in ways]
    assert not wrong, f"not as in signatures/{system}.txt: {wrong}"
    same = [cell for cell, text in rows(system) if text.startswith("the same")]
    assert all("`" in cell for cell in same), f"which names are these? {same}"
    assert sum(text.startswith("the same") for _, text in found) > 5


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_page_has_every_old_name(system: str) -> None:
    """Each line of the list is in the tables, as it is there."""
    ways = known(system)
    shown = {old for cell, _ in rows(system) for one in calls(cell) for old in ways.get(one, [])}
    left = [str(old) for old in read_list(system).lines if old not in shown]
    assert not left, f"not in docs/from-{system}.md: {left}"


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_page_says_what_it_covers(system: str) -> None:
    """The versions; and with PyTensor, what became of Theano's flags and of T.nnet."""
    page = (DOCS / f"from-{system}.md").read_text()
    assert re.search(r"^## Versions$", page, re.MULTILINE)
    if "PyTensor" in page:
        for word in ("floatX", "`T.nnet`", "`device`", "PYTENSOR_FLAGS"):
            assert word in page, word


# the comparison itself


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("a, b=1", "a, b=1, c=2, *, d=3", []),
        ("a, b=1", "a, b=2", ["b has the default 2, not 1"]),
        ("a, b=1", "a=None, b=1", []),
        (
            "a, b=1",
            "b=1, a=2",
            ["a is expected where there is b=1", "b is expected where there is a=2"],
        ),
        ("a", "a, b", ["b must be given"]),
        ("a, *rest, **options", "a", ["*rest is missing", "**options is missing"]),
        ("*rest, a=1", "*others, a=1, **more", []),
        ("a, b=1", "a, *, b=1", ["b is expected where there is None"]),
    ],
)
def test_what_counts_as_a_difference(old: str, new: str, said: list[str]) -> None:
    """Names, order and defaults do; more arguments that may be left out do not."""
    assert list(differences(parse(old), parse(new))) == said


def test_an_older_generation_is_compared_by_name() -> None:
    """Its arguments may stand anywhere, or come in as further keywords."""
    old = parse("a, b=1, *rest")
    assert list(missing_names(old, parse("b=None, *, a=None"))) == []
    assert list(missing_names(old, parse("**options"))) == []
    assert list(missing_names(old, parse("a"))) == ["b is missing"]
