"""PyTorch tensors and modules, on any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy

from weft.adapters import containers, torch_arrays
from weft.adapters.contents import Contents
from weft.errors import InvalidType, InvalidValue

NAME = "torch"
_BFLOAT16 = "bfloat16"
#: classes whose pickles have no more than their contents; a subclass may have more
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: kinds of devices whose tensors an engine may use where they are; others are copied to the host
DEVICES = {"cuda"}


def is_mine(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def describe(value: Any) -> tuple[str, np.dtype[Any], tuple[int, ...], str]:
    return *_form(value.dtype), tuple(value.shape), str(value.device)


@lru_cache(maxsize=256)
def _form(dtype: torch.dtype) -> tuple[str, np.dtype[Any]]:
    """Return the name of a dtype, and the NumPy dtype of its view: uint16 for bfloat16."""
    array, element = view(torch.empty(0, dtype=dtype))
    return element, array.dtype


def view(value: Any) -> tuple[NDArray[Any], str]:
    """Return a view; of a tensor on a device a copy on the host."""
    tensor = dense(value)
    element = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu":
        return torch_arrays.stage([tensor])[0], element
    if element == _BFLOAT16:
        return tensor.view(torch.uint16).numpy(), element
    try:
        array = tensor.numpy()
    except TypeError as error:
        raise InvalidType(f"a tensor of dtype {tensor.dtype} has no NumPy form: {error}") from None
    if value.is_conj() or value.is_neg():
        array.flags.writeable = False  # a copy: results written to it would be lost
    return array, element


def on_device(value: Any) -> Any:
    """Return a tensor on a device, without a copy, if an engine may use it there, else None."""
    return dense(value) if value.device.type in DEVICES else None


def deliver_tensor(tensor: Any) -> Any:
    return tensor


def dense(value: Any) -> Any:
    """Return a tensor without its gradient. Raise InvalidType unless all its numbers are there."""
    tensor = value.detach()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise InvalidType(
            f"a tensor of layout {tensor.layout}, dtype {tensor.dtype}: only dense tensors of "
            "numbers can be used; pass tensor.to_dense() or tensor.dequantize()"
        )
    if tensor.is_meta:
        raise InvalidType(
            f"a tensor on {tensor.device}, which has no values; make it on a device that has"
        )
    return tensor.resolve_conj().resolve_neg()


def deliver(array: NDArray[Any], element: str) -> Any:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if element == _BFLOAT16 else tensor


def contents(value: Any) -> Contents | None:
    """Return the memory of a dense tensor, or a copy of it on the host. Torch's own count of
    changes misses those of `tensor.data`."""
    if type(value) not in _PLAIN or value.is_meta or value.layout != torch.strided:
        return None
    try:
        array, element = view(value)
    except InvalidType:  # a dtype that NumPy does not have
        return None
    kind = type(value).__name__, element, value.requires_grad, value.stride(), str(value.device)
    return Contents(variable=(kind, array, value.__dict__ or None))


def is_model(value: Any) -> bool:
    return containers.all_are(value, (torch.nn.Module, torch.Tensor))


def names(model: Any) -> list[str]:
    return list(_parameters(model))


def read(model: Any) -> list[NDArray[Any]]:
    return [read_array(tensor) for tensor in _parameters(model).values()]


def write(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    parameters = _parameters(model)
    containers.validate_forms(_forms(parameters), arrays)
    with torch.no_grad():
        for tensor, array in zip(parameters.values(), arrays, strict=True):
            tensor.copy_(_tensor(array))


def parts(model: Any) -> list[Any]:
    return list(_parameters(model).values())


def device_of(model: Any) -> str:
    """Return the GPU on which all of a model lies; "cpu" if there is none."""
    from weft.adapters import torch_values

    return torch_values.device_of(model)


def values_on(device: str) -> Any:
    """Return what reads and writes a model's values as tensors on a device."""
    from weft.adapters import torch_values

    return torch_values.DeviceValues(device)


def validate_on(model: Any, device: str) -> None:
    """Raise InvalidValue unless all of a model lies on a device."""
    from weft.adapters import torch_values

    torch_values.validate_on(model, device)


def reshape(model: Any, arrays: Sequence[NDArray[Any]]) -> None:
    for tensor, array in zip(parts(model), arrays, strict=True):
        tensor.data = torch.tensor(array, dtype=tensor.dtype, device=tensor.device)


def live_in(model: Any, arrays: Sequence[NDArray[Any]]) -> bool:
    """Make the parameters live in these arrays, until they are moved or cast: `module.to(...)`."""
    return tensors_live_in(_parameters(model), arrays)


def read_array(tensor: Any) -> NDArray[Any]:
    """Return a tensor's values, from any device, in float32 if NumPy does not have their dtype."""
    near = tensor if tensor.is_meta else tensor.detach().cpu()  # the meta device has no values
    return view(_in_numpys_dtypes(near))[0]


def tensors_live_in(tensors: dict[str, Any], arrays: Sequence[NDArray[Any]]) -> bool:
    """Make all tensors live in the arrays, or none. Return whether they do."""
    containers.validate_forms(_forms(tensors), arrays)
    pairs = list(zip(tensors.values(), arrays, strict=True))
    if not all(_can_live_in(tensor, array) for tensor, array in pairs):
        return False
    memory = [tensor.untyped_storage().data_ptr() for tensor, _ in pairs if tensor.numel()]
    if len(set(memory)) < len(memory):
        return False  # views of one tensor, which somebody may hold
    for tensor, array in pairs:
        tensor.data = torch.from_numpy(array)
    return True


def _can_live_in(tensor: Any, array: NDArray[Any]) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype == _in_numpys_dtypes(tensor.detach()).dtype
        and array.flags.writeable
        and array.flags.c_contiguous
    )


def _parameters(model: Any) -> dict[str, Any]:
    """Return the tensors in the order of `state_dict`, without what its hooks do to them."""
    return containers.unique(
        (containers.parameter_name(place, name), tensor)
        for place, leaf in containers.leaves(model)
        for name, tensor in _tensors_of(leaf)
    )


def _tensors_of(leaf: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(leaf, torch.Tensor):
        yield "", leaf
        return
    for place, module in leaf.named_modules():
        lasting = [
            (name, buffer)
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        for name, tensor in [*module.named_parameters(recurse=False), *lasting]:
            if is_lazy(tensor):
                raise InvalidValue(
                    f"{containers.parameter_name(place, name)} has no shape yet: pass a batch "
                    "through the module first"
                )
            yield containers.parameter_name(place, name), tensor


def _forms(tensors: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dtype and shape in which each tensor is read."""
    return {
        name: (read_array(torch.empty(0, dtype=tensor.dtype)).dtype, tensor.shape)
        for name, tensor in tensors.items()
    }


def _in_numpys_dtypes(tensor: Any) -> Any:
    known = (torch.float16, torch.float32, torch.float64)
    return tensor.float() if tensor.is_floating_point() and tensor.dtype not in known else tensor


def _tensor(array: NDArray[Any]) -> Any:
    """Return a tensor with an array's values, to copy from."""
    plain = np.asarray(array, order="C")
    return torch.from_numpy(plain) if plain.flags.writeable else torch.tensor(plain)
