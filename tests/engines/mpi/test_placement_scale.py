"""docs/scale.md says what the functions say that decide it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from weft.engines.mpi.placement import DIRECT

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """docs/scale_tables.py, which is a program and in no package."""
    spec = importlib.util.spec_from_file_location("scale_tables", DOCS / "scale_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_up_to_date(tables: ModuleType) -> None:
    """All of them, and each has its rows."""
    page = (DOCS / "scale.md").read_text()
    made = tables.filled(page)
    assert made == page, "run python docs/scale_tables.py"
    assert made.count("<!-- table: ") == 5
    for hosts in tables.HOSTS:
        assert made.count(f"\n| {hosts} | ") >= 2


def test_numbers_in_the_text_are_those_of_the_code() -> None:
    """The table has them as rows; the sentences have them as words."""
    text = (DOCS / "scale.md").read_text()
    assert f"Up to {DIRECT} hosts every agent" in text


@pytest.mark.parametrize("hosts", [*range(2, 20), 33, 64, 100, 128])
def test_an_exchange_brings_every_part_to_every_host(tables: ModuleType, hosts: int) -> None:
    """With one message to each host, or with as many as the number of hosts has binary digits."""
    messages, parts = tables.exchanged(hosts)
    assert messages == (hosts - 1 if hosts <= DIRECT else (hosts - 1).bit_length())
    assert hosts - 1 <= parts < 2 * hosts
