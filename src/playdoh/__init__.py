"""Playdoh's names on top of weft: distribute over lists and matrices.

Nothing is here yet: this release of weft has the ground only (groups, shared
arrays, the launcher). The names arrive with the parts of weft that they need.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    raise AttributeError(f"playdoh.{name} is not in this release of weft; it comes later")
