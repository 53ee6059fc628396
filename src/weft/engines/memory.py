"""Whether there is memory for what is about to be made."""

from __future__ import annotations

from weft.errors import OutOfMemory, format_bytes
from weft.resources import available_memory

#: left to the rest of the machine
_MARGIN = 64 << 20


def check_memory(what: str, size: int, remedy: str) -> None:
    """Raise OutOfMemory unless `size` more bytes can be had now."""
    free, reason = available_memory()
    if size + _MARGIN > free:
        raise OutOfMemory(
            f"{what} of {format_bytes(size)} was asked for, but {format_bytes(free)} are free "
            f"({reason}); {remedy}"
        )
