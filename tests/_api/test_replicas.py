"""`replicate`: one copy per rank, collectives on them, and functions that mention them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import weft

SIZE = 3
#: the team is for all tests: a worker loads torch in two seconds
SHARES = True


@pytest.fixture(scope="module")
def team() -> Iterator[weft.Team]:
    with weft.Team(SIZE) as made:
        yield made


def per_rank(copies: weft.Replica, value: Any) -> None:
    """Set each rank's values to its rank."""
    for rank in range(SIZE):
        copies.set(rank, np.full_like(np.asarray(value), rank))


@pytest.mark.parametrize("length", [3, 30_000])
def test_every_rank_has_its_own(team: weft.Team, length: int) -> None:
    """What one rank's copy becomes no other's does, small or large; get() is a copy."""
    values = np.zeros(length)
    copies = weft.replicate(values, team=team)
    per_rank(copies, values)
    assert [copies.get(rank)[-1] for rank in range(SIZE)] == [0, 1, 2]
    mine = copies.get(0)
    mine += 5
    assert values[0] == 0
    assert copies.shapes() == [(length,)] * SIZE
    assert not copies.same()
    copies.broadcast()
    assert copies.same()
    assert weft.same(values, team=team)


def test_collectives(team: weft.Team) -> None:
    """Each of them does to all copies what its name says."""
    values = np.zeros(4)
    copies = weft.replicate(values, team=team)
    for op, expected in {"sum": 3, "mean": 1, "max": 2, "min": 0, "prod": 0}.items():
        per_rank(copies, values)
        copies.all_reduce(op)
        assert all((copies.get(rank) == expected).all() for rank in range(SIZE))
    per_rank(copies, values)
    copies.reduce("sum")
    assert [copies.get(rank)[0] for rank in range(SIZE)] == [3, 1, 2]
    assert copies.gather().shape == (12,)
    assert copies.gather(stack=True).tolist() == [[3.0] * 4, [1.0] * 4, [2.0] * 4]
    copies.broadcast(np.arange(4.0))
    assert values.tolist() == [0, 1, 2, 3]
    assert copies.get(2).tolist() == [0, 1, 2, 3]
    values *= 2  # the driver's copy is the user's own
    copies.broadcast()
    assert copies.get(1).tolist() == [0, 2, 4, 6]


def test_scatter(team: weft.Team) -> None:
    """Rows are split as even as can be, all of them or a batch."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2)
    copies = weft.replicate(tensor, team=team)
    copies.scatter(np.arange(7, dtype=np.float32))
    assert copies.shapes() == [(3,), (2,), (2,)]
    assert tensor.tolist() == [0, 1, 2]
    assert copies.gather().tolist() == list(range(7))
    copies.scatter(np.arange(7, dtype=np.float32), batch=slice(None, None, -2))
    assert copies.gather().tolist() == [6, 4, 2, 0]
    copies.all_gather()
    assert tensor.tolist() == [6, 4, 2, 0]
    assert copies.same()


def test_shapes_that_differ(team: weft.Team) -> None:
    """Copies of different lengths, changed where they are, gather correctly."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(1, 2)
    copies = weft.replicate(tensor, team=team)
    for rank in range(SIZE):
        copies.set(rank, np.full((rank + 1, 2), rank, np.float32))
    double = weft.function(
        lambda x: [tensor.mul_(2).sum().item()], collect="gather", team=team, check=None
    )
    assert double(np.ones(SIZE)) == [0.0, 8.0, 24.0]
    assert copies.shapes() == [(1, 2), (2, 2), (3, 2)]
    assert copies.gather()[:, 0].tolist() == [0, 2, 2, 4, 4, 4]
    with pytest.raises(weft.InvalidValue, match=r"stack=True.*rank 1 has \(2, 2\)"):
        copies.gather(stack=True)
    copies.all_gather()
    assert copies.same()
    assert tensor.shape == (6, 2)


def test_one_copy_for_all_functions(team: weft.Team) -> None:
    """Globals, closures, attributes, partials, containers: whoever mentions it has the worker's
    own, and sees what others make of it there."""
    weights = np.zeros(2)
    table = {"w": np.zeros(1)}
    copies, tables = weft.replicate(weights, team=team), weft.replicate(table, team=team)
    assert weft.replicate(weights, team=team)._number == copies._number

    class Model:
        def __init__(self) -> None:
            self.weights = weights

        def add(self, x: Any) -> float:
            self.weights += len(x)
            return 0.0

    def read(held: Any, x: Any) -> list[float]:
        return [float(held[0])]

    def replace(x: Any) -> float:
        table["w"] = table["w"] + 1  # in the dict itself
        return 0.0

    weft.function(Model().add, collect="sum", team=team)(np.ones(7))
    assert [copies.get(rank)[0] for rank in range(SIZE)] == [3, 2, 2]
    one_each: dict[str, Any] = {"collect": "gather", "team": team, "check": None}
    partial = weft.function(functools.partial(read, weights), **one_each)
    assert partial(np.ones(SIZE)) == [3, 2, 2]
    by_replica = weft.function(lambda x: [float(copies.value[0])], **one_each)
    assert by_replica(np.ones(SIZE)) == [3, 2, 2]
    weft.function(replace, collect="sum", team=team)(np.ones(SIZE))
    assert [tables.get(rank)[0][0] for rank in range(SIZE)] == [1, 1, 1]


