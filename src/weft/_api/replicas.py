"""`replicate`: an object with one copy in each rank of a team, and collectives on the copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft import adapters
from weft._api.team import Team, default_team
from weft._core.arguments import whole
from weft._core.arithmetic import OPERATIONS
from weft._core.partition import Batch, choose, common_length, count, part
from weft.adapters import containers, models
from weft.engines.base import Member
from weft.errors import InvalidType, InvalidValue, UsageError

Arrays = list[Any]


def replicate(obj: Any, *, team: Team | None = None) -> Replica:
    """Give every worker of a team a copy of an object; functions that mention it use theirs.

    The object may be a torch Module or tensor, a PyTensor shared variable, a Keras model, a NumPy
    array, a `weft.Holder` of a JAX pytree, or a list or dict of these. It stays the driver's own
    copy: use and change it as you like. An object that is replicated already is not sent again,
    and the copies stay until the team is closed.

    >>> import numpy, weft
    >>> weights = numpy.zeros(2)
    >>> copies = weft.replicate(weights, team=weft.Team(2))
    >>> weights += 1
    >>> copies.all_reduce("mean")
    >>> weights
    array([0.5, 0.5])
    >>> weft.shutdown()

    Raises InvalidType for what cannot be pickled.
    """
    return Replica(obj, default_team() if team is None else team)


class Replica:
    """The copies of one object. Rank 0's is the driver's own object.

    Values are one array for an object that has one (an array, a tensor, a shared variable), else a
    list of arrays in the order of its parameters. Many parameters travel as one buffer.
    """

    def __init__(self, obj: Any, team: Team) -> None:
        self.value = obj
        self.team = team
        self._number = team.replica_number(obj)

    def __reduce__(self) -> tuple[Any, ...]:
        """In a worker, where a function mentions it: `value` is the worker's own copy."""
        return CopyInWorker, (self.value,)

    def broadcast(self, values: Any = None) -> None:
        """Have every rank take over the driver's values, or these."""
        if values is not None:
            models.assign(self.value, _as_list(self.value, values))
        self._everywhere(_broadcast, [(self._number,)] * self.team.size)

    def scatter(self, values: Any, batch: Batch | None = None) -> None:
        """Split values along their first axis, as even as can be, a part for each rank."""
        lists = _as_list(self.value, values)
        rows = choose(batch, common_length({f"values[{i}]": one for i, one in enumerate(lists)}))
        size = self.team.size
        if count(rows) < size:
            raise InvalidValue(
                f"scatter of {count(rows)} rows over {size} ranks; expected a row each"
            )
        parts = [[one[part(rows, size, rank)] for one in lists] for rank in range(size)]
        self._everywhere(_write_replica, [(self._number, own) for own in parts])

    def gather(self, *, stack: bool = False, order: Sequence[int] | None = None) -> Any:
        """All ranks' values here: joined along the first axis, or stacked along a new one. The
        ranks come in this order, if one is given."""
        found = self._everywhere(_read_replica, [(self._number,)] * self.team.size)
        found = found if order is None else [found[rank] for rank in order]
        return self._as_value([_joined(one, stack=stack) for one in zip(*found, strict=True)])

    def all_gather(self) -> None:
        """Every rank's values become all ranks', joined along the first axis."""
        self._everywhere(_all_gather, [(self._number,)] * self.team.size)

    def reduce(self, op: str = "mean", *, in_place: bool = True) -> Any:
        """The driver's values become the sum, mean, ... of all ranks'. With `in_place=False` that
        is returned, and nobody's values change."""
        _validate_op(op)
        found = self._everywhere(_reduce, [(self._number, op, in_place)] * self.team.size)[0]
        return None if in_place else self._as_value([np.array(one) for one in found])

    def all_reduce(self, op: str = "mean") -> None:
        """Every rank's values become the sum, mean, ... of all ranks', the same bits everywhere."""
        _validate_op(op)
        self._everywhere(_all_reduce, [(self._number, op)] * self.team.size)

    def set(self, rank: int, values: Any) -> None:
        """Set one rank's values."""
        rank = self._validate_rank(rank)
        own = (self._number, _as_list(self.value, values))
        self._everywhere(_write_replica, [own if one == rank else None for one in self._ranks])

    def get(self, rank: int) -> Any:
        """One rank's values, in memory of their own."""
        rank = self._validate_rank(rank)
        own = [(self._number,) if one == rank else None for one in self._ranks]
        found = self._everywhere(_read_replica, own)[rank]
        return self._as_value([array.copy() for array in found] if rank == 0 else found)

    def shapes(self) -> list[Any]:
        """The shapes of each rank's values."""
        found = self._everywhere(_shapes, [(self._number,)] * self.team.size)
        return [self._as_value(shapes) for shapes in found]

    def same(self) -> bool:
        """Whether all ranks have the same bits."""
        digests = self._everywhere(_digest, [(self._number,)] * self.team.size)
        return len(set(digests)) == 1

    def __repr__(self) -> str:
        return f"<Replica of a {type(self.value).__name__} in {self.team.size} ranks>"

    @property
    def _ranks(self) -> range:
        return range(self.team.size)

    def _everywhere(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...] | None]
    ) -> list[Any]:
        models.validate(self.value)
        return self.team.backend.call(function, arguments)

    def _as_value(self, found: list[Any]) -> Any:
        return found[0] if len(found) == 1 and not isinstance(self.value, _SEVERAL) else found

    def _validate_rank(self, rank: object) -> int:
        number = whole(rank)
        if number is None:
            raise InvalidType(f"rank={rank!r}: expected a whole number")
        if not 0 <= number < self.team.size:
            raise InvalidValue(f"rank={rank}: the team has ranks 0 to {self.team.size - 1}")
        return number


