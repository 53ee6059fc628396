"""Multiverso on PyTensor: kinds of variables, graphs and pickles; managers of every model."""

import copy
import pickle
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.tensor.special import softmax

import multiverso as mv
from multiverso.theano_ext import sharedvar
from multiverso.theano_ext.lasagne_ext.param_manager import LasagneParamManager, MVNetParamManager
from weft.errors import Disagreement, InvalidType, InvalidValue, NotInitialized

mv.init()
workers, worker = mv.workers_num(), mv.worker_id()
total = sum(range(1, workers + 1))


def sync_twice(*calls):
    """Sync until everybody has everybody's changes."""
    for call in calls:
        call()
    mv.barrier()
    for call in calls:
        call()
    mv.barrier()


# every kind of value that is a number, as pytensor.shared makes it
kinds = [
    np.zeros((2, 3), "float32"),
    np.arange(4.0),
    np.arange(4, dtype="int32"),
    np.zeros(2, "complex128"),
    np.float32(1.5),
    2.5,
    7,
    np.zeros((0, 3)),
]
for value in kinds:
    variable = sharedvar.mv_shared(value)
    plain = pytensor.shared(value)
    assert type(variable) is type(plain)
    assert variable.type == plain.type
    assert np.array_equal(variable.get_value(), plain.get_value())
    variable.set_value(variable.get_value() + np.asarray(worker + 1, dtype=variable.dtype))
    sync_twice(variable.mv_sync)
    assert variable.get_value().dtype == plain.get_value().dtype
    assert np.array_equal(variable.get_value(), plain.get_value() + total), value

# arguments are those of pytensor.shared: by position, by name
named = sharedvar.mv_shared(np.zeros(2), "named")
assert named.name == "named"
assert sharedvar.mv_shared(value=1.0, name="one", borrow=True).name == "one"
strict = sharedvar.mv_shared(np.zeros(2, "float32"), strict=True, allow_downcast=None)
with pytest.raises(TypeError):
    strict.set_value(np.zeros(2, "float64"))
assert sharedvar.mv_shared(np.zeros((1, 3)), shape=(1, 3)).type.shape == (1, 3)
for wrong in (np.random.default_rng(0), "text", [1.0, 2.0]):
    with pytest.raises(InvalidType, match="expected"):
        sharedvar.mv_shared(wrong)
if workers > 1:
    with pytest.raises(Disagreement):
        sharedvar.mv_shared(np.zeros(1 + worker))

# a wrong argument is named, with the nearest one that there is, and makes no worker wait
for arguments, text in (
    ({"valeu": 1.0}, r"mv_shared\(valeu=\.\.\.\): .* the nearest is value="),
    ({"value": 1.0, "nmae": "w"}, r"mv_shared\(nmae=\.\.\.\): .* the nearest is name="),
    ({"value": 1.0, "shape": ()}, "mv_shared takes what pytensor.shared takes: .*'shape'"),
    ({}, "mv_shared takes what pytensor.shared takes: .*'value'"),
):
    with pytest.raises(InvalidType, match=text):
        sharedvar.mv_shared(**arguments)

# a variable of the program's own, with a table beside it
plain = pytensor.shared(np.full(2, 3.0 + worker), name="plain")
shared = sharedvar.MVSharedVariable(plain)
assert (shared.name, shared.get_value().tolist()) == ("plain", [3, 3])
assert shared not in sharedvar.mv_shared.shared_vars
plain.set_value(plain.get_value() + worker + 1)
sync_twice(shared.mv_sync)
assert plain.get_value().tolist() == [3 + total] * 2
loaded = pickle.loads(pickle.dumps(shared))
assert loaded.get_value().tolist() == [3 + total] * 2
with pytest.raises(NotInitialized, match="mv_shared"):
    loaded.mv_sync()
with pytest.raises(AttributeError, match="no_such"):
    shared.no_such  # noqa: B018  the access is the test
with pytest.raises(InvalidType, match=r"MVSharedVariable\(3\): expected a shared variable"):
    sharedvar.MVSharedVariable(3)

# in graphs: gradients, updates, givens
w = sharedvar.mv_shared(np.full(3, 2.0 + worker), name="w")
x = pt.vector("x")
cost = (w * x).sum()
step = pytensor.function([x], cost, updates=[(w, w - pt.grad(cost, w))])
swapped = pytensor.function([x], cost, givens={w: np.ones(3)})
assert step(np.arange(3.0)) == 6
assert swapped(np.arange(3.0)) == 3
sync_twice(w.mv_sync)
assert w.get_value().tolist() == [2 - workers * number for number in range(3)]
assert step(np.ones(3)) == 6 - 3 * workers
mv.barrier()
# everybody's changes count, also those that were made in another library's memory
jax_step = pytensor.function([], [], updates=[(w, w + 1.0)], mode="JAX")
sync_twice(w.mv_sync)
before = w.get_value()
mv.barrier()
jax_step()
sync_twice(w.mv_sync)
assert np.allclose(w.get_value(), before + workers)

