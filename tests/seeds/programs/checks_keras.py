"""Multiverso on Keras: the manager, and the callback that syncs during `fit`."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np
import pytest

import multiverso as mv
import weft
from multiverso.theano_ext.keras_ext.callbacks import MVCallback
from multiverso.theano_ext.keras_ext.param_manager import KerasParamManager
from weft.errors import InvalidType, InvalidValue, NotInitialized

mv.init()
workers, worker = mv.workers_num(), mv.worker_id()


def build(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    return model


masters = build(0).get_weights()
model = build(worker)
manager = KerasParamManager(model)
for value, expected in zip(model.get_weights(), masters, strict=True):
    assert np.array_equal(value, expected), "everybody starts as the master does"
manager.set_all_param_values([value + 1 for value in manager.get_all_param_values()])
manager.sync_all_param()
mv.barrier()
manager.sync_all_param()
for value, expected in zip(model.get_weights(), masters, strict=True):
    assert np.allclose(value, expected + workers, atol=1e-5), (value, expected)
assert np.allclose(
    manager.tbh.get(), np.concatenate([value.reshape(-1) for value in model.get_weights()])
)
for wrong in (object(), keras.layers.Dense(2)):
    with pytest.raises((InvalidType, InvalidValue)):
        KerasParamManager(wrong)
mv.shutdown()
with pytest.raises(NotInitialized):
    manager.sync_all_param()

# workers in step: they end with the same weights, having learned from everybody's rows
mv.init(sync=True)
generator = np.random.default_rng(worker)
x = generator.normal(size=(192, 4)).astype("float32")
y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")
model = build(worker)
callback = MVCallback(model, freq=2)
history = model.fit(x, y, batch_size=32, epochs=4, verbose=0, callbacks=[callback])
losses = history.history["loss"]
assert losses[-1] < 0.5 * losses[0], losses
weights = np.concatenate([value.reshape(-1) for value in model.get_weights()])

everybodys = weft.all_gather(weights[None])
assert (everybodys == weights).all(), everybodys
assert callback._batches == 24
callback.on_batch_end(0)  # as a loop of the program's own does
assert callback._batches == 25
callback.on_batch_end(batch=1, logs={})
for wrong, error in ((0, InvalidValue), (1.5, InvalidType), (True, InvalidType)):
    with pytest.raises(error, match="freq="):
        MVCallback(model, freq=wrong)
mv.shutdown()
