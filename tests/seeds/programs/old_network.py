"""What Multiverso's example of a network did: parameters and their momentum are shared variables,
each worker trains on its own minibatches and syncs after every one.

Dense layers stand in place of convolutions, and the data are drawn here.
"""

import numpy as np
import pytensor as theano
import pytensor.tensor as T  # noqa: N812  its usual name
from pytensor.tensor.special import softmax

import multiverso as mv
from multiverso.theano_ext import sharedvar

mv.init()
worker_id, workers_num = mv.worker_id(), mv.workers_num()
is_master_worker = worker_id == 0


def float_x(values):
    return np.asarray(values, dtype=theano.config.floatX)


def init_weights(shape, name):
    generator = np.random.default_rng(worker_id)
    return sharedvar.mv_shared(float_x(generator.normal(size=shape) * 0.3), name=name)


def momentum(cost, params, learning_rate, momentum):
    updates = []
    for p, g in zip(params, theano.grad(cost, params), strict=True):
        mparam_i = sharedvar.mv_shared(np.zeros(p.get_value().shape, dtype=theano.config.floatX))
        v = momentum * mparam_i - learning_rate * g
        updates += [(mparam_i, v), (p, p + v)]
    return updates


x, t = T.matrix("x"), T.matrix("t")
w_h, b_h = init_weights((4, 16), "w_h"), init_weights((16,), "b_h")
w_o, b_o = init_weights((16, 2), "w_o"), init_weights((2,), "b_o")
p_y_given_x = softmax(T.dot(T.maximum(0, T.dot(x, w_h) + b_h), w_o) + b_o, axis=1)
cost = T.mean(-(t * T.log(p_y_given_x)).sum(axis=1))
updates = momentum(cost, [w_h, b_h, w_o, b_o], learning_rate=0.3 / workers_num, momentum=0.5)
train = theano.function([x, t], cost, updates=updates, allow_input_downcast=True)
predict = theano.function([x], T.argmax(p_y_given_x, axis=1), allow_input_downcast=True)

mv.barrier()
if not is_master_worker:
    sharedvar.sync_all_mv_shared_vars()
before = [variable.get_value() for variable in (w_h, b_h, w_o, b_o)]
expected = np.random.default_rng(0).normal(size=(4, 16)) * 0.3
assert np.allclose(before[0], expected, atol=1e-6), "everybody starts as the master does"
mv.barrier()

data = np.random.default_rng(1).normal(size=(400, 4))
labels = (data[:, 0] * data[:, 1] > 0).astype(int)
batch_size = 20
for _ in range(6 * workers_num):
    for start in range(0, len(data), batch_size):
        if start // batch_size % workers_num == worker_id:
            train(data[start : start + batch_size], np.eye(2)[labels[start : start + batch_size]])
            sharedvar.sync_all_mv_shared_vars()
    mv.barrier()
if is_master_worker:
    sharedvar.sync_all_mv_shared_vars()
    accuracy = np.mean(predict(data) == labels)
    assert accuracy > 0.75, accuracy
mv.shutdown()
