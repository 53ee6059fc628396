"""Kernels in C, if they were compiled: when weft was installed and a C compiler was there.

Everything works without them, but more slowly (docs/performance.md has the times).
`WEFT_KERNELS=0` turns them off. kernels.c has the source; hatch_build.py compiles it to the library
beside this file. Each `..._kernel` function returns a kernel, or None if there is none for a kind
of number; arrays are passed by their addresses.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

#: hash_buffers(buffers, bytes, seed): return the hash of buffers, each with its number of bytes; it
#: depends on a seed of 16 bytes too
HashBuffers = Callable[[Sequence[int], Sequence[int], bytes], bytes]
#: add(array, delta, count): add `count` numbers to an array. Both are the same or do not overlap.
Add = Callable[[int, int, int], None]
#: sum_in_place(arrays, count): add arrays of `count` numbers in their order; each becomes the sum
SumInPlace = Callable[[Sequence[int], int], None]
#: advance(work, steps, spins): advance a pipelined collective by `steps` steps at most, or until
#: there was nothing to do for `spins` spins; return whether it is done
Advance = Callable[["PipelinedState", int, int], bool]
#: add_rows(table, n_rows, ids, n_ids, deltas, n_columns): add a delta to the row of each id, which
#: may repeat; return how many were added: fewer than all if an id is outside the table
AddRows = Callable[[int, int, int, int, int, int], int]
#: apply(arrays, count, factors): apply an updater's rule to rows, state and delta, each of `count`
#: numbers, with the numbers that the rule needs
ApplyRule = Callable[[Sequence[int], int, Sequence[float]], None]

_SOURCE = Path(__file__).with_name("kernels.c")
_PATH = Path(__file__).with_name("libkernels.so")
_FLOATS = ("float32", "float64")
#: kinds of numbers: NumPy's name, and the suffix of the kernel's name
_KINDS = {kind: kind.removeprefix("u") for kind in (*_FLOATS, "int32", "uint32", "int64", "uint64")}
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class PipelinedState(ctypes.Structure):
    """A pipelined collective as one rank sees it; kernels.c explains the fields."""

    _fields_ = (
        ("rank", _NUMBER),
        ("ranks", _NUMBER),
        ("root", _NUMBER),
        ("source", _POINTER),
        ("target", _POINTER),
        ("size", _NUMBER),
        ("divisor", ctypes.c_double),
        ("memory", _POINTER),
        ("chunk", _NUMBER),
        ("chunks", _NUMBER),
        ("before", _NUMBER),
        ("slow", _NUMBER),
        ("given", _NUMBER),
        ("added", _NUMBER),
        ("taken", _NUMBER),
    )


_ADVANCE = (ctypes.POINTER(PipelinedState), _NUMBER, _NUMBER)


def hash_kernel() -> HashBuffers | None:
    """Return the kernel that hashes arrays."""
    if _library is None:
        return None
    kernel: Any = _library.hash_buffers
    kernel.argtypes, kernel.restype = (_POINTER, _POINTER, _NUMBER, _POINTER), None

    def hash_buffers(buffers: Sequence[int], sizes: Sequence[int], seed: bytes) -> bytes:
        count = len(sizes)
        words = (ctypes.c_uint64 * 2).from_buffer_copy(seed)
        kernel((_POINTER * count)(*buffers), (_NUMBER * count)(*sizes), count, words)
        return bytes(words)

    return hash_buffers


def add_kernel(kind: str) -> Add | None:
    """Return the kernel that adds one array to another."""
    add: Add | None = _kernel("add", kind, (_POINTER, _POINTER, _NUMBER))
    return add


def sum_in_place_kernel(kind: str) -> SumInPlace | None:
    """Return the kernel that sums several arrays, each of which becomes the sum."""
    kernel = _kernel("add_up", kind, (_POINTER, _NUMBER, _NUMBER))
    if kernel is None:
        return None

    def sum_in_place(arrays: Sequence[int], count: int) -> None:
        kernel((_POINTER * len(arrays))(*arrays), len(arrays), count)

    return sum_in_place


def pipelined_sum_kernel(kind: str) -> Advance | None:
    """Return the kernel that advances a pipelined sum."""
    advance: Advance | None = _kernel("joint_sum", kind, _ADVANCE, ctypes.c_int)
    return advance


def pipelined_broadcast_kernel() -> Advance | None:
    """Return the kernel that advances a pipelined broadcast."""
    advance: Advance | None = _kernel("joint_broadcast", None, _ADVANCE, ctypes.c_int)
    return advance


def pipelined_bytes(ranks: int, chunk: int) -> int:
    """Return the size of the memory for pipelined collectives in chunks of so many bytes."""
    return int(_kernel("joint_bytes", None, (_NUMBER, _NUMBER), _NUMBER)(ranks, chunk))


def pipelined_is_done(work: PipelinedState, rank: int) -> bool:
    """Return whether a rank has finished its part of a pipelined collective."""
    return bool(_library.joint_is_done(ctypes.byref(work), _NUMBER(rank)))


def pipelined_past_cache(work: PipelinedState) -> bool:
    """Return whether a finished pipelined collective used non-temporal stores, as cores share no
    cache. All ranks that ask before they meet again get the same answer."""
    return bool(_library.joint_past_cache(ctypes.byref(work)))


def pipelined_use_cache(memory: int, rank: int) -> None:
    """Make a rank measure again, in this memory, whether cores share a cache."""
    _library.joint_use_cache(_POINTER(memory), _NUMBER(rank))


def add_rows_kernel(kind: str) -> AddRows | None:
    """Return the kernel that adds to rows of a table."""
    arguments = (_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _NUMBER)
    add_rows: AddRows | None = _kernel("add_rows", kind, arguments, _NUMBER)
    return add_rows


def rule_kernel(rule: str, kind: str) -> ApplyRule | None:
    """Return the kernel that applies an updater's rule."""
    kernel = _kernel(rule, kind, (_POINTER, _NUMBER, _POINTER)) if kind in _FLOATS else None
    if kernel is None:
        return None

    def apply(arrays: Sequence[int], count: int, factors: Sequence[float]) -> None:
        kernel((_POINTER * len(arrays))(*arrays), count, (ctypes.c_double * len(factors))(*factors))

    return apply


