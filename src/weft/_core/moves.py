"""The four calls that move arrays and objects from rank to rank: see `calls.py`.

    broadcast     root's arrays     -> everyone
    scatter       root's rows       -> a share for each
    gather        everyone's rows   -> one after the other at the root
    all_gather    everyone's rows   -> one after the other at everyone's

Rows are the first axis. What is no array, nor a list, tuple or dict of arrays, travels as a pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from weft._core.calls import Call, check_out, checked_root, shown, taken_arrays
from weft._core.elements import Array
from weft._core.split import Layout, layout_of, share_of
from weft._core.values import Arrays, Leaf, Target, flat, in_words, keep_apart
from weft.errors import InvalidType, InvalidValue


class Copy(NamedTuple):
    """Bytes of one rank's array that go to another's: which array, from which byte on."""

    source: int
    from_array: int
    start: int
    target: int
    to_array: int
    place: int
    length: int


@dataclass(frozen=True)
class Movement:
    """Bytes are to go from the ranks' sources to their targets."""

    #: what this rank gets, and what others get from it
    incoming: Sequence[Copy]
    outgoing: Sequence[Copy]
    #: for every rank the bytes of each of its source arrays
    sizes: Sequence[Sequence[int]]
    #: this rank's results
    target: Sequence[Array]
    #: the part of each copy that its sender carries where both sides can
    pushed: float


class Broadcast(Call):
    def __init__(self, name: str, rank: int, size: int, value: Any, *, root: int, out: Any) -> None:
        self.name = name
        self._rank, self._size, self._value, self._out = rank, size, value, out
        self._root = checked_root(self.name, root, size)
        self.common = f"broadcast(root={self._root})".encode()
        self._taken = None if out is None else taken_arrays(name, out)
        given = _arrays_of(value)
        offer: tuple[Any, ...] | None = None
        if rank == self._root and given is None:
            _refuse_out(self.name, out, value)
            self.source = [_pickled(value)]
            offer = _OBJECT, (), len(self.source[0])
        elif given is not None:
            offer = _ARRAYS, given.leaves, given.structure
            if rank == self._root:
                self.source = [flat(view) for view in given.views]
        if self._taken is not None:
            self.source = keep_apart(self.source, self._taken.views)
        self.layout = _layout(self.source)
        self.own = _pack(offer, None if self._taken is None else self._taken.leaves)

    def settle(self, owns: Sequence[bytes]) -> Movement:
        offers = [_unpack(own) for own in owns]
        kind, leaves, extra = offers[self._root][0]
        for rank, (offer, out) in enumerate(offers):
            if out is not None:
                _check_roots(self.name, kind, rank, out, leaves)
            if rank != self._root and kind == _kind(offer) == _ARRAYS:
                _check_alike(rank, offer[1], self._root, leaves)
        self._target: Target | None = None
        if kind == _OBJECT:
            sizes, leaves, structure = [extra], [Leaf("numpy", "uint8", _BYTES, (extra,))], None
        else:
            sizes, structure = [_bytes_of(leaf) for leaf in leaves], extra
        if self._rank != self._root or self._taken is not None:
            self._target = Target(leaves, structure, self._taken)
        self._kind = kind
        receivers = [rank for rank in range(self._size) if rank != self._root]
        if self._taken is not None and self._rank == self._root:
            receivers.append(self._root)
        copies = [
            Copy(self._root, index, 0, rank, index, 0, length)
            for rank in receivers
            for index, length in enumerate(sizes)
        ]
        return _movement(
            self._rank,
            copies,
            sizes=[sizes if rank == self._root else () for rank in range(self._size)],
            target=self._target,
            pushed=1 / self._size,
        )

    def result(self) -> Any:
        if self._target is None:
            return self._value
        if self._kind == _OBJECT:
            return pickle.loads(self._target.arrays[0].data)
        return self._target.deliver(self._out)


