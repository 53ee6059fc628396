"""Tensors on a device, as the arrays of a collective: what `_core` does with NumPy's on the host.

An array of a collective lies on the host, as an `ndarray`, or on a device, as a tensor. Between the
two, numbers go through pinned memory, to and from which a GPU copies without the processor's help:

    tensor  --stage-->  ndarray  ...  an engine that moves host memory  ...  --deliver-->  tensor

Everything here is queued on the current stream of the calling thread; `synchronize` waits for it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.errors import DeviceUnavailable, InvalidType, InvalidValue, OutOfMemory

#: seconds for which a stream is asked whether it is done before the thread sleeps: the turns of
#: several processes take less, and to be woken takes as long as one
_POLLED = 500e-6
#: bytes from which on CUDA has a copy engine bring them to a device
_COPIED = 32 << 10
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
SIGNED = {"uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64}


# memory


def empty(shape: Sequence[int], element: str, device: str) -> Any:
    """Return a tensor of any values. Raises OutOfMemory, InvalidValue without such a device."""
    return allocated(lambda: torch.empty(tuple(shape), dtype=dtype_of(element), device=device))


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
    if torch.device(device).type != "cuda" or not _is_sent_with_commands(host):
        return allocated(lambda: host.to(device))
    target = allocated(lambda: torch.empty(host.shape, dtype=host.dtype, device=device))
    small = SmallCopy(host.nbytes)
    small.array[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    small.to(target)
    synchronize(device)
    return target


def _is_sent_with_commands(host: Any) -> bool:
    """Return whether CUDA would send so few bytes to the device as a part of its commands."""
    return bool(0 < host.nbytes < _COPIED and host.nbytes % 2 == 0)


class SmallCopy:
    """Few bytes in pinned memory that go to a device by one of its copy engines.

    CUDA sends so few bytes with the commands for the device's processors, and where processes use
    these by turns, each copy would wait for a turn. Two rows at a distance are never sent so.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._memory = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=True)
        self._whole = self._memory.numpy()
        #: to be filled with the bytes
        self.array = self._whole[:nbytes]
        self._library = ctypes.CDLL("libcuda.so.1")

    def to(self, target: Any) -> None:
        """Queue a copy to a contiguous tensor, on the current stream of its device."""
        half, size = self._nbytes // 2, self._nbytes
        self._whole[size : size + half] = self._whole[half:size]
        rows = _CopyOfRows(
            sources=1,
            source=self._memory.data_ptr(),
            source_pitch=size,
            targets=2,
            target=target.data_ptr(),
            target_pitch=half,
            width=half,
            height=2,
        )
        stream = torch.cuda.current_stream(target.device).cuda_stream
        code = self._library.cuMemcpy2DAsync_v2(ctypes.byref(rows), ctypes.c_void_p(stream))
        if code:
            raise RuntimeError(f"cuMemcpy2DAsync of CUDA's driver failed ({code})")


