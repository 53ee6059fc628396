"""The four calls that move arrays and objects from rank to rank; `calls.py` draws a call's course.

    broadcast     root's arrays     -> everyone
    scatter       root's rows       -> a part for each
    gather        everyone's rows   -> one after the other at the root
    all_gather    everyone's rows   -> one after the other at everyone's

Rows are the first axis. Anything but an array, or a list, tuple or dict of arrays, is pickled.
"""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from weft._core.arithmetic import Array
from weft._core.arrays import (
    Arrays,
    Leaf,
    Target,
    copy_if_aliased,
    flat,
    in_words,
    own_device,
)
from weft._core.calls import (
    Call,
    Copy,
    Movement,
    UnlikeArrays,
    alike,
    as_text,
    layout_of,
    out_arrays,
    validate_out,
    validate_root,
)
from weft._core.partition import part_of
from weft.errors import InvalidType, InvalidValue


class _Offer(NamedTuple):
    """Describe what a rank sends: arrays, or pickles."""

    leaves: tuple[Leaf, ...] = ()
    structure: Any = None
    #: the length of each pickle
    pickles: tuple[int, ...] = ()
    #: whether the arrays travel from device to device
    on_device: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.pickles or tuple(leaf.nbytes for leaf in self.leaves)


class _Own(NamedTuple):
    """The rank's part of a call: what it sends, if anything, and its `out=` for the results."""

    offer: _Offer | None
    out: tuple[Leaf, ...] | None


class _Move(Call):
    """Give the calls that move what they have in common."""

    def __init__(self, name: str, rank: int, size: int, *, out: Any, receives: bool) -> None:
        self.name, self._rank, self._size, self._out = name, rank, size, out
        self._out_arrays = out_arrays(name, out) if receives and out is not None else None
        self._target: Target | None = None
        self._sent: Arrays | None = None

    def place(self, device: str | None) -> None:
        arrays, self.placed = self._sent, device
        if arrays is not None:
            offer = _Offer(arrays.leaves, arrays.structure, on_device=device is not None)
            self._give(offer, [flat(view) for view in arrays.at(device)])

    def _send(self, arrays: Arrays) -> None:
        """Set the arrays that this rank sends. Those on a device are sent once they are placed."""
        self._sent, self.device, self.leaves = arrays, arrays.device, arrays.leaves
        if self.device is None:
            self.place(None)

    def _give(self, offer: _Offer | None, source: Sequence[Array]) -> None:
        """Set what this rank sends, of what it offers."""
        if self._out_arrays is not None:
            source = copy_if_aliased(source, self._out_arrays.views)
        self.source = source
        self.layout = layout_of(tuple(array.nbytes for array in source))
        out = None if self._out_arrays is None else self._out_arrays.leaves
        self.own = _dumps(_Own(offer, out))

    def _movement(self, copies: Sequence[Copy], sizes: Sequence[Sequence[int]]) -> Movement:
        present = [copy for copy in copies if copy.length]
        return Movement(
            incoming=[copy for copy in present if copy.to_rank == self._rank],
            outgoing=[copy for copy in present if copy.from_rank == self._rank != copy.to_rank],
            sizes=sizes,
            target=self._target.arrays if self._target is not None else (),
            copies=present,
        )


