"""What a worker does with a chunk: run the items one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft._core.failures import Failure, describe
from weft._core.seeding import derive, seed_generators


def carry_out(
    function: Callable[[Any], Any],
    items: list[Any],
    *,
    first: int,
    seed: int | None,
    keep_going: bool,
    note: Callable[[int], None],
) -> tuple[list[Any], list[tuple[int, Failure]]]:
    """The results, None where an item failed, and the failures by position.

    Takes the items out of their list: an argument is gone as soon as its call is over. `note` is
    told the index of each item before its call. KeyboardInterrupt ends it.
    """
    values: list[Any] = []
    failures: list[tuple[int, Failure]] = []
    items.reverse()
    while items:
        index = first + len(values)
        note(index)
        try:
            if seed is not None:
                seed_generators(derive(seed, index))
            values.append(function(items.pop()))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too is the item's, not the worker's
            failures.append((len(values), describe(error)))
            values.append(None)
            if not keep_going:
                items.clear()
    return values, failures
