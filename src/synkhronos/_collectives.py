"""Collectives on shared variables: those that functions use, one or a list, or their names.

This process's copy is the user's own variable. `nccl` chose a transport once; there is one here.
In February 2017 variables could be left out: then they are those of `functions`, or of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import weft
from synkhronos import _session
from synkhronos._data import is_minibatch
from synkhronos._names import also
from synkhronos._selections import parts, rows_of
from synkhronos._shareds import find, of_functions
from synkhronos._values import fit
from weft._core.partition import Batch
from weft.errors import InvalidType, InvalidValue

OPERATIONS = {"avg": "mean", "sum": "sum", "prod": "prod", "min": "min", "max": "max"}


@also(early=("shared_vars", "functions"), vars="shared_vars")
def broadcast(
    shared_vars: Any = None, values: Any = None, nccl: bool = True, *, functions: Any = None
) -> None:
    """Copy this process's values, or these, to every rank."""
    call = _Call.of_any(shared_vars, functions, "broadcast")
    call.replica.broadcast(None if values is None else call.packed(call.values(values)))


@also(vars="shared_vars", shared_var="shared_vars", sources="values")
def scatter(shared_vars: Any, values: Any, batch: Batch | None = None) -> None:
    """Split values, or the rows of a batch of them, along the first axis: a part for each rank. For
    one variable also a list with one value for each rank, as in February 2017."""
    call = _Call(shared_vars, "scatter")
    own = call.one_for_each_rank(values)
    if own is None:
        own = call.cut(values, batch, call.size)
        lengths = [len(arrays[0]) for arrays in own]
        if min(lengths) == 0:
            raise InvalidValue(
                f"scatter got {sum(lengths)} rows for {call.size} ranks; expected one row for each "
                "or more"
            )
    elif batch is not None:
        raise InvalidValue(f"scatter got one value for each rank, and batch={batch!r} of them all")
    for place, arrays in zip(_session.places(call.size), own, strict=True):
        call.replica.set(place, call.packed(arrays))


@also(early=("shared_vars", "functions", "dest", "nd_up"), vars="shared_vars")
def gather(
    shared_vars: Any = None,
    nd_up: int | None = 1,
    nccl: bool = True,
    *,
    functions: Any = None,
    dest: Any = None,
) -> Any:
    """Return all ranks' values: with nd_up=1 stacked along a new first axis, with 0 joined along
    the first axis, also where their lengths are different. An array of a single variable, a tuple
    of several; with `dest`, an array or variable to write to, None."""
    if nd_up not in (0, 1, None):
        raise InvalidValue(f"nd_up={nd_up!r}: expected 1 (a new axis) or 0 (the first axis)")
    call = _Call.of_any(shared_vars, functions, "gather")
    return call.delivered(call.gathered(stack=nd_up != 0), dest)


@also(vars="shared_vars", source="shared_vars")
def all_gather(shared_vars: Any, nccl: Any = True, *, dest: Any = None) -> None:
    """Set every rank's values to those of all ranks, joined along the first axis. With `dest`,
    another variable, set that: joined, or stacked if it has one axis more."""
    if not isinstance(nccl, bool):  # February's second argument
        dest = nccl
    call = _Call(shared_vars, "all_gather")
    places = _session.places(call.size)
    if dest is not None:
        target = _Call(dest, "all_gather: dest")
        if len(call.variables) != 1 or len(target.variables) != 1:
            raise InvalidValue(
                f"all_gather got {len(call.variables)} variables and dest= of "
                f"{len(target.variables)}; expected a single one each"
            )
        [source], [into] = call.variables, target.variables
        broadcast(into, call.gathered(stack=into.ndim > source.ndim)[0])
    elif places == sorted(places):
        call.replica.all_gather()
    else:
        call.replica.broadcast(call.replica.gather(order=places))


@also(early=("shared_vars", "functions", "op", "in_place", "dest"), vars="shared_vars")
def reduce(
    shared_vars: Any = None,
    op: str = "avg",
    in_place: bool = True,
    nccl: bool = True,
    *,
    functions: Any = None,
    dest: Any = None,
) -> Any:
    """Set this process's values to the average, sum, ... of all ranks'. With in_place=False return
    that instead, as `gather` does; with `dest` write it there."""
    call = _Call.of_any(shared_vars, functions, "reduce")
    in_place = in_place and dest is None
    found = call.replica.reduce(_operation(op, "reduce"), in_place=in_place)
    return None if in_place else call.delivered(call.listed(found), dest)


@also(early=("shared_vars", "functions", "op"), vars="shared_vars")
def all_reduce(
    shared_vars: Any = None, op: str = "avg", nccl: bool = True, *, functions: Any = None
) -> None:
    """Set every rank's values to the average, sum, ... of all ranks'."""
    call = _Call.of_any(shared_vars, functions, "all_reduce")
    call.replica.all_reduce(_operation(op, "all_reduce"))


@also(vars="shared_vars")
def set_value(rank: int, shared_vars: Any, values: Any, batch: Batch | None = None) -> None:
    """Set one rank's values, to the rows of a batch if one is given."""
    place = _session.place(rank, "set_value")
    call = _Call(shared_vars, "set_value")
    given = call.values(values) if batch is None else call.cut(values, batch, 1)[0]
    call.replica.set(place, call.packed(given))


@also(vars="shared_vars")
def get_value(rank: int, shared_vars: Any) -> Any:
    """Return one rank's values; for a list of variables, a tuple of these."""
    place = _session.place(rank, "get_value")
    call = _Call(shared_vars, "get_value")
    return call.each(call.listed(call.replica.get(place)))