class Scatter(Call):
    def __init__(self, name: str, rank: int, size: int, value: Any, *, root: int, out: Any) -> None:
        self.name = name
        self._rank, self._size, self._out = rank, size, out
        self._root = checked_root(self.name, root, size)
        self.common = f"scatter(root={self._root})".encode()
        self._taken = None if out is None else taken_arrays(name, out)
        given = _arrays_of(value)
        offer: tuple[Any, ...] | None = None
        if given is not None:
            _check_rows(given.leaves)
            offer = _ARRAYS, given.leaves, given.structure
        if rank == self._root:
            if given is not None:
                self.source = [flat(view) for view in given.views]
            else:
                _refuse_out(self.name, out, value)
                self.source = _pickled_shares(value, size)
                offer = _OBJECT, (), [len(share) for share in self.source]
        if self._taken is not None:
            self.source = keep_apart(self.source, self._taken.views)
        self.layout = _layout(self.source)
        self.own = _pack(offer, None if self._taken is None else self._taken.leaves)

    def settle(self, owns: Sequence[bytes]) -> Movement:
        offers = [_unpack(own) for own in owns]
        kind, leaves, extra = offers[self._root][0]
        for rank, (offer, out) in enumerate(offers):
            if out is not None:
                _check_roots(self.name, kind, rank, out, _shares(leaves, self._size, rank))
            if rank != self._root and kind == _kind(offer) == _ARRAYS:
                _check_alike(rank, offer[1], self._root, leaves)
        self._kind = kind
        if kind == _OBJECT:
            sizes = extra
            mine = [Leaf("numpy", "uint8", _BYTES, (extra[self._rank],))]
            self._target = Target(mine, None, None)
            copies = [Copy(self._root, k, 0, k, 0, 0, extra[k]) for k in range(self._size)]
        else:
            sizes = [_bytes_of(leaf) for leaf in leaves]
            mine = _shares(leaves, self._size, self._rank)
            self._target = Target(mine, extra, self._taken)
            copies = [
                Copy(
                    self._root, index, start * _row(leaf), k, index, 0, (stop - start) * _row(leaf)
                )
                for k in range(self._size)
                for index, leaf in enumerate(leaves)
                for start, stop in [share_of(leaf.shape[0], self._size, k)]
            ]
        return _movement(
            self._rank,
            copies,
            sizes=[sizes if rank == self._root else () for rank in range(self._size)],
            target=self._target,
            pushed=0.0,
        )

    def result(self) -> Any:
        if self._kind == _OBJECT:
            return pickle.loads(self._target.arrays[0].data)
        return self._target.deliver(self._out)


class Gathering(Call):
    """all_gather, and with a root gather."""

    def __init__(
        self, name: str, rank: int, size: int, value: Any, *, out: Any, root: Any = None
    ) -> None:
        self.name = name
        if name == "gather":
            root = checked_root(name, root, size)
        self._rank, self._size, self._root, self._out = rank, size, root, out
        receives = root is None or root == rank
        self._taken = taken_arrays(name, out) if receives and out is not None else None
        self._given = _arrays_of(value)
        where = "" if root is None else f", root={root}"
        leaves: tuple[Leaf, ...]
        if self._given is None:
            _refuse_out(self.name, out, value)
            self.source = [_pickled(value)]
            what, leaves = "object", (Leaf("numpy", "uint8", _BYTES, self.source[0].shape),)
        else:
            leaves = self._given.leaves
            rowless = [leaf._replace(shape=("rows", *leaf.shape[1:])) for leaf in leaves]
            what = in_words(self._given.structure, rowless)
            self.source = [flat(view) for view in self._given.views]
        self.common = f"{self.name}({what}{where})".encode()
        if self._taken is not None:
            self.source = keep_apart(self.source, self._taken.views)
        self.layout = _layout(self.source)
        self.own = _pack(leaves, None if self._taken is None else self._taken.leaves)

    def settle(self, owns: Sequence[bytes]) -> Movement:
        offers = [_unpack(own) for own in owns]
        parts: list[Sequence[Leaf]] = [leaves for leaves, _ in offers]
        whole = [_joined(column) for column in zip(*parts, strict=True)]
        if self._given is None:
            whole = [leaf for leaves in parts for leaf in leaves]  # each pickle is its own
        else:  # of this rank's own library, whosever came first
            mine = zip(whole, self._given.leaves, strict=True)
            whole = [leaf._replace(adapter=own.adapter) for leaf, own in mine]
        for rank, (_, out) in enumerate(offers):
            if out is not None:
                check_out(self.name, out, whole, f"rank {rank}'s out=")
        receives = self._root is None or self._root == self._rank
        structure = None if self._given is None else self._given.structure
        self._target = Target(whole, structure, self._taken) if receives else None
        receivers = range(self._size) if self._root is None else [self._root]
        return _movement(
            self._rank,
            [copy for rank in receivers for copy in self._copies(parts, rank)],
            sizes=[[_bytes_of(leaf) for leaf in leaves] for leaves in parts],
            target=self._target,
            pushed=0.0 if self._root is None else 1.0,
        )

    def _copies(self, parts: Sequence[Sequence[Leaf]], target: int) -> list[Copy]:
        """What one rank gets from all: it keeps each rank's rows behind those of the one before."""
        copies = []
        places = [0] * len(parts[0])
        for source, leaves in enumerate(parts):
            for index, leaf in enumerate(leaves):
                length = _bytes_of(leaf)
                if self._given is None:
                    copies.append(Copy(source, 0, 0, target, source, 0, length))
                else:
                    copies.append(Copy(source, index, 0, target, index, places[index], length))
                    places[index] += length
        return copies

    def result(self) -> Any:
        if self._target is None:
            return None
        if self._given is None:
            return [pickle.loads(part.data) for part in self._target.arrays]
        return self._target.deliver(self._out)


