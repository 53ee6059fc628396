"""When and how a function's mode, or a loss, is checked: at the first call of each shape, in this
process, on a few rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from weft._core.checks import Comparison, Difference, compare, is_close, isolate, sample
from weft._core.functions import Modes, Partial
from weft._core.partition import count, leaves
from weft.engines.generators import kept
from weft.engines.interruption import by_signal_handler
from weft.errors import InvalidType

#: shapes that are checked; a program with more has rows of any length
_SHAPES = 64


class Schedule:
    """Which calls are checked: with `check=True` all, with None none. With False the first of each
    shape, and the 2nd, 4th, 8th, ... until a check has settled the matter: zeros fit any mode,
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
        """Note a call with inputs of this shape, and compare if it is due."""
        if not self._is_due(shape):
            return None
        difference, settled = compare()
        if difference is None and settled:
            self._calls[shape] = None
        return difference

    def _is_due(self, shape: Hashable) -> bool:
        if self.option is not False:
            return self.option is True
        if len(self._calls) >= _SHAPES and shape not in self._calls:
            return False
        calls = self._calls.get(shape, 0)
        if calls is None:
            return False
        self._calls[shape] = calls + 1
        return (calls + 1) & calls == 0


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
    cannot be copied, raises an error, or gives other numbers the next time, differs in nothing.
    Raises InvalidType and InvalidValue for outputs that the modes cannot join.
    """
    few, parts = sample(rows)
    with kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            isolated = isolate(used, shared)
            whole = evaluate(isolated, few)
            pieces = [Partial(evaluate(isolated, part), count(part)) for part in parts]
        except Exception as error:  # it cannot be sent either, or so few rows are not enough
            if by_signal_handler(error):
                raise
            return Comparison(None, settled=False)
        compared = compare(whole, pieces, modes)
        if compared.difference is None:
            return compared
        try:
            alike = is_close(whole, evaluate(isolated, few))
        except Exception as error:  # its state has changed
            if by_signal_handler(error):
                raise
            alike = False
    return compared if alike else Comparison(None, settled=True)
