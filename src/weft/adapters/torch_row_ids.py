"""Row ids that are on a device, used there without a detour through the host.

Two kernels, `rows.cu`, do in one pass what torch has no operation for: they take rows and see on
the way whether each id is one of a row, or they see whether ids are repeated. What they find they
write to memory of the host, where it is read once the stream has been waited for. For tensors of
the CPU, with which tables on a device are tried, torch does the same.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.adapters import torch_rows

#: ids that `check` gives to the host
NAMED = 504
_THREADS = 256


def are_ids(value: Any, device: str) -> bool:
    """Return whether a tensor on a device is a list of row ids that can be used there."""
    return bool(
        torch_rows.is_on(value, device)
        and value.dtype == torch.int64
        and value.dim() == 1
        and value.numel() > 0
        and value.layout == torch.strided
        and value.is_contiguous()
        and (value.device.type == "cpu" or _kernels(value.device.index) is not None)
    )


class Found(threading.local):
    """Tell what kernels queued by this thread have found: memory of the host that GPUs reach."""

    def __init__(self) -> None:
        self._flags = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._names = torch.zeros(NAMED, dtype=torch.int64, pin_memory=True)
        #: whether an id is none of a row, and whether one is repeated
        self.flags: NDArray[Any] = self._flags.numpy()
        #: the first ids
        self.names: NDArray[Any] = self._names.numpy()
        self.places = (
            self._flags.data_ptr(),
            self._flags.data_ptr() + 4,
            self._names.data_ptr(),
        )


_found: Found | None = None


def _results() -> Found:
    global _found
    if _found is None:
        _found = Found()
    return _found


def take(table: Any, ids: Any, out: Any) -> bool:
    """Copy rows to `out` and return, when it is done, whether all ids are rows of the table. If
    not, `out` has some rows only."""
    if table.device.type == "cpu":
        valid = bool(((ids >= 0) & (ids < len(table))).all())
        if valid:
            torch_rows.take(table, ids, out)
        return valid
    found, device = _results(), str(table.device)
    found.flags[0] = 0
    kernels: Any = _kernels(table.device.index)
    try:
        kernels.take(table, ids, out, found.places[0])
    finally:
        torch_rows.finish(device)
    return not found.flags[0]


class Checker:
    """Checks lists of ids of one table. For one thread at a time."""

    def __init__(self, n_rows: int, device: str) -> None:
        self._n_rows = n_rows
        #: for each row the number of the last list that had its id
        self._stamps = torch_rows.zeros((n_rows,), "int32", device)
        self._stamp = 0

    def check(self, ids: Any) -> tuple[bool, bool, NDArray[Any]]:
        """Return, when all that was queued before is done, whether all ids are rows of the table,
        whether any is repeated, and the first of them."""
        if ids.device.type == "cpu":
            valid = bool(((ids >= 0) & (ids < self._n_rows)).all())
            return valid, ids.unique().numel() < ids.numel(), ids[:NAMED].numpy().copy()
        if self._stamp == np.iinfo(np.int32).max:
            self._stamps.zero_()
            self._stamp = 0
        self._stamp += 1
        found = _results()
        found.flags[:] = 0
        kernels: Any = _kernels(ids.device.index)
        try:
            kernels.check(ids, self._n_rows, self._stamps, self._stamp, found.places)
        finally:
            torch_rows.finish(str(ids.device))
        wrong, repeated = found.flags.tolist()
        return not wrong, bool(repeated), found.names[: ids.numel()].copy()


@lru_cache
def _kernels(index: int) -> _Kernels | None:
    """Return the kernels for a GPU; None where its driver does not take them."""
    try:
        return _Kernels(index)
    except (OSError, RuntimeError):
        return None


class _Kernels:
    """The kernels of rows.cu, loaded for one GPU."""

    def __init__(self, index: int) -> None:
        self._library, self._index = ctypes.CDLL("libcuda.so.1"), index
        text = Path(__file__).with_name("rows.ptx").read_bytes() + b"\0"
        module = ctypes.c_void_p()
        with torch.cuda.device(index):
            torch.cuda.current_stream().synchronize()  # makes the context
            self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(text))
            self._take, self._check = ctypes.c_void_p(), ctypes.c_void_p()
            for function, name in ((self._take, b"take_rows"), (self._check, b"check_ids")):
                self._call("cuModuleGetFunction", ctypes.byref(function), module, name)

    def take(self, table: Any, ids: Any, out: Any, wrong: int) -> None:
        row_bytes = table.nbytes // len(table)
        places = table.data_ptr() | out.data_ptr() | row_bytes
        unit = 16 if not places % 16 else 4 if not places % 4 else 1
        shift = min(5, (max(1, row_bytes // unit) - 1).bit_length())
        arguments = (
            *(_address(table), _address(ids), _address(out)),
            *map(ctypes.c_longlong, (ids.numel(), len(table), row_bytes)),
            *(ctypes.c_int(unit), ctypes.c_int(shift), ctypes.c_void_p(wrong)),
        )
        self._launch(self._take, ids.numel() << shift, arguments)

    def check(
        self, ids: Any, n_rows: int, stamps: Any, stamp: int, places: tuple[int, int, int]
    ) -> None:
        arguments = (
            *(_address(ids), ctypes.c_longlong(ids.numel()), ctypes.c_longlong(n_rows)),
            *(_address(stamps), ctypes.c_int(stamp)),
            *map(ctypes.c_void_p, places),
            ctypes.c_longlong(NAMED),
        )
        self._launch(self._check, ids.numel(), arguments)

    def _launch(self, function: ctypes.c_void_p, threads: int, arguments: Any) -> None:
        """Queue a kernel on the current stream of the device."""
        stream = torch.cuda.current_stream(self._index).cuda_stream
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        blocks = ctypes.c_uint(-(-threads // _THREADS))
        one, nothing = ctypes.c_uint(1), ctypes.c_uint(0)
        size = (blocks, one, one, ctypes.c_uint(_THREADS), one, one, nothing)
        arguments = (*size, ctypes.c_void_p(stream), pointers, ctypes.c_void_p())
        with torch.cuda.device(self._index):
            self._call("cuLaunchKernel", function, *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} of CUDA's driver failed ({code})")


def _address(tensor: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
