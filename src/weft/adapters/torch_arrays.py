"""Tensors on a device, as the arrays of a collective: what `_core` does with NumPy's on the host.

An array of a collective lies on the host, as an `ndarray`, or on a device, as a tensor. Between the
two, numbers go through pinned memory, to and from which a GPU copies without the processor's help:

    tensor  --stage-->  ndarray  ...  an engine that moves host memory  ...  --deliver-->  tensor

Everything here is queued on the current stream of the calling thread; `synchronize` waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.errors import InvalidType, InvalidValue, OutOfMemory

#: seconds for which a stream's work is asked for before the thread sleeps until it is done: most
#: small copies take less, and to be woken takes longer
_POLLED = 50e-6
_FUNCTIONS = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
_BOOLEAN = {**_FUNCTIONS, "sum": torch.logical_or, "prod": torch.logical_and}
_HALVES = (torch.float16, torch.bfloat16)
#: dtypes for which torch has few operations: those whose sums and products have the same bits
_SIGNED = {"uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64}


# memory


def empty(shape: Sequence[int], element: str, device: str) -> Any:
    """Return a tensor of any values. Raises OutOfMemory, InvalidValue without such a device."""
    return allocated(lambda: torch.empty(tuple(shape), dtype=_dtype(element), device=device))


def allocated(make: Any) -> Any:
    """Return the tensor that `make` returns. Raises OutOfMemory, which tells what is free, once
    what torch keeps for later has been given back and it still does not fit; InvalidValue if torch
    cannot use the device."""
    try:
        return make()
    except torch.OutOfMemoryError as error:  # torch has emptied its own cache by now
        free, total = torch.cuda.mem_get_info()
        words = str(error).split(". ")
        raise OutOfMemory(
            f"{'. '.join(words[:2])}: the GPU has {free >> 20} MiB of {total >> 20} MiB free, and "
            f"this process's torch holds {torch.cuda.memory_allocated() >> 20} MiB; use smaller "
            "arrays, or fewer processes on this GPU"
        ) from error
    except (RuntimeError, AssertionError) as error:
        if _is_out_of_range(error):
            raise InvalidValue(f"{str(error).splitlines()[0]}; {devices_in_words()}") from error
        raise


def _is_out_of_range(error: Exception) -> bool:
    words = ("invalid device", "NVIDIA driver", "not compiled with CUDA", "No CUDA GPUs")
    return any(part in str(error) for part in words)


def devices_in_words() -> str:
    """Tell which devices this process has, for errors."""
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    count = torch.cuda.device_count()
    if not count:
        return "there is no GPU that this process may use (CUDA_VISIBLE_DEVICES, nvidia-smi)"
    names = ", ".join(f"cuda:{index}" for index in range(count))
    return f"this process may use {names}"


def pinned(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of any values in pinned memory, where there is a GPU to copy to."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not size or not torch.cuda.is_initialized():
        return np.empty(tuple(shape), dtype)
    memory = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    array: NDArray[Any] = memory.view(dtype).reshape(tuple(shape))
    return array


def stage(tensors: Sequence[Any]) -> list[NDArray[Any]]:
    """Return copies of tensors on the host, in pinned memory; bfloat16 as uint16."""
    staged = []
    for tensor in tensors:
        words = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        host = torch.empty(tensor.shape, dtype=words.dtype, pin_memory=torch.cuda.is_initialized())
        host.copy_(words, non_blocking=True)
        staged.append(host)
    for device in {tensor.device for tensor in tensors}:
        synchronize(device)
    return [
        host.numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else host.numpy()
        for tensor, host in zip(tensors, staged, strict=True)
    ]


def deliver(array: NDArray[Any], element: str, device: str) -> Any:
    """Return a tensor on a device with the values of an array on the host."""
    host = torch.from_numpy(array)
    if element == "bfloat16":
        host = host.view(torch.bfloat16)
    return allocated(lambda: host.to(device))


def copy(target: Any, source: Any) -> None:
    """Copy values, of either kind, to an array of either kind, of the same elements."""
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(target, source)
    else:
        _tensor(target, source).copy_(_tensor(source, target))


def _tensor(array: Any, other: Any) -> Any:
    """Return an array as a tensor: itself, or one over its memory, of the dtype of the other."""
    if not isinstance(array, np.ndarray):
        return array
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if other.dtype == torch.bfloat16 else tensor


def flat(tensor: Any) -> Any:
    """Return a tensor as a contiguous one of one dimension: a view where possible, else a copy."""
    return tensor.contiguous().view(-1)


def concatenate(tensors: Sequence[Any]) -> Any:
    """Return flat tensors of one dtype, one after the other."""
    return torch.cat(list(tensors))


def as_bytes(tensor: Any) -> Any:
    """Return the memory of a flat tensor as bytes."""
    return tensor.view(torch.uint8)


def overlap(one: Any, other: Any) -> bool:
    """Return whether two flat arrays have memory in common without being the same."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return False
    if one.device != other.device or (one.data_ptr(), one.nbytes) == (
        other.data_ptr(),
        other.nbytes,
    ):
        return False
    first, second = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (one, other))
    return bool(second[0] < first[1])


