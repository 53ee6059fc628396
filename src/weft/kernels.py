"""Loops in C, where they were compiled: when weft was installed and a C compiler was there.

Everything works without them, but more slowly (docs/performance.md has the times).
`WEFT_KERNELS=0` leaves them away. kernels.c has the loops; hatch_build.py compiles them to the
library beside this file.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

#: adds an array to another: where that is, where the first is, and how many numbers. They are the
#: same or lie apart.
Add = Callable[[int, int, int], None]
#: adds to some rows of a table: where it is, where the ids of the rows are, how many, where one
#: delta for each is, and how many columns there are. A row may be named several times.
AddRows = Callable[[int, int, int, int, int], None]

_LIBRARY = Path(__file__).with_name("libkernels.so")
#: kinds of numbers, as NumPy names them, and as the loops do
_KINDS = {
    "float32": "float32",
    "float64": "float64",
    "int32": "int32",
    "uint32": "int32",
    "int64": "int64",
    "uint64": "int64",
}
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "add": (_POINTER, _POINTER, _NUMBER),
    "add_rows": (_POINTER, _POINTER, _NUMBER, _POINTER, _NUMBER),
}


def adder(kind: str) -> Add | None:
    """What adds arrays of a kind of number; None if there is nothing for it."""
    return _loop("add", kind)


def row_adder(kind: str) -> AddRows | None:
    """What adds to rows of a kind of number; None if there is nothing for it."""
    return _loop("add_rows", kind)


def missing() -> str:
    """Why there are no loops in C; empty if there are."""
    return _missing


def _loop(name: str, kind: str) -> Callable[..., None] | None:
    if _library is None or kind not in _KINDS:
        return None
    function: Callable[..., None] = getattr(_library, f"{name}_{_KINDS[kind]}")
    return function


def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("WEFT_KERNELS") == "0":
        return None, "WEFT_KERNELS=0"
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        return None, "row ids have 8 bytes in them"
    if not _LIBRARY.exists():
        return None, "no C compiler was found when weft was installed"
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:  # for another system
        return None, str(error)
    for name, signature in _SIGNATURES.items():
        for kind in set(_KINDS.values()):
            function = getattr(library, f"{name}_{kind}")
            function.argtypes, function.restype = signature, None
    return library, ""


_library, _missing = _load()
