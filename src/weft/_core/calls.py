"""A collective call as one rank makes it, before and after the ranks have met. No processes.

    call = AllReduce(rank, size, value, ...)      refuses what makes no sense
      call.common    in words; must be the same on every rank
      call.own       what only this rank knows and the others need, as bytes
      call.source    this rank's arrays: flat, contiguous, its own memory where possible
                                     --- an engine has the ranks exchange `common` and `own` ---
    plan = call.settle(owns)                      what is to be moved or combined, and into what
                                     --- an engine carries out the plan ---
    call.result()                                 of the type of what was given

This module has what all calls share and the two that compute; `moves.py` the four that move.
"""

from __future__ import annotations

import operator
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from weft import adapters
from weft._core import trees
from weft._core.elements import OPERATIONS, Array, is_numeric
from weft.errors import InvalidType, InvalidValue

_WEIGHT = struct.Struct("d")
#: longest description that ranks show each other
_WORDS = 400


class Leaf(NamedTuple):
    """One array of a call, described: enough to make another like it elsewhere."""

    adapter: str
    #: the kind of number; what the dtype does not tell is bfloat16, stored as uint16
    element: str
    dtype: np.dtype[Any]
    shape: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.element}[{', '.join(map(str, self.shape))}]"

    def matches(self, other: Leaf) -> bool:
        """Whether one array can take the other's values; whose arrays they are does not matter."""
        return self[1:] == other[1:]


class Arrays:
    """The arrays in a value: what they are, views of their memory, and how they hang together."""

    __slots__ = ("leaves", "structure", "views")

    def __init__(self, leaves: Sequence[Leaf], views: Sequence[Array], structure: Any) -> None:
        self.leaves, self.views, self.structure = tuple(leaves), list(views), structure

    @classmethod
    def of(cls, value: Any, find: Callable[[Any], Any] = adapters.of) -> Arrays | None:
        """Those of an array, or of a list, tuple or dict of arrays; None for anything else."""
        adapter = find(value)
        if adapter is not None:
            leaf, view = _describe(value, adapter)
            return cls((leaf,), (view,), None)
        if not isinstance(value, (list, tuple, dict)):
            return None
        found = trees.flatten(value, lambda item: find(item) is not None)
        if found is None:
            return None
        described = [_describe(item, find(item)) for item in found[0]]
        return cls([leaf for leaf, _ in described], [view for _, view in described], found[1])

    def __str__(self) -> str:
        return _words(self.structure, self.leaves)


def _describe(value: Any, adapter: Any) -> tuple[Leaf, Array]:
    view, element = adapter.view(value)
    return Leaf(adapter.NAME, element, view.dtype, view.shape), view


def _words(structure: Any, leaves: tuple[Leaf, ...]) -> str:
    """The arrays in words; a long text is cut, and told from others by its checksum."""
    text = trees.describe(structure, iter(leaves))
    if len(text) <= _WORDS:
        return text
    return f"{text[: _WORDS - 60]}... ({len(leaves)} arrays, checksum {zlib.crc32(text.encode())})"


class Target:
    """Where the results of a call go: fresh arrays, or those that the user gave as `out=`."""

    def __init__(self, leaves: Sequence[Leaf], structure: Any, out: Arrays | None) -> None:
        self.leaves, self._structure = leaves, structure
        self._unpacked: list[tuple[Array, Array]] = []
        if out is None:
            self._views = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        else:
            self._views = out.views
        #: flat and contiguous; the results are to be written here
        self.arrays = [self._flat(view) for view in self._views]

    def _flat(self, view: Array) -> Array:
        if view.flags.c_contiguous:
            return view.reshape(-1)
        packed = np.empty(view.size, view.dtype)
        self._unpacked.append((view, packed))
        return packed

    def deliver(self) -> Any:
        """The results, each as its leaf's library has them."""
        self.unpack()
        leaves = zip(self.leaves, self._views, strict=True)
        values = (adapters.named(leaf.adapter).deliver(view, leaf.element) for leaf, view in leaves)
        return trees.rebuild(self._structure, values)

    def unpack(self) -> None:
        """Bring to the user's strided arrays what was written to packed ones."""
        for view, packed in self._unpacked:
            np.copyto(view, packed.reshape(view.shape))