# arithmetic


@lru_cache(maxsize=256)
def can_combine(element: str, op: str) -> bool:
    """Return whether numbers of this kind can be combined on a device: torch has no order of
    complex numbers, and none of wide unsigned ones."""
    known = hasattr(torch, element)
    if op in ("min", "max"):
        return known and not element.startswith("complex") and element not in _SIGNED
    return known and not (op == "mean" and element in _SIGNED)


def combine(
    parts: Iterable[Any], out: Any, op: str, weights: Sequence[float] | None = None
) -> None:
    """Do what `arithmetic.combine` does, with tensors: parts come in the order of their ranks."""
    if (signed := _SIGNED.get(str(out.dtype).removeprefix("torch."))) is not None:
        parts, out = (part.view(signed) for part in parts), out.view(signed)
    wide = _wide(out.dtype, op, weighted=weights is not None)
    function = (_BOOLEAN if out.dtype == torch.bool else _FUNCTIONS)[op]
    if weights is None and wide == out.dtype:
        count = _accumulate(iter(parts), out, function)
        if op == "mean" and count != 1:
            out.div_(count)
        return
    total, weight = None, 0.0
    for rank, part in enumerate(parts):
        share = 1.0 if weights is None else weights[rank]
        if share == 0:
            continue  # the mean of no rows is often NaN
        term = part.to(wide) if weights is None and total is None else part
        term = term if weights is None else part.to(wide, copy=True).mul_(share)
        total = term if total is None else function(total, term, out=total)
        weight += share
    if op == "mean" and weight != 1:
        total = torch.div(total, weight, out=total)
    out.copy_(total)


def _accumulate(parts: Iterator[Any], out: Any, function: Any) -> int:
    first = next(parts)
    second = next(parts, None)
    if second is None:
        out.copy_(first)
        return 1
    function(first, second, out=out)
    count = 2
    for part in parts:
        function(out, part, out=out)
        count += 1
    return count


def _wide(dtype: Any, op: str, *, weighted: bool) -> Any:
    """Return the type in which totals are accumulated."""
    wide = dtype
    if op not in ("min", "max"):
        if dtype in _HALVES:
            wide = torch.float32
        elif op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
            wide = torch.float64
    if not weighted:
        return wide
    return torch.complex128 if wide.is_complex else torch.float64


def _dtype(element: str) -> Any:
    dtype = getattr(torch, element, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidType(f"{element}: torch has no such numbers, so they cannot be on a GPU")
    return dtype


# order


def synchronize(device: Any) -> None:
    """Return when all that was queued on the current stream is done: asked for at first, then
    slept for, so that a long wait takes no processor."""
    if torch.device(device).type != "cuda":
        return
    with torch.cuda.device(device):
        done = torch.cuda.Event(blocking=True)
        done.record()
        wait_for(done)


def wait_for(done: Any) -> None:
    """Return when an event has happened."""
    until = time.perf_counter() + _POLLED
    while not done.query():
        if time.perf_counter() > until:
            done.synchronize()
            return


def event(device: str) -> Any:
    """Return an event that happens when what is queued on the current stream now is done; None
    where nothing is ever queued."""
    if not device.startswith("cuda"):
        return None
    with torch.cuda.device(device):
        done = torch.cuda.Event(blocking=True)
        done.record()
    return done


class Stream:
    """The current stream of a device when this was made, which another thread can go on with."""

    def __init__(self, device: str) -> None:
        kind = torch.device(device)
        self._stream = torch.cuda.current_stream(kind) if kind.type == "cuda" else None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Queue on it what this thread does, and end when that is done."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield
            synchronize(self._stream.device)


# which device


def number_of(device: str) -> int:
    """Return the number of a GPU among those of this process."""
    index = torch.device(device).index
    return int(torch.cuda.current_device()) if index is None else int(index)


def over(buffer: Any) -> Any:
    """Return a tensor of bytes over memory of the host."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


def here(device: str) -> str:
    """Return the device of this process for a tensor that came from another: of the same kind,
    whatever its number was there. Raises InvalidValue if there is none."""
    kind = torch.device(device).type
    if kind != "cuda":
        return str(kind)
    if not torch.cuda.is_available():
        raise InvalidValue(
            f"a tensor on {device} came from another process, and {devices_in_words()}; send "
            "tensor.cpu() to processes without a GPU"
        )
    return f"cuda:{torch.cuda.current_device()}"
