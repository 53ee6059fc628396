"""What stands for a block in another process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

NO_PIN = 0


@dataclass(frozen=True)
class Source:
    """A keeper's address, and the process behind it."""

    address: str
    pid: int
    start: int

    def __reduce__(self) -> tuple[Any, ...]:
        """In a third of the time that dataclasses take."""
        return Source, (self.address, self.pid, self.start)


class Extent(NamedTuple):
    """Where a block lies in its owner's segments."""

    segment: int
    offset: int
    length: int


@dataclass(frozen=True)
class Reference:
    """What stands for a block in another process."""

    block: int
    #: keeps the block until the reference is attached for the first time; NO_PIN: whoever made the
    #: reference keeps it
    pin: int
    #: whom to ask: the owner, then who sent it
    sources: tuple[Source, ...]
    #: for who has the owner's segment mapped already; not in `encode`, whose readers have to ask
    extent: Extent | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Reference, (self.block, self.pin, self.sources, self.extent)

    def encode(self) -> bytes:
        sources = [asdict(source) for source in self.sources]
        return json.dumps({"block": self.block, "pin": self.pin, "sources": sources}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Reference:
        values = json.loads(data)
        sources = tuple(Source(**source) for source in values["sources"])
        return cls(values["block"], values["pin"], sources)


def new_name() -> int:
    """A number that no other block or pin on this machine has."""
    return int.from_bytes(os.urandom(7), "little") + 1
