"""A network that learns handwritten digits with all processes, beside the same in one process.

python examples/synkhronos/digits.py
"""

from itertools import pairwise

import numpy as np
import pytensor
import pytensor.tensor as pt
from sklearn.datasets import load_digits

import synkhronos as synk
from synkhronos.extensions import train, updates

EPOCHS, BATCH = 6, 101  # an odd number: the processes' parts are uneven


def make_network(inputs, rng):
    """Two layers; their parameters, and the logarithms of the probabilities of the digits."""
    sizes = [64, 48, 10]
    parameters, layer = [], inputs
    for number, (before, after) in enumerate(pairwise(sizes)):
        weights = rng.normal(size=(before, after)) / np.sqrt(before)
        w = pytensor.shared(weights.astype("float32"), name=f"w{number}")
        b = pytensor.shared(np.zeros(after, dtype="float32"), name=f"b{number}")
        layer = layer.dot(w) + b
        layer = pt.tanh(layer) if number == 0 else pt.special.log_softmax(layer, axis=1)
        parameters += [w, b]
    return parameters, layer


def learn(step, x_values, y_values):
    """Go through the training data; the losses of all steps."""
    order = np.random.default_rng(1)
    losses = []
    for _ in range(EPOCHS):
        rows = order.permutation(len(x_values))
        for start in range(0, len(rows), BATCH):
            losses.append(step(x_values, y_values, rows[start : start + BATCH]))
    return np.array(losses)


digits = load_digits()
images, labels = (digits.data / 16).astype("float32"), digits.target.astype("int32")
x, y = pt.matrix("x", dtype="float32"), pt.vector("y", dtype="int32")

n = synk.fork(2)
parameters, log_probabilities = make_network(x, np.random.default_rng(0))
loss = -log_probabilities[pt.arange(y.shape[0]), y].mean()
step = train.make_train_function(loss, parameters, x, y, updates.nesterov_momentum, 0.1)
right = synk.function([x, y], (pt.eq(log_probabilities.argmax(axis=1), y).sum(), "sum"))
synk.distribute()

start = [one.get_value() for one in parameters]
x_data, y_data = step.gradients.build_inputs(images[:1437], labels[:1437])  # in shared memory
losses = learn(lambda xs, ys, rows: step(xs, ys, batch=rows), x_data, y_data)
found = [one.get_value() for one in parameters]
correct = right(images[1437:], labels[1437:])
for one in parameters:
    assert (synk.get_value(1, one) == one.get_value()).all(), one

synk.broadcast(parameters, start)  # once more from the start, in this process alone
single = train.make_train_function(loss, parameters, x, y, updates.nesterov_momentum, 0.1)
alone = learn(lambda xs, ys, rows: single.as_theano(xs[rows], ys[rows]), x_data, y_data)

assert np.allclose(losses, alone, rtol=1e-3, atol=1e-4), abs(losses - alone).max()
for one, other in zip(found, parameters, strict=True):
    assert np.allclose(one, other.get_value(), rtol=1e-2, atol=1e-3), other
print(
    f"{n} processes: {correct} of 360 digits are right after {len(losses)} steps; the losses are "
    f"those of one process, to {abs(losses - alone).max():.0e}"
)