def test_modules(team: weft.Team) -> None:
    """A module's parameters and buffers, an optimizer that mentions them, and its state."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(200, 150), torch.nn.BatchNorm1d(150))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(4, 200)).sum().backward()
    optimizer.step()
    copies = weft.replicate(model, team=team)
    assert copies.same()
    assert len(copies.shapes()[1]) == len(model.state_dict())

    def step(x: Any) -> list[float]:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * float(x[0])
        optimizer.step()
        return [model[0].bias[0].item()]

    before = model[0].bias[0].item()
    f = weft.function(step, collect="gather", team=team, check=None)
    found = f(np.array([1.0, 2.0, 3.0]))
    steps = np.diff([before, *found])[1:]
    assert np.allclose(steps, -1, atol=1e-5)  # each rank a step of its own, on its own copy
    assert np.allclose(copies.get(2)[1][0], found[2])
    copies.all_reduce("mean")
    assert weft.same(model, team=team)
    assert model[0].bias[0].item() == pytest.approx(found[1], abs=1e-5)


def test_holders(team: weft.Team) -> None:
    """A pytree of JAX in a holder; its arrays are replaced, in every rank."""
    jnp = pytest.importorskip("jax.numpy")
    holder = weft.Holder({"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)})
    copies = weft.replicate(holder, team=team)

    def update(x: Any) -> float:
        holder.value = {key: value + len(x) for key, value in holder.value.items()}
        return 0.0

    weft.function(update, collect="sum", team=team)(np.ones(7))
    assert [float(copies.get(rank)[0][0]) for rank in range(SIZE)] == [3, 2, 2]
    copies.all_reduce("sum")
    assert float(holder.value["w"][0, 0]) == 7.0
    assert copies.same()


def test_lists_and_numbers_as_values(team: weft.Team) -> None:
    """Values may be lists and numbers, and of narrower dtypes; what would be lost is refused."""
    values = [np.zeros(2, np.float32), np.zeros((), np.int64)]
    copies = weft.replicate(values, team=team)
    copies.set(1, [[1.5, 2.5], 3])
    assert copies.get(1)[0].tolist() == [1.5, 2.5]
    assert copies.get(1)[1] == 3
    copies.broadcast([np.ones(2, np.float16), np.int8(4)])
    assert values[0].tolist() == [1.0, 1.0]
    with pytest.raises(weft.InvalidValue, match=r"float64.*float32"):
        copies.set(1, [np.full(2, 0.1), 1])
    single = weft.replicate([np.zeros(3)], team=team)
    single.set(2, [np.ones(3)])
    assert single.get(2)[0].tolist() == [1, 1, 1]


def test_what_bad_input_gets(team: weft.Team) -> None:
    """Typed errors that name the value and the expectation; nothing has changed after them."""
    values = np.zeros(2)
    copies = weft.replicate(values, team=team)
    with pytest.raises(weft.InvalidValue, match="rank=3: the team has ranks 0 to 2"):
        copies.get(3)
    with pytest.raises(weft.InvalidValue, match="rank=-1"):
        copies.set(-1, values)
    with pytest.raises(weft.InvalidType, match=r"rank=1\.0"):
        copies.get(1.0)  # type: ignore[arg-type]
    with pytest.raises(weft.InvalidValue, match=r"op='median'.*'sum'"):
        copies.all_reduce("median")
    with pytest.raises(weft.InvalidValue, match=r"cannot change its shape.*weft\.Holder"):
        copies.broadcast(np.zeros(3))
    with pytest.raises(weft.InvalidValue, match="scatter of 2 rows over 3 ranks"):
        copies.scatter(np.zeros(2))
    with pytest.raises(weft.InvalidValue, match="the object has 2 arrays; got values for 3"):
        weft.replicate([values, np.ones(1)], team=team).set(1, [values] * 3)
    with pytest.raises(weft.InvalidValue, match=r"not replicated in this team"):
        weft.same(np.zeros(2), team=team)
    with pytest.raises(weft.InvalidType, match="cannot be sent"):
        weft.replicate(threading.Lock(), team=team)
    with pytest.raises(weft.InvalidType, match="a str has no values"):
        weft.replicate("text", team=team).broadcast()
    assert copies.same()
    with pytest.raises(weft.InvalidType, match=r"write numpy\.asarray\(replica\.value\)"):
        np.asarray(copies)
    assert repr(copies) == "<Replica of a ndarray in 3 ranks>"
