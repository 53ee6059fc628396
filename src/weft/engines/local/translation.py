"""The operating system's errors about memory and descriptors, as weft's."""

from __future__ import annotations

import errno
import resource

from weft.errors import OutOfDescriptors, OutOfMemory, format_bytes


def translated(error: OSError, size: int = 0) -> Exception:
    """What to raise in place of an OSError; `size` is how much memory was asked for."""
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        return OutOfMemory(
            f"shared memory of {format_bytes(size)} was asked for and refused: {error.strerror}; "
            "share less, or make room"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return OutOfDescriptors(
            error.errno,
            f"no file descriptor is left: this process may have {soft} (hard limit {hard}); "
            "close files, or raise the limit with `ulimit -n`",
        )
    return error
