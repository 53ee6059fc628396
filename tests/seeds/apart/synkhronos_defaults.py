"""Updates that variables have by default, in all forms of a call; and graphs that are deep."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import synkhronos as synk
from synkhronos.extensions import updates

#: PyTensor calls updates by default old, and programs for Theano have them
pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting default_update:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:RandomStream is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:RandomVariable Ops:DeprecationWarning"),
]

ROWS = np.arange(1, 21, dtype="float32").reshape(10, 2)
PARTS = [ROWS[:5], ROWS[5:]]


def scattered() -> tuple[Any, Any]:
    """An input, and the variable in its place: five rows in each process."""
    x = pt.matrix("x", dtype="float32")
    rows = pytensor.shared(np.zeros((2, 2), "float32"), "rows")
    return x, rows


CALLS: list[tuple[dict[str, Any], Any]] = [
    ({}, slice(None)),
    ({"batch_s": [0, 1, 2]}, [0, 1, 2]),
    ({"batch_s": slice(1, 4)}, slice(1, 4)),
    ({"num_slices": 2}, slice(None)),
    ({"batch_s": [4, 1, 0], "num_slices": 2}, [4, 1, 0]),
]


def test_a_running_average() -> None:
    """It is updated from the chosen rows, once, by what they are: as in one process."""
    x, rows = scattered()
    average = pytensor.shared(np.zeros(2, "float32"), "average")
    average.default_update = 0.5 * average + 0.5 * x.mean(axis=0)
    f = synk.function(
        [], (x.sum() + 0 * average.sum(), "sum"), givens={x: rows}, sliceable_shareds=[rows]
    )
    assert f.update_modes == []
    assert set(f.get_shared()) == {rows, average}
    synk.scatter(rows, ROWS)
    expected = np.zeros((2, 2))
    for options, chosen in CALLS:
        assert np.isclose(f(**options), sum(part[chosen].sum() for part in PARTS)), options
        means = [part[chosen].mean(axis=0) for part in PARTS]
        expected = 0.5 * expected + 0.5 * np.array(means)
        assert np.allclose(synk.gather(average), expected, rtol=1e-5), options


def test_another_update_in_its_place() -> None:
    """An update that is given is made, and not the one by default; also of inputs in slices."""
    x = pt.matrix("x", dtype="float32")
    count = pytensor.shared(np.float32(0), "count")
    count.default_update = count + 100
    f = synk.function([x], (x.sum() + 0 * count, "sum"), updates=[(count, count + 1)])
    for number, slices in enumerate((1, 2, 3), 1):
        assert np.isclose(f(ROWS, num_slices=slices), ROWS.sum())
        assert synk.gather(count).tolist() == [number, number]


def test_dropout() -> None:
    """A stream of random numbers of the shape of what is in the input's place."""
    x, rows = scattered()
    stream = pt.random.utils.RandomStream(7)
    kept = stream.uniform(size=x.shape) < 0.5
    f = synk.function(
        [], (x * kept.astype("float32"), "gather"), givens=[(x, rows)], sliceable_shareds=[rows]
    )
    synk.scatter(rows, ROWS)
    for options, chosen in CALLS:
        whole = np.concatenate([part[chosen] for part in PARTS])
        found = [f(**options) for _ in range(3)]
        for one in found:
            assert one.shape == whole.shape, options
            assert np.isin(one, [0.0, *whole.flat]).all()
            assert ((one == 0) | (one == whole)).all(), options
        assert not (np.array_equal(*found[:2]) and np.array_equal(*found[1:])), options


def test_a_deep_graph() -> None:
    """A thousand operations one after the other are sent and computed, by all and in slices."""
    x, rows = scattered()
    w = pytensor.shared(np.float32(0.5), "w")
    z, expected = x, ROWS.astype("float64")
    for number in range(500):
        z = pt.tanh(z) if number % 50 == 0 else z * np.float32(1.001)
        expected = np.tanh(expected) if number % 50 == 0 else expected * 1.001
        z, expected = z + w * np.float32(0.001), expected + 0.0005
    f = synk.function(
        [], (z.sum(axis=0), "sum"), givens={x: rows}, sliceable_shareds=[rows], name="deep"
    )
    synk.scatter(rows, ROWS)
    assert np.allclose(f(), expected.sum(axis=0), rtol=1e-4)


def deep_loss() -> tuple[Any, Any, Any]:
    """An input, a variable, and what a thousand operations make of them."""
    x = pt.matrix("x")
    w = pytensor.shared(np.ones(2), "w")
    z = x.dot(w)
    for _ in range(1000):
        z = z * 1.0001
    return x, w, z.mean()


def test_a_gradient_of_the_programs_own() -> None:
    """PyTensor makes it of a deep loss too, as Theano did once Synkhronos was there."""
    x, w, loss = deep_loss()
    f = synk.function([x], pytensor.grad(loss, w), mode=pytensor.compile.Mode("py", None))
    assert np.allclose(f(ROWS), ROWS.mean(axis=0) * 1.0001**1000)


def test_the_recursion_limit() -> None:
    """It is Synkhronos's from `fork` to `close`. Without processes what is made of a deep loss
    needs none, and leaves it as it is; one that the program has set itself stays."""
    assert sys.getrecursionlimit() == 50_000
    synk.close()
    before = sys.getrecursionlimit()
    assert before < 50_000
    x, w, loss = deep_loss()
    gradient_updates, _, flat = updates.sgd(loss, [w], 0.1)
    assert gradient_updates[0][0] is flat
    f = synk.function([x], loss)
    assert sys.getrecursionlimit() == before
    synk.fork(2)
    assert np.isclose(f(ROWS), f.as_theano(ROWS))
    assert sys.getrecursionlimit() == 50_000
    sys.setrecursionlimit(before + 1)
    synk.close()
    assert sys.getrecursionlimit() == before + 1
    sys.setrecursionlimit(before)
    synk.fork(2)
