"""ModelTable: a model's change is added, the latest is taken, whatever library the model is of."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.support import run_python, run_ranks
from weft.engines.base import Group
from weft.errors import Disagreement, InvalidType, InvalidValue, NotInitialized


def network(seed: int) -> Any:
    """Three dtypes, a buffer of integers, and a frozen parameter."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2).double()]
    layers[0].bias.requires_grad_(False)
    return torch.nn.Sequential(*layers)


@pytest.fixture
def traces(tmp_path: Path) -> dict[str, str]:
    """Where frameworks may leave what they leave behind in a process's temporary folder."""
    folder = tmp_path / "traces"
    folder.mkdir()
    return {"TMPDIR": str(folder)}


# with two ranks


def test_changes_add_up_and_the_masters_values_win() -> None:
    """Every rank starts from the master's values; after all have synced, everyone has the sum."""

    def body(group: Group) -> Any:
        net = network(group.rank)
        mine = {name: value.clone() for name, value in net.state_dict().items()}
        table = weft.ModelTable(net)
        start = {name: value.clone() for name, value in net.state_dict().items()}
        for _ in range(3):
            with torch.no_grad():
                net[0].weight += group.rank + 1
                net[2].weight += 1e-12  # lost if it were float32
                net[1].num_batches_tracked += 1
            table.sync()
        group.barrier()
        table.sync()
        types = {name: str(value.dtype) for name, value in net.state_dict().items()}
        return mine, start, net.state_dict(), types, net[0].bias.requires_grad

    results = run_ranks(2, body)
    masters = results[0][0]
    for _, start, end, types, trainable in results:
        assert all(torch.equal(start[name], value) for name, value in masters.items())
        assert torch.allclose(end["0.weight"] - start["0.weight"], torch.full((3, 4), 9.0))
        moved = end["2.weight"] - start["2.weight"]
        assert torch.allclose(moved, torch.full((2, 3), 6e-12).double(), rtol=1e-3)
        assert end["1.num_batches_tracked"] == start["1.num_batches_tracked"] + 6
        assert types["1.num_batches_tracked"] == "torch.int64"
        assert types["2.weight"] == "torch.float64"
        assert not trainable


