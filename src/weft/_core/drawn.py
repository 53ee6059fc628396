"""Items of an iterator that draws on after it has yielded them.

Several items are drawn before they are sent together, and one may be run again later. A generator
that fills one array again and again, or one list, would have changed by then what it has yielded,
and the function would get other values than in a loop. So what may still be changed is copied if
it is small; otherwise the next item is drawn only when this one has been packed.

What nothing but the iterator's result refers to cannot be changed by anybody: it is kept as it is.
So is what cannot be changed at all, and what is in shared memory, which is meant to be seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

#: bytes of the largest array that is copied
_COPIED = 64 << 10
#: the most parts of a list, tuple or dict that are looked at one by one, and how deep
_PARTS, _DEPTH = 64, 3
_IMMUTABLE = frozenset(
    (int, float, complex, bool, str, bytes, type(None), range, slice, type, type(...), frozenset)
)
#: iterators that keep the tuple that they have yielded, and change nothing in it
_KEEPING = (zip, enumerate)


def draw(items: Iterator[Any]) -> tuple[Any, bool]:
    """Return the next item, and whether the one after it may be drawn before this one is packed.
    Raises StopIteration at the end."""
    item = next(items)
    if type(item) in _IMMUTABLE:
        return item, True
    # before the call, whose argument is one more reference
    is_alone = sys.getrefcount(item) <= _ALONE or type(items) in _KEEPING
    return _kept(item, is_alone, _DEPTH)


def _kept(value: Any, is_alone: bool, depth: int) -> tuple[Any, bool]:
    """Return a value, or a copy if somebody else may change it, and whether it is safe now."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return value, True
    if kind is tuple or kind is list or kind is dict:
        return _kept_parts(value, is_alone, depth)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return _kept_array(value, is_alone)
    is_constant = numpy is not None and isinstance(value, numpy.generic)
    return value, is_alone or is_constant or kind.__module__.startswith("weft.")


def _kept_array(array: Any, is_alone: bool) -> tuple[Any, bool]:
    """Do so with an array, which may be a view of another's memory."""
    if array.flags.owndata and (is_alone or not array.flags.writeable):
        return array, True
    if array.nbytes < _COPIED and not array.dtype.hasobject:
        return array.copy(), True
    return array, False


def _kept_parts(value: Any, is_alone: bool, depth: int) -> tuple[Any, bool]:
    """Do so with a list, tuple or dict and what is in it."""
    kind = type(value)
    if len(value) > _PARTS or not depth:
        return value, False
    parts: Iterable[Any] = value.values() if kind is dict else value
    kept, safe, changed = [], True, False
    for part in parts:
        if type(part) in _IMMUTABLE:
            kept.append(part)
            continue
        is_its_own = is_alone and sys.getrefcount(part) <= _ALONE_IN_PARTS
        mine, is_safe = _kept(part, is_its_own, depth - 1)
        kept.append(mine)
        safe, changed = safe and is_safe, changed or mine is not part
    if changed or not (is_alone or kind is tuple):
        value = dict(zip(value, kept, strict=True)) if kind is dict else kind(kept)
    return value, safe


def _alone(items: Iterator[Any]) -> int:
    """Return how many references `draw` counts of an item that nobody else has."""
    item = next(items)
    return sys.getrefcount(item)


def _alone_in_parts(parts: Iterable[Any]) -> int:
    """Return the same for what is in a list."""
    counts = [0]
    for part in parts:
        counts.append(sys.getrefcount(part))
    return max(counts)


_ALONE = _alone(object() for _ in range(1))
_ALONE_IN_PARTS = _alone_in_parts([object()])
