"""Shared variables: found among those that functions use, and registered with every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import weft
from synkhronos import _session
from weft.adapters import lookup
from weft.engines.base import Member
from weft.errors import InvalidType, InvalidValue


def register(team: weft.Team, variable: Any) -> None:
    """Give every rank a copy of a shared variable."""
    if team.has_replica(variable):
        return
    if lookup.of_model(variable) is not None:
        team.replica_number(variable)
        return
    team.replica_number(variable.container)  # what compiled functions hold of it
    number = team.replica_number(variable)
    team.backend.call(_own_stream, [(number,)] * team.size)


def _own_stream(member: Member, number: int) -> None:
    """Give each rank's random generator a stream of its own, for its rows (a remote function)."""
    generator = member.registered[number].get_value()
    if member.rank and hasattr(getattr(generator, "bit_generator", None), "jumped"):
        stream = generator.bit_generator.jumped(member.rank)
        member.registered[number].set_value(np.random.Generator(stream))


def find(given: Any, caller: str) -> tuple[list[Any], bool]:
    """Return the variables given as such or by name, and whether it was a single one.

    Raises InvalidValue for one that no function uses, for one given twice, and for an empty list.
    """
    if not isinstance(given, (list, tuple)):
        return [_find(given, caller)], True
    found = [_find(one, caller) for one in given]
    if not found:
        raise InvalidValue(f"{caller} got an empty list; expected shared variables or their names")
    for position, one in enumerate(found):
        if any(one is before for before in found[:position]):
            raise InvalidValue(
                f"{caller} got the variable {one.name!r} twice; expected each variable once"
            )
    return found, False


def of_functions(functions: Any, caller: str) -> list[Any]:
    """Return the variables of these functions, or of all if they are None: those with arrays.

    Raises InvalidType, InvalidValue.
    """
    if functions is None:
        known = list(_session.variables())
    else:
        given = functions if isinstance(functions, (list, tuple)) else [functions]
        for one in given:
            if not hasattr(one, "shareds"):
                raise InvalidType(
                    f"{caller} got functions={functions!r}; expected what synkhronos.function "
                    "returns, or a list of these"
                )
        known = [variable for one in given for variable in one.shareds]
    found = [one for one in dict.fromkeys(known) if lookup.of_model(one) is not None]
    if not found:
        raise InvalidValue(f"{caller} was called without variables, and functions use none")
    return found


def _find(given: Any, caller: str) -> Any:
    known = list(_session.variables())
    names = [one.name for one in known]
    if not isinstance(given, str):
        if not hasattr(given, "get_value"):
            raise InvalidType(
                f"{caller} got a {type(given).__name__}; expected a shared variable or its name"
            )
        if any(one is given for one in known):
            return given
        raise InvalidValue(
            f"{caller} got the variable {given.name!r}, which no synkhronos function uses; those "
            f"that are used: {names}"
        )
    found = [one for one in known if one.name == given]
    if len(found) != 1:
        count = "more than one variable is" if found else "no variable of a function is"
        raise InvalidValue(f"{caller} got the name {given!r}: {count} called so, of {names}")
    return found[0]


def validate_sliceable(sliceable: Sequence[Any], shareds: Sequence[Any]) -> None:
    for one in sliceable:
        if not any(one is shared for shared in shareds):
            raise InvalidValue(
                f"sliceable_shareds has {one}, which the function does not use; it uses {shareds}"
            )
