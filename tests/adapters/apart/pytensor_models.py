"""PyTensor's shared variables, and Lasagne's layers."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import apply_ancestors, graph_inputs

from tests.adapters import contract
from tests.adapters.contract import Subject
from weft.adapters import containers, lookup, models


def shared(value: Any, name: str | None = None) -> Any:
    return pytensor.shared(value, name=name)


def weights() -> Any:
    return [shared(np.ones((4, 3), "f4"), "w"), shared(np.zeros(3, "f4"), "b")]


def by_key() -> Any:
    again = shared(np.ones(2), "again")
    return {
        "layers": [shared(np.ones((2, 2))), (shared(np.ones(0, "f4")),)],
        "steps": shared(3),
        "tied": [again, again],
        "half": shared(np.ones(2, "f2"), "same name"),
        "flags": shared(np.array([True, False]), "same name"),
        "complex": shared(np.ones(2, "c8")),
    }


def alone() -> Any:
    return shared(np.ones(3))


def descent(model: Any) -> Callable[[], object]:
    w, b = model
    loss = ((pt.tanh(pt.dot(np.ones((2, 4), "f4") / 8, w) + b) - 1) ** 2).sum()
    rate = np.float32(0.125)
    updates = [(one, one - rate * pt.grad(loss, one)) for one in model]
    return pytensor.function([], [], updates=updates)  # type: ignore[no-any-return]


def counting(model: Any) -> Callable[[], object]:
    (first, *_) = [one for one in variables(model) if one.type.dtype == "float64"]
    return pytensor.function([], [], updates=[(first, pt.sqrt(first + 1))])  # type: ignore[no-any-return]


def variables(model: Any) -> list[Any]:
    return [leaf for _, leaf in containers.leaves(model)]


def by_jax(model: Any) -> Callable[[], object]:
    (first,) = variables(model)
    return pytensor.function([], [], updates=[(first, pt.sqrt(first + 1))], mode="JAX")  # type: ignore[no-any-return]


SUBJECTS = {
    "list": Subject(weights, descent, variables, False),
    "dict": Subject(by_key, counting, variables, False),
    "alone": Subject(alone, counting, variables, False),
    "in JAX's hands": Subject(alone, by_jax, variables, False),
}


@pytest.mark.parametrize("check", contract.CHECKS)
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_models_keep_the_contract(subject: Subject, check: Any) -> None:
    """Shared variables, alone, listed and nested, keep each rule."""
    check(subject)


def test_names_are_those_of_the_variables_and_their_places() -> None:
    """A name of the user's is shown; places tell those of one name apart."""
    adapter = lookup.named("pytensor")
    assert adapter.names(weights()) == ["[0].w", "[1].b"]
    assert adapter.names(alone()) == ["value"]
    assert adapter.names(shared(1.0, "w")) == ["w"]


def test_values_are_views() -> None:
    """Reading copies nothing, writing needs no fresh memory."""
    model = alone()
    adapter = lookup.named("pytensor")
    (array,) = adapter.read(model)
    assert array is model.get_value(borrow=True)
    adapter.write(model, [np.full(3, 5.0)])
    assert model.get_value(borrow=True) is array
    assert array.tolist() == [5, 5, 5]


def test_a_readonly_value_is_replaced() -> None:
    """What a variable borrowed may be read-only; it gets memory of its own."""
    borrowed = np.ones(3)
    borrowed.flags.writeable = False
    model = pytensor.shared(borrowed, borrow=True)
    lookup.named("pytensor").write(model, [np.zeros(3)])
    assert model.get_value().tolist() == [0, 0, 0]
    assert borrowed.tolist() == [1, 1, 1]


def test_values_that_another_library_left_there() -> None:
    """Functions compiled for JAX leave its arrays in a variable, which still is a model."""
    model = alone()
    step = pytensor.function([], [], updates=[(model, model + 1)], mode="JAX")
    step()
    assert not isinstance(model.get_value(borrow=True), np.ndarray)
    assert lookup.of_model(model) is lookup.named("pytensor")
    (array,) = lookup.named("pytensor").read(model)
    assert array.tolist() == [2, 2, 2]
    lookup.named("pytensor").write(model, [np.full(3, 5.0)])
    step()
    assert lookup.named("pytensor").read(model)[0].tolist() == [6, 6, 6]


@pytest.fixture
def lasagne(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What weft uses of Lasagne, which no living release provides."""
    module = ModuleType("lasagne")
    layer = type("Layer", (), {"params": ()})
    module.layers = SimpleNamespace(  # type: ignore[attr-defined]
        Layer=layer, get_all_params=lambda network: list(network.params)
    )
    monkeypatch.setitem(sys.modules, "lasagne", module)
    return module


def test_lasagnes_networks(lasagne: Any) -> None:
    """All parameters of a network, given by its last layer; layers use the same names."""

    def network() -> Any:
        made = lasagne.layers.Layer()
        made.params = [*weights(), *weights()]
        return made

    subject = Subject(network, lambda net: descent(net.params[:2]), lambda net: net.params, False)
    for check in contract.CHECKS:
        check(subject)
    assert lookup.named("pytensor").names(network()) == ["0.w", "1.b", "2.w", "3.b"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: shared(np.random.default_rng(0)),
        lambda: [alone(), shared(np.random.default_rng(0))],
        lambda: [alone(), np.ones(1)],
        pt.vector,
        lambda: pt.constant(np.ones(1)),
    ],
)
def test_other_values_are_no_models(make: Callable[[], Any]) -> None:
    """Random generators, mixtures, and variables that hold no value."""
    assert lookup.of_model(make()) is None


def pickled(value: Any) -> Any:
    """A value as another process gets it."""
    ordered: set[Any] = set()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def reducer_override(self, part: Any) -> Any:
            reduced = models.reduce(part, ordered)
            return super().reducer_override(part) if reduced is None else reduced

    file = io.BytesIO()
    Pickler(file, 5).dump(value)
    return pickle.loads(file.getvalue())


@pytest.mark.filterwarnings("ignore:Setting default_update:DeprecationWarning")
def test_graphs_of_any_depth_are_pickled() -> None:
    """Operations come one after the other: of a variable, of what updates one by default, and of a
    graph within an operation, which stays the one that equals it."""
    x, s = pt.vector("x"), shared(np.zeros(2), "s")
    results = []
    for start in (x, s):
        result = start
        for _ in range(1000):
            result = pt.tanh(result)
        results.append(result)
    s.default_update = results[1]
    frozen = FunctionGraph([x], [results[0]], clone=True).freeze()
    copies = pickled([results[0], s, frozen])
    assert len(list(apply_ancestors([copies[0]]))) == 1000
    assert [one.name for one in graph_inputs([copies[0]]) if one.name] == ["x"]
    assert len(list(apply_ancestors([copies[1].default_update]))) == 1000
    assert [one for one in graph_inputs([copies[1].default_update]) if one.name] == [copies[1]]
    assert (copies[1].get_value() == s.get_value()).all()
    assert copies[2] == frozen
