"""Whether there is memory for what is about to be made."""

from __future__ import annotations

from weft.errors import OutOfMemory
from weft.resources import available_memory

#: left to the rest of the machine
_MARGIN = 64 << 20


def check_memory(what: str, size: int, remedy: str) -> None:
    """Raise OutOfMemory unless `size` more bytes can be had now."""
    free, reason = available_memory()
    if size + _MARGIN > free:
        raise OutOfMemory(
            f"{what} of {amount(size)} was asked for, but {amount(free)} are free ({reason}); "
            f"{remedy}"
        )


def amount(size: int) -> str:
    """Bytes as people say them."""
    if size < 10_000_000:
        return f"{size:,} bytes"
    whole, hundredths = divmod(size // 10_000_000, 100)  # not a float: it may be too large for one
    return f"{whole}.{hundredths:02d} GB"
