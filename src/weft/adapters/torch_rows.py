"""Some rows of a tensor: what tables on a device need of torch.

Everything is queued on the current stream of the calling thread, and `synchronize` waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.adapters import torch_arrays
from weft.errors import InvalidType, InvalidValue


def cut(memory: Any, start: int, shape: Sequence[int], element: str) -> Any:
    """Return a tensor over a part of a tensor of bytes."""
    dtype = torch_arrays.dtype_of(element)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return memory[start : start + size].view(dtype).view(tuple(shape))


def zeros(shape: Sequence[int], element: str, device: str) -> Any:
    """Return a tensor of zeros. Raises OutOfMemory, InvalidValue without such a device."""
    tensor = torch_arrays.empty(shape, element, device)
    words(tensor).zero_()
    return tensor


def element_of(tensor: Any) -> str:
    """Return the name of a tensor's numbers, as NumPy has it."""
    return str(tensor.dtype).removeprefix("torch.")


def send(array: NDArray[Any], device: str) -> Any:
    """Return a copy of an array on a device, which is still on its way."""
    host = torch.empty(
        array.shape,
        dtype=torch_arrays.dtype_of(array.dtype.name),
        pin_memory=torch.device(device).type == "cuda",
    )
    np.copyto(host.numpy(), array)
    return torch_arrays.allocated(lambda: host.to(device, non_blocking=True))


def fetch(tensor: Any) -> NDArray[Any]:
    """Return a copy of a tensor on the host, which is there."""
    return torch_arrays.stage([tensor])[0]


def copy(target: Any, source: Any) -> None:
    """Copy values between tensors, or from an array, which may be read-only."""
    if isinstance(source, np.ndarray):
        source = torch.from_numpy(source if source.flags.writeable else source.copy())
    words(target).copy_(words(source))


def words(tensor: Any) -> Any:
    """Return a tensor's memory as numbers for which torch has all operations: of unsigned ones the
    signed, whose sums have the same bits."""
    signed = torch_arrays.SIGNED.get(element_of(tensor))
    return tensor if signed is None else tensor.view(signed)


def take(table: Any, index: Any, out: Any = None) -> Any:
    """Return some rows of a table, in `out` or a new tensor."""
    if out is not None:
        torch.index_select(words(table), 0, index, out=words(out))
        return out
    return torch_arrays.allocated(lambda: words(table).index_select(0, index)).view(table.dtype)


def put(table: Any, index: Any, rows: Any) -> None:
    """Replace some rows of a table, none of them named twice."""
    words(table).index_copy_(0, index, words(rows))


def add_all(table: Any, delta: Any) -> None:
    """Add a delta to all rows of a table."""
    words(table).add_(words(delta))


def add_some(table: Any, index: Any, delta: Any) -> None:
    """Add a delta to some rows of a table, none of them named twice: then there is one order."""
    words(table).index_add_(0, index, words(delta))


def prepare_addition(table: Any, index: Any, delta: Any) -> Callable[[], object]:
    """Return what does the same, or for all rows without an index, by one call of torch."""
    if index is None:
        return partial(words(table).add_, words(delta))
    return partial(words(table).index_add_, 0, index, words(delta))


class Orders(threading.local):
    """Tell what this thread waits with for what it has queued on each device."""

    def __init__(self) -> None:
        self._orders: dict[str, torch_arrays.Order] = {}

    def synchronize(self, device: str) -> None:
        """Return when what this thread has queued on its current stream is done."""
        order = self._orders.get(device)
        if order is None:
            order = self._orders[device] = torch_arrays.Order(device)
        if not order.is_done():
            order.synchronize()


_orders = Orders()


def synchronize(device: str) -> None:
    """Return when what this thread has queued on its current stream of a device is done."""
    _orders.synchronize(device)


def finish(device: str) -> None:
    """Do the same to the end, and raise only then what a signal handler has raised meanwhile."""
    raised: BaseException | None = None
    while True:
        try:
            _orders.synchronize(device)
            break
        except RuntimeError:  # CUDA cannot be used any more
            raise
        except BaseException as error:
            raised = raised or error
    if raised is not None:
        raise raised


def empty(shape: Sequence[int], like: Any) -> Any:
    """Return a tensor of any values, of the dtype and on the device of another."""
    return torch_arrays.allocated(
        lambda: torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    )


def like(tensor: Any) -> Any:
    """Return a tensor of any values. Raises OutOfMemory."""
    return torch_arrays.allocated(lambda: torch.empty_like(tensor))


def change(
    rule: Callable[..., None],
    stored: Sequence[Any],
    delta: Any,
    element: str,
    factors: Sequence[float],
) -> None:
    """Change a block of rows and state in place by an updater's rule, computed in numbers of this
    kind."""
    wide = torch_arrays.dtype_of(element)
    rows, *state = computed = [array.to(wide) for array in stored]
    rule((rows, state, delta.to(wide), torch.empty_like(rows), torch), *factors)
    for target, source in zip(stored, computed, strict=True):
        if target is not source:
            target.copy_(source)


# what users give


def is_on(value: Any, device: str) -> bool:
    """Return whether a tensor lies on a device, named with its number."""
    place = torch.device(device)
    if place.type == "cpu":
        return bool(value.device.type == "cpu")
    return bool(value.device == place)


def dense(value: Any) -> Any:
    """Return a tensor without its gradient. Raises InvalidType unless all its numbers are there."""
    from weft.adapters import torch as adapter

    return adapter.dense(value)


def is_finite(tensor: Any) -> bool:
    """Return whether a tensor has neither NaN nor infinity."""
    return bool(torch.isfinite(tensor).all())


def validate_element(element: str) -> None:
    """Raise InvalidType for numbers that torch does not have."""
    torch_arrays.dtype_of(element)


def stream(device: str) -> torch_arrays.Stream:
    """Return this thread's current stream of a device."""
    return torch_arrays.Stream(device)


def same_memory(one: Any, other: Any) -> bool:
    """Return whether two tensors of one shape and dtype, one of them contiguous, are the same."""
    return bool(
        one.device == other.device
        and one.data_ptr() == other.data_ptr()
        and one.stride() == other.stride()
    )


def deliver(tensor: Any, out: Any) -> None:
    """Copy a tensor's values to another, on any device."""
    with torch.no_grad():
        out.copy_(tensor)


def device_of_table(given: Any) -> str:
    """Return the device that `device=` names, with its number. Raises InvalidValue if this process
    has none, InvalidType for what is no device."""
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        kind = InvalidValue if isinstance(given, str) else InvalidType
        raise kind(
            f"device={given!r}: expected 'cpu', 'cuda', or the device that weft.device() returns "
            f"({str(error).splitlines()[0]})"
        ) from None
    if device.type == "cpu":
        return str(device)
    if device.type != "cuda":
        raise InvalidValue(f"device={given!r}: tables are on the 'cpu' or on 'cuda'")
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise InvalidValue(
            f"device={given!r}: {torch_arrays.devices_in_words()}; expected one of these, or 'cpu'"
        )
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