class _CopyOfRows(ctypes.Structure):
    """CUDA_MEMCPY2D. Of a kind of memory 1 is the host, 2 a device."""

    _fields_ = [
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("sources", ctypes.c_int),
        ("source", ctypes.c_void_p),
        ("source_on_device", ctypes.c_ulonglong),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("targets", ctypes.c_int),
        ("target_on_host", ctypes.c_void_p),
        ("target", ctypes.c_ulonglong),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


def copy(target: Any, source: Any) -> None:
    """Copy values, of either kind, to an array of either kind, of the same elements."""
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        np.copyto(target, source)
    else:
        _tensor(target, source).copy_(_tensor(source, target))


def copy_all(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy the values of tensors to others on the same device, all at once."""
    torch._foreach_copy_(list(targets), list(sources))


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
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.byte()


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
        return known and not element.startswith("complex") and element not in SIGNED
    return known and not (op == "mean" and element in SIGNED)


def combine(
    parts: Iterable[Any], out: Any, op: str, weights: Sequence[float] | None = None
) -> None:
    """Do what `arithmetic.combine` does, with tensors: parts come in the order of their ranks."""
    if (signed := SIGNED.get(str(out.dtype).removeprefix("torch."))) is not None:
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


def dtype_of(element: str) -> Any:
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


class Order:
    """Tell what one thread after the other has queued on a device, to be waited for."""

    def __init__(self, device: str) -> None:
        kind = torch.device(device)
        #: None where nothing is ever queued
        self._device = kind if kind.type == "cuda" else None
        self._is_reading = False
        if self._device is not None:
            self._work, self._reads = (torch.cuda.Event(blocking=True) for _ in range(2))

    def is_done(self) -> bool:
        """Return whether all that was queued on the current stream is done, without a wait for a
        turn on the device."""
        return self._device is None or bool(torch.cuda.current_stream(self._device).query())

    def synchronize(self) -> None:
        """Return when all that was queued on the current stream is done."""
        if self._device is not None:
            self._work.record(torch.cuda.current_stream(self._device))
            wait_for(self._work)

    def note_reads(self) -> None:
        """Note what has been queued on the current stream until now."""
        if self._device is not None:
            self._reads.record(torch.cuda.current_stream(self._device))
            self._is_reading = True

    def await_reads(self) -> None:
        """Return when what was noted is done."""
        if self._is_reading:
            wait_for(self._reads)
            self._is_reading = False


class StagedBuffers:
    """Memory of the host through which tensors like one go, and their results back."""

    def __init__(self, like: Any, slots: Sequence[NDArray[Any]]) -> None:
        """Fetch tensors to one of these arrays."""
        self._slots = [torch.from_numpy(slot) for slot in slots]
        on_gpu = like.device.type == "cuda"
        self._small: SmallCopy | None = None
        if on_gpu and _is_sent_with_commands(like):
            self._small = SmallCopy(like.nbytes)
            #: what is to be delivered
            self.result = self._small.array.view(slots[0].dtype).reshape(slots[0].shape)
        else:
            self._results = torch.empty(like.shape, dtype=like.dtype, pin_memory=on_gpu)
            self.result = self._results.numpy()
        self._order = Order(str(like.device))

    def fetch(self, value: Any, slot: int) -> None:
        """Copy a tensor's values to one of the arrays, once earlier results have been delivered."""
        self._slots[slot].copy_(value.detach(), non_blocking=True)
        self._order.await_reads()
        self._order.synchronize()

    def deliver(self, value: Any, out: Any) -> Any:
        """Return `out`, or a tensor like `value`, with what is in `result`."""
        target = like(value) if out is None else out
        if self._small is not None:
            self._small.to(target)
        else:
            target.copy_(self._results, non_blocking=True)
        self._order.note_reads()
        return target


def is_plain(value: Any) -> bool:
    """Return whether a value is one contiguous tensor with all its numbers."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_conj() or value.is_neg())
        and value.numel() > 0
        and value.is_contiguous()
    )


def can_write(value: Any, out: Any) -> bool:
    """Return whether results like `value`, which is plain, can be written to `out` without further
    checks: there is none, or it is as plain, and the same memory or another."""
    if not is_plain(value):
        return False
    return out is None or (
        is_plain(out)
        and (out.shape, out.dtype, out.device) == (value.shape, value.dtype, value.device)
        and not overlap(value, out)
        and not (out.requires_grad and torch.is_grad_enabled())
    )


def like(value: Any) -> Any:
    """Return a tensor like this one, of any values, without a gradient."""
    return torch.empty_like(value, requires_grad=False)


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
    whatever its number was there. Raises DeviceUnavailable if there is none."""
    kind = torch.device(device).type
    if kind != "cuda":
        return str(kind)
    if not torch.cuda.is_available():
        raise DeviceUnavailable(
            f"a tensor on {device} came from another process, and {devices_in_words()}; send "
            "tensor.cpu() to processes without a GPU"
        )
    return f"cuda:{torch.cuda.current_device()}"
