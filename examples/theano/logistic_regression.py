"""Logistic regression on scikit-learn's handwritten digits, trained by many processes.

    mpirun -np 4 python ./examples/theano/logistic_regression.py
    weft run -n 4 ./examples/theano/logistic_regression.py
    python ./examples/theano/logistic_regression.py

The master prints the share of digits that nobody was shown and that it gets right, which must be
over 0.9. Where the program differs from `logistic_regression_single.py` beside it, a comment says
so: each worker trains on a share of the digits and adds its changes to what all of them have.
"""

import os

# a graph this small has been trained before a compiler is done with it
os.environ.setdefault("PYTENSOR_FLAGS", "linker=py,optimizer=fast_compile")

import numpy as np
import pytensor
import pytensor.tensor as pt
from sklearn.datasets import load_digits

# MULTIVERSO: import it
import multiverso as mv
from multiverso.theano_ext import sharedvar

EPOCHS, BATCH, RATE = 20, 50, 0.2

# MULTIVERSO: join the other workers
mv.init()

# every fifth digit is for validation
digits = load_digits()
images, labels = digits.data / 16, digits.target
held_back = np.arange(len(labels)) % 5 == 0
train_x, train_y = images[~held_back], labels[~held_back]
valid_x, valid_y = images[held_back], labels[held_back]

# MULTIVERSO: this worker's share of the digits
train_x = train_x[mv.worker_id() :: mv.workers_num()]
train_y = train_y[mv.worker_id() :: mv.workers_num()]

# MULTIVERSO: variables that all workers add to; they start with the master's values
W = sharedvar.mv_shared(value=np.zeros((64, 10)), name="W", borrow=True)
b = sharedvar.mv_shared(value=np.zeros(10), name="b", borrow=True)

x, y = pt.matrix("x"), pt.lvector("y")
scores = x @ W + b
cost = -pt.mean(pt.special.log_softmax(scores, axis=1)[pt.arange(y.shape[0]), y])
updates = [(one, one - RATE * pt.grad(cost, one)) for one in (W, b)]
train = pytensor.function([x, y], cost, updates=updates)
predict = pytensor.function([x], pt.argmax(scores, axis=1))

for _ in range(EPOCHS):
    for start in range(0, len(train_y), BATCH):
        train(train_x[start : start + BATCH], train_y[start : start + BATCH])
        # MULTIVERSO: add this batch's change, take the latest values
        sharedvar.sync_all_mv_shared_vars()
    # MULTIVERSO: nobody is ahead by more than an epoch
    mv.barrier()

# MULTIVERSO: all have added their last change; take everybody's
sharedvar.sync_all_mv_shared_vars()

right = np.mean(predict(valid_x) == valid_y)
# MULTIVERSO: all have the same result, so one prints it
if mv.is_master_worker():
    print(f"{mv.workers_num()} workers: {right:.3f} of {len(valid_y)} digits are right")
assert right > 0.9, right

# MULTIVERSO: leave
mv.shutdown()