class _FromRoot(_Move):
    """A call in which the root sends and everyone receives."""

    def __init__(self, name: str, rank: int, size: int, value: Any, *, root: Any, out: Any) -> None:
        super().__init__(name, rank, size, out=out, receives=True)
        self._root, self._value = validate_root(name, root, size), value
        self._own_device: str | None = None
        self.common = f"{name}(root={self._root})".encode()
        given = _arrays_of(value)
        if given is not None:
            self._validate_leaves(given.leaves)
            self._own_device = given.device
            if rank == self._root:
                self._send(given)
            else:
                self._give(_Offer(given.leaves, given.structure), [])
        elif rank == self._root:
            _refuse_out(name, out, value)
            pickles = self._pickles(value)
            self._give(_Offer(pickles=tuple(map(len, pickles))), pickles)
        else:
            self._give(None, [])

    def settle(self, owns: Sequence[bytes]) -> Movement:
        ranks: list[_Own] = [pickle.loads(own) for own in owns]
        offer = ranks[self._root].offer or _Offer()
        given = {rank: own.offer.leaves for rank, own in enumerate(ranks) if own.offer is not None}
        if offer.leaves and not all(alike(leaves, offer.leaves) for leaves in given.values()):
            raise UnlikeArrays(given)
        for rank, own in enumerate(ranks):
            if own.out is not None:
                self._validate_out(rank, own.out, offer)
        self._from_pickle = bool(offer.pickles)
        copies = [copy for rank in range(self._size) for copy in self._copies(offer, rank)]
        if self._wants_result():
            mine = [copy.length for copy in copies if copy.to_rank == self._rank]
            leaves = _as_bytes(mine) if self._from_pickle else self._parts(offer.leaves, self._rank)
            leaves = [self._brought_here(leaf) for leaf in leaves]
            device = leaves[0].device if offer.on_device else None
            self._target = Target(leaves, offer.structure, self._out_arrays, device)
        else:
            copies = [copy for copy in copies if copy.to_rank != self._rank]
        sizes = [offer.sizes if rank == self._root else () for rank in range(self._size)]
        return self._movement(copies, sizes)

    def _validate_out(self, rank: int, out: Sequence[Leaf], offer: _Offer) -> None:
        if offer.pickles:
            raise InvalidValue(
                f"{self.name}: rank {rank}'s out= is {as_text(out)}, but the root's value is an "
                "object, which comes back as a new one; leave out= away"
            )
        validate_out(self.name, out, self._parts(offer.leaves, rank), f"rank {rank}'s out=")

    def result(self) -> Any:
        if self._target is None:
            return self._value
        if self._from_pickle:
            return pickle.loads(self._target.arrays[0].data)
        return self._target.deliver(self._out)

    def _brought_here(self, leaf: Leaf) -> Leaf:
        """Return the description of what arrives: a tensor is put on this rank's device, whatever
        its number was at the root."""
        if leaf.device == "cpu" or leaf.adapter != "torch" or self._rank == self._root:
            return leaf
        return leaf._replace(device=self._own_device or own_device(leaf.device))

    # what differs between broadcast and scatter

    def _validate_leaves(self, leaves: Sequence[Leaf]) -> None:
        """Raise InvalidValue for arrays that cannot be sent."""

    def _wants_result(self) -> bool:
        """Return whether this rank's result is another than the value that it gave."""
        return True

    @abstractmethod
    def _pickles(self, value: Any) -> list[Array]:
        """Return what the root sends of an object."""

    @abstractmethod
    def _parts(self, leaves: Sequence[Leaf], rank: int) -> list[Leaf]:
        """Return what a rank gets of the root's arrays."""

    @abstractmethod
    def _copies(self, offer: _Offer, rank: int) -> list[Copy]:
        """Return the copies that bring a rank what it gets."""


class Broadcast(_FromRoot):
    """A call that sends the root's whole value to everyone; the root has it already."""

    def _wants_result(self) -> bool:
        return self._rank != self._root or self._out_arrays is not None

    def _pickles(self, value: Any) -> list[Array]:
        return [_pickled(value)]

    def _parts(self, leaves: Sequence[Leaf], rank: int) -> list[Leaf]:
        return list(leaves)

    def _copies(self, offer: _Offer, rank: int) -> list[Copy]:
        return [
            Copy(self._root, index, 0, rank, index, 0, length)
            for index, length in enumerate(offer.sizes)
        ]


class Scatter(_FromRoot):
    """A call that sends each rank a part of the root's rows, or of the items of its list."""

    def _validate_leaves(self, leaves: Sequence[Leaf]) -> None:
        for leaf in leaves:
            if not leaf.shape:
                raise InvalidValue(
                    f"scatter({leaf}): a single number has no rows to share out; for one value for "
                    "all use broadcast"
                )

    def _pickles(self, value: Any) -> list[Array]:
        if not isinstance(value, (list, tuple)):
            raise InvalidType(
                f"scatter({type(value).__name__}): expected an array with rows, or a list or tuple "
                "of items, to give each rank a part of; for one object for all use broadcast"
            )
        parts = (part_of(len(value), self._size, rank) for rank in range(self._size))
        return [_pickled(value[start:stop]) for start, stop in parts]

    def _parts(self, leaves: Sequence[Leaf], rank: int) -> list[Leaf]:
        parts = []
        for leaf in leaves:
            start, stop = part_of(leaf.shape[0], self._size, rank)
            parts.append(leaf._replace(shape=(stop - start, *leaf.shape[1:])))
        return parts

    def _copies(self, offer: _Offer, rank: int) -> list[Copy]:
        if offer.pickles:
            return [Copy(self._root, rank, 0, rank, 0, 0, offer.pickles[rank])]
        copies = []
        for index, leaf in enumerate(offer.leaves):
            start, stop = (n * leaf.row_nbytes for n in part_of(leaf.shape[0], self._size, rank))
            copies.append(Copy(self._root, index, start, rank, index, 0, stop - start))
        return copies


