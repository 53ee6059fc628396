"""The demos that train: by rows that every call splits, by rows that the processes keep, and by
gradients in variables of the program's own."""

import numpy as np
import pytensor as theano
import pytensor.tensor as T

import synkhronos as synk
from synkhronos.extensions import updates
from synkhronos.extensions.train import make_train_function

n_gpu = synk.fork(max_n_var=1000)
dtype = theano.config.floatX
rng = np.random.default_rng(0)
images = rng.normal(size=(400, 6)).astype(dtype)
labels = (images[:, :3].sum(axis=1) > 0).astype("int32")

x, y = T.matrix("inputs"), T.ivector("targets")
start = [0.1 * rng.normal(size=(6, 8)), np.zeros(8), 0.1 * rng.normal(size=(8, 2)), np.zeros(2)]
params = [theano.shared(one.astype(dtype)) for one in start]
hidden = T.tanh(x.dot(params[0]) + params[1])
scores = hidden.dot(params[2]) + params[3]
logs = scores - T.log(T.exp(scores).sum(axis=1, keepdims=True))
loss = -logs[T.arange(y.shape[0]), y].mean()
accuracy = T.mean(T.eq(T.argmax(scores, axis=1), y), dtype=dtype)

grad_updates, param_updates, grad_shared = updates.nesterov_momentum(
    loss, params, learning_rate=0.2, momentum=0.9
)
rows_of_x = theano.shared(images[: len(images) // n_gpu])
rows_of_y = theano.shared(labels[: len(labels) // n_gpu])
train_grad = synk.function([x, y], outputs=loss, updates=grad_updates)
train_grad_kept = synk.function(
    inputs=[],
    outputs=loss,
    givens=[(x, rows_of_x), (y, rows_of_y)],
    sliceable_shareds=[rows_of_x, rows_of_y],
    updates=grad_updates,
)
train_update = synk.function([], updates=param_updates)
validate = synk.function([x, y], outputs=[loss, accuracy])
# without extensions: a shared variable for each gradient, and one for the learning rate
rate = theano.shared(np.array(0.2 / n_gpu, dtype=dtype), name="rate")
own_grads = [theano.shared(one.get_value() * 0.0, name="own_grad") for one in params]
columns = T.imatrix("columns")
own_loss = -logs[T.arange(columns.shape[0]), columns.flatten()].mean()
train_own = synk.function(
    inputs=[x, columns],
    outputs=own_loss,
    updates=list(zip(own_grads, T.grad(own_loss, wrt=params), strict=True)),
    name="train_own",
)
update_own = synk.function(
    inputs=[], updates=[(p, p - rate * g) for p, g in zip(params, own_grads, strict=True)]
)
train_all = make_train_function(loss, params, x, y, updates.sgd, learning_rate=0.5)
synk.distribute()

x_train, y_train = validate.build_inputs(images[:360], labels[:360])
x_test, y_test = validate.build_inputs(images[360:], labels[360:])


def reset():
    for variable, value in zip(params, start, strict=True):
        variable.set_value(value.astype(dtype))
    synk.broadcast(params)


def learned(step, length, batch_size):
    """Go through the training data for some epochs: the test's loss and accuracy."""
    for _ in range(4):
        order = rng.permutation(length)
        for first in range(0, length - batch_size + 1, batch_size):
            step(order[first : first + batch_size])
    test_loss, test_accuracy = validate(x_test, y_test, num_slices=4)
    assert float(test_loss) < 0.4
    assert float(test_accuracy) > 0.8
    for one in params:
        assert np.array_equal(synk.get_value(1, one), one.get_value())


def by_split_rows(batch):
    train_grad(x_train, y_train, batch=batch)
    synk.all_reduce(grad_shared)
    train_update()


def by_kept_rows(batch):
    train_grad_kept(batch_s=batch)
    synk.all_reduce(grad_shared)
    train_update()


reset()
learned(by_split_rows, 360, 40)
reset()
synk.scatter([rows_of_x, rows_of_y], [x_train, y_train])
learned(by_kept_rows, min(synk.get_lengths(rows_of_y)), 40 // n_gpu)
reset()
columns_train = synk.data(labels[:360].reshape(-1, 1))
for first in list(range(0, 360, 40)) * 4:
    rows = slice(first, first + 40)
    before = float(train_own(x_train, columns_train, batch=rows))
    synk.all_reduce(own_grads, op="sum")  # which the rate takes into account
    update_own()
    assert float(train_own.as_theano(images[rows], labels[rows].reshape(-1, 1))) < before
reset()
losses = [train_all(x_train, y_train) for _ in range(20)]
assert losses[-1] < losses[0] / 1.5
