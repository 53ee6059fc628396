"""The arrays of a call: what they are, where their memory is, and where results go.

Many small arrays of a call as few: what is to be done for each takes longer than to copy it.

Arrays to which nothing can be written.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

from weft import adapters
from weft._core.arithmetic import Array, same_buffer
from weft.adapters import containers

#: bytes of the longest description that ranks show each other
_LONGEST_WORDS = 400


class Leaf(NamedTuple):
    """One array of a call, described: enough to make another like it elsewhere."""

    adapter: str
    #: the kind of number; what the dtype does not tell is bfloat16, stored as uint16
    element: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    #: "cpu", or where else its memory is, as its library says it: "cuda:0"
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.element}[{', '.join(map(str, self.shape))}]"

    def without_rows(self) -> str:
        return f"{self.element}[{', '.join(('rows', *map(str, self.shape[1:])))}]"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def row_nbytes(self) -> int:
        """The bytes of what lies behind one index of the first axis."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def matches(self, other: Leaf) -> bool:
        """Whether one array can take the other's values; whose arrays they are, and where, does
        not matter."""
        return self is other or self[1:4] == other[1:4]


class Arrays:
    """The arrays in a value: what they are, views of their memory, and how they hang together."""

    __slots__ = ("leaves", "structure", "views")

    def __init__(
        self, leaves: tuple[Leaf, ...], views: Sequence[Array], structure: Any = None
    ) -> None:
        self.leaves, self.views, self.structure = leaves, views, structure

    @classmethod
    def of(cls, value: Any, find: Callable[[Any], Any] = adapters.of) -> Arrays | None:
        """Those of an array, or of a list, tuple or dict of arrays; None for anything else."""
        if type(value) is np.ndarray:
            known = _plain.get((value.dtype, value.shape))
            if known is not None:
                return cls(known, (value,))
        adapter = find(value)
        if adapter is not None:
            leaf, view = _describe(value, adapter)
            return cls(_remembered(leaf) if view is value else (leaf,), (view,))
        if not isinstance(value, (list, tuple, dict)):
            return None
        found = containers.flatten(value, lambda item: find(item) is not None)
        if found is None:
            return None
        described = [_describe(item, find(item)) for item in found[0]]
        leaves, views = [leaf for leaf, _ in described], [view for _, view in described]
        return cls(tuple(leaves), views, found[1])


#: what plain NumPy arrays of a dtype and shape are: describing one costs more than reducing it
_plain: dict[tuple[np.dtype[Any], tuple[int, ...]], tuple[Leaf]] = {}


def _remembered(leaf: Leaf) -> tuple[Leaf]:
    if len(_plain) >= 1024:
        _plain.clear()
    return _plain.setdefault((leaf.dtype, leaf.shape), (leaf,))


def _describe(value: Any, adapter: Any) -> tuple[Leaf, Array]:
    view, _ = adapter.view(value)  # first: it refuses what cannot be used
    return Leaf(adapter.NAME, *adapter.describe(value)), view


def in_words(structure: Any, leaves: Sequence[Leaf], *, any_rows: bool = False) -> str:
    """Arrays in words, if asked for without the number of their rows; a long text is cut, and told
    from others by its checksum."""
    words = [leaf.without_rows() if any_rows else str(leaf) for leaf in leaves]
    text = containers.describe(structure, iter(words))
    data = text.encode(errors="replace")
    if len(data) <= _LONGEST_WORDS:
        return text
    beginning = data[: _LONGEST_WORDS - 60].decode(errors="ignore")
    return f"{beginning}... ({len(leaves)} arrays, checksum {zlib.crc32(data)})"