def test_an_optimizer_made_before_goes_on(traces: dict[str, str]) -> None:
    """Training with an optimizer that was made before the table trains what is exchanged."""

    def body(group: Group) -> Any:
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        table = weft.ModelTable(net, consistency="bsp")
        random = torch.Generator().manual_seed(group.rank)
        for _ in range(400):
            x = torch.randn(64, 2, generator=random)
            loss = (net(x).squeeze(1) - (x[:, 0] * 2 - x[:, 1] + 0.5)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            table.sync()
        return net.weight.detach().numpy(), float(net.bias), float(loss)

    (weight, bias, loss), other = run_ranks(2, body, env=traces)
    assert np.allclose(weight, [[2, -1]], atol=0.05)
    assert abs(bias - 0.5) < 0.05
    assert loss < 0.01
    assert np.array_equal(weight, other[0])


def test_bsp_every_and_updaters() -> None:
    """Under bsp all ranks have equal bits after each exchange; with every=2 half the calls do
    nothing; an optimizer's rule takes the change for a step against the gradient."""

    def body(group: Group) -> Any:
        model = {
            "w": np.zeros(3, np.float32),
            "mask": np.array([True, False]),
            "n": np.zeros(1, int),
        }
        table = weft.ModelTable(model, consistency="bsp", every=2)
        seen = []
        for turn in range(4):
            model["w"] += 0.1 * (group.rank + 1)
            model["n"] += 1
            seen.append((table.sync(), model["w"].tobytes(), int(model["n"][0])))
            assert turn < 4
        server = {"w": np.zeros(2)}
        moved = weft.ModelTable(server, updater=weft.updaters.sgd(lr=0.5), consistency="bsp")
        server["w"] += 1 + group.rank
        moved.sync()
        return seen, model["mask"].tolist(), server["w"].tolist()

    first, second = run_ranks(2, body)
    assert [did for did, _, _ in first[0]] == [False, True, False, True]
    assert first[0][1] == second[0][1]
    assert first[0][3] == second[0][3]
    assert first[0][3][2] == 8
    assert first[1] == [True, False]
    assert first[2] == second[2] == [1.5, 1.5]


def test_other_libraries(traces: dict[str, str]) -> None:
    """Keras, PyTensor and JAX models are exchanged as torch's are."""

    def body(group: Group) -> Any:
        os.environ["KERAS_BACKEND"] = "torch"
        import jax.numpy as jnp
        import keras
        import pytensor

        rank = group.rank
        layers = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        shared = [pytensor.shared(np.full(2, float(rank)), name="w"), pytensor.shared(1.0 * rank)]
        holder = weft.Holder({"a": jnp.full(2, float(rank)), "b": [jnp.zeros((1, 2))]})
        tables = [weft.ModelTable(model) for model in (layers, shared, holder)]
        start = [layers.get_weights()[0], shared[0].get_value(), np.asarray(holder.value["a"])]
        layers.set_weights([weight + 1 for weight in layers.get_weights()])
        shared[0].set_value(shared[0].get_value() + 1)
        holder.value = {"a": holder.value["a"] + 1, "b": [holder.value["b"][0] + 2]}
        for table in tables:
            table.sync()
        group.barrier()
        for table in tables:
            table.sync()
        end = [layers.get_weights()[0], shared[0].get_value(), np.asarray(holder.value["a"])]
        return start, end, np.asarray(holder.value["b"][0]).tolist()

    ranks = run_ranks(2, body, env=traces)
    for start, end, nested in ranks:
        for before, after, masters in zip(start, end, ranks[0][0], strict=True):
            assert np.array_equal(before, masters)
            assert np.allclose(after, before + 2)
        assert nested == [[4.0, 4.0]]


def test_different_models_are_a_disagreement() -> None:
    """Ranks whose models differ in a shape, or only in a name, all find out; the group goes on."""

    def body(group: Group) -> Any:
        texts = []
        for model in ({"w": np.zeros(3 + group.rank)}, {f"w{group.rank}": np.zeros(3)}):
            with pytest.raises(Disagreement) as caught:
                weft.ModelTable(model)
            texts.append(str(caught.value))
        if group.rank == 0:
            with pytest.raises(InvalidType, match="model of type str"):
                weft.ModelTable("no model")
        else:
            with pytest.raises(Disagreement, match="model of type str"):
                weft.ModelTable({"w": np.zeros(3)})
        return texts, group.all_reduce(1)

    for texts, total in run_ranks(2, body):
        assert "ArrayTable(3," in texts[0]
        assert "ArrayTable(4," in texts[0]
        assert total == 2


# in one process


def test_alone_the_parameters_live_in_the_table() -> None:
    """In a group of one a torch model's parameters are the table: training changes it at once."""
    weft.init()
    net = network(0)
    table = weft.ModelTable(net)
    with torch.no_grad():
        net[0].weight.fill_(7)
    assert (table.tables[0].get()[:12] == 7).all()
    assert table.sync()
    assert (net[0].weight == 7).all()


def test_a_model_that_moved_away_is_found_again() -> None:
    """A parameter whose memory the program has replaced is exchanged all the same."""
    weft.init()
    net = torch.nn.Linear(2, 2)
    table = weft.ModelTable(net)
    net.weight.data = torch.full((2, 2), 5.0)
    table.sync()
    assert (table.tables[0].get()[:4] == 5).all()
    assert (net.weight == 5).all()


def test_alone_what_is_added_to_the_table_itself_is_kept() -> None:
    """As in a group of several: a sync adds the model's change to it, and takes both."""
    weft.init()
    model = {"a": np.zeros(3), "b": np.zeros(2, int)}
    table = weft.ModelTable(model)
    for _ in range(2):
        model["a"] += 1
        table.tables[0].add([10, 0, 0])
        table.tables[1].add([0, 5])
        table.sync()
    assert model["a"].tolist() == [22, 2, 2]
    assert model["b"].tolist() == [0, 10]
    assert table.tables[0].get().tolist() == [22, 2, 2]


def test_what_cannot_be_a_model() -> None:
    """Wrong models and options are refused in words, and the session goes on."""
    weft.init()
    net = torch.nn.Linear(2, 2)
    for model, message in ((object(), "of type object"), ("text", "of type str")):
        with pytest.raises(InvalidType, match=message):
            weft.ModelTable(model)
    with pytest.raises(InvalidValue, match="without parameters"):
        weft.ModelTable(torch.nn.Sequential())
    with pytest.raises(InvalidType, match="every='often'"):
        weft.ModelTable(net, every="often")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="every=0"):
        weft.ModelTable(net, every=0)
    with pytest.raises(InvalidValue, match="expected one of add, sgd"):
        weft.ModelTable(net, updater="adamant")
    with pytest.raises(InvalidValue, match="'async', 'bsp'"):
        weft.ModelTable(net, consistency="strict")
    for wrong, words in (
        ({"w": np.zeros(2), "name": "x"}, r"str at \['name'\]"),
        ([], "without parts"),
        ([np.zeros(2), torch.zeros(2)], "several libraries"),
    ):
        with pytest.raises(InvalidType, match=words):
            weft.ModelTable(wrong)
    with pytest.raises(InvalidValue, match="name=3"):
        weft.ModelTable(net, name=3)  # type: ignore[arg-type]
    table = weft.ModelTable(net)
    with pytest.raises(InvalidType, match="timeout='x'"):
        table.sync(timeout="x")  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match=r"numpy\.asarray\(table\.tables\[0\]\)"):
        np.asarray(table)
    with pytest.raises(InvalidType, match="send the model itself"):
        copy.deepcopy(table)
    weft.shutdown()
    with pytest.raises(NotInitialized):
        weft.ModelTable(net)
    assert "ModelTable of torch" in repr(table)


def test_no_framework_is_imported_for_arrays() -> None:
    """A dict of NumPy arrays needs no framework."""
    outcome = run_python(
        "import sys, numpy, weft\n"
        "weft.init()\n"
        "model = {'w': numpy.zeros(3)}\n"
        "weft.ModelTable(model).sync()\n"
        "print(sorted({'torch', 'jax', 'keras', 'pytensor'} & set(sys.modules)))"
    )
    assert outcome.out == "[]\n", outcome