def adding_side_by_side_pays() -> bool:
    """Return whether `add_kernel` is faster than NumPy for arrays that are in no cache."""
    return _library is not None and bool(_library.adding_side_by_side_pays())


def missing() -> str:
    """Return why there are no kernels and what to do about it; "" if there are."""
    return _missing


@cache
def _kernel(
    name: str, kind: str | None, arguments: tuple[type, ...], result: type | None = None
) -> Any:
    """Return a kernel for a kind of number, or with None for all; None if there is none."""
    if _library is None or (kind is not None and kind not in _KINDS):
        return None
    function = getattr(_library, name if kind is None else f"{name}_{_KINDS[kind]}")
    function.argtypes, function.restype = arguments, result
    return function


def _load() -> tuple[Any, str]:
    if os.environ.get("WEFT_KERNELS") == "0":
        return None, "WEFT_KERNELS=0 is set; unset it"
    if ctypes.sizeof(_POINTER) != 8:
        return None, "this Python has 32 bits; use one of 64"
    try:
        library = ctypes.CDLL(str(_PATH))
        compiled_from = ctypes.c_uint32.in_dll(library, "kernels_source").value
    except (OSError, ValueError):
        return None, "they were not compiled; have a C compiler, and install weft again"
    if compiled_from != zlib.crc32(_SOURCE.read_bytes()):
        return None, "they were compiled for another version of weft; install weft again"
    return library, ""


_library, _missing = _load()
