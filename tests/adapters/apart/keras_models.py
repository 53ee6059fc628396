"""Keras's models, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import weft
from tests.adapters import contract
from tests.adapters.contract import Subject
from weft.adapters import lookup
from weft.errors import InvalidValue

# Keras calls np.array on its own variables and on tensors, neither of which knows `copy`
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning:keras"
)

TORCH = keras.backend.backend() == "torch"


def sequential() -> Any:
    keras.utils.set_random_seed(0)
    parts = [layers.Dense(3), layers.BatchNormalization(), layers.Dropout(0.5, seed=1)]
    return keras.Sequential([layers.Input((4,)), *parts, layers.Dense(1)])


def branched() -> Any:
    """One layer used twice, one frozen, and a counter of whole numbers."""
    keras.utils.set_random_seed(0)
    twice, frozen = layers.Dense(4), layers.Dense(4, trainable=False)
    start = keras.Input((4,))
    end = layers.Dense(1)(twice(frozen(twice(start))) + Counter()(start))
    return keras.Model(start, end)


@keras.saving.register_keras_serializable()
class Counter(layers.Layer):
    def build(self, shape: Any) -> None:
        self.count = self.add_weight(
            name="count", shape=(), dtype="int32", initializer="zeros", trainable=False
        )

    def call(self, x: Any) -> Any:
        return x


def half() -> Any:
    keras.utils.set_random_seed(0)
    parts = [layers.Dense(3, dtype="bfloat16"), layers.Dense(1, dtype="float16")]
    return keras.Sequential([layers.Input((4,)), *parts])


def layer() -> Any:
    made = layers.Dense(1, kernel_initializer="ones")
    made.build((None, 4))
    return made


def fit_trainer(model: Any, eagerly: bool = False) -> Callable[[], object]:
    x, y = np.arange(32.0).reshape(8, 4) / 32, np.full((8, 1), 3.0)
    model.compile(keras.optimizers.SGD(0.125, momentum=0.5), "mse", run_eagerly=eagerly)
    return lambda: model.train_on_batch(x, y)


def eager_trainer(model: Any) -> Callable[[], object]:
    """For most: compiling takes far longer than the few steps that a check makes."""
    return fit_trainer(model, eagerly=True)


def layer_trainer(model: Any) -> Callable[[], object]:
    optimizer = keras.optimizers.Adam(0.125)
    return lambda: optimizer.apply(
        [keras.ops.ones(one.shape) for one in model.weights], model.trainable_variables
    )


def variables(model: Any) -> list[Any]:
    """On torch the tensors too: optimizers of torch's hold them."""
    return [*model.weights, *(one.value for one in model.weights if TORCH)]


SUBJECTS = {
    "sequential": Subject(sequential, fit_trainer, variables, TORCH),
    "branched": Subject(branched, eager_trainer, variables, TORCH),
    "half": Subject(half, eager_trainer, variables, False),
    "layer": Subject(layer, layer_trainer, variables, TORCH),
}


@pytest.mark.parametrize("check", contract.CHECKS)
@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_models_keep_the_contract(subject: Subject, check: Any) -> None:
    """Each model of Keras keeps each rule."""
    check(subject)


def test_this_is_the_backend_that_was_asked_for() -> None:
    """Whoever runs this file says which."""
    assert keras.backend.backend() == os.environ["KERAS_BACKEND"]


def test_a_model_is_keras_even_where_it_is_torchs_too() -> None:
    """On the torch backend a Keras model is a torch module; its weights are read as Keras's."""
    adapter = contract.adapter_of(sequential())
    assert adapter.NAME == "keras"
    names = ["kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance", "kernel", "bias"]
    assert adapter.names(sequential()) == [f"{i}.{name}" for i, name in enumerate(names)]


def test_random_states_and_optimizers_are_not_shared() -> None:
    """Workers draw different numbers; compiled and trained, a model has the same parameters."""
    model = sequential()
    adapter = lookup.named("keras")
    names = adapter.names(model)
    assert len(names) < len(model.variables)
    fit_trainer(model)()
    assert adapter.names(model) == names


def test_several_models_are_one() -> None:
    """In a dict, each under its key; a layer that both use counts once."""
    shared = layer()
    both = {"a": keras.Sequential([keras.Input((4,)), shared]), "b": [shared, layer()]}
    adapter = contract.adapter_of(both)
    assert adapter.names(both) == [
        *("['a'].0.kernel", "['a'].1.bias", "['b'][1].0.kernel", "['b'][1].1.bias"),
    ]


def test_models_without_weights_are_refused() -> None:
    """A model that has seen no batch has none yet; the message says so."""
    model = keras.Sequential([layers.Dense(3)])
    with pytest.raises(InvalidValue, match=r"sequential.* has no weights yet: pass it a batch"):
        lookup.named("keras").names(model)


def test_other_values_are_no_models() -> None:
    """Variables of a layer, optimizers, classes."""
    for value in (
        layer().weights,
        keras.optimizers.SGD(),
        layers.Dense,
        [sequential(), np.ones(1)],
    ):
        assert lookup.of_model(value) is None


@pytest.mark.skipif(not TORCH, reason="only on the torch backend is a model a module")
def test_training_by_an_optimizer_of_torch() -> None:
    """In every rank the optimizer changes that rank's own model, so that steps are those of one
    process."""
    import torch

    def make() -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Input((3,)), layers.Dense(4), layers.Dense(1)])
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(model: Any, x: Any, y: Any) -> Any:
        return ((model(x) - y) ** 2).mean()

    x = torch.tensor(np.random.default_rng(0).normal(size=(65, 3)).astype(np.float32))
    y = x.sum(1, keepdim=True)
    (alone, its_own), (model, optimizer) = make(), make()
    expected = []
    for _ in range(5):
        its_own.zero_grad()
        error = loss(alone, x, y)
        error.backward()
        its_own.step()
        expected.append(error.item())
    with weft.Team(2) as team:
        step = weft.train_step(loss, model, optimizer, team=team)
        assert np.allclose([step(x, y) for _ in range(5)], expected, rtol=1e-4)
        assert weft.same(model, team=team)
