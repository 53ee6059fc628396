"""The arrays of a call: what they are, where their memory is, and where its results go.

value   --Arrays.of-->  leaves, views, structure  --flat, coalesce-->  sources
                                                                          |  an engine
result  <--deliver----  Target  <--scatter_back--------------------  early targets

An array lies on the host, as an `ndarray`, or on a device, as a tensor there. An engine that moves
host memory only has a call `staged`: its arrays are copied to the host, and its results back.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

from weft._core.arithmetic import Array, same_buffer
from weft.adapters import containers, lookup
from weft.errors import InvalidValue

#: bytes of the longest description that ranks exchange
_LONGEST_WORDS = 400


class Leaf(NamedTuple):
    """The description of one array of a call: enough to make another like it elsewhere."""

    adapter: str
    #: the kind of number; what the dtype does not tell is bfloat16, stored as uint16
    element: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    #: where its memory is, in the words of its library: "cpu", "cuda:0"
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
        """Return the bytes of one row: of one index of the first axis."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def matches(self, other: Leaf) -> bool:
        """Return whether one array can take the other's values, whatever their libraries and
        devices are."""
        return self is other or self[1:4] == other[1:4]


class Arrays:
    """The arrays in a value: their descriptions, views of their memory, and their structure."""

    __slots__ = ("device", "leaves", "structure", "views")

    def __init__(
        self, leaves: tuple[Leaf, ...], views: Sequence[Array], structure: Any = None
    ) -> None:
        self.leaves, self.views, self.structure = leaves, views, structure
        #: the device that all of them are on; None: they are on the host
        self.device = _common_device(leaves, views)

    def at(self, device: str | None) -> Sequence[Array]:
        """Return the arrays there: views, or copies on the host of what is on a device."""
        return self.views if device == self.device else _torch().stage(self.views)

    @classmethod
    def of(cls, value: Any, find: Callable[[Any], Any] = lookup.of) -> Arrays | None:
        """Return those of an array, or of a list, tuple or dict of arrays; None for anything else.
        `find` returns the adapter of an array, None for what is none."""
        adapter = find(value)
        if adapter is not None:
            leaf, view = _describe(value, adapter)
            return cls((leaf,), (view,))
        if not isinstance(value, (list, tuple, dict)):
            return None
        flattened = containers.flatten(value, lambda item: find(item) is not None)
        if flattened is None:
            return None
        items, structure = flattened
        described = [_describe(item, find(item)) for item in items]
        leaves, views = [leaf for leaf, _ in described], [view for _, view in described]
        return cls(tuple(leaves), views, structure)


def _describe(value: Any, adapter: Any) -> tuple[Leaf, Array]:
    on_device = getattr(adapter, "on_device", None)
    view = None if on_device is None else on_device(value)
    if view is None:
        view, _ = adapter.view(value)  # first: it refuses what cannot be used
    return Leaf(adapter.NAME, *adapter.describe(value)), view


def _common_device(leaves: Sequence[Leaf], views: Sequence[Array]) -> str | None:
    """Return the device of the arrays. Raises InvalidValue if they are on several."""
    if all(isinstance(view, np.ndarray) for view in views):
        return None
    devices = {leaf.device: f"{leaf} on {leaf.device}" for leaf in leaves}
    if len(devices) > 1:
        raise InvalidValue(
            f"arrays on different devices in one call: {', '.join(devices.values())}; move them to "
            "one device first, or make a call for each"
        )
    return leaves[0].device


def is_on_host(array: Array) -> bool:
    """Return whether an array is one of NumPy's, and no tensor on a device."""
    return isinstance(array, np.ndarray)


def own_device(device: str) -> str:
    """Return the device of this process for a tensor that comes from another process's. Raises
    DeviceUnavailable if there is none."""
    return str(_torch().here(device))


def stream_of(device: str) -> Any:
    """Return the current stream of a device, to go on with in another thread."""
    return _torch().Stream(device)


def _torch() -> Any:
    """Return what knows tensors on a device. It is loaded at the first sight of one."""
    return importlib.import_module("weft.adapters.torch_arrays")


def in_words(structure: Any, leaves: Sequence[Leaf], *, any_rows: bool = False) -> str:
    """Describe arrays, with `any_rows` without their numbers of rows. A long text is truncated, and
    has a checksum that distinguishes it from others."""
    words = [leaf.without_rows() if any_rows else str(leaf) for leaf in leaves]
    text = containers.describe(structure, iter(words))
    data = text.encode(errors="replace")
    if len(data) <= _LONGEST_WORDS:
        return text
    beginning = data[: _LONGEST_WORDS - 60].decode(errors="ignore")
    return f"{beginning}... ({len(leaves)} arrays, checksum {zlib.crc32(data)})"


class Target:
    """Tell where the results of a call go: fresh arrays, or those that the user gave as `out=`."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        structure: Any,
        out: Arrays | None,
        device: str | None = None,
    ) -> None:
        """Make an engine write the results on the host or, if there is one, on `device`."""
        self._leaves, self._structure, self._device = leaves, structure, device
        self._packed: list[tuple[Array, Array]] = []
        self._views = [self._fresh(leaf) for leaf in leaves] if out is None else out.views
        #: where the results are to be written: flat and contiguous
        self.arrays = [
            self._flat(view, leaf) for view, leaf in zip(self._views, leaves, strict=True)
        ]

    def _fresh(self, leaf: Leaf) -> Array:
        if self._device is not None:
            return _torch().empty(leaf.shape, leaf.element, self._device)  # type: ignore[no-any-return]
        if leaf.device == "cpu" or leaf.adapter != "torch":
            return np.empty(leaf.shape, leaf.dtype)
        return _torch().pinned(leaf.shape, leaf.dtype)  # type: ignore[no-any-return]

    def _flat(self, view: Array, leaf: Leaf) -> Array:
        # NumPy may round differently where memory is not aligned, and ranks must get the same bits
        if _is_flat(view, self._device):
            return view if view.ndim == 1 else view.reshape(-1)
        packed = self._fresh(leaf._replace(shape=(prod(leaf.shape),)))
        self._packed.append((view, packed))
        return packed

    def deliver(self, out: Any) -> Any:
        """Return the results: `out`, if the user gave it, else arrays of each leaf's library."""
        for view, packed in self._packed:
            copy(view, packed.reshape(view.shape))
        if out is not None:
            return out
        pairs = zip(self._leaves, self._views, strict=True)
        return containers.rebuild(self._structure, (_delivered(*pair) for pair in pairs))


