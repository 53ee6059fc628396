"""What a process that computes keeps of the memory that it has freed: a worker, or the driver of a
team, which is the user's own process, for as long as it lives.

A step of training frees and takes the same few megabytes again and again. The C library gives them
back to the kernel as soon as they happen to lie at the end of what it has, and gets them again as
pages full of zeros, one fault for each: 600 in a step of 40 ms, which took 2 of them. So the
processes of a team keep more before they give any back. Large arrays are not concerned: they go
back at once, as ever.
"""

from __future__ import annotations

import os

from weft.engines.local import libc

#: bytes that are kept, and the size from which on something is given back when it is freed: the
#: largest that glibc takes
_KEPT, _LARGE = 64 << 20, 32 << 20


def keep_freed_memory() -> None:
    """Have this process do so, unless the user's environment has a word on it."""
    said = any(name.startswith("MALLOC_") for name in os.environ)
    if not said and not os.environ.get("GLIBC_TUNABLES"):
        libc.set_allocator(kept=_KEPT, large=_LARGE)