@dataclass(frozen=True)
class Combination:
    """Corresponding arrays of all ranks are to be combined, element by element, in rank order."""

    op: str
    elements: Sequence[str]
    weights: Sequence[float] | None
    #: who gets the result: one rank, or None for all
    root: int | None
    #: this rank's results; empty where it gets none
    target: Sequence[Array]


class Call(ABC):
    """See the top of this module."""

    name: ClassVar[str]
    common: bytes
    own: bytes = b""
    source: Sequence[Array] = ()

    @abstractmethod
    def settle(self, owns: Sequence[bytes]) -> Any:
        """What is to be done, now that every rank's `own` is known.

        Raises InvalidValue where they do not go together, on every rank alike.
        """

    @abstractmethod
    def result(self) -> Any:
        """What the call returns on this rank, once the plan has been carried out."""


class _Reduction(Call):
    """Combine the ranks' arrays."""

    def __init__(
        self,
        rank: int,
        size: int,
        value: Any,
        *,
        op: str,
        root: int | None,
        weight: float | None,
        out: Any,
    ) -> None:
        self._op = _checked_op(self.name, op)
        self._root, self._size, self._out = root, size, out
        given = _numbers_of(self.name, value, op)
        receives = root is None or root == rank
        taken = taken_arrays(self.name, out, receives)
        if taken is not None:
            check_out(self.name, taken.leaves, given.leaves)
        if weight is not None:
            self.own = _WEIGHT.pack(_checked_weight(self.name, weight, op))
        self._leaves = given.leaves
        how = _how(op, root, weight is not None)
        self.common = _call_words(self.name, given.structure, given.leaves, how)
        self._target = Target(given.leaves, given.structure, taken) if receives else None
        self.source = [flat(view) for view in given.views]
        if taken is not None and self._target is not None:
            self.source = keep_apart(self.source, self._target.arrays)

    def settle(self, owns: Sequence[bytes]) -> Combination:
        weights = None
        if self.own:
            weights = [_WEIGHT.unpack(own)[0] for own in owns]
            if not sum(weights):
                raise InvalidValue(
                    f"{self.name}(weight=...): the weights of all {self._size} ranks are 0, so "
                    "there is no mean; at least one rank must have some weight"
                )
        return Combination(
            op=self._op,
            elements=[leaf.element for leaf in self._leaves],
            weights=weights,
            root=self._root,
            target=self._target.arrays if self._target else (),
        )

    def result(self) -> Any:
        if self._target is None:
            return None
        if self._out is None:
            return self._target.deliver()
        self._target.unpack()
        return self._out


class AllReduce(_Reduction):
    name = "all_reduce"

    def __init__(
        self, rank: int, size: int, value: Any, *, op: str, weight: float | None, out: Any
    ) -> None:
        super().__init__(rank, size, value, op=op, root=None, weight=weight, out=out)


class Reduce(_Reduction):
    name = "reduce"

    def __init__(
        self,
        rank: int,
        size: int,
        value: Any,
        *,
        op: str,
        root: int,
        weight: float | None,
        out: Any,
    ) -> None:
        root = checked_root(self.name, root, size)
        super().__init__(rank, size, value, op=op, root=root, weight=weight, out=out)


@lru_cache(maxsize=64)
def _how(op: str, root: int | None, weighted: bool) -> str:
    where = "" if root is None else f", root={root}"
    return f", op={op!r}{where}" + (", weight=..." if weighted else "")


@lru_cache(maxsize=256)
def _call_words(name: str, structure: Any, leaves: tuple[Leaf, ...], how: str) -> bytes:
    return f"{name}({_words(structure, leaves)}{how})".encode()


# what the calls check


def checked_root(name: str, root: Any, size: int) -> int:
    """The root as a rank of the group."""
    try:
        place = operator.index(root)
    except TypeError:
        place = -1
    if isinstance(root, bool) or not 0 <= place < size:
        kind = InvalidValue if isinstance(root, int) else InvalidType
        raise kind(f"{name}(root={root!r}): expected a rank of the group, 0 to {size - 1}")
    return place


