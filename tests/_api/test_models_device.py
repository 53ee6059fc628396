"""ModelTable of a model whose parameters are on a device: the same values as through the host.

Ranks without a GPU keep tensors in memory of the host, as `device="cpu:0"` says.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import weft
from tests.gpus import obstacle
from tests.support import run_ranks
from weft.errors import InvalidValue

HOST = "cpu:0"


def all_of_it(group: Any, device: str) -> list[str]:
    same_as_through_the_host(group, device)
    where_it_lives(group, device)
    models_that_change(group, device)
    return refused(group, device)


def network(kind: str) -> Any:
    """Four dtypes, a buffer of integers, a frozen parameter, and one in another order."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2).double()]
    layers.append(torch.nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last))
    layers.append(torch.nn.Linear(2, 2).bfloat16())
    layers[0].bias.requires_grad_(False)
    net = torch.nn.Sequential(*layers)
    net.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
    return net.to(kind)


def made(model: Any, device: str, **options: Any) -> Any:
    """A table where the model is: on a GPU by default."""
    table = weft.ModelTable(model, device=HOST if device == HOST else None, **options)
    for one in table.tables:
        assert one._spec.device == (HOST if device == HOST else "cuda:0"), one
    return table


def same_as_through_the_host(group: Any, device: str) -> None:
    import torch

    kind = torch.device(device).type
    for consistency, updater in (("bsp", "add"), ("bsp", "momentum"), ("async", "add")):
        far = network(kind)
        near = copy.deepcopy(far)
        options = {"consistency": consistency, "updater": updater}
        tables = [
            weft.ModelTable(near, device="cpu", **options),
            made(far, device, **options),
        ]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (near, far)]
        group.barrier()
        for turn in range(4):
            for net, table, optimizer in zip((near, far), tables, optimizers, strict=True):
                for number, parameter in enumerate(net.parameters()):
                    parameter.grad = torch.full_like(parameter, (group.rank + turn + number) / 8)
                optimizer.step()
                with torch.no_grad():
                    net[1].num_batches_tracked += group.rank + 1
                    net.seen[turn % 3] = True
                if consistency == "bsp":
                    assert table.sync()
                    continue
                for one in range(group.size):  # in one order: sums of floats depend on it
                    if one == group.rank:
                        assert table.sync()
                    group.barrier()
        group.barrier()
        for one in range(group.size) if consistency != "bsp" else ():
            if one == group.rank:
                assert all(table.sync() for table in tables)
            group.barrier()
        for name, expected in near.state_dict().items():
            found = far.state_dict()[name]
            assert (found.dtype, found.device) == (expected.dtype, expected.device), name
            assert found.stride() == expected.stride(), name
            if updater == "add":
                assert torch.equal(found, expected), (name, consistency, found, expected)
            else:
                assert torch.allclose(found.double(), expected.double(), 1e-4, 1e-4), name


def where_it_lives(group: Any, device: str) -> None:
    """A model of plain numbers lives in the memory of the table's values; alone, in the table."""
    import torch

    kind = torch.device(device).type
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1)).to(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)  # four ranks' steps add up
    memory = [parameter.data_ptr() for parameter in net.parameters()]
    table = made(net, device, every=2)
    lives = [parameter.data_ptr() for parameter in net.parameters()]
    assert not set(memory) & set(lives)
    assert lives[1] - lives[0] == 4 * 64, lives  # 35 numbers, and room up to the next
    for step in range(4):
        loss = net(torch.full((3, 5), 1.0 + group.rank, device=kind)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert table.sync() == bool(step % 2)
    group.barrier()
    table.sync()
    table.sync()
    group.barrier()
    [rows] = table.tables
    found = rows.get()
    assert torch.equal(found[:35].view(7, 5), net[0].weight.detach())
    assert [parameter.data_ptr() for parameter in net.parameters()] == lives
    if group.size == 1:
        assert rows._store.exclusive_rows().data_ptr() == lives[0]  # type: ignore[union-attr]
        before = net[1].bias.detach().clone()
        rows.add(torch.ones_like(found))
        assert torch.equal(net[1].bias.detach(), before + 1)
    # parts of one tensor, and tensors in a dict, stay where they are
    whole = torch.arange(6.0, device=kind)
    model = {"a": whole[:2], "b": whole[2:]}
    both = made(model, device)
    group.barrier()
    model["a"] += 1
    both.sync()
    group.barrier()
    both.sync()
    assert whole.tolist()[:2] == [group.size, 1 + group.size], whole
    assert model["a"].data_ptr() == whole.data_ptr()
    group.barrier()


def models_that_change(group: Any, device: str) -> None:
    """What was put elsewhere is found again; what has another shape is refused."""
    import torch

    kind = torch.device(device).type
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(kind)
    table = made(net, device)
    group.barrier()
    with torch.no_grad():
        net[0].weight.fill_(3.0)
        net[1] = torch.nn.Linear(2, 2).to(kind)  # other tensors
        net[1].bias.fill_(5.0)
    net[0].weight.data = net[0].weight.data.clone()  # as `net.to()` does
    group.barrier()
    if group.rank == 0:
        table.sync()
    group.barrier()
    if group.rank:
        with torch.no_grad():
            net[0].weight.copy_(table.tables[0].get()[:4].view(2, 2))
    group.barrier()
    got = table.tables[0].get().cpu().numpy()
    assert np.allclose(got[:4], 3.0), got
    assert np.allclose(got[-64:][:2], 5.0), got
    group.barrier()
    net[1] = torch.nn.Linear(2, 3).to(kind)
    with pytest.raises(InvalidValue, match="when its ModelTable was made"):
        table.sync()
    group.barrier()


def refused(group: Any, device: str) -> list[str]:
    import torch

    found = []
    models = [torch.nn.Linear(2, 2), {"w": np.zeros(3)}]
    for model in models if device != HOST else models[1:]:
        with pytest.raises(InvalidValue) as caught:
            weft.ModelTable(model, device=device)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_of_tensors(ranks: int) -> None:
    for [text] in run_ranks(ranks, all_of_it, HOST):
        assert "only torch's are kept on a device" in text


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_models_on_a_gpu(ranks: int) -> None:
    for elsewhere, text in run_ranks(ranks, all_of_it, "cuda"):
        assert "weight is on cpu, for a ModelTable with device='cuda:0'" in elsewhere
        assert "only torch's are kept on a device" in text


def test_a_device_that_is_not_there() -> None:
    if not obstacle():
        pytest.skip("there is a GPU here")
    weft.init()
    with pytest.raises(InvalidValue, match="device='cuda'"):
        weft.ModelTable({"w": np.zeros(3)}, device="cuda")
