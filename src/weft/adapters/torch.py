"""PyTorch's tensors in the memory of the CPU."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from weft.errors import InvalidType

NAME = "torch"
_BFLOAT16 = "bfloat16"


def is_mine(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def view(value: Any) -> tuple[NDArray[Any], str]:
    tensor = value.detach()
    if tensor.device.type != "cpu":
        raise InvalidType(
            f"a tensor on {tensor.device}: tensors on a GPU cannot be used yet; pass tensor.cpu()"
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise InvalidType(
            f"a tensor of layout {tensor.layout}, dtype {tensor.dtype}: only dense tensors of "
            "numbers can be used; pass tensor.to_dense() or tensor.dequantize()"
        )
    resolved = tensor.resolve_conj().resolve_neg()
    element = str(tensor.dtype).removeprefix("torch.")
    if element == _BFLOAT16:
        return resolved.view(torch.uint16).numpy(), element
    try:
        array = resolved.numpy()
    except TypeError as error:
        raise InvalidType(f"a tensor of dtype {tensor.dtype} has no NumPy form: {error}") from None
    if tensor.is_conj() or tensor.is_neg():
        array.flags.writeable = False  # a copy: results written to it would be lost
    return array, element


def deliver(array: NDArray[Any], element: str) -> Any:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if element == _BFLOAT16 else tensor
