"""Which versions of Ray weft can use. Pure."""

from __future__ import annotations

import re

#: nodes that join have a folder of their own from this version on
OLDEST = "2.56"


def is_too_old(version: str) -> bool:
    """Return whether a version is older than the oldest that weft can use.

    >>> is_too_old("2.9.3"), is_too_old("2.56.0"), is_too_old("3.0.0rc1")
    (True, False, False)
    """
    return _first_two(version) < _first_two(OLDEST)


def _first_two(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