def _is_flat(view: Array, device: str | None) -> bool:
    """Return whether an engine that works on a device, or on the host, can write to an array as to
    a flat one."""
    if is_on_host(view):
        return device is None and view.flags.c_contiguous and view.flags.aligned
    tensor: Any = view
    return str(tensor.device) == device and bool(tensor.is_contiguous())


def _delivered(leaf: Leaf, view: Array) -> Any:
    if not is_on_host(view):
        return lookup.named(leaf.adapter).deliver_tensor(view)
    if leaf.device != "cpu" and leaf.adapter == "torch":
        return _torch().deliver(view, leaf.element, leaf.device)
    return lookup.named(leaf.adapter).deliver(view, leaf.element)


def copy(target: Array, source: Array) -> None:
    """Copy all values of one array to another, wherever they are."""
    if is_on_host(target) and is_on_host(source):
        np.copyto(target, source)
    else:
        _torch().copy(target, source)


def flat(view: Array) -> Array:
    """Return an array as a contiguous one of one dimension: a view where possible, else a copy."""
    if not is_on_host(view):
        return _torch().flat(view)  # type: ignore[no-any-return]
    if view.flags.c_contiguous:
        return view if view.ndim == 1 else view.reshape(-1)
    return np.ascontiguousarray(view).reshape(-1)


def as_bytes(array: Array) -> Array:
    """Return the memory of a flat array as bytes."""
    if is_on_host(array):
        return array.view(np.uint8)
    return _torch().as_bytes(array)  # type: ignore[no-any-return]


def copy_if_aliased(sources: Sequence[Array], targets: Sequence[Array]) -> list[Array]:
    """Return the sources, copied where writing to a target would change what is still to be read. A
    source may be its own target. It may not overlap it in any other way, nor another's target."""
    safe = []
    for index, source in enumerate(sources):
        for position, target in enumerate(targets):
            if source is target and index == position:
                continue
            if not (is_on_host(source) and is_on_host(target)):
                shared = _torch().overlap(source, target)
            else:
                shared = np.may_share_memory(source, target) and not (
                    index == position and same_buffer(source, target)
                )
            if shared:
                # from here on it is the copy that counts
                source = source.copy() if is_on_host(source) else source.clone()  # type: ignore[attr-defined]  # noqa: PLW2901
                break
        safe.append(source)
    return safe


#: bytes from which on an array is not coalesced
_LARGE = 256 << 10


class Coalescing:
    """Tell which arrays of a call are treated as one: the small ones of a dtype, in their order.
    What is done for each array takes longer than to copy it."""

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
        #: the kind of number of each coalesced array
        self.elements = tuple(leaves[group[0]].element for group in groups)

    def coalesce(self, arrays: Sequence[Array]) -> list[Array]:
        """Return these flat arrays, with the small ones of a dtype copied into one."""
        return [
            arrays[group[0]] if len(group) == 1 else _concatenate([arrays[i] for i in group])
            for group in self._groups
        ]

    def targets(self, coalesced: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        """Return where results are to be written: to an array itself, or to the coalesced one, from
        which `scatter_back` copies them."""
        return [
            arrays[group[0]] if len(group) == 1 else source
            for group, source in zip(self._groups, coalesced, strict=True)
        ]

    def scatter_back(self, coalesced: Sequence[Array], arrays: Sequence[Array]) -> None:
        """Copy the elements of coalesced arrays to those that they came from."""
        for group, source in zip(self._groups, coalesced, strict=True):
            if len(group) > 1:
                ends = accumulate(len(arrays[index]) for index in group)
                parts = [
                    source[end - len(arrays[index]) : end]
                    for index, end in zip(group, ends, strict=True)
                ]
                if not is_on_host(source):
                    _torch().copy_all([arrays[index] for index in group], parts)
                    continue
                for index, part in zip(group, parts, strict=True):
                    arrays[index][...] = part


def _concatenate(arrays: Sequence[Array]) -> Array:
    if is_on_host(arrays[0]):
        return np.concatenate(arrays)
    return _torch().concatenate(arrays)  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def coalescing(leaves: tuple[Leaf, ...]) -> Coalescing:
    """Return how the arrays of a call are coalesced. Cached, since to work it out takes longer than
    a small reduction."""
    return Coalescing(leaves)


def read_only(array: Array) -> Array:
    """Return a read-only view of an array, of the same class; its mask is read-only too."""
    if isinstance(array, np.ma.MaskedArray):
        # data and mask first: NumPy keeps a mask as it is given
        mask = read_only(np.ma.getmaskarray(array))
        return masked(read_only(array.data), mask, array.fill_value, array.hardmask)
    view: Array = array.view()
    view.flags.writeable = False
    return view


def masked(data: Array, mask: Array, fill_value: Any, hard: bool) -> Array:
    """Return a masked array over this data and mask, without a copy."""
    array: Array = np.ma.array(data, mask=mask, copy=False, fill_value=fill_value, hard_mask=hard)
    return array
