"""Two processes for all tests of a file. What is left behind is checked by who runs the file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import synkhronos as synk
import weft


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """In the place of the check after every test."""


@pytest.fixture(scope="module", autouse=True)
def two() -> Iterator[None]:
    assert synk.fork(2) == 2
    yield
    weft.shutdown()
