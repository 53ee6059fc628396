"""README, docs and examples: what they show runs, what they link to exists."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import multiverso.utils
import playdoh._distributing
import playdoh._mapping
import synkhronos._data
import synkhronos._selections
from tests.support import HANGS
from weft._api import (
    collectives,
    distributing,
    functions,
    mapping,
    models,
    replicas,
    session,
    sharing,
    tables,
    team,
)
from weft._core import failures, partition, updaters
from weft._core import tables as core_tables
from weft.adapters import containers, holder

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples" / "README.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def block_cases() -> list[Any]:
    """Each block alone and with two ranks. `make soak` has those with two ranks that join no group,
    and alone those of ranks that load a framework, which takes seconds in every process."""
    return [
        pytest.param(
            text,
            ranks,
            marks=pytest.mark.soak if is_left_to_soak(text, ranks) else (),
            id=f"{page.relative_to(ROOT)} {number}{' with two ranks' if ranks == 2 else ''}",
        )
        for page in PAGES
        for number, text in enumerate(blocks(page, "python"))
        for ranks in (1, 2)
    ]


def is_left_to_soak(text: str, ranks: int) -> bool:
    if ".init(" not in text:
        return ranks == 2
    return ranks == 1 and re.search(r"^import (torch|keras|jax|pytensor)$", text, re.M) is not None


@pytest.mark.parametrize(("text", "ranks"), block_cases())
def test_every_python_block_runs(text: str, ranks: int, tmp_path: Path) -> None:
    """Pasted into a file, each block is a program that ends well, alone and with two ranks."""
    # a compiler takes longer than all the rest; small graphs do without
    env = {**os.environ, "PYTENSOR_FLAGS": "linker=py,optimizer=fast_compile"}
    script = tmp_path / "block.py"
    script.write_text(text)
    by_launcher = ["-m", "weft", "run", "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *by_launcher, str(script)],
        capture_output=True,
        text=True,
        timeout=HANGS,
        cwd=tmp_path,
        env=env,
    )
    assert done.returncode == 0, f"{text}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page: Path) -> None:
    """Links between files of the project point to files that exist."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tests_that_hold_a_promise_exist() -> None:
    """Each test file that the guarantees name is there."""
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 20
    for name in named:
        assert (ROOT / "tests" / name).exists() or (ROOT / name).exists(), name


def test_each_test_that_holds_a_promise_is_in_the_file_before_it() -> None:
    """A test that was renamed or deleted is missed here."""
    guarantees = (ROOT / "docs" / "guarantees.md").read_text()
    path, found = "", 0
    for file, test in re.findall(r"`([\w/]+\.py)`|`(test_\w+)`", guarantees):
        path = file or path
        if test:
            found += 1
            assert f"def {test}(" in (ROOT / "tests" / path).read_text(), f"{path}: {test}"
    assert found > 50


@pytest.mark.parametrize(
    "module",
    [
        collectives,
        tables,
        containers,
        distributing,
        functions,
        holder,
        mapping,
        models,
        multiverso.utils,
        playdoh._distributing,
        playdoh._mapping,
        replicas,
        session,
        sharing,
        partition,
        synkhronos._data,
        synkhronos._selections,
        core_tables,
        team,
        failures,
        updaters,
    ],
    ids=lambda module: module.__name__,
)
def test_docstring_examples_are_true(module: object) -> None:
    """What the docstrings show is what happens."""
    import gc

    failed, tried = doctest.testmod(module)  # type: ignore[arg-type]
    gc.collect()
    assert tried > 0
    assert failed == 0
