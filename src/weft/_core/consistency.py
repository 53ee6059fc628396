"""How far apart the ranks that share a table may be: the clocks behind async, bsp and ssp(k).

Each rank counts its own adds. A rule says how many adds every other rank must have made before
this one may go on; a rank that has left or died is not waited for.

                before this rank's next add    before its get
    async       nothing                        nothing
    ssp(k)      own + 1 - k                    nothing
    bsp         own                            own, and everybody's first `own` adds are applied

Under ssp(k) nobody is ever more than k adds ahead of the slowest. Under bsp a rank's delta waits in
a place of its own until its turn; there is one such place for each rank, so the next add waits
until the last one has been applied, which it can be once everybody has made that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft._core.counts import whole
from weft.errors import InvalidType, InvalidValue


@dataclass(frozen=True)
class Consistency:
    """One of the three rules. Made by its name, or by `ssp(k)`."""

    name: str
    #: of ssp: how many adds a rank may be ahead of the slowest
    slack: int = 0

    def __str__(self) -> str:
        return f"ssp({self.slack})" if self.name == "ssp" else self.name

    def before_add(self, own: int) -> int:
        """Return how many adds every other rank must have made before one that has made `own`
        adds again."""
        if self.name == "ssp":
            return max(0, own + 1 - self.slack)
        return own if self.name == "bsp" else 0

    def before_get(self, own: int) -> int:
        """Return how many adds every other rank must have made before one that has made `own`
        reads."""
        return own if self.name == "bsp" else 0


ASYNC = Consistency("async")
BSP = Consistency("bsp")


def ssp(k: int) -> Consistency:
    """Return a consistency: nobody is more than `k` adds ahead of the slowest rank.

    A rank that would be waits, before its add, until the slowest has caught up, has left or has
    died.

    >>> import weft
    >>> weft.init().size
    1
    >>> table = weft.ArrayTable(10, consistency=weft.ssp(3))
    >>> weft.shutdown()

    Raises InvalidType, InvalidValue for anything but a whole number of at least 1.
    """
    adds = whole(k)
    if adds is None:
        raise InvalidType(f"ssp({k!r}): expected a whole number of adds")
    if adds < 1:
        raise InvalidValue(
            f"ssp({k}): expected 1 or more; where nobody may be ahead at all, use consistency='bsp'"
        )
    return Consistency("ssp", adds)


def resolve(value: object) -> Consistency:
    """Return the rule that `consistency=` names. Raise if there is none."""
    if isinstance(value, Consistency):
        return value
    for known in (ASYNC, BSP):
        if value == known.name:
            return known
    kind = InvalidValue if isinstance(value, str) else InvalidType
    raise kind(f"consistency={value!r}: expected 'async', 'bsp' or weft.ssp(k)")


def behind(counts: Mapping[int, int], needed: int) -> list[int]:
    """List the ranks that have made fewer adds than needed, given how many each has made."""
    return [rank for rank, count in counts.items() if count < needed]


def staleness(own: int, others: Mapping[int, int]) -> int:
    """Return how many adds the slowest of the others is behind a rank that has made `own`."""
    return max(0, own - min(others.values(), default=own))
