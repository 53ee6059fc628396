"""What every engine does with tensors.

Ranks load PyTorch for more than a second, and what is done with tensors hangs neither on who
launched them nor on how many they are: so each launcher and each size has its turn, and `make soak`
has all of both.
"""

from __future__ import annotations

import operator
import sys
from functools import reduce
from typing import Any

import numpy as np

import weft
from tests.contracts.bodies import Bodies
from weft.engines.base import Group
from weft.engines.local.collectives.transport import ROOM
from weft.errors import InvalidType

BODIES = Bodies(each_in="session")
#: elements of 8 bytes that do not fit a slot
LARGE = ROOM // 8 + 1001


def given(rank: int, shape: Any) -> Any:
    """What a rank gives."""
    return np.random.default_rng(rank).normal(size=shape).astype("float32")


def usable(group: Group) -> bool:
    """Whether all ranks are in step, and can make and use a table."""
    table = weft.ArrayTable(2)
    table.add([group.rank, 1])
    group.barrier()
    return bool(table.get().tolist() == [sum(range(group.size)), group.size])


@BODIES.of_all
def in_tables(group: Group) -> bool:
    start = np.arange(6, dtype="f4").reshape(3, 2)
    expected = start + group.size
    if group.rank:  # the library is a rank's own choice: these have not loaded it yet
        assert "torch" not in sys.modules
        table = weft.MatrixTable(start)
        group.barrier()
        table.add(np.ones((3, 2)))
        group.barrier()
        assert np.array_equal(table.get(), expected)
        return usable(group)
    import torch

    torch.set_num_threads(1)  # mpirun leaves every rank all cores
    table = weft.MatrixTable(torch.from_numpy(start).clone().requires_grad_(), dtype=torch.float32)
    group.barrier()
    table.add(torch.ones(2, 3, dtype=torch.float64).T)
    group.barrier()
    tensor = torch.from_numpy(expected)
    found = table.get()
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.float32
    assert torch.equal(found, tensor)
    assert torch.equal(table.get([2, 2]), tensor[[2, 2]])
    assert torch.equal(table.get_async([0]).wait(), tensor[:1])
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        assert torch.equal(table.get(torch.tensor([2, 0, 2], dtype=dtype)), tensor[[2, 0, 2]])
        assert torch.equal(table.get(torch.tensor(1, dtype=dtype)), tensor[1])
    for out in (torch.zeros(3, 2), torch.zeros(2, 3).T, torch.zeros(3, 2, requires_grad=True)):
        assert table.get(out=out) is out
        assert torch.equal(out, tensor)
    array = np.zeros((3, 2), "f4")
    assert table.get(out=array) is array
    assert np.array_equal(array, expected)
    return usable(group)


def test_in_tables(outcome_of_few: Any) -> None:
    """Tensors go in everywhere, and come out where the table was made from one."""
    assert all(outcome_of_few(in_tables))


@BODIES.of_all
def in_collectives(group: Group) -> list[bytes]:
    import torch

    size, rank = group.size, group.rank
    torch.set_num_threads(1)  # mpirun leaves every rank all cores
    bits = []
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool)
    for length in (7, 2 * LARGE):
        for dtype in dtypes if length == 7 else dtypes[:1]:
            parts = [torch.from_numpy(given(of, (length, 2))) for of in range(size)]
            parts = [(part * 3).to(dtype) for part in parts]
            mine, half = parts[rank], dtype in (torch.bfloat16, torch.float16)
            totals: dict[str, Any] = {}  # of each host, in rank order
            for host, part in zip(group.hosts, parts, strict=True):
                own = part.float() if half else part
                totals[host] = totals[host] + own if host in totals else own
            total = reduce(operator.add, totals.values())
            out = torch.empty(2, length, dtype=dtype).T
            for found in (
                group.all_reduce(mine),
                group.all_reduce(mine, out=out),
                group.all_reduce(mine.clone().T).T,
                group.broadcast(group.reduce(mine, root=size - 1), size - 1),
            ):
                assert found.dtype == dtype
                assert torch.equal(found, total.to(dtype)), (dtype, length)
            if half:
                mean = (total / size).to(dtype)
                assert torch.equal(group.all_reduce(mine, "mean"), mean)
            assert torch.equal(group.all_gather(mine), torch.cat(parts))
            assert torch.equal(group.scatter(mine, 0), parts[0].tensor_split(size)[rank])
            bits.append(found.contiguous().view(torch.uint8).numpy().tobytes()[:5000])
    model = {"w": torch.nn.Parameter(torch.full((3,), float(rank))), "b": torch.tensor(1.0)}
    found = group.all_reduce(model, "mean", out=model)
    assert found["w"].tolist() == [(size - 1) / 2] * 3
    assert found["w"].requires_grad
    for device in ("meta",):
        try:
            group.all_reduce(torch.empty(2, device=device))
        except InvalidType as error:
            assert f"a tensor on {device}" in str(error)
            assert "which has no values" in str(error)
        else:
            raise AssertionError(device)
    assert usable(group)
    return bits


def test_in_collectives(outcome_of_few: Any) -> None:
    """CPU tensors of every dtype come back as tensors; bfloat16 is summed in float32."""
    first, *others = outcome_of_few(in_collectives)
    assert all(other == first for other in others)
    assert len(first) == 6
