"""synkhronos.extensions: training methods, and training that equals one process's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import synkhronos as synk
import weft
from synkhronos.extensions import train, updates
from weft.errors import InvalidType, InvalidValue

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(11, 3)), RNG.normal(size=11)


def expected(method: str, gradient: Callable[[Any], Any], start: Any, steps: int) -> Any:
    """The methods as their papers have them, in NumPy."""
    p, memory, other = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for time in range(1, steps + 1):
        g = gradient(p)
        if method == "sgd":
            p -= 0.1 * g
        elif method in ("momentum", "nesterov_momentum"):
            memory = 0.9 * memory - 0.1 * g
            p += memory if method == "momentum" else 0.9 * memory - 0.1 * g
        elif method == "adagrad":
            memory += g * g
            p -= 0.1 * g / np.sqrt(memory + 1e-6)
        elif method == "rmsprop":
            memory = 0.9 * memory + 0.1 * g * g
            p -= 0.1 * g / np.sqrt(memory + 1e-6)
        elif method == "adadelta":
            memory = 0.95 * memory + 0.05 * g * g
            step = g * np.sqrt(other + 1e-6) / np.sqrt(memory + 1e-6)
            other = 0.95 * other + 0.05 * step * step
            p -= 0.1 * step
        elif method in ("adam", "adamax"):
            memory = 0.9 * memory + 0.1 * g
            if method == "adam":
                other = 0.999 * other + 0.001 * g * g
                size = np.sqrt(other / (1 - 0.999**time))
            else:
                size = other = np.maximum(0.999 * other, abs(g))
            p -= 0.1 * memory / (1 - 0.9**time) / (size + 1e-8)
    return p


@pytest.mark.parametrize(
    "method",
    ["sgd", "momentum", "nesterov_momentum", "adagrad", "rmsprop", "adadelta", "adam", "adamax"],
)
def test_a_method(method: str) -> None:
    """Uneven rows over two processes give what NumPy gives of all; all processes are the same."""
    x, y = pt.matrix("x"), pt.vector("y")
    w, b = pytensor.shared(np.ones((3, 1)), "w"), pytensor.shared(0.5, "b")
    loss = ((x.dot(w)[:, 0] + b - y) ** 2).mean()
    made = getattr(updates, method)(loss, [w, b], learning_rate=0.1)
    gradient_updates, _, flat = made
    assert gradient_updates[0][0] is flat
    assert flat.get_value().shape == (4,)
    step = train.make_train_function([x, y], loss, made)

    def gradient(p: Any) -> Any:
        error = X @ p[:3] + p[3] - Y
        return 2 * np.append(X.T @ error, error.sum()) / len(X)

    start = np.array([1, 1, 1, 0.5])
    losses = [step(X, Y), step(X, Y, num_slices=3), step(x=X, y=Y)]
    assert np.isclose(losses[0], ((X @ start[:3] + 0.5 - Y) ** 2).mean())
    found = np.append(w.get_value(), b.get_value())
    assert np.allclose(found, expected(method, gradient, start, 3), rtol=1e-6, atol=1e-9)
    assert weft.same(w)
    assert weft.same(b)
    step.as_theano(X, Y)
    assert np.allclose(
        np.append(w.get_value(), b.get_value()), expected(method, gradient, start, 4), rtol=1e-6
    )


def test_the_steps_one_by_one() -> None:
    """As the documents have it: a function, one all_reduce, a function. Of even parts."""
    x = pt.matrix("x", dtype="float32")
    w = pytensor.shared(np.ones(3, "float32"), "w")
    gradients, steps, flat = updates.sgd([x.mean(axis=0)], [w], learning_rate=0.5)
    f = synk.function([x], updates=gradients)
    g = synk.function([], updates=steps)
    synk.distribute()
    values = X[:10].astype("float32")
    f(values)
    synk.all_reduce(flat)
    g()
    assert np.allclose(synk.get_value(1, w), 1 - 0.5 * values.mean(axis=0), rtol=1e-5)
    assert w.get_value().dtype == np.float32
    assert weft.same(w)


def test_more_ranks_than_rows_and_several_outputs() -> None:
    """A process without rows makes the step of the others."""
    x = pt.matrix("x")
    w = pytensor.shared(np.ones(3), "w")
    loss = x.dot(w).mean()
    step = train.make_train_function(
        [x], [loss, (x.shape[0], "sum")], updates.sgd(loss, [w], 1.0), name="step"
    )
    assert step.name == "step"
    found = step(X[:1])
    assert np.isclose(found[0], X[0].sum())
    assert found[1] == 1
    assert np.allclose(synk.get_value(1, w), 1 - X[0])
    assert step(X, batch=[1, 2, 3], output_subset=[1]) == [3]


def test_data_stays_mapped() -> None:
    """From one step to the next nobody is asked for it again."""
    x = pt.matrix("x")
    w = pytensor.shared(np.ones(3), "w")
    loss = x.dot(w).mean()
    step = train.make_train_function([x], loss, updates.sgd(loss, [w], 1.0))
    data = step.gradients.build_inputs(X)
    step(data)
    team = weft._api.team.default_team()
    before = team.backend.call(questions, [None, ()])
    for _ in range(3):
        step(data)
    assert team.backend.call(questions, [None, ()]) == before


def questions(member: Any) -> str:
    """How often this process has asked others for memory, as text."""
    from weft.engines.local.memory import blocks

    return repr(blocks._here.client._numbers)


def test_rows_that_processes_keep() -> None:
    """Sliceable variables in the place of inputs: uneven ones too."""
    x = pt.matrix("x")
    rows = pytensor.shared(np.zeros((1, 3)), "rows_kept")
    w = pytensor.shared(np.ones(3), "w")
    loss = (x.dot(w) ** 2).mean()
    step = train.make_train_function(
        [], loss, updates.sgd(loss, [w], 0.1), givens={x: rows}, sliceable_shareds=[rows]
    )
    synk.scatter(rows, X)
    assert np.isclose(step(), (X.sum(axis=1) ** 2).mean())
    assert np.allclose(w.get_value(), 1 - 0.2 * X.T @ X.sum(axis=1) / len(X))
    before = w.get_value()
    chosen = np.concatenate([X[:5][[2, 4]], X[5:][[2, 4]]])
    step(batch_s=[2, 4], num_slices=2)
    change = 0.2 * chosen.T @ (chosen @ before) / len(chosen)
    assert np.allclose(w.get_value(), before - change)


def test_an_exception_in_one_process() -> None:
    """Is the error of the call; nobody waits for anybody."""
    x = pt.matrix("x")
    w = pytensor.shared(np.ones(3), "w")
    loss = x[5:].dot(w).mean()
    step = train.make_train_function([x], loss, updates.sgd(loss, [w], 1.0))
    with pytest.raises(ValueError):
        step(X[:, :2])


def test_what_methods_refuse() -> None:
    """Each error names what was given."""
    w = pytensor.shared(np.ones(3), "w")
    with pytest.raises(InvalidType, match=r"params\[1\]"):
        updates.adam(w.sum(), [w, pytensor.shared(3)])
    with pytest.raises(InvalidType, match="params=w: expected a list of shared variables"):
        updates.adam(w.sum(), w)
    for make in (train.make_train_function, train.make_train_function_theano):
        with pytest.raises(InvalidType, match=r"update_rule=0\.1: expected one of synkhro"):
            make(w.sum(), [w], pt.matrix("x"), pt.vector("y"), 0.1)
    with pytest.raises(InvalidValue, match="params is empty"):
        updates.adam(w.sum(), [])
    with pytest.raises(InvalidValue, match="got 2 gradients for 1 parameters"):
        updates.sgd([w, w], [w], 0.1)
