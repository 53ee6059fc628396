"""What a process keeps of the memory that it has freed."""

from __future__ import annotations

import pytest

from tests.support import run_python

pytestmark = pytest.mark.alone

#: takes and frees 20 MB at the end of what malloc has, and counts the faults of the next time
PROGRAM = """
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def take_and_free():
    pieces = [libc.malloc(1 << 20) for _ in range(20)]
    for piece in pieces:
        ctypes.memset(piece, 1, 1 << 20)
    for piece in reversed(pieces):
        libc.free(piece)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

{first}
take_and_free()
take_and_free()
before = faults()
take_and_free()
print(faults() - before)
"""
KEEPS = "from weft.engines.local.heap import keep_freed_memory; keep_freed_memory()"


@pytest.mark.parametrize(
    ("first", "environment", "keeps"),
    [
        (KEEPS, {}, True),
        ("", {}, False),
        (KEEPS, {"MALLOC_TRIM_THRESHOLD_": "131072"}, False),
        (KEEPS, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, False),
    ],
)
def test_what_is_freed_is_there_for_the_next(
    first: str, environment: dict[str, str], keeps: bool
) -> None:
    """Without a fault for each page, unless the environment has a word on it."""
    outcome = run_python(PROGRAM.format(first=first), env=environment)
    assert (int(outcome.out) < 500) == keeps, outcome
