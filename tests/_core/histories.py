"""What ranks did to a table, one event after the other, and whether a consistency allows it.

Only rules are known here, not how anybody keeps them: what is checked may come from a model or from
real ranks. Each rank's own events are in their order. The order between ranks matters to two rules
only: how far ahead somebody is under ssp, and that a get under bsp waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft._core.tables import Consistency


@dataclass(frozen=True)
class Added:
    """A rank's add has ended."""

    rank: int
    #: how many adds the rank has made, with this one
    own: int


@dataclass(frozen=True)
class Got:
    """A rank has read the table."""

    rank: int
    #: how many adds the rank had made
    own: int
    #: by rank: how many of its adds were in what was read
    seen: tuple[int, ...]


@dataclass(frozen=True)
class Gone:
    """A rank has left, or has died, in which case it may have begun an add."""

    rank: int
    died: bool = False


Event = Added | Got | Gone


def violations(
    history: Sequence[Event], size: int, rule: Consistency, *, in_order: bool = True
) -> list[str]:
    """What the history of a table of `size` ranks has that its consistency rules out.

    `in_order`: whether events of different ranks are in the order in which they happened; if not,
    what can be told of each rank by itself is checked.
    """
    found = [f"{event}: {text}" for event, text in _of_each_rank(history, size, rule)]
    if in_order:
        found += [f"{event}: {text}" for event, text in _between_ranks(history, size, rule)]
    return found


def _of_each_rank(
    history: Sequence[Event], size: int, rule: Consistency
) -> list[tuple[Event, str]]:
    """Every rule: a rank sees all of its own adds, and no fewer of the others' than before.
    bsp: it sees of each exactly as many as it has made itself, or all if there are fewer."""
    totals = [sum(isinstance(e, Added) and e.rank == rank for e in history) for rank in range(size)]
    ended = {event.rank for event in history if isinstance(event, Gone) and not event.died}
    most = [total + (rank not in ended) for rank, total in enumerate(totals)]
    own, before, found = [0] * size, [(0,) * size] * size, []
    for event in history:
        if isinstance(event, Added):
            own[event.rank] += 1
        if isinstance(event, Gone):
            continue
        if event.own != own[event.rank]:
            found.append((event, f"its rank has made {own[event.rank]} adds"))
        if not isinstance(event, Got):
            continue
        if event.seen[event.rank] != event.own:
            found.append((event, f"it has made {event.own} adds and sees others of its own"))
        for rank in range(size):
            if event.seen[rank] < before[event.rank][rank]:
                found.append((event, f"it saw more of rank {rank} before"))
            if event.seen[rank] > most[rank]:
                found.append((event, f"rank {rank} never made so many"))
            if rule.name == "bsp" and event.seen[rank] != min(event.own, totals[rank]):
                found.append((event, f"of rank {rank} it is not min(own, {totals[rank]})"))
        before[event.rank] = event.seen
    return found


def _between_ranks(
    history: Sequence[Event], size: int, rule: Consistency
) -> list[tuple[Event, str]]:
    """ssp(k): nobody who is present is more than k adds ahead of the slowest who is present.
    bsp: nobody reads before everybody present has added as often."""
    made = dict.fromkeys(range(size), 0)
    found: list[tuple[Event, str]] = []
    for event in history:
        if event.rank not in made:
            found.append((event, "it had gone"))
        elif isinstance(event, Gone):
            del made[event.rank]
        elif isinstance(event, Added):
            made[event.rank] = event.own
            slowest = min(made.values())
            if rule.name == "ssp" and event.own - slowest > rule.slack:
                found.append((event, f"the slowest has made {slowest}"))
        elif rule.name == "bsp" and min(made.values()) < event.own:
            found.append((event, f"the slowest has made {min(made.values())}"))
    return found
