"""Collectives on shared variables: those that functions use, one or a list, or their names.

This process's copy is the user's own variable. `nccl` chose a transport once; there is one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import weft
from synkhronos import _session
from synkhronos._shareds import find
from synkhronos._values import fit
from weft._core.partition import Batch, choose, common_length, count, part_of_rows
from weft.errors import InvalidValue

OPERATIONS = {"avg": "mean", "sum": "sum", "prod": "prod", "min": "min", "max": "max"}


def broadcast(vars: Any, values: Any = None, nccl: bool = True) -> None:
    """Copy this process's values, or these, to every rank."""
    call = _Call(vars, "broadcast")
    call.replica.broadcast(None if values is None else call.packed(call.values(values)))


def scatter(vars: Any, values: Any, batch: Batch | None = None) -> None:
    """Split values, or the rows of a batch of them, along the first axis: a part for each rank."""
    call = _Call(vars, "scatter")
    given = call.values(values)
    rows = choose(batch, common_length({one.name or "values": v for one, v in call.pairs(given)}))
    if count(rows) < call.size:
        raise InvalidValue(
            f"scatter got {count(rows)} rows for {call.size} ranks; expected one row for each or "
            "more"
        )
    for rank, place in enumerate(_session.places(call.size)):
        own = part_of_rows(rows, call.size, rank)
        call.replica.set(place, call.packed([np.array(one[own]) for one in given]))


def gather(vars: Any, nd_up: int = 1, nccl: bool = True) -> Any:
    """Return all ranks' values: with nd_up=1 stacked along a new first axis, with 0 joined along
    the first axis, also where their lengths are different."""
    if nd_up not in (0, 1):
        raise InvalidValue(f"nd_up={nd_up!r}: expected 1 (a new axis) or 0 (the first axis)")
    call = _Call(vars, "gather")
    return call.unpacked(call.replica.gather(stack=bool(nd_up), order=_session.places(call.size)))


def all_gather(vars: Any, nccl: bool = True) -> None:
    """Set every rank's values to those of all ranks, joined along the first axis."""
    call = _Call(vars, "all_gather")
    places = _session.places(call.size)
    if places == sorted(places):
        call.replica.all_gather()
    else:
        call.replica.broadcast(call.replica.gather(order=places))


def reduce(vars: Any, op: str = "avg", in_place: bool = True, nccl: bool = True) -> Any:
    """Set this process's values to the average, sum, ... of all ranks'; with in_place=False return
    that instead."""
    call = _Call(vars, "reduce")
    found = call.replica.reduce(_operation(op, "reduce"), in_place=in_place)
    return None if in_place else call.unpacked(found)


def all_reduce(vars: Any, op: str = "avg", nccl: bool = True) -> None:
    """Set every rank's values to the average, sum, ... of all ranks'."""
    _Call(vars, "all_reduce").replica.all_reduce(_operation(op, "all_reduce"))


def set_value(rank: int, vars: Any, values: Any, batch: Batch | None = None) -> None:
    """Set one rank's values, to the rows of a batch if one is given."""
    place = _session.place(rank, "set_value")
    call = _Call(vars, "set_value")
    given = call.values(values)
    if batch is not None:
        length = common_length({one.name or "values": v for one, v in call.pairs(given)})
        given = [np.array(one[choose(batch, length)]) for one in given]
    call.replica.set(place, call.packed(given))


def get_value(rank: int, vars: Any) -> Any:
    """Return one rank's values."""
    place = _session.place(rank, "get_value")
    call = _Call(vars, "get_value")
    return call.unpacked(call.replica.get(place))


def get_lengths(vars: Any) -> Any:
    """Return how many rows each rank's value has; for a list of variables, a list of these."""
    call = _Call(vars, "get_lengths")
    return call.each([[shape[0] if shape else 0 for shape in one] for one in call.shapes()])


def get_shapes(vars: Any) -> Any:
    """Return the shape of each rank's value; for a list of variables, a list of these."""
    call = _Call(vars, "get_shapes")
    return call.each(call.shapes())


class _Call:
    """The variables of a call."""

    def __init__(self, given: Any, caller: str) -> None:
        team = _session.team(caller)
        self.size = team.size
        self._caller = caller
        self._variables, self._single = find(given, caller)
        for variable in self._variables:
            weft.replicate(variable, team=team)
        self.replica = weft.replicate(_session.together(self._variables), team=team)

    def pairs(self, values: Sequence[Any]) -> list[tuple[Any, Any]]:
        return list(zip(self._variables, values, strict=True))

    def values(self, values: Any) -> list[Any]:
        """Return the user's values, one for each variable, in its dtype and number of axes."""
        given = [values] if self._single else list(values)
        if len(given) != len(self._variables):
            raise InvalidValue(
                f"{self._caller} got {len(given)} values for {len(self._variables)} variables"
            )
        return [
            fit(value, one.dtype, one.ndim, f"{self._caller}: the value for {one}")
            for one, value in self.pairs(given)
        ]

    def packed(self, values: list[Any]) -> Any:
        """Return values in the form that a replica takes."""
        return values if len(values) > 1 else values[0]

    def unpacked(self, found: Any) -> Any:
        """Return a replica's values in the form in which the user gave the variables."""
        return [found] if len(self._variables) == 1 and not self._single else found

    def shapes(self) -> list[list[tuple[int, ...]]]:
        """Return the shapes in all ranks, for each variable."""
        found = self.replica.shapes()
        ranks = [found[place] for place in _session.places(self.size)]
        if len(self._variables) == 1:
            return [ranks]
        return [[one[position] for one in ranks] for position in range(len(self._variables))]

    def each(self, found: list[Any]) -> Any:
        return found[0] if self._single else found


def _operation(op: object, caller: str) -> str:
    if not isinstance(op, str) or op not in OPERATIONS:
        known = ", ".join(map(repr, OPERATIONS))
        raise InvalidValue(f"{caller}: op={op!r}: expected one of {known}")
    return OPERATIONS[op]
