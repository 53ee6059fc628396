"""Tensors among items, arguments and results."""

from __future__ import annotations

import pytest

from weft.engines.local.pool.payload import load, pack

torch = pytest.importorskip("torch")


def test_a_small_view_takes_its_own_bytes_with_it() -> None:
    """Not those of the large tensor that it is a part of."""
    rows = torch.arange(1_000_000)
    payload = pack([rows[500:510]], 0)
    assert len(payload.data) < 1000
    (found,) = load(payload.data)
    assert torch.equal(found, rows[500:510])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.arange(12.0).reshape(3, 4).T,
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, requires_grad=True),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(2).to_sparse(),
    ],
    ids=str,
)
def test_small_tensors_arrive_as_they_were(tensor: torch.Tensor) -> None:
    """Whatever their kind, and writable."""
    payload = pack([tensor], 0)
    (found,) = load(payload.data)
    assert found.dtype == tensor.dtype
    assert found.requires_grad == tensor.requires_grad
    assert found.layout == tensor.layout
    assert torch.equal(found.to_dense(), tensor.to_dense())
    with torch.no_grad():
        if found.layout is torch.strided:
            found.zero_()