class CopyInWorker:
    """A replica as a function in a worker sees it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"{name!r} of a replica is the driver's to call; a function in a worker has .value"
        )


def same(obj: Any, *, team: Team | None = None) -> bool:
    """Whether every rank's copy of a replicated object has the same bits."""
    chosen = default_team() if team is None else team
    if not chosen.has_replica(obj):
        raise InvalidValue(
            f"same() got a {type(obj).__name__} that is not replicated in this team; first:\n"
            "    weft.replicate(obj)"
        )
    return Replica(obj, chosen).same()


# remote functions: what each rank does


def _write_replica(member: Member, number: int, arrays: Arrays) -> None:
    models.assign(member.registered[number], arrays)


def _read_replica(member: Member, number: int) -> Arrays:
    return models.read(member.registered[number])


def _shapes(member: Member, number: int) -> list[tuple[int, ...]]:
    return [array.shape for array in models.read(member.registered[number])]


def _digest(member: Member, number: int) -> bytes:
    import hashlib

    digest = hashlib.blake2b(digest_size=16)
    for array in models.read(member.registered[number]):
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def _broadcast(member: Member, number: int) -> None:
    value = member.registered[number]
    values = member.group.broadcast(models.read(value) if member.rank == 0 else None)
    if member.rank > 0:
        models.assign(value, values)


def _all_gather(member: Member, number: int) -> None:
    value = member.registered[number]
    models.assign(value, member.group.all_gather(models.read(value)))


def _reduce(member: Member, number: int, op: str, in_place: bool) -> Arrays | None:
    value = member.registered[number]
    result: Arrays | None = member.group.reduce(models.read(value), op)
    if result is not None and in_place:
        models.assign(value, result)
    return result


def _all_reduce(member: Member, number: int, op: str) -> None:
    value = member.registered[number]
    models.assign(value, member.group.all_reduce(models.read(value), op))


# values


#: objects whose values are a list, even of one
_SEVERAL = (list, tuple, dict)


def _as_list(value: Any, values: Any) -> Arrays:
    """Values as given by the user, one array for each that the object has."""
    own = models.read(value)
    several = isinstance(values, _SEVERAL) and (len(own) != 1 or isinstance(value, _SEVERAL))
    given = [leaf for _, leaf in containers.leaves(values)] if several else [values]
    if several and isinstance(values, (list, tuple)) and len(values) == len(own):
        given = list(values)  # lists of numbers are arrays too
    if len(given) != len(own):
        raise InvalidValue(f"the object has {len(own)} arrays; got values for {len(given)}")
    return [_as_array(one, like.dtype) for one, like in zip(given, own, strict=True)]


def _as_array(value: Any, dtype: np.dtype[Any]) -> Any:
    """In the dtype where nothing is lost by it; else its adapter says what is wrong."""
    adapter = adapters.of(value)
    array = np.asarray(value) if adapter is None else adapter.view(value)[0]
    if array.dtype == dtype or array.dtype.kind not in "biufc":
        return array
    cast = array.astype(dtype)
    exact = adapter is None and np.allclose(cast, array, rtol=1e-6, atol=0, equal_nan=True)
    return cast if exact or np.can_cast(array.dtype, dtype, "safe") else array


def _joined(arrays: Sequence[Any], *, stack: bool) -> Any:
    try:
        return np.stack(arrays) if stack else np.concatenate([np.atleast_1d(one) for one in arrays])
    except ValueError:
        shapes = ", ".join(f"rank {rank} has {one.shape}" for rank, one in enumerate(arrays))
        raise InvalidValue(
            f"gather(stack={stack}) of values that do not fit together: {shapes}; get(rank) has "
            "each alone"
        ) from None


def _validate_op(op: object) -> None:
    if op not in OPERATIONS:
        raise InvalidValue(f"op={op!r}: expected one of {', '.join(map(repr, OPERATIONS))}")
