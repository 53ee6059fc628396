"""Several byte strings as one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

_COUNT = struct.Struct("=I")


def pack(parts: Sequence[Any]) -> bytes:
    """Return byte strings as one: how many, the length of each, then all.

    >>> [bytes(part) for part in unpack(pack([b"one", b"", b"two"]))]
    [b'one', b'', b'two']
    """
    lengths = struct.pack(f"={len(parts)}Q", *map(len, parts))
    return b"".join((_COUNT.pack(len(parts)), lengths, *parts))


def unpack(packed: Any) -> list[Any]:
    """Return the byte strings that `pack` has joined, as views. More may follow them."""
    view = memoryview(packed).cast("B")
    (count,) = _COUNT.unpack_from(view)
    at = _COUNT.size + 8 * count
    parts = []
    for length in struct.unpack_from(f"={count}Q", view, _COUNT.size):
        parts.append(view[at : at + length])
        at += length
    return parts


def packed_size(packed: Any) -> int:
    """Return the length of what `pack` has made, which may be followed by more."""
    view = memoryview(packed).cast("B")
    (count,) = _COUNT.unpack_from(view)
    lengths: tuple[int, ...] = struct.unpack_from(f"={count}Q", view, _COUNT.size)
    return _COUNT.size + 8 * len(lengths) + sum(lengths)