# what ranks tell each other: what they give, and the leaves of what they take

_OBJECT, _ARRAYS = "object", "arrays"
_BYTES = np.dtype(np.uint8)


def _arrays_of(value: Any) -> Arrays | None:
    """The arrays of a value; None if it travels as an object, as an empty list does."""
    arrays = Arrays.of(value)
    return arrays if arrays is not None and arrays.leaves else None


def _pack(offer: Any, out: Any) -> bytes:
    return _dumps((offer, out))


def _unpack(own: bytes) -> tuple[Any, Any]:
    return pickle.loads(own)  # type: ignore[no-any-return]


def _kind(offer: Any) -> str | None:
    return offer[0] if offer is not None else None


def _pickled(value: Any) -> Array:
    return np.frombuffer(_dumps(value), np.uint8)


def _dumps(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        # what only one process knows by name, such as a lambda, travels by value
        return bytes(cloudpickle.dumps(value, protocol=5))


def _pickled_shares(value: Any, size: int) -> list[Array]:
    if not isinstance(value, (list, tuple)):
        raise InvalidType(
            f"scatter({type(value).__name__}): expected an array with rows, or a list or tuple of "
            "items, to give each rank a share of; for one object for all use broadcast"
        )
    shares = (share_of(len(value), size, rank) for rank in range(size))
    return [_pickled(value[start:stop]) for start, stop in shares]


def _check_rows(leaves: Sequence[Leaf]) -> None:
    for leaf in leaves:
        if not leaf.shape:
            raise InvalidValue(
                f"scatter({leaf}): a single number has no rows to share out; for one value for all "
                "use broadcast"
            )


def _check_roots(
    name: str, kind: str, rank: int, out: Sequence[Leaf], expected: Sequence[Leaf]
) -> None:
    """Refuse a rank's arrays for results of the root's value."""
    if kind == _OBJECT:
        raise InvalidValue(
            f"{name}: rank {rank}'s out= is {shown(out)}, but the root's value is an object, which "
            "comes back as a new one"
        )
    check_out(name, out, expected, f"rank {rank}'s out=")


def _check_alike(rank: int, leaves: Sequence[Leaf], root: int, expected: Sequence[Leaf]) -> None:
    if len(leaves) != len(expected) or not all(map(Leaf.matches, leaves, expected)):
        raise Differ(rank, leaves, root, expected)


class Differ(Exception):
    """A rank's arrays are not like the root's."""

    def __init__(
        self, rank: int, leaves: Sequence[Leaf], root: int, expected: Sequence[Leaf]
    ) -> None:
        self.ranks = {rank: _listed(leaves), root: _listed(expected)}
        super().__init__(str(self.ranks))


def _listed(leaves: Sequence[Leaf]) -> str:
    return ", ".join(map(str, leaves[:8])) + (", ..." if len(leaves) > 8 else "")


def _refuse_out(name: str, out: Any, value: Any) -> None:
    if out is not None:
        raise InvalidType(
            f"{name}({type(value).__name__}, out=...): out= takes arrays, and this is an object, "
            "which comes back as a new one"
        )


def _layout(source: Sequence[Array]) -> Layout:
    return layout_of(tuple(array.nbytes for array in source))


def _movement(
    rank: int,
    copies: Sequence[Copy],
    *,
    sizes: Sequence[Sequence[int]],
    target: Target | None,
    pushed: float,
) -> Movement:
    present = [copy for copy in copies if copy.length]
    return Movement(
        incoming=[copy for copy in present if copy.target == rank],
        outgoing=[copy for copy in present if copy.source == rank != copy.target],
        sizes=sizes,
        target=target.arrays if target is not None else (),
        pushed=pushed,
    )


def _bytes_of(leaf: Leaf) -> int:
    return int(prod(leaf.shape)) * leaf.dtype.itemsize


def _row(leaf: Leaf) -> int:
    return int(prod(leaf.shape[1:])) * leaf.dtype.itemsize


def _shares(leaves: Sequence[Leaf], size: int, rank: int) -> list[Leaf]:
    """What one rank gets of arrays that are scattered."""
    shares = []
    for leaf in leaves:
        start, stop = share_of(leaf.shape[0], size, rank)
        shares.append(leaf._replace(shape=(stop - start, *leaf.shape[1:])))
    return shares


def _joined(leaves: Sequence[Leaf]) -> Leaf:
    """What gathered arrays come to; a single number counts as one row."""
    rows = sum(leaf.shape[0] if leaf.shape else 1 for leaf in leaves)
    return leaves[0]._replace(shape=(rows, *leaves[0].shape[1:]))
