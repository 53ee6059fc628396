"""What a rank says at the first step of a collective.

    whether its arrays are in its slot | how long the message is | common | 0
    where its arrays are, if they are not in the slot: how many sources and targets, then each; none
    if that does not matter, because all ranks know that they sum jointly
    own

A message may be longer than a mailbox; then what is heard first is its beginning.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

_HEAD = struct.Struct("=?Q")
_COUNTS = struct.Struct("=II")
_END = b"\0"


class Location(NamedTuple):
    """Where an array is: in its process, and in a block of shared memory (number 0: in none)."""

    address: int
    block: int
    offset: int


class FirstMessage(NamedTuple):
    """What one rank says."""

    in_slot: bool
    common: bytes
    own: bytes
    #: where the arrays are that are not in the slot; the targets only if they are known already
    sources: tuple[Location, ...] = ()
    targets: tuple[Location, ...] = ()

    def encode(self) -> bytes:
        rest = self.common + _END
        if not self.in_slot:
            table = np.array([*self.sources, *self.targets], np.uint64).tobytes()
            rest += _COUNTS.pack(len(self.sources), len(self.targets)) + table
        rest += self.own
        return _HEAD.pack(self.in_slot, _HEAD.size + len(rest)) + rest

    @classmethod
    def decode(cls, message: bytes) -> FirstMessage:
        """The mirror of `encode`, for a message that was heard to its end."""
        in_slot, _ = _HEAD.unpack_from(message)
        common, _, rest = message[_HEAD.size :].partition(_END)
        if in_slot:
            return cls(True, common, rest)
        sources, targets = _COUNTS.unpack_from(rest)
        end = _COUNTS.size + 24 * (sources + targets)
        table = np.frombuffer(rest[_COUNTS.size : end], np.uint64).reshape(-1, 3).tolist()
        locations = tuple(Location(*row) for row in table)
        return cls(False, common, rest[end:], locations[:sources], locations[sources:])


def common_of(message: bytes) -> bytes:
    """A message's `common`, which is in its beginning."""
    return message[_HEAD.size :].partition(_END)[0]


def length_of(message: bytes) -> int:
    """How long a message is of which the beginning was heard."""
    return int(_HEAD.unpack_from(message)[1])
