"""Many small arrays of a call as few: what is to be done for each takes longer than to copy it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from weft._core.elements import Array
from weft._core.values import Leaf

#: bytes from which on an array stays by itself
_LARGE = 256 << 10


class Together:
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

    def join(self, arrays: Sequence[Array]) -> list[Array]:
        """These flat arrays, the small ones of a kind copied into one."""
        return [
            arrays[group[0]] if len(group) == 1 else np.concatenate([arrays[i] for i in group])
            for group in self._groups
        ]

    def targets(self, joined: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        """Where results are to be written: to the arrays themselves, or where others were joined
        to; `spread` then brings them to their arrays."""
        return [
            arrays[group[0]] if len(group) == 1 else one
            for group, one in zip(self._groups, joined, strict=True)
        ]

    def spread(self, joined: Sequence[Array], arrays: Sequence[Array]) -> None:
        """Copy what was joined to its arrays."""
        for group, one in zip(self._groups, joined, strict=True):
            if len(group) > 1:
                ends = accumulate(len(arrays[index]) for index in group)
                for index, end in zip(group, ends, strict=True):
                    arrays[index][...] = one[end - len(arrays[index]) : end]


@lru_cache(maxsize=256)
def together(leaves: tuple[Leaf, ...]) -> Together:
    """The same one for calls alike: to make it takes longer than a small reduction."""
    return Together(leaves)
