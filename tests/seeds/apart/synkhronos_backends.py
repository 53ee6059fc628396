"""synkhronos with what PyTensor compiles for: its own default, JAX, PyTorch."""

from __future__ import annotations

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import synkhronos as synk
import weft
from synkhronos.extensions import train, updates

X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")


@pytest.mark.parametrize("mode", ["NUMBA", "JAX", "PYTORCH"])
@pytest.mark.filterwarnings("ignore")
def test_a_backend(mode: str) -> None:
    """Outputs, updates, slices, collectives and training are as in one process."""
    x = pt.matrix("x", dtype="float32")
    w = pytensor.shared(np.ones(3, "float32"), "w")
    total = pytensor.shared(np.zeros(3, "float32"), "total")
    loss = (x.dot(w) ** 2).mean()
    f = synk.function(
        [x],
        [loss, (x.dot(w), "gather")],
        updates=[(total, x.sum(axis=0), "sum")],
        mode=mode,
    )
    synk.distribute()
    squares = (X.sum(axis=1) ** 2).mean()
    for slices in (1, 2):
        found = f(f.build_inputs(X), num_slices=slices)
        assert isinstance(found[0], np.ndarray)
        assert np.allclose(found[0], squares, rtol=1e-5)
        assert np.allclose(found[1], X.sum(axis=1), rtol=1e-5)
    assert np.allclose(synk.get_value(1, total), X[3:].sum(axis=0), rtol=1e-4)
    synk.all_reduce(total, "sum")
    assert np.allclose(synk.get_value(1, total), X.sum(axis=0), rtol=1e-4)
    assert weft.same(total)
    step = train.make_train_function([x], loss, updates.sgd(loss, [w], 0.1), mode=mode)
    step(X)
    assert np.allclose(w.get_value(), 1 - 0.2 * X.T @ X.sum(axis=1) / 7, rtol=1e-4)
    assert weft.same(w)
