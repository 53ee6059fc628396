"""A collective call as one rank makes it, before and after the ranks have met.

    call = Reduce("all_reduce", rank, size, value, ...)    refuses what makes no sense
    call.place(device)                                     where the engine takes its arrays
      call.common    the shared part: the call in words, which must be the same on every rank
      call.own       the rank's part: what only this rank knows and the others need, as bytes
      call.source    this rank's arrays: flat, contiguous, its own memory where possible
                                     --- an engine has the ranks exchange `common` and `own` ---
    plan = call.settle(owns)                      a Combination or a Movement, and its target
                                     --- an engine carries out the plan ---
    call.finish()                                 results go to where they belong
    call.result()                                 of the type of what was given

`Reduce` is here; `moves.py` has the calls that move.
"""

from __future__ import annotations

import operator
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from weft._core.arithmetic import NUMERIC, OPERATIONS, Array
from weft._core.arrays import (
    Arrays,
    Leaf,
    Target,
    coalescing,
    copy_if_aliased,
    flat,
    in_words,
    is_on_host,
    stream_of,
)
from weft._core.partition import part_of
from weft.adapters import containers, lookup, numbers
from weft.errors import InvalidType, InvalidValue

_WEIGHT = struct.Struct("d")


class Call(ABC):
    """One rank's side of a collective, in the order drawn at the top of this module."""

    name: str
    #: the shared part
    common: bytes
    #: the rank's part
    own: bytes = b""
    source: Sequence[Array] = ()
    #: the source as one flat buffer
    layout: Layout
    #: what this rank's arrays are, where the call takes them from a device
    leaves: Sequence[Leaf] = ()
    #: where the results go, if that is known before the ranks have met
    early_target: Sequence[Array] = ()
    #: the device on which this rank's arrays are; None: they are on the host, or there are none
    device: str | None = None
    #: where the source is now: that device, or None for the host
    placed: str | None = None
    #: the stream on which the arrays on a device are ready
    stream: Any = None

    @abstractmethod
    def place(self, device: str | None) -> None:
        """Put the source and the results on the call's own device, or on the host (None)."""

    def note_stream(self) -> None:
        """Note the caller's stream, for a thread that carries the call out."""
        if self.device is not None:
            self.stream = stream_of(self.device)

    @abstractmethod
    def settle(self, owns: Sequence[bytes]) -> Plan:
        """Return what is to be done, given every rank's part. Raises InvalidValue and UnlikeArrays
        where the parts do not fit together, on every rank."""

    def finish(self) -> None:  # noqa: B027  most calls have nothing left to do
        """Bring results to where they belong: the last step of carrying out the plan."""

    @abstractmethod
    def result(self) -> Any:
        """Return the call's result on this rank, once the plan has been carried out."""


class Combination(NamedTuple):
    """A plan to combine corresponding arrays of all ranks, element by element: in rank order within
    a host, then in the order of hosts, which is that of their lowest ranks."""

    op: str
    elements: Sequence[str]
    weights: Sequence[float] | None
    #: who gets the result: one rank, or None for all
    root: int | None
    #: this rank's results; empty where it gets none
    target: Sequence[Array]


class Copy(NamedTuple):
    """Consecutive bytes that go from one rank's array to another's."""

    from_rank: int
    from_array: int
    from_byte: int
    to_rank: int
    to_array: int
    to_byte: int
    length: int


class Movement(NamedTuple):
    """A plan to copy bytes from the ranks' sources to their targets."""

    #: what this rank gets, and what others get from it
    incoming: Sequence[Copy]
    outgoing: Sequence[Copy]
    #: for every rank the bytes of each of its source arrays
    sizes: Sequence[Sequence[int]]
    #: this rank's results
    target: Sequence[Array]
    #: what goes from any rank to any other
    copies: Sequence[Copy] = ()


Plan = Combination | Movement


class UnlikeArrays(Exception):
    """Arrays of some ranks differ that must have one shape and dtype. The engine raises a
    Disagreement from it on every rank."""

    def __init__(self, ranks: Mapping[int, Sequence[Leaf]]) -> None:
        #: the arrays of these ranks, as text
        self.ranks = {rank: as_text(leaves) for rank, leaves in ranks.items()}
        super().__init__(str(self.ranks))


