"""What one rank is to do for a call, and the remote function that does it.

driver                                      every rank
an Order each, in which split inputs   ->   run(member, order):
are row slices                                cuts its own sliceable variables,
joins the results                      <-     computes slice by slice,
                                              sets its own variables once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from synkhronos._selections import choose, slices
from weft._core.functions import Partial, Task, compute
from weft._core.partition import Bounds, RowSlice, common_length, count
from weft.adapters import models
from weft.engines.base import Member
from weft.errors import InvalidValue


@dataclass(frozen=True)
class Order:
    """One rank's part of a call. Functions and variables are named by their numbers."""

    function: int
    task: Task
    #: of the outputs, and after them of the new values of `updated`
    modes: Sequence[str | None]
    updated: Sequence[int] = ()
    #: how sliceable variables are cut: "bounds", "indexes", or not at all
    cut: str | None = None
    sliceable: Sequence[int] = ()
    #: the rows of the sliceable variables, as the user chose them
    selection: Any = None
    #: whether there are inputs, whose rows count; else those of the sliceable variables do
    has_rows: bool = True


def run(member: Member, order: Order, /, **common: Any) -> Partial:
    """Compute a rank's part of a call (a remote function)."""
    order = replace(order, task=order.task.with_common(common))
    task = _with_rows(member, order) if order.sliceable else order.task
    function = _as_numpy(member.registered[order.function])
    found = compute(function, task, order.modes, slices)
    if not order.updated:
        return found
    several = len(found.outputs) - len(order.updated)
    for number, value in zip(order.updated, found.outputs[several:], strict=True):
        variable = member.registered[number]
        models.assign(variable, [np.asarray(value).astype(variable.dtype)])
    return Partial(found.outputs[:several], found.rows)


def _with_rows(member: Member, order: Order) -> Task:
    """Return the task with the rows of the sliceable variables: their number, if the inputs' rows
    do not count, and if they are cut, which ones, as one more argument."""
    variables = [member.registered[number] for number in order.sliceable]
    values = {str(one): models.read(one)[0] for one in variables}
    rows = choose(order.selection, common_length(values), "batch_s")
    task = order.task
    if not order.has_rows:
        task = task._replace(rows=count(rows))
    if order.cut is None:
        return task
    if count(rows) != task.rows:
        raise InvalidValue(
            f"rank {member.rank} has {task.rows} rows of the inputs and {count(rows)} of "
            f"{', '.join(values)}; expected as many: choose them by batch= and batch_s="
        )
    if task.slices > max(1, count(rows)):
        raise InvalidValue(
            f"num_slices={task.slices}: expected 1 to {count(rows)}, as many as there are rows in "
            f"{', '.join(values)} of rank {member.rank}"
        )
    if order.cut == "bounds":
        own = RowSlice(Bounds(), rows)
    else:
        indexes = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        own = RowSlice(np.asarray(indexes, np.int64), slice(0, len(indexes)))
    return task._replace(arguments=[*task.arguments, own])


def _as_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function that takes and returns NumPy arrays, on any backend."""

    def plain(value: Any) -> Any:
        return np.asarray(value) if hasattr(value, "__array__") else value

    return lambda *arguments: [plain(one) for one in function(*map(plain, arguments))]
