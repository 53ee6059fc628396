"""PyTorch's tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weft.adapters import torch as adapter
from weft.errors import InvalidType

DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_and_arrays_share_memory_both_ways(dtype: str, shape: tuple[int, ...]) -> None:
    """A view sees the tensor's memory, and a delivered tensor the array's, in every dtype."""
    tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
    view, element = adapter.view(tensor)
    assert (view.shape, element) == (shape, dtype)
    assert view.itemsize == tensor.element_size()
    assert adapter.describe(tensor) == (dtype, view.dtype, shape, "cpu")
    if view.size:
        assert view.__array_interface__["data"][0] == tensor.data_ptr()
    back = adapter.deliver(view, element)
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.data_ptr() == tensor.data_ptr()


def test_strides_are_kept() -> None:
    """Transposed and sliced tensors are seen as they are, without a copy."""
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.arange(12, dtype=dtype).reshape(3, 4)
        for one in (tensor.T, tensor[:, ::2], tensor[1:]):
            view, _ = adapter.view(one)
            assert view.shape == tuple(one.shape)
            assert not view.flags.owndata
            view[...] = 0
            assert one.count_nonzero() == 0


def test_gradients_do_not_stand_in_the_way() -> None:
    """A parameter's numbers can be read and written without its gradient."""
    parameter = torch.nn.Parameter(torch.ones(2))
    view, _ = adapter.view(parameter)
    view[...] = 5
    assert parameter.tolist() == [5, 5]


def test_lazy_conjugates_are_resolved() -> None:
    """What is only marked as conjugated or negated is read right, and takes no results."""
    tensor = torch.tensor([1 + 2j])
    for lazy, expected in ((tensor.conj(), [1 - 2j]), (tensor.conj().imag, [-2.0])):
        view, _ = adapter.view(lazy)
        assert view.tolist() == expected
        assert not view.flags.writeable


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(2, device="meta"), "a tensor on meta, which has no values"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "float8_e4m3fn has no NumPy form"),
    ],
)
def test_other_tensors_are_refused(tensor: Any, words: str) -> None:
    """On a device, sparse, or of numbers that NumPy does not have: the message says which."""
    with pytest.raises(InvalidType) as caught:
        adapter.view(tensor)
    assert words in str(caught.value)


def test_a_tensor_is_described_where_it_is() -> None:
    """Without a view, so on any device."""
    tensor = torch.empty((2, 3), dtype=torch.bfloat16, device="meta")
    assert adapter.describe(tensor) == ("bfloat16", np.dtype("u2"), (2, 3), "meta")


def test_only_tensors_are_taken() -> None:
    """NumPy's arrays are another adapter's."""
    assert adapter.is_mine(torch.ones(1))
    assert not adapter.is_mine(np.ones(1))