class Target:
    """Where the results of a call go: fresh arrays, or those that the user gave as `out=`."""

    def __init__(self, leaves: Sequence[Leaf], structure: Any, out: Arrays | None) -> None:
        self._leaves, self._structure = leaves, structure
        self._packed: list[tuple[Array, Array]] = []
        if out is None:
            self._views: Sequence[Array] = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        else:
            self._views = out.views
        #: flat and contiguous; the results are to be written here
        self.arrays = [self._flat(view) for view in self._views]

    def _flat(self, view: Array) -> Array:
        # NumPy may round otherwise where memory is not aligned, and ranks are to get the same bits
        if view.flags.c_contiguous and view.flags.aligned:
            return view if view.ndim == 1 else view.reshape(-1)
        packed = np.empty(view.size, view.dtype)
        self._packed.append((view, packed))
        return packed

    def deliver(self, out: Any) -> Any:
        """The results: `out`, if the user gave it, else as each leaf's library has them."""
        for view, packed in self._packed:
            np.copyto(view, packed.reshape(view.shape))
        if out is not None:
            return out
        leaves = zip(self._leaves, self._views, strict=True)
        values = (adapters.named(leaf.adapter).deliver(view, leaf.element) for leaf, view in leaves)
        return containers.rebuild(self._structure, values)


def flat(view: Array) -> Array:
    """The same numbers as a contiguous array of one dimension; a copy only where it must be."""
    if view.flags.c_contiguous:
        return view if view.ndim == 1 else view.reshape(-1)
    return np.ascontiguousarray(view).reshape(-1)


def copy_if_aliased(sources: Sequence[Array], targets: Sequence[Array]) -> list[Array]:
    """The sources, copied where results written to a target would change what is still to be read.

    An array may be its own target. It may not overlap it in another way, nor another's target.
    """
    apart = []
    for index, source in enumerate(sources):
        for position, target in enumerate(targets):
            if source is target and index == position:
                continue
            if np.may_share_memory(source, target) and not (
                index == position and same_buffer(source, target)
            ):
                source = source.copy()  # noqa: PLW2901  from here on it is the copy that counts
                break
        apart.append(source)
    return apart


#: bytes from which on an array stays by itself
_LARGE = 256 << 10


class Coalescing:
    """Which arrays of a call are treated as one: the small ones of a kind, in their order."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        small: dict[tuple[str, str], list[int]] = {}
        groups: list[list[int]] = []
        for index, leaf in enumerate(leaves):
            alone = leaf.nbytes >= _LARGE
            group = [] if alone else small.setdefault((leaf.element, leaf.dtype.str), [])
            if not group:
                groups.append(group)
            group.append(index)
        self._groups = groups
        #: the kind of number of each
        self.elements = tuple(leaves[group[0]].element for group in groups)

    def coalesce(self, arrays: Sequence[Array]) -> list[Array]:
        """These flat arrays, the small ones of a kind copied into one."""
        return [
            arrays[group[0]] if len(group) == 1 else np.concatenate([arrays[i] for i in group])
            for group in self._groups
        ]

    def targets(self, joined: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        """Where results are to be written: to the arrays themselves, or where others were joined
        to; `scatter_back` then brings them to their arrays."""
        return [
            arrays[group[0]] if len(group) == 1 else one
            for group, one in zip(self._groups, joined, strict=True)
        ]

    def scatter_back(self, joined: Sequence[Array], arrays: Sequence[Array]) -> None:
        """Copy what was joined to its arrays."""
        for group, one in zip(self._groups, joined, strict=True):
            if len(group) > 1:
                ends = accumulate(len(arrays[index]) for index in group)
                for index, end in zip(group, ends, strict=True):
                    arrays[index][...] = one[end - len(arrays[index]) : end]


@lru_cache(maxsize=256)
def coalescing(leaves: tuple[Leaf, ...]) -> Coalescing:
    """The same one for calls alike: to make it takes longer than a small reduction."""
    return Coalescing(leaves)


def read_only(array: Array) -> Array:
    """A view of an array, of its own class, to which nothing can be written; nor to its mask."""
    if isinstance(array, np.ma.MaskedArray):
        # both parts first: NumPy takes a mask over as it is
        mask = read_only(np.ma.getmaskarray(array))
        return masked(read_only(array.data), mask, array.fill_value, array.hardmask)
    view: Array = array.view()
    view.flags.writeable = False
    return view


def masked(data: Array, mask: Array, fill_value: Any, hard: bool) -> Array:
    """A masked array over these."""
    found: Array = np.ma.array(data, mask=mask, copy=False, fill_value=fill_value, hard_mask=hard)
    return found
