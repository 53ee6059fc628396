"""A process's part in a team: its rank, its group, and its registered objects.

    driver                                  worker
    Member of rank 0                        Member of rank 1, 2, ...
    function(member, *own, **common)        run_remote: the same function, with its own arguments

Workers load this module without the driver's code (team.py). First joining and leaving the group,
then remote functions, then how registered objects and arguments are packed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from weft._core.partition import RowSlice
from weft.adapters.models import parts, reduce
from weft.engines.base import Group, Member
from weft.engines.local.group import forget_unfinished, join
from weft.engines.local.meeting.rendezvous import Identity
from weft.engines.local.memory.arrays import SharedArray, buffer_of
from weft.engines.local.pool import payload_arrays
from weft.engines.local.pool.driver_state import outside_inference
from weft.engines.local.pool.payload import (
    IMMUTABLE,
    Payload,
    Pickler,
    SharedPayload,
    is_interrupt,
    unpicklable_error,
)

#: by the name of the team: a worker may be the driver of another team
_members: dict[str, Member] = {}


def enter(name: str, rank: int, size: int, timeout: float, start: float) -> Member:
    """Join the group of a team. Return this process's member."""
    identity = Identity(rank, size, name)
    group: Group = join(identity, timeout=timeout, start_timeout=start)
    member = _members[name] = Member(rank, size, group)
    return member


def enter_as_worker(name: str, rank: int, size: int, timeout: float, start: float) -> None:
    """Join the group of a team (a remote function). Return None: a member cannot be sent."""
    enter(name, rank, size, timeout, start)


def leave(name: str, *, peers_end: Callable[[], None]) -> None:
    """Leave the group of a team as its driver, and end the peers by `peers_end`. Only then is the
    memory of an unfinished collective freed: until their end, peers may write there."""
    member = _members.pop(name, None)
    if member is not None:
        member.group.leave()
    peers_end()
    if member is not None:
        forget_unfinished(member.group)


def run_remote(work: tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
    """Run a function of a team for its driver."""
    name, function, own, common = work
    if function is enter_as_worker:
        return function(*own)
    return function(_members[name], *own, **common)


def register(member: Member, number: int, payload: bytes) -> None:
    """Load an object, and register it under its number (a remote function)."""
    with outside_inference():
        member.registered[number] = _Unpickler(member, payload).load()


def unregister(member: Member, numbers: Sequence[int]) -> None:
    """Forget registered objects (a remote function)."""
    for number in numbers:
        member.registered.pop(number, None)


def renew(member: Member) -> None:
    """Form the group's next generation after a failure, which may have left a collective half way
    (a remote function)."""
    member.group = member.group.survivors()


#: pickle's persistent id of a registered object: its number, and the index of one of its parts
PersistentId = tuple[int, int | None]


def part_ids(number: int, value: Any) -> dict[int, PersistentId]:
    """Return the persistent ids of an object's parts, by the identity of the part."""
    return {id(part): (number, index) for index, part in enumerate(parts(value))}


def has_parts(value: Any) -> bool:
    return bool(parts(value))


def pack_for_registration(
    value: Any, persistent_id_of: Callable[[int], PersistentId | None], name: str
) -> Payload:
    """Pack a value to be registered. A registered object that it mentions becomes, in each worker,
    the worker's own copy; `persistent_id_of` looks it up by the identity of the driver's object.

    Raises InvalidType.
    """

    ordered: set[Any] = set()

    class RegisteringPickler(Pickler):
        def persistent_id(self, part: Any) -> PersistentId | None:
            return persistent_id_of(id(part))  # called for every object, lists and dicts too

        def reducer_override(self, part: Any) -> Any:
            reduced = reduce(part, ordered)
            return super().reducer_override(part) if reduced is None else reduced

    payload = _RegisteredPayload()
    try:
        payload.dump_by(RegisteringPickler, value)
    except BaseException as error:
        payload.release()
        if is_interrupt(error):
            raise
        raise unpicklable_error(value, name, error) from error
    return payload


class _Unpickler(pickle.Unpickler):
    """Loads what `pack_for_registration` has packed."""

    def __init__(self, member: Member, payload: bytes) -> None:
        super().__init__(io.BytesIO(payload))
        self._registered = member.registered

    def persistent_load(self, persistent_id: PersistentId) -> Any:
        number, part = persistent_id
        return self._registered[number] if part is None else parts(self._registered[number])[part]


class _RegisteredPayload(Payload):
    """A payload for several workers, each of which may change its arrays: they arrive as copies.
    Its pickle is an argument of the call that registers it, and in a block with that."""

    def _put_in_block(self, pieces: Any) -> bytes:
        return b"".join(pieces.written)

    def _array(self, array: Any) -> Any:
        return payload_arrays.as_copy(super()._array(array))


class Arguments(Payload):
    """The arguments of one worker in a call. Row slices of arrays in shared memory are cut in the
    worker; of other arrays only the rows that are needed are sent."""

    def __init__(self) -> None:
        super().__init__()
        #: what row slices were reduced to, by identity, for a second pickler
        self._cut: dict[int, Any] = {}

    def reducers(self) -> dict[type, Callable[[Any], Any]]:
        return {**super().reducers(), RowSlice: self._row_slice}

    def _row_slice(self, rows: RowSlice) -> Any:
        if lies_in_shared_memory(rows.array):
            return rows.reduce_whole()
        if id(rows) not in self._cut:
            self._cut[id(rows)] = rows.__reduce__()
        return self._cut[id(rows)]


def stays_shared(value: Any) -> bool:
    """Return whether workers that get a value within a registered object see its later changes."""
    return type(value) is SharedArray and buffer_of(value) is not None


def lies_in_shared_memory(value: Any) -> bool:
    """Return whether a value is an array in memory that workers share with this process."""
    return type(value) in payload_arrays.KINDS and buffer_of(value) is not None


def pack_once(value: Any, name: str) -> Any:
    """Return a common argument for several workers, packed once for all."""
    # immutable values are quicker to pickle for each worker
    return value if isinstance(value, IMMUTABLE) else SharedPayload(value, name)
