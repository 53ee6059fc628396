"""`replicate`: an object with one copy in each rank of a team, and collectives on the copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weft._api.team import Team, default_team, validate_team
from weft._core.arguments import whole
from weft._core.arithmetic import OPERATIONS
from weft._core.partition import Batch, choose, common_length, count, part_of_rows
from weft.adapters import containers, lookup, models
from weft.engines.base import Member
from weft.errors import InvalidType, InvalidValue, UsageError

Arrays = list[Any]


def replicate(obj: Any, *, team: Team | None = None) -> Replica:
    """Give every worker of a team a copy of an object; functions that use it there use the copy.

    The object may be a torch Module or tensor, a PyTensor shared variable, a Keras model, a NumPy
    array, a `weft.Holder` of a JAX pytree, or a list or dict of these. It is the driver's own copy:
    use and change it as you like. An object that is replicated already is not sent again. The
    copies stay until the team is closed.

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
    return Replica(obj, validate_team(team) or default_team())


class Replica:
    """One object with a copy in each rank of a team. Rank 0's copy is the driver's own object.

    Its values are one array if the object has one (an array, a tensor, a shared variable), else a
    list of arrays in the order of its parameters. Many parameters travel as one buffer.
    """

    def __init__(self, obj: Any, team: Team) -> None:
        self.value = obj
        self.team = team
        self._number = team.replica_number(obj)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it for a worker whose function uses it: there `value` is the worker's own copy."""
        return CopyInWorker, (self.value,)

    def broadcast(self, values: Any = None) -> None:
        """Copy the driver's values, or these, to every rank."""
        if values is not None:
            models.assign(self.value, _as_list(self.value, values))
        self._everywhere(_broadcast, [(self._number,)] * self.team.size)

    def scatter(self, values: Any, batch: Batch | None = None) -> None:
        """Split values, or the rows of a batch of them, along the first axis, as evenly as
        possible: a part for each rank."""
        arrays = _as_list(self.value, values)
        rows = choose(batch, common_length({f"values[{i}]": one for i, one in enumerate(arrays)}))
        size = self.team.size
        if count(rows) < size:
            raise InvalidValue(
                f"scatter of {count(rows)} rows over {size} ranks; expected a row each"
            )
        parts = [
            [array[part_of_rows(rows, size, rank)] for array in arrays] for rank in range(size)
        ]
        self._everywhere(_write_replica, [(self._number, own) for own in parts])

    def gather(self, *, stack: bool = False, order: Sequence[int] | None = None) -> Any:
        """Return all ranks' values, joined along the first axis or stacked along a new one. The
        ranks come in rank order, or in this order."""
        ranks = self._everywhere(_read_replica, [(self._number,)] * self.team.size)
        ranks = ranks if order is None else [ranks[rank] for rank in order]
        return self._as_value([_join(arrays, stack=stack) for arrays in zip(*ranks, strict=True)])

    def all_gather(self) -> None:
        """Set every rank's values to those of all ranks, joined along the first axis."""
        self._everywhere(_all_gather, [(self._number,)] * self.team.size)

    def reduce(self, op: str = "mean", *, in_place: bool = True) -> Any:
        """Set the driver's values to the sum, mean, ... of all ranks'. With `in_place=False` return
        that instead, and change no values."""
        _validate_op(op)
        values = self._everywhere(_reduce, [(self._number, op, in_place)] * self.team.size)[0]
        return None if in_place else self._as_value([np.array(array) for array in values])

    def all_reduce(self, op: str = "mean") -> None:
        """Set every rank's values to the sum, mean, ... of all ranks': the same bits everywhere."""
        _validate_op(op)
        self._everywhere(_all_reduce, [(self._number, op)] * self.team.size)

    def set(self, rank: int, values: Any) -> None:
        """Set one rank's values."""
        rank = self._validate_rank(rank)
        own = (self._number, _as_list(self.value, values))
        self._everywhere(_write_replica, [own if other == rank else None for other in self._ranks])

    def get(self, rank: int) -> Any:
        """Return a copy of one rank's values."""
        rank = self._validate_rank(rank)
        own = [(self._number,) if other == rank else None for other in self._ranks]
        values = self._everywhere(_read_replica, own)[rank]
        return self._as_value([array.copy() for array in values] if rank == 0 else values)

    def shapes(self) -> list[Any]:
        """Return the shapes of each rank's values."""
        ranks = self._everywhere(_shapes, [(self._number,)] * self.team.size)
        return [self._as_value(shapes) for shapes in ranks]

    def same(self) -> bool:
        """Return whether the values of all ranks have the same bits."""
        digests = self._everywhere(_digest, [(self._number,)] * self.team.size)
        return len(set(digests)) == 1

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Refuse: NumPy would make an array of one Python object. Raises InvalidType."""
        raise InvalidType(f"numpy.asarray() of {self!r}: write numpy.asarray(replica.value)")

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

    def _as_value(self, values: list[Any]) -> Any:
        return values[0] if len(values) == 1 and not isinstance(self.value, _SEVERAL) else values

    def _validate_rank(self, rank: object) -> int:
        number = whole(rank)
        if number is None:
            raise InvalidType(f"rank={rank!r}: expected a whole number")
        if not 0 <= number < self.team.size:
            raise InvalidValue(f"rank={rank}: the team has ranks 0 to {self.team.size - 1}")
        return number


class CopyInWorker:
    """A replica in a worker: only the worker's own copy."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        raise UsageError(
            f"{name!r} of a replica is the driver's to call; a function in a worker has .value"
        )


