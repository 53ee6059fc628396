"""The values of a torch model whose parameters are all on one device, as tensors there.

To find a module's tensors takes torch half a millisecond, so they are found once, and afterwards it
is only checked that they are where they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from weft.adapters import containers, torch_rows
from weft.adapters import torch as adapter
from weft.errors import InvalidValue

#: elements at whose multiples values begin in a flat tensor: kernels load several at once
_ALIGN = 64
_KINDS = {torch.bool: "b"}
#: kinds of numbers by dtype, as NumPy has them; every other is a float
_KINDS |= dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64), "i")
_KINDS |= dict.fromkeys((torch.uint8, torch.uint16, torch.uint32, torch.uint64), "u")
_KINDS |= dict.fromkeys((torch.complex64, torch.complex128), "c")


class DeviceValues:
    """Read and write one model's values as tensors: see `HostValues`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._found: _Found | None = None

    def read(self, model: Any) -> list[Any]:
        if self._found is None or not self._found.is_still(model):
            self._found = _Found(model)
        return self._found.tensors

    def write(self, model: Any, views: Sequence[Any], like: Sequence[Any]) -> None:
        self.copy(like, views)

    def live_in(self, model: Any, views: Sequence[Any], values: Sequence[Any]) -> bool:
        memory = [one.untyped_storage().data_ptr() for one in values if one.numel()]
        if len(set(memory)) < len(memory):
            return False  # views of one tensor, which somebody may hold
        for view, one in zip(views, values, strict=True):
            if (one.dtype, one.device) != (view.dtype, view.device) or not one.is_contiguous():
                return False
        for view, one in zip(views, values, strict=True):
            one.data = view
        return True

    def form(self, value: Any) -> tuple[Any, str]:
        return value.shape, _KINDS.get(value.dtype, "f")

    def describe(self, value: Any) -> tuple[tuple[int, ...], str]:
        return tuple(value.shape), torch_rows.element_of(value)

    def stored_as(self, value: Any) -> np.dtype[Any]:
        if value.dtype == torch.bool:
            return np.dtype(np.int8)
        known = (torch.float16, torch.float32, torch.float64)
        if value.is_floating_point() and value.dtype not in known:
            return np.dtype(np.float32)  # a change is a difference, with more digits
        return np.dtype(torch_rows.element_of(value))

    def zeros(self, values: Mapping[int, Any], dtype: np.dtype[Any]) -> Any:
        size = sum(_padded(value.numel()) for value in values.values())
        return torch_rows.zeros((max(1, size),), dtype.name, self._device)

    def cut(self, flat: Any, values: Mapping[int, Any]) -> dict[int, Any]:
        views, start = {}, 0
        for index, value in values.items():
            views[index] = flat[start : start + value.numel()].view(value.shape)
            start += _padded(value.numel())
        return views

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(list(targets), list(sources))

    def clone(self, flat: Any) -> Any:
        return flat.clone()

    def subtract(self, new: Any, old: Any, out: Any) -> None:
        torch.sub(torch_rows.words(new), torch_rows.words(old), out=torch_rows.words(out))

    def same_memory(self, one: Any, other: Any) -> bool:
        return bool(one.data_ptr() == other.data_ptr())


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class _Found:
    """A model's tensors, and where each was found."""

    def __init__(self, model: Any) -> None:
        self.tensors = adapter.parts(model)
        modules = [
            one
            for _, leaf in containers.leaves(model)
            if isinstance(leaf, torch.nn.Module)
            for one in leaf.modules()
        ]
        #: what holds parameters, buffers and modules, and what each held
        self._holders = [(holder, dict(holder)) for one in modules for holder in _holders_of(one)]
        self._is_module = isinstance(model, torch.nn.Module)

    def is_still(self, model: Any) -> bool:
        """Return whether a model, the same module, has the same tensors. Of lists and dicts nobody
        knows: they are looked through again."""
        return self._is_module and all(
            len(holder) == len(held) and all(holder.get(key) is one for key, one in held.items())
            for holder, held in self._holders
        )


def _holders_of(module: Any) -> Iterator[dict[str, Any]]:
    for holder in (module._parameters, module._buffers, module._modules):
        if holder:
            yield holder


def device_of(model: Any) -> str:
    """Return the device on which all tensors of a model lie, if it is a GPU, else "cpu"."""
    places = {str(tensor.device) for tensor in adapter.parts(model)}
    [place] = places if len(places) == 1 else ["cpu"]
    return place if torch.device(place).type == "cuda" else "cpu"


def validate_on(model: Any, device: str) -> None:
    """Raise InvalidValue unless all tensors of a model lie on a device."""
    for name, tensor in zip(adapter.names(model), adapter.parts(model), strict=True):
        if not torch_rows.is_on(tensor, device):
            raise InvalidValue(
                f"{name} is on {tensor.device}, for a ModelTable with device={device!r}: move the "
                "model there first, model.to(device), or leave device= out"
            )
