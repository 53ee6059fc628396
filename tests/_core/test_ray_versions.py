"""Which versions of Ray are too old."""

from __future__ import annotations

import pytest

from weft._core.ray_versions import is_too_old


@pytest.mark.parametrize(
    ("version", "too_old"),
    [("1.13.0", True), ("2.9", True), ("2.55.1", True), ("2.56.0", False), ("3.0.0rc1", False)],
)
def test_versions_are_compared_as_numbers(version: str, too_old: bool) -> None:
    assert is_too_old(version) == too_old