@also(vars="shared_vars")
def get_lengths(shared_vars: Any) -> Any:
    """Return how many rows each rank's value has; for a list of variables, a tuple of these."""
    call = _Call(shared_vars, "get_lengths")
    return call.each([[shape[0] if shape else 0 for shape in one] for one in call.shapes()])


@also(vars="shared_vars")
def get_shapes(shared_vars: Any) -> Any:
    """Return the shape of each rank's value; for a list of variables, a tuple of these."""
    call = _Call(shared_vars, "get_shapes")
    return call.each(call.shapes())


class _Call:
    """The variables of a call."""

    def __init__(self, given: Any, caller: str) -> None:
        team = _session.team(caller)
        self.size = team.size
        self._caller = caller
        self.variables, self._single = find(given, caller)
        for variable in self.variables:
            weft.replicate(variable, team=team)
        self.replica = weft.replicate(_session.together(self.variables), team=team)

    @classmethod
    def of_any(cls, given: Any, functions: Any, caller: str) -> _Call:
        """Return a call with these variables, and those of functions; of all, where there are
        neither."""
        _session.team(caller)
        if given is not None and functions is None:
            return cls(given, caller)
        of_given = [] if given is None else find(given, caller)[0]
        return cls([*dict.fromkeys([*of_given, *of_functions(functions, caller)])], caller)

    def pairs(self, values: Sequence[Any]) -> list[tuple[Any, Any]]:
        return list(zip(self.variables, values, strict=True))

    def values(self, values: Any) -> list[Any]:
        """Return the user's values, one for each variable, in its dtype and number of axes."""
        given = [values] if self._single else values
        if not isinstance(given, (list, tuple)):
            raise InvalidType(
                f"{self._caller} got a {type(values).__name__} for {len(self.variables)} "
                "variables; expected a list with a value for each"
            )
        if len(given) != len(self.variables):
            raise InvalidValue(
                f"{self._caller} got {len(given)} values for {len(self.variables)} variables"
            )
        return [
            fit(value, one.dtype, one.ndim, f"{self._caller}: the value for {one}")
            for one, value in self.pairs(given)
        ]

    def cut(self, values: Any, batch: Batch | None, count: int) -> list[list[Any]]:
        """Return so many parts of the rows of the user's values, or of a batch of them: in each
        part one array for each variable."""
        arrays = self.values(values)
        named = {f"values[{at}]": one for at, one in enumerate(arrays)}
        given = [values] if self._single else values
        minibatches = [name for name, one in zip(named, given, strict=True) if is_minibatch(one)]
        rows = rows_of(named, minibatches, batch)
        return [
            [
                np.array(one[part.positions if name in minibatches else part.rows])
                for name, one in named.items()
            ]
            for part in parts(rows, count)
        ]

    def one_for_each_rank(self, values: Any) -> list[list[Any]] | None:
        """Return each rank's values if they are such a list; None if they are to be split."""
        if not (self._single and isinstance(values, (list, tuple)) and len(values) == self.size):
            return None
        variable = self.variables[0]
        if any(np.ndim(one) != variable.ndim for one in values):
            return None
        what = f"{self._caller}: the value for {variable} in rank"
        return [
            [fit(value, variable.dtype, variable.ndim, f"{what} {rank}")]
            for rank, value in enumerate(values)
        ]

    def packed(self, values: list[Any]) -> Any:
        """Return values in the form that a replica takes."""
        return values if len(values) > 1 else values[0]

    def gathered(self, *, stack: bool) -> list[Any]:
        """Return all ranks' values of each variable."""
        order = _session.places(self.size)
        return self.listed(self.replica.gather(stack=stack, order=order))

    def listed(self, found: Any) -> list[Any]:
        """Return a replica's values, one for each variable."""
        return [found] if len(self.variables) == 1 else list(found)

    def delivered(self, values: list[Any], dest: Any) -> Any:
        """Return a single variable's value, or a tuple of several; or write it to `dest`."""
        if dest is None:
            return values[0] if len(values) == 1 else tuple(values)
        if len(values) != 1:
            raise InvalidValue(
                f"{self._caller} got dest= for {len(values)} variables; expected a single one"
            )
        if hasattr(dest, "set_value"):
            dest.set_value(values[0])
        elif isinstance(dest, np.ndarray) and dest.shape == values[0].shape:
            np.copyto(dest, values[0], casting="same_kind")
        else:
            shape = f" of shape {dest.shape}" if hasattr(dest, "shape") else ""
            raise InvalidType(
                f"{self._caller} got dest= a {type(dest).__name__}{shape}; expected an array of "
                f"shape {values[0].shape}, or a shared variable"
            )
        return None

    def shapes(self) -> list[list[tuple[int, ...]]]:
        """Return the shapes in all ranks, for each variable."""
        found = self.replica.shapes()
        ranks = [found[place] for place in _session.places(self.size)]
        if len(self.variables) == 1:
            return [ranks]
        return [[one[position] for one in ranks] for position in range(len(self.variables))]

    def each(self, found: list[Any]) -> Any:
        """Return one value for each variable as the user gave these: itself, or a tuple."""
        return found[0] if self._single else tuple(found)


def _operation(op: object, caller: str) -> str:
    if not isinstance(op, str) or op not in OPERATIONS:
        known = ", ".join(map(repr, OPERATIONS))
        raise InvalidValue(f"{caller}: op={op!r}: expected one of {known}")
    return OPERATIONS[op]
