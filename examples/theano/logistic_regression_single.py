"""Logistic regression on scikit-learn's handwritten digits, in one process.

    python examples/theano/logistic_regression_single.py

Prints the share of digits that it was not shown and gets right, which must be over 0.9.
`logistic_regression.py` beside this file is the same program for many processes.
"""

import os

# a graph this small has been trained before a compiler is done with it
os.environ.setdefault("PYTENSOR_FLAGS", "linker=py,optimizer=fast_compile")

import numpy as np
import pytensor
import pytensor.tensor as pt
from sklearn.datasets import load_digits

EPOCHS, BATCH, RATE = 20, 50, 0.2

# every fifth digit is for validation
digits = load_digits()
images, labels = digits.data / 16, digits.target
held_back = np.arange(len(labels)) % 5 == 0
train_x, train_y = images[~held_back], labels[~held_back]
valid_x, valid_y = images[held_back], labels[held_back]

W = pytensor.shared(value=np.zeros((64, 10)), name="W", borrow=True)
b = pytensor.shared(value=np.zeros(10), name="b", borrow=True)

x, y = pt.matrix("x"), pt.lvector("y")
scores = x @ W + b
cost = -pt.mean(pt.special.log_softmax(scores, axis=1)[pt.arange(y.shape[0]), y])
updates = [(one, one - RATE * pt.grad(cost, one)) for one in (W, b)]
train = pytensor.function([x, y], cost, updates=updates)
predict = pytensor.function([x], pt.argmax(scores, axis=1))

for _ in range(EPOCHS):
    for start in range(0, len(train_y), BATCH):
        train(train_x[start : start + BATCH], train_y[start : start + BATCH])

right = np.mean(predict(valid_x) == valid_y)
print(f"1 worker: {right:.3f} of {len(valid_y)} digits are right")
assert right > 0.9, right
