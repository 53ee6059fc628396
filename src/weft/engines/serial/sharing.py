"""What `weft.share` returns without other processes: shared arrays in ordinary memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft._core import shared
from weft.engines.refusals import validate_memory


class _Memory(bytearray):
    """The memory of a shared array, by whose class an array is told from a copy."""


class SharedArray(shared.SharedArray):
    """An ndarray in this process's own memory. A pickle of it is a copy."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self.view(np.ndarray).__reduce__()

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        return self.view(np.ndarray).__reduce_ex__(protocol)


def share(source: NDArray[Any], *, readonly: bool) -> SharedArray:
    """Return a copy in the same memory order, or a view of an array that is shared already."""
    if isinstance(source, SharedArray) and isinstance(shared.memory_of(source), _Memory):
        array = source.view(SharedArray)
    else:
        validate_memory("a shared array", source.nbytes, "share less")
        array = shared.like(SharedArray, source, _Memory(source.nbytes))
        array[...] = source
    return shared.read_only(array, shared.memory_of(array)) if readonly else array