# what docs/from-multiverso.md writes in place of T.nnet
chances = softmax(x.dimshuffle("x", 0), axis=-1)
targets, indexes = pt.matrix(), pt.ivector()
chosen = -pt.log(chances)[pt.arange(indexes.shape[0]), indexes]
crossed = -(targets * pt.log(chances)).sum(axis=-1)
in_place_of_nnet = pytensor.function(
    [x, targets, indexes],
    [chances, crossed, chosen, pt.sigmoid(x), pt.softplus(x), pt.maximum(x, 0)],
)
values = np.array([1.0, -2.0])
shares = np.exp(values) / np.exp(values).sum()
wanted = [
    [shares],
    [-np.log(shares[1])],
    [-np.log(shares[1])],
    1 / (1 + np.exp(-values)),
    np.log(1 + np.exp(values)),
    [1, 0],
]
for found, expected in zip(in_place_of_nnet(values, [[0.0, 1.0]], [1]), wanted, strict=True):
    assert np.allclose(found, expected), (found, expected)

# a pickle or copy is a variable without a table, as a saved model should be
for other in (pickle.loads(pickle.dumps(w)), copy.deepcopy(w)):
    assert np.array_equal(other.get_value(), w.get_value())
    with pytest.raises(NotInitialized, match="mv_shared"):
        other.mv_sync()

# managers: networks as lists, dicts, one variable, layers of Lasagne


def variables():
    return [
        pytensor.shared(np.full((2, 2), worker, "float32"), name="W"),
        pytensor.shared(np.full(2, worker), name="b"),
    ]


lasagne = ModuleType("lasagne")  # what is used of it: no living release runs on PyTensor
lasagne.layers = SimpleNamespace(
    Layer=type("Layer", (), {}), get_all_params=lambda layer: layer.params
)
assert MVNetParamManager is LasagneParamManager


def layer():
    sys.modules["lasagne"] = lasagne
    made = lasagne.layers.Layer()
    made.params = variables()
    return made


for make in (
    variables,
    lambda: dict(zip("Wb", variables(), strict=True)),
    lambda: {"layers": [tuple(variables())]},
    lambda: variables()[0],
    layer,
):
    network = make()
    manager = MVNetParamManager(network)
    assert manager.model is network
    start = manager.get_all_param_values()
    assert all(not value.any() for value in start), "everybody starts as the master does"
    manager.set_all_param_values([value + np.ones_like(value) for value in start])
    sync_twice(manager.sync_all_param)
    for value, first in zip(manager.get_all_param_values(), start, strict=True):
        assert value.dtype == first.dtype
        assert np.array_equal(value, np.full_like(value, workers)), value
one_dtype = MVNetParamManager(pytensor.shared(np.full((2, 2), worker, "float32")))
mv.barrier()
one_dtype.tbh.add([1, 2, 3, 4])
sync_twice(one_dtype.sync_all_param)
assert one_dtype.tbh.get().tolist() == [workers, 2 * workers, 3 * workers, 4 * workers]
assert one_dtype.model.get_value().reshape(-1).tolist() == one_dtype.tbh.get().tolist()
del sys.modules["lasagne"]
for wrong, error in (
    ([], InvalidType),
    (object(), InvalidType),
    ([np.ones(1), named], InvalidType),
):
    with pytest.raises((error, InvalidValue)):
        MVNetParamManager(wrong)

# all of a session's variables, and none of the next one's
last = sharedvar.mv_shared.shared_vars[-1]
assert isinstance(last, sharedvar.MVSharedVariable)
assert last.type == w.type
sync_twice(sharedvar.sync_all_mv_shared_vars)
mv.shutdown()
with pytest.raises(NotInitialized):
    w.mv_sync()
mv.init(sync=True)
assert sharedvar.mv_shared.shared_vars == []
v = sharedvar.mv_shared(np.zeros(2), name="v")
for number in range(1, 4):
    v.set_value(v.get_value() + worker + 1)
    sharedvar.sync_all_mv_shared_vars()
    assert v.get_value().tolist() == [total * number] * 2, "in step without barriers"
mv.shutdown()
