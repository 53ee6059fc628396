"""Arrays that many calls use, once on each host.

    driver                              host
    put: an array, a number    ──>      Ray's store ── one copy ──>  weft's shared memory
    a Placed in its place      ──>      the array there, mapped by all its workers

A `Placed` is pickled as its number. The driver notes which numbers a pickle mentions, and sends
with it those arrays that the host does not have.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft._core.arithmetic import Array

_numbers = itertools.count()
#: by thread: the numbers that were mentioned since `noting`
_noted = threading.local()


class Placed:
    """An array that a pool has stored for all its workers."""

    def __init__(self, array: Array, *, readonly: bool) -> None:
        self.number = next(_numbers)
        self.array = array
        self.readonly = readonly
        #: Ray's reference, once it was sent
        self.reference: Any = None
        _placed[self.number] = self

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        return self.array.ndim

    def __reduce__(self) -> Any:
        mentioned: dict[int, Placed] | None = getattr(_noted, "mentioned", None)
        if mentioned is not None:
            mentioned[self.number] = self
        return find, (self.number,)


#: those of this process
_placed: weakref.WeakValueDictionary[int, Placed] = weakref.WeakValueDictionary()


def is_placed(number: int) -> bool:
    """Return whether somebody still refers to an array of this process."""
    return number in _placed


class Noting:
    """A context that notes which arrays pickles mention."""

    def __init__(self) -> None:
        self.mentioned: dict[int, Placed] = {}

    def __enter__(self) -> Noting:
        _noted.mentioned = self.mentioned
        return self

    def __exit__(self, *_: object) -> None:
        _noted.mentioned = None


# on a host

#: the arrays of this host, by number
_held: dict[int, Any] = {}


def update(arrays: dict[int, tuple[list[Any], bool]], dropped: tuple[int, ...]) -> None:
    """Fetch arrays that the driver has sent, and drop others."""
    for number in dropped:
        _held.pop(number, None)
    for number, (reference, readonly) in arrays.items():
        if number not in _held:
            _held[number] = _fetch(reference[0], readonly)


def _fetch(reference: Any, readonly: bool) -> Any:
    import numpy as np
    import ray

    from weft.engines.local.pool.payload_arrays import place

    array = ray.get(reference)
    if isinstance(array, np.ndarray):
        return place(array, readonly=readonly)
    return place(array.load(), readonly=readonly)


def find(number: int) -> Any:
    """Return the array that stands for a number in this process. Unpickling calls it."""
    return _held[number] if number in _held else _placed[number].array
