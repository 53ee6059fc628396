"""When and how a function's mode, or a loss, is checked: at the first call of each shape, in this
process, on a few rows."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from weft._core.checks import (
    Comparison,
    Difference,
    Trial,
    compare,
    fits_well,
    isolate,
    sample,
    vary,
)
from weft._core.functions import Modes, Partial
from weft._core.partition import count, leaves
from weft.engines.generators import kept
from weft.engines.interruption import by_signal_handler
from weft.errors import InvalidType

#: shapes that are checked; a program with more has rows of any length
_SHAPES = 64

#: how often a function whose parts differ from the whole is tried, after how many trials it is
#: seen whether that is enough, and for how many seconds
_TRIALS, _SOME, _LONGEST = 40, 8, 1.0


class Schedule:
    """Tell which calls are checked: with `check=True` all, with None none. With False the first of
    each shape, and the 2nd, 4th, 8th, ... until a check has settled the matter: zeros fit any mode,
    and what is made of equal rows may depend on all of them."""

    def __init__(self, check: bool | None) -> None:
        if check not in (True, False, None):
            raise InvalidType(
                f"check={check!r}: expected True (check every call), False (the first call of each "
                "shape) or None (none)"
            )
        self.option = check
        #: by shape, the number of calls that have not settled it; None once one has
        self._calls: dict[Hashable, int | None] = {}

    def check(self, shape: Hashable, compare: Callable[[], Comparison]) -> Difference | None:
        """Compare, if a call with inputs of this shape is due; note it, unless it is refused, as
        one that was is checked again. If the matter is settled, no other is."""
        due = self._is_due(shape)
        difference, settled = compare() if due else Comparison(None, settled=False)
        if difference is None:
            self._note(shape, settled=settled)
        return difference

    def _is_due(self, shape: Hashable) -> bool:
        if self.option is not False:
            return self.option is True
        if len(self._calls) >= _SHAPES and shape not in self._calls:
            return False
        calls = self._calls.get(shape, 0)
        return calls is not None and (calls + 1) & calls == 0

    def _note(self, shape: Hashable, *, settled: bool) -> None:
        calls = self._calls.get(shape, 0)
        if len(self._calls) < _SHAPES or shape in self._calls:
            self._calls[shape] = None if settled or calls is None else calls + 1


def shape_of(inputs: Iterable[tuple[Any, Any, bool]]) -> Hashable:
    """Return the types, dtypes and shapes of inputs; each comes with its name and whether it is
    split: of those the number of rows does not count."""
    return tuple(
        (
            name,
            type(leaf),
            getattr(leaf, "dtype", None),
            getattr(leaf, "shape", ())[1 if is_split else 0 :],
        )
        for key, value, is_split in inputs
        for name, leaf in (leaves(value, str(key)) if is_split else [(key, value)])
    )


def check_parts(
    used: Any,
    evaluate: Callable[[Any, Any], Any],
    rows: slice | np.ndarray[Any, Any],
    modes: Modes,
    shared: Sequence[Any] = (),
) -> Comparison:
    """Compare what a function gives for a few rows with the parts of them.

    `evaluate` calls it with a copy of what it uses, but for the objects in `shared`, and some rows,
    so that there is no effect on the program; random generators are as before afterwards. What
    cannot be copied, or raises an error, differs in nothing. What differs is tried again and again,
    as it may be random: then it differs only if that cannot be chance. Raises InvalidType and
    InvalidValue for outputs that the modes cannot join.
    """
    few, parts = sample(rows)
    with kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            isolated = isolate(used, shared)

            def evaluated() -> Trial:
                whole = evaluate(isolated, few)
                pieces = [Partial(evaluate(isolated, part), count(part)) for part in parts]
                return Trial(whole, pieces)

            trials = [evaluated()]
        except Exception as error:  # it cannot be sent either, or so few rows are not enough
            if by_signal_handler(error):
                raise
            return Comparison(None, settled=False)
        compared = compare(trials, modes)
        if compared.difference is None:
            return compared
        until = time.monotonic() + _LONGEST
        try:
            while len(trials) < 2 or (len(trials) < _TRIALS and time.monotonic() < until):
                trials.append(evaluated())
                some = len(trials) % _SOME == 0
                if some and (not vary(trials) or fits_well(trials, modes)):
                    break
            return compare(trials, modes)._replace(settled=True)
        except Exception as error:  # its state has changed
            if by_signal_handler(error):
                raise
            return Comparison(None, settled=True)
