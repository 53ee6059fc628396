"""A process's part in a standing team: its rank, the group, and what it was given to keep.

    driver                                  worker
    Member of rank 0                        Member of rank 1, 2, ...
    perform(procedure, arguments)           perform(procedure, arguments)
                └──────── the same procedure, each with arguments of its own ────────┘

A procedure is a function of a module of weft's that gets the member of the process it runs in.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cloudpickle

from weft._core.models import parts, reduce
from weft.engines.base import Group, Member
from weft.engines.local.group import forget_unfinished, join
from weft.engines.local.rendezvous import Identity
from weft.engines.local.shared_arrays import SharedArray
from weft.engines.local.wire import Payload, is_interrupt, unpicklable


class LocalMember(Member):
    """A process of this machine."""

    #: in a worker: the shared arrays of the last call, which the next finds mapped; to have one
    #: mapped it would have to ask the driver, who computes
    mapped: Sequence[Any] = ()

    def hold(self, arguments: Iterable[Any]) -> None:
        if self.rank > 0:
            self.mapped = [one for one in arguments if isinstance(one, SharedArray)]


#: by the name of the team; a worker may be a driver of others
_members: dict[str, Member] = {}


def enter(name: str, rank: int, size: int, timeout: float, start: float) -> Member:
    """Join the group of a team."""
    identity = Identity(rank, size, name)
    group: Group = join(identity, timeout=timeout, start_timeout=start)
    member = _members[name] = LocalMember(rank, size, group)
    return member


def enter_as_worker(name: str, rank: int, size: int, timeout: float, start: float) -> None:
    enter(name, rank, size, timeout, start)


def leave(name: str, *, peers_end: Callable[[], None]) -> None:
    """The driver's end of a team. What a collective was given that was left half way can go once
    its peers, who might still write there, have ended."""
    member = _members.pop(name, None)
    if member is not None:
        member.group.leave()
    peers_end()
    if member is not None:
        forget_unfinished(member.group)


def perform(task: tuple[str, Callable[..., Any], tuple[Any, ...]]) -> Any:
    """What a worker does for its driver: one procedure of a team."""
    name, procedure, arguments = task
    if procedure is enter_as_worker:
        return procedure(*arguments)
    return procedure(_members[name], *arguments)


def keep(member: Member, number: int, payload: bytes, dropped: Sequence[int]) -> None:
    """A procedure: load something and keep it under its number; some others no longer."""
    member.kept[number] = _Unpickler(member, payload).load()
    for other in dropped:
        member.kept.pop(other, None)


def renew(member: Member) -> None:
    """A procedure: after a failure, perhaps in the middle of a collective, meet in a new
    generation."""
    member.group = member.group.survivors()


#: something kept, or one of the parts that it has as a model
Place = tuple[int, int | None]


def places(number: int, value: Any) -> dict[int, Place]:
    """Where workers find their own copies of an object's parts, by identity."""
    return {id(part): (number, at) for at, part in enumerate(parts(value))}


def has_parts(value: Any) -> bool:
    return bool(parts(value))


def pack_mentioning(value: Any, place_of: Callable[[int], Place | None], what: str) -> Payload:
    """A value ready to be kept: what it mentions of what is kept already becomes, in each worker,
    the worker's own copy. `place_of` finds its place by the identity of the driver's object."""

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def persistent_id(self, mentioned: Any) -> Place | None:
            return place_of(id(mentioned))  # asked of everything, lists and dicts too

        def reducer_override(self, mentioned: Any) -> Any:
            reduced = reduce(mentioned)
            return super().reducer_override(mentioned) if reduced is None else reduced

    packed = _Copied()
    try:
        packed.dump_by(Pickler, value)
    except BaseException as error:
        packed.release()
        if is_interrupt(error):
            raise
        raise unpicklable(value, what, error) from error
    return packed


class _Unpickler(pickle.Unpickler):
    """The mirror of `pack_mentioning`."""

    def __init__(self, member: Member, payload: bytes) -> None:
        super().__init__(io.BytesIO(payload))
        self._kept = member.kept

    def persistent_load(self, place: Place) -> Any:
        number, part = place
        return self._kept[number] if part is None else parts(self._kept[number])[part]


class _Copied(Payload):
    """Sent to several workers, each of which may change its arrays: each copies them."""

    def _array(self, array: Any) -> Any:
        from weft.engines.local import large_arrays

        return large_arrays.copied_there(super()._array(array))
