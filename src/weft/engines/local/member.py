"""A process's part in a standing team: its rank, the group, and what it was given to keep.

    driver                                  worker
    Member of rank 0                        Member of rank 1, 2, ...
    perform(procedure, arguments)           perform(procedure, arguments)
                └──────── the same procedure, each with arguments of its own ────────┘

A procedure is a function of a module of weft's that gets the member of the process it runs in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from weft._core.models import parts, reduce
from weft.engines.base import Group, Member
from weft.engines.local.group import join
from weft.engines.local.rendezvous import Identity
from weft.engines.local.wire import Packed, load, unpicklable
from weft.errors import WeftError

#: by the name of the team; a worker may be a driver of others
_members: dict[str, Member] = {}


def enter(name: str, rank: int, size: int, timeout: float, start: float) -> Member:
    """Join the group of a team."""
    identity = Identity(rank, size, name)
    group: Group = join(identity, timeout=timeout, start_timeout=start)
    member = _members[name] = Member(rank, size, group)
    return member


def enter_as_worker(name: str, rank: int, size: int, timeout: float, start: float) -> None:
    enter(name, rank, size, timeout, start)


def leave(name: str) -> None:
    member = _members.pop(name, None)
    if member is not None:
        member.group.leave()


def perform(task: tuple[str, Callable[..., Any], tuple[Any, ...]]) -> Any:
    """What a worker does for its driver: one procedure of a team."""
    name, procedure, arguments = task
    if procedure is enter_as_worker or procedure is leave:
        return procedure(*arguments)
    return procedure(_members[name], *arguments)


def keep(member: Member, number: int, payload: bytes) -> None:
    """A procedure: load something and keep it under its number."""
    member.kept[number] = load(payload)


def drop(member: Member, number: int) -> None:
    """A procedure: keep it no longer."""
    member.kept.pop(number, None)


#: something kept, or one of the parts that it has as a model
Place = tuple[int, int | None]


def places(number: int, value: Any) -> dict[int, Place]:
    """Where workers find their own copies of an object and of its parts, by identity."""
    found: dict[int, Place] = {id(part): (number, at) for at, part in enumerate(parts(value))}
    return {**found, id(value): (number, None)}


def own_copy(name: str, number: int, part: int | None) -> Any:
    """What stands for something kept, in the pickle of something else that mentions it."""
    value = _members[name].kept[number]
    return value if part is None else parts(value)[part]


def pack_mentioning(value: Any, name: str, known: Mapping[int, Place], what: str) -> Packed:
    """A value ready to be kept: what it mentions of what is kept already becomes, in each worker,
    the worker's own copy. `known` are their places, by the identity of the driver's objects."""

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def reducer_override(self, mentioned: Any) -> Any:
            place = known.get(id(mentioned))
            if place is not None:
                return own_copy, (name, *place)
            reduced = reduce(mentioned)
            if reduced is not None:
                return reduced
            return super().reducer_override(mentioned)

    packed = Packed()
    try:
        packed.dump_by(Pickler, value)
        packed.hold()
    except BaseException as error:
        packed.release()
        if isinstance(error, WeftError) or not isinstance(error, Exception):
            raise
        raise unpicklable(value, what, error) from error
    return packed
