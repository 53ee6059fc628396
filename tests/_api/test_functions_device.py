"""Tensors on a GPU as arguments and results of functions and maps, and in replicas."""

from __future__ import annotations

import pytest

from tests.support import launch

PROGRAM = """
import torch, weft

device = "cuda"
x = torch.arange(40.0, device=device).reshape(10, 4)


def double(row):
    assert row.is_cuda, row.device
    return row * 2


results = weft.map(double, list(x), n=2)
assert all(row.is_cuda for row in results)
assert torch.equal(torch.stack(results), x * 2)
big = torch.randn(300_000, device=device)
half = big.bfloat16().requires_grad_()
for found, given in zip(weft.map(lambda t: t, [big, half, big[::2]], n=2), [big, half, big[::2]]):
    assert found.is_cuda and found.dtype == given.dtype
    assert torch.equal(found.detach(), given.detach())
    assert found.requires_grad == given.requires_grad

weights = torch.full((4,), 3.0, device=device)
with weft.Team(2) as team:
    score = weft.function(lambda rows: rows @ weights, collect="gather", team=team)
    found = score(x)
    assert found.is_cuda and torch.equal(found, x @ weights)
    weights.mul_(2)  # what a function uses is what the driver has
    assert torch.equal(score(x), x @ weights)
    mean = weft.function(lambda rows: rows.mean(), collect="mean", team=team)
    assert mean(x).is_cuda and mean(x).item() == x.mean().item()
    model = torch.nn.Linear(4, 2).to(device)
    replica = weft.replicate(model, team=team)
    forward = weft.function(lambda rows: model(rows).detach(), collect="gather", team=team)
    assert torch.allclose(forward(x), model(x).detach(), atol=1e-6)
    with torch.no_grad():
        model.weight.fill_(1.0)
    replica.broadcast()
    assert torch.allclose(forward(x), model(x).detach(), atol=1e-6)
    replica.all_reduce("mean")
    assert next(model.parameters()).is_cuda
print("done")
"""


@pytest.mark.gpu
def test_tensors_on_a_gpu() -> None:
    outcome = launch(PROGRAM, 1)
    assert outcome.code == 0, outcome
    assert "done" in outcome.out, outcome
