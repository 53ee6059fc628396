"""What `multiverso.init` chose, and the shared variables made since: the only state here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import weft
from weft.errors import InvalidType

if TYPE_CHECKING:
    from weft import ModelTable

#: the group of an `init(sync=True)`
_in_step: weft.Group | None = None
#: of the variables that `mv_shared` has made, in the order in which all workers make them
shared_variables: list[ModelTable] = []


def begin(sync: bool) -> None:
    global _in_step
    if not isinstance(sync, bool):
        raise InvalidType(f"init(sync={sync!r}): expected True or False")
    group = weft.init()
    shared_variables.clear()
    _in_step = group if sync else None


def end() -> None:
    global _in_step
    weft.shutdown()
    shared_variables.clear()
    _in_step = None


def consistency() -> str:
    """Return the consistency of new tables, as `weft.ArrayTable` names it."""
    return "bsp" if _in_step is not None and weft.group() is _in_step.latest else "async"