def taken_arrays(name: str, out: Any, receives: bool = True) -> Arrays | None:
    """The arrays that the user gave for the results, on a rank that gets results."""
    if out is None or not receives:
        return None
    arrays = Arrays.of(out)
    if arrays is None:
        raise InvalidType(
            f"{name}(out={type(out).__name__}): expected an array, or a list, tuple or dict of "
            "arrays, to write the result to"
        )
    for leaf, view in zip(arrays.leaves, arrays.views, strict=True):
        if not view.flags.writeable:
            raise InvalidValue(f"{name}(out=...): {leaf} is read-only; pass an array to write to")
    return arrays


def check_out(
    name: str, taken: Sequence[Leaf], expected: Sequence[Leaf], whose: str = "out="
) -> None:
    """Refuse arrays for the results that cannot take them."""
    if len(taken) != len(expected) or not all(map(Leaf.matches, taken, expected)):
        raise InvalidValue(
            f"{name}: {whose} is {_shown(taken)}, the result is {_shown(expected)}; they must have "
            "the same shape and dtype"
        )


def _shown(leaves: Sequence[Leaf]) -> str:
    shown = ", ".join(map(str, leaves[:8])) + (", ..." if len(leaves) > 8 else "")
    return shown if len(leaves) == 1 else f"{len(leaves)} arrays ({shown})"


def flat(view: Array) -> Array:
    """The same numbers as a contiguous array of one dimension; a copy only where it must be."""
    return view.reshape(-1) if view.flags.c_contiguous else np.ascontiguousarray(view).reshape(-1)


def keep_apart(sources: Sequence[Array], targets: Sequence[Array]) -> list[Array]:
    """The sources, copied where results written to a target would change what is still to be read.

    An array may be its own target. It may not overlap it in another way, nor another's target.
    """
    apart = []
    for index, source in enumerate(sources):
        clash = any(
            np.may_share_memory(source, target) and not (index == place and _same(source, target))
            for place, target in enumerate(targets)
        )
        apart.append(source.copy() if clash else source)
    return apart


def _same(source: Array, target: Array) -> bool:
    begins = (array.__array_interface__["data"][0] for array in (source, target))
    return len(set(begins)) == 1 and source.nbytes == target.nbytes


def _checked_op(name: str, op: Any) -> str:
    if op not in OPERATIONS:
        raise InvalidValue(f"{name}(op={op!r}): expected one of {', '.join(OPERATIONS)}")
    return str(op)


def _checked_weight(name: str, weight: Any, op: str) -> float:
    if op != "mean":
        raise InvalidValue(f"{name}(op={op!r}, weight={weight!r}): weight= is for op='mean'")
    if isinstance(weight, bool) or not isinstance(weight, (int, float, np.number)):
        raise InvalidType(f"{name}(weight={weight!r}): expected a number, such as a count of rows")
    number = float(weight)
    if not 0 <= number < float("inf"):
        raise InvalidValue(f"{name}(weight={weight!r}): expected 0 or more, and finite")
    return number


def _numbers_of(name: str, value: Any, op: str) -> Arrays:
    """The arrays of a value that can be reduced."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        raise InvalidType(f"{name}: an array of Python objects cannot be reduced; use gather")
    given = Arrays.of(value, adapters.of_number)
    if given is None:
        raise InvalidType(
            f"{name}({type(value).__name__}): expected numbers: an array, a tensor, a number, or a "
            "list, tuple or dict of these; other objects can be gathered"
        )
    for index, leaf in enumerate(given.leaves):
        if leaf.element != "bfloat16" and not is_numeric(leaf.dtype):
            raise InvalidType(f"{name}: {leaf} cannot be reduced; expected numbers")
        if op == "mean" and leaf.element in ("Python int", "Python bool"):
            # as Python's own division: the mean of 1 and 2 is 1.5
            given.views[index] = given.views[index].astype(np.float64)
            changed = Leaf(leaf.adapter, "Python float", np.dtype(np.float64), ())
            given.leaves = (*given.leaves[:index], changed, *given.leaves[index + 1 :])
    return given