class Reduce(Call):
    """A call of all_reduce or, with a root, of reduce."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        value: Any,
        *,
        op: str,
        weight: float | None,
        out: Any,
        root: Any = None,
    ) -> None:
        self.name = name
        if not isinstance(op, str) or op not in OPERATIONS:
            raise InvalidValue(f"{name}(op={op!r}): expected one of {', '.join(OPERATIONS)}")
        if name == "reduce":
            root = validate_root(name, root, size)
        if weight is not None:
            self.own = _WEIGHT.pack(_validate_weight(name, weight, op))
        self.value, self.op, self.root, self._out = value, op, root, out
        self._given = given = _numbers_of(name, value, op, size)
        self.device, self.leaves = given.device, given.leaves
        self.common = _common(name, given, op, root, weight is not None)
        self._coalescing = coalescing(given.leaves)
        self._receives = root is None or root == rank
        self._target: Target | None = None
        self._results = out_arrays(name, out) if self._receives and out is not None else None
        if self._results is not None:
            validate_out(name, self._results.leaves, given.leaves)
        if self.device is None:
            self.place(None)

    def place(self, device: str | None) -> None:
        given, self.placed = self._given, device
        self.source = self._coalescing.coalesce([flat(view) for view in given.at(device)])
        if self._receives:
            self._target = Target(given.leaves, given.structure, self._results, device)
            self.early_target = self._coalescing.targets(self.source, self._target.arrays)
            if self._results is not None:
                self.source = copy_if_aliased(self.source, self.early_target)
        self.layout = layout_of(tuple(array.nbytes for array in self.source))

    @property
    def elements(self) -> Sequence[str]:
        """Return the kind of number of each source."""
        return self._coalescing.elements

    def settle(self, owns: Sequence[bytes]) -> Combination:
        weights = [_WEIGHT.unpack(own)[0] for own in owns] if self.own else None
        if weights is not None and not sum(weights):
            raise InvalidValue(
                f"{self.name}(weight=...): the weights of all {len(weights)} ranks are 0, so "
                "there is no mean; at least one rank must have some weight"
            )
        elements = self._coalescing.elements
        return Combination(self.op, elements, weights, self.root, self.early_target)

    def finish(self) -> None:
        if self._target is not None:
            self._coalescing.scatter_back(self.early_target, self._target.arrays)

    def result(self) -> Any:
        return None if self._target is None else self._target.deliver(self._out)


def _common(name: str, given: Arrays, op: str, root: int | None, weighted: bool) -> bytes:
    where = "" if root is None else f", root={root}"
    weights = ", weight=..." if weighted else ""
    # the ranks' kinds of devices must agree, as the order of sums may differ
    on = "" if given.device is None else f" on {given.device.partition(':')[0]}"
    words = f"{name}({in_words(given.structure, given.leaves)}{on}, op={op!r}{where}{weights})"
    return words.encode()


def validate_root(name: str, root: Any, size: int) -> int:
    """Return the root as an int. Raise unless it is a rank of the group."""
    expected = f"{name}(root={root!r}): expected a rank of the group, 0 to {size - 1}"
    try:
        rank = operator.index(root)
    except TypeError:
        raise InvalidType(expected) from None
    if isinstance(root, bool) or not 0 <= rank < size:
        raise InvalidValue(expected)
    return rank


def out_arrays(name: str, out: Any) -> Arrays:
    """Return the arrays that the user gave for the results. Raise if these cannot be written to."""
    arrays = Arrays.of(out)
    if arrays is None:
        raise InvalidType(
            f"{name}(out={type(out).__name__}): expected an array, or a list, tuple or dict of "
            "arrays, to write the result to"
        )
    for leaf, view in zip(arrays.leaves, arrays.views, strict=True):
        if is_on_host(view) and not view.flags.writeable:
            raise InvalidValue(
                f"{name}(out=...): {leaf} cannot be written to; pass an array that is neither "
                "read-only nor in another byte order"
            )
    return arrays


def validate_out(
    name: str, given: Sequence[Leaf], expected: Sequence[Leaf], whose: str = "out="
) -> None:
    """Raise InvalidValue unless the arrays given for the results can take them."""
    if not alike(given, expected):
        raise InvalidValue(
            f"{name}: {whose} is {as_text(given)}, the result is {as_text(expected)}; they must "
            "have the same shape and dtype"
        )


def alike(given: Sequence[Leaf], expected: Sequence[Leaf]) -> bool:
    """Return whether arrays can take the values of others."""
    return len(given) == len(expected) and all(map(Leaf.matches, given, expected))


def as_text(leaves: Sequence[Leaf]) -> str:
    """Describe arrays for an error message: at most eight of them."""
    some = ", ".join(map(str, leaves[:8])) + (", ..." if len(leaves) > 8 else "")
    return some if len(leaves) == 1 else f"{len(leaves)} arrays ({some})"


def _validate_weight(name: str, weight: Any, op: str) -> float:
    if op != "mean":
        raise InvalidValue(f"{name}(op={op!r}, weight={weight!r}): weight= is for op='mean'")
    try:
        if isinstance(weight, (bool, str, bytes, np.complexfloating)):
            raise TypeError
        number = float(weight)  # also of arrays and tensors of one element
    except (TypeError, ValueError, RuntimeError):
        raise InvalidType(
            f"{name}(weight={weight!r}): expected a number, such as a count of rows"
        ) from None
    except OverflowError:
        number = float("inf")
    if not 0 <= number < float("inf"):
        raise InvalidValue(f"{name}(weight={weight!r}): expected 0 or more, and finite")
    return number


def _numbers_of(name: str, value: Any, op: str, size: int) -> Arrays:
    """Return the arrays of a value. Raise unless they can be reduced."""
    given = Arrays.of(value, lookup.of_array_or_number)
    if given is None:
        where, what = containers.find_other(value, lookup.of_array_or_number)
        raise InvalidType(
            f"{name}: {where} is {_kind(what)}; expected numbers: an array, a tensor, a number, or "
            "a list, tuple or dict of these. Other objects can be gathered"
        )
    for index, leaf in enumerate(given.leaves):
        if leaf.dtype.kind not in NUMERIC:
            raise InvalidType(f"{name}({leaf}): expected numbers; other arrays can be gathered")
        if leaf.adapter == numbers.NAME and leaf.dtype.kind in "biu":
            if op == "mean":
                given = _as_float(given, index)
            elif op == "sum" and abs(int(given.views[index])) * size >= 2**63:
                raise InvalidValue(
                    f"{name}({int(given.views[index])}): a sum over {size} ranks may not fit 64 "
                    "bits; reduce it as a float"
                )
    return given


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    objects = isinstance(value, np.ndarray) and value.dtype.hasobject
    return "an array of Python objects" if objects else f"a {type(value).__name__}"


def _as_float(given: Arrays, index: int) -> Arrays:
    """Return the arrays with one of them as floats: the mean of Python's ints is a float, as their
    quotient is."""
    views, leaves = list(given.views), list(given.leaves)
    views[index] = views[index].astype(np.float64)
    leaves[index] = leaves[index]._replace(element="float64", dtype=views[index].dtype)
    return Arrays(tuple(leaves), views, given.structure)


#: arrays of a call begin at multiples of this in their buffer; every item size divides it
LINE = 64


@lru_cache(maxsize=256)
def layout_of(sizes: tuple[int, ...]) -> Layout:
    """Return the layout of arrays of these sizes. Cached, since calls are often alike."""
    return Layout(sizes)


class Layout:
    """Several arrays as one flat buffer: each begins on a line of its own.

    >>> layout = Layout([100, 8])
    >>> layout.starts, layout.size
    ((0, 128), 136)
    >>> layout.window(64, 192)
    [Piece(array=0, start=64, stop=100, at=0), Piece(array=1, start=0, stop=8, at=64)]
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        starts, end = [], 0
        for size in self.sizes:
            start = -(-end // LINE) * LINE
            starts.append(start)
            end = start + size
        self.starts = tuple(starts)
        #: bytes from the beginning of the first array to the end of the last
        self.size = end
        #: all arrays, whole
        self.pieces = self.window(0, end)

    def window(self, first: int, last: int) -> list[Piece]:
        """Return what lies between two offsets in the buffer; `at` counts from the first."""
        pieces = []
        for index, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            low, high = max(first, start), min(last, start + size)
            if low < high:
                pieces.append(Piece(index, low - start, high - start, low - first))
        return pieces

    def blocks_of(self, rank: int, size: int, block: int) -> Iterator[Piece]:
        """Yield the blocks that one of `size` ranks works on; each byte is in one of one rank.
        Blocks are cut on lines, so that no element is in two of them; each is of one array."""
        lines = -(-self.size // LINE)
        first, last = part_of(lines, size, rank)
        for index, start, stop, _ in self.window(first * LINE, last * LINE):
            for begin in range(start, stop, block):
                yield Piece(index, begin, min(begin + block, stop), 0)


class Piece(NamedTuple):
    """The bytes `start` to `stop` of one array, which lie at `at` in some window."""

    array: int
    start: int
    stop: int
    at: int


def elements(arrays: Sequence[Array], piece: Piece) -> Array:
    """Return a view of the elements of a piece."""
    array = arrays[piece.array]
    if piece.stop - piece.start == array.nbytes:
        return array
    width = array.dtype.itemsize
    return array[piece.start // width : piece.stop // width]
