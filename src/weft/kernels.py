"""Loops in C, where they were compiled: when weft was installed and a C compiler was there.

Everything works without them, but more slowly (docs/performance.md has the times).
`WEFT_KERNELS=0` leaves them away. kernels.c has the loops; hatch_build.py compiles them to the
library beside this file.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

#: copies bytes: where to, where from, and how many. They lie apart.
Copy = Callable[[int, int, int], None]
#: adds an array to another: where that is, where the first is, and how many numbers. They are the
#: same or lie apart.
Add = Callable[[int, int, int], None]
#: adds several arrays up, in their order: where they are, and how many numbers each has. All are
#: the sums then.
SumInPlace = Callable[[Sequence[int], int], None]
#: goes on with joint work: does so many steps at the most, and returns if there was nothing to do
#: at so many looks. Whether it is done.
GoOn = Callable[["Joint", int, int], bool]
#: adds to some rows of a table: where it is, how many rows it has, where the ids of those rows are,
#: how many, where one delta for each is, and how many columns there are. A row may be named several
#: times. Returns how many were added: less than all if an id is not in the table.
AddRows = Callable[[int, int, int, int, int, int], int]

#: changes rows and state as an updater does: where these and the delta are, how many numbers each
#: has, and the numbers that the rule needs
ApplyRule = Callable[[Sequence[int], int, Sequence[float]], None]

_SOURCE = Path(__file__).with_name("kernels.c")
_PATH = Path(__file__).with_name("libkernels.so")
#: kinds of numbers, as NumPy names them, and as the loops do
_KINDS = {
    "float32": "float32",
    "float64": "float64",
    "int32": "int32",
    "uint32": "int32",
    "int64": "int64",
    "uint64": "int64",
}
_FLOATS = ("float32", "float64")
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class Joint(ctypes.Structure):
    """What several processes do together, as one of them sees it: kernels.c has what the fields
    are, and how it is done."""

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


_JOINT = (ctypes.POINTER(Joint), _NUMBER, _NUMBER)


def copy_kernel() -> Copy | None:
    """What copies large arrays; None if there is nothing for it."""
    if _library is None:
        return None
    kernel: Any = _library.copy
    kernel.argtypes, kernel.restype = (_POINTER, _POINTER, _NUMBER), None
    found: Copy = kernel
    return found


def add_kernel(kind: str) -> Add | None:
    """What adds arrays of a kind of number; None if there is nothing for it."""
    found: Add | None = _kernel("add", kind, (_POINTER, _POINTER, _NUMBER), None)
    return found


def sum_in_place_kernel(kind: str) -> SumInPlace | None:
    """What adds several arrays of a kind of number up; None if there is nothing for it."""
    kernel = _kernel("add_up", kind, (_POINTER, _NUMBER, _NUMBER), None)
    if kernel is None:
        return None

    def sum_in_place(arrays: Sequence[int], count: int) -> None:
        kernel((_POINTER * len(arrays))(*arrays), len(arrays), count)

    return sum_in_place


def joint_sum_kernel(kind: str) -> GoOn | None:
    """What goes on with joint sums of a kind of number; None if there is nothing for it."""
    found: GoOn | None = _kernel("joint_sum", kind, _JOINT, ctypes.c_int)
    return found


def joint_broadcast_kernel() -> GoOn | None:
    """What goes on with joint broadcasts; None if there is nothing for it."""
    if _library is None:
        return None
    kernel: Any = _library.joint_broadcast
    kernel.argtypes, kernel.restype = _JOINT, ctypes.c_int
    found: GoOn = kernel
    return found


def joint_bytes(ranks: int, chunk: int) -> int:
    """The bytes of the memory for joint work of so many ranks, in chunks of so many bytes."""
    size = _loaded().joint_bytes
    size.restype = _NUMBER
    return int(size(_NUMBER(ranks), _NUMBER(chunk)))


def joint_is_done(work: Joint, rank: int) -> bool:
    """Whether a rank needs nobody any more for joint work."""
    return bool(_loaded().joint_is_done(ctypes.byref(work), _NUMBER(rank)))


def joint_past_cache(work: Joint) -> bool:
    """Whether joint work that is done goes past the caches, as cores share none. All ranks that ask
    before they meet again get the same answer."""
    return bool(_loaded().joint_past_cache(ctypes.byref(work)))


def joint_use_cache(memory: int, rank: int) -> None:
    """Have a rank try again whether cores share a cache, in this memory for joint work."""
    _loaded().joint_use_cache(_POINTER(memory), _NUMBER(rank))


def add_rows_kernel(kind: str) -> AddRows | None:
    """What adds to rows of a kind of number; None if there is nothing for it."""
    arguments = (_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _NUMBER)
    found: AddRows | None = _kernel("add_rows", kind, arguments, _NUMBER)
    return found


def rule_kernel(rule: str, kind: str) -> ApplyRule | None:
    """What applies an updater's rule to rows of a kind of number; None if there is nothing for
    it."""
    if kind not in _FLOATS:
        return None
    kernel = _kernel(rule, kind, (_POINTER, _NUMBER, _POINTER), None)
    if kernel is None:
        return None

    def apply(places: Sequence[int], count: int, factors: Sequence[float]) -> None:
        kernel((_POINTER * len(places))(*places), count, (ctypes.c_double * len(factors))(*factors))

    return apply


def adding_side_by_side_pays() -> bool:
    """Whether `add_kernel` is quicker than NumPy for arrays that are in no cache."""
    return _library is not None and bool(_library.adding_side_by_side_pays())


def missing() -> str:
    """Why there are no loops in C, and what to do about it; empty if there are."""
    return _missing


@cache
def _kernel(name: str, kind: str, arguments: tuple[type, ...], result: type | None) -> Any:
    if _library is None or kind not in _KINDS:
        return None
    function = getattr(_library, f"{name}_{_KINDS[kind]}")
    function.argtypes, function.restype = arguments, result
    return function


def _loaded() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError(f"the loops in C are not there: {_missing}")
    return _library


def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("WEFT_KERNELS") == "0":
        return None, "WEFT_KERNELS=0 is set; unset it"
    if ctypes.sizeof(_POINTER) != 8:
        return None, "this Python has 32 bits; use one of 64"
    try:
        library = ctypes.CDLL(str(_PATH))
        made_from = ctypes.c_uint32.in_dll(library, "kernels_source").value
    except (OSError, ValueError):
        return None, "they were not compiled; have a C compiler, and install weft again"
    if made_from != zlib.crc32(_SOURCE.read_bytes()):
        return None, "they were compiled for another version of weft; install weft again"
    return library, ""


_library, _missing = _load()
