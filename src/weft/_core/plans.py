"""What a collective comes to, once the ranks have told each other what they have: two kinds.

An engine carries them out; the planning is in `calls.py` and `moves.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft._core.elements import Array


class Combination(NamedTuple):
    """Corresponding arrays of all ranks are to be combined, element by element: in rank order
    within a host, then in the order of hosts, which is that of their lowest ranks."""

    op: str
    elements: Sequence[str]
    weights: Sequence[float] | None
    #: who gets the result: one rank, or None for all
    root: int | None
    #: this rank's results; empty where it gets none
    target: Sequence[Array]


class Copy(NamedTuple):
    """Bytes of one rank's array that go to another's."""

    from_rank: int
    from_array: int
    from_byte: int
    to_rank: int
    to_array: int
    to_byte: int
    length: int


class Movement(NamedTuple):
    """Bytes are to go from the ranks' sources to their targets."""

    #: what this rank gets, and what others get from it
    incoming: Sequence[Copy]
    outgoing: Sequence[Copy]
    #: for every rank the bytes of each of its source arrays
    sizes: Sequence[Sequence[int]]
    #: this rank's results
    target: Sequence[Array]


Plan = Combination | Movement
