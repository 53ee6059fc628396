"""What is compared to tell whether a value has changed since it was sent."""

from __future__ import annotations

from typing import Any, NamedTuple


class Contents(NamedTuple):
    """The contents of a value, in two parts."""

    #: what cannot change, and is compared by its identity: perhaps the value itself
    constant: Any = None
    #: what is compared by its pickle
    variable: Any = None