def same(obj: Any, *, team: Team | None = None) -> bool:
    """Return whether every rank's copy of a replicated object has the same bits.

    >>> import numpy, weft
    >>> weights = numpy.zeros(2)
    >>> replica = weft.replicate(weights, team=weft.Team(2))
    >>> weights += 1
    >>> weft.same(weights, team=replica.team)
    False
    >>> weft.shutdown()

    Raises InvalidValue for an object that is not replicated in this team.
    """
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


#: types whose values are a list, even with one array
_SEVERAL = (list, tuple, dict)


def _as_list(value: Any, values: Any) -> Arrays:
    """Return the user's values as arrays, one for each array of the object. Raises InvalidValue."""
    own = models.read(value)
    several = isinstance(values, _SEVERAL) and (len(own) != 1 or isinstance(value, _SEVERAL))
    given = [leaf for _, leaf in containers.leaves(values)] if several else [values]
    if several and isinstance(values, (list, tuple)) and len(values) == len(own):
        given = list(values)  # lists of numbers are arrays too
    if len(given) != len(own):
        raise InvalidValue(f"the object has {len(own)} arrays; got values for {len(given)}")
    return [_as_array(leaf, like.dtype) for leaf, like in zip(given, own, strict=True)]


def _as_array(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a value as an array, cast to the dtype if that loses nothing; otherwise as it is, so
    that its adapter says what is wrong."""
    adapter = lookup.of(value)
    array = np.asarray(value) if adapter is None else adapter.view(value)[0]
    if array.dtype == dtype or array.dtype.kind not in "biufc":
        return array
    cast = array.astype(dtype)
    exact = adapter is None and np.allclose(cast, array, rtol=1e-6, atol=0, equal_nan=True)
    return cast if exact or np.can_cast(array.dtype, dtype, "safe") else array


def _join(arrays: Sequence[Any], *, stack: bool) -> Any:
    try:
        return np.stack(arrays) if stack else np.concatenate([*map(np.atleast_1d, arrays)])
    except ValueError:
        shapes = ", ".join(f"rank {rank} has {array.shape}" for rank, array in enumerate(arrays))
        raise InvalidValue(
            f"gather(stack={stack}) of values that do not fit together: {shapes}; get(rank) has "
            "each alone"
        ) from None


def _validate_op(op: object) -> None:
    if op not in OPERATIONS:
        raise InvalidValue(f"op={op!r}: expected one of {', '.join(map(repr, OPERATIONS))}")