class Gather(_Move):
    """A call of all_gather or, with a root, of gather."""

    def __init__(
        self, name: str, rank: int, size: int, value: Any, *, out: Any, root: Any = None
    ) -> None:
        self._root = validate_root(name, root, size) if name == "gather" else None
        self._receives = self._root is None or self._root == rank
        super().__init__(name, rank, size, out=out, receives=self._receives)
        where = "" if self._root is None else f", root={self._root}"
        self._given = _arrays_of(value)
        if self._given is None:
            _refuse_out(name, out, value)
            what = "object"
            pickled = _pickled(value)
            self._give(_Offer(pickles=(len(pickled),)), [pickled])
        else:
            what = in_words(self._given.structure, self._given.leaves, any_rows=True)
            self._send(self._given)
        self.common = f"{name}({what}{where})".encode()

    def settle(self, owns: Sequence[bytes]) -> Movement:
        ranks: list[_Own] = [pickle.loads(own) for own in owns]
        offers = [own.offer or _Offer() for own in ranks]
        whole = self._whole(offers)
        for rank, own in enumerate(ranks):
            if own.out is not None:
                validate_out(self.name, own.out, whole, f"rank {rank}'s out=")
        if self._receives:
            structure = None if self._given is None else self._given.structure
            self._target = Target(whole, structure, self._out_arrays, self.placed)
        receivers = range(self._size) if self._root is None else [self._root]
        copies = [copy for rank in receivers for copy in self._copies(offers, rank)]
        return self._movement(copies, [offer.sizes for offer in offers])

    def _whole(self, offers: Sequence[_Offer]) -> list[Leaf]:
        """Return what is gathered: each pickle by itself, arrays joined, as arrays of the library
        that this rank's own belong to."""
        if self._given is None:
            return _as_bytes([length for offer in offers for length in offer.pickles])
        columns = zip(*(offer.leaves for offer in offers), strict=True)
        mine = zip(columns, self._given.leaves, strict=True)
        return [
            _joined(column)._replace(adapter=own.adapter, device=own.device) for column, own in mine
        ]

    def _copies(self, offers: Sequence[_Offer], to_rank: int) -> list[Copy]:
        """Return the copies that bring one rank the rows of all, in the order of ranks."""
        copies = []
        ends = [0] * len(offers[0].sizes)
        for rank, offer in enumerate(offers):
            for index, length in enumerate(offer.sizes):
                if offer.pickles:
                    copies.append(Copy(rank, 0, 0, to_rank, rank, 0, length))
                else:
                    copies.append(Copy(rank, index, 0, to_rank, index, ends[index], length))
                    ends[index] += length
        return copies

    def result(self) -> Any:
        if self._target is None:
            return None
        if self._given is None:
            return [pickle.loads(part.data) for part in self._target.arrays]
        return self._target.deliver(self._out)


def _arrays_of(value: Any) -> Arrays | None:
    """Return the arrays of a value; None if it is sent as a pickle, as an empty list is."""
    arrays = Arrays.of(value)
    return arrays if arrays is not None and arrays.leaves else None


def _as_bytes(lengths: Sequence[int]) -> list[Leaf]:
    """Return descriptions of arrays that hold pickles of these lengths."""
    return [Leaf("numpy", "uint8", np.dtype(np.uint8), (length,)) for length in lengths]


def _joined(leaves: Sequence[Leaf]) -> Leaf:
    """Return the description of arrays joined along their rows; a single number is one row."""
    rows = sum(leaf.shape[0] if leaf.shape else 1 for leaf in leaves)
    return leaves[0]._replace(shape=(rows, *leaves[0].shape[1:]))


def _pickled(value: Any) -> Array:
    return np.frombuffer(_dumps(value), np.uint8)


def _dumps(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:
        # what has no importable name, such as a lambda, is sent by value
        return bytes(cloudpickle.dumps(value, protocol=5))


def _refuse_out(name: str, out: Any, value: Any) -> None:
    if out is not None:
        raise InvalidType(
            f"{name}({type(value).__name__}, out=...): out= takes arrays, and this is an object, "
            "which comes back as a new one; leave out= away"
        )
