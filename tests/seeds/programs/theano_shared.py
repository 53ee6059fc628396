"""Seed 000, "How to use multiverso in theano": first without multiverso, then with it.

PyTensor stands in Theano's place.
"""

import numpy
import pytensor as theano
from pytensor import tensor

import multiverso as mv
from multiverso.theano_ext import sharedvar

n_in, n_out = 4, 3
mv.init()


class Layer:
    def __init__(self):
        self.W = theano.shared(
            value=numpy.zeros((n_in, n_out), dtype=theano.config.floatX), name="W", borrow=True
        )


plain = Layer().W

# Only the master worker can initialize the shared value. The initial value from
# other processes will be ignored
W = sharedvar.mv_shared(
    value=numpy.full((n_in, n_out), mv.worker_id(), dtype=theano.config.floatX),
    name="W",
    borrow=True,
)
b = sharedvar.mv_shared(value=numpy.zeros(n_out, dtype=theano.config.floatX), name="b", borrow=True)
assert type(W) is type(plain)
assert W.type == plain.type
assert W.name == plain.name
assert not W.get_value().any(), "everybody starts with the master's value"

# build the model
x = tensor.matrix("x")
train = theano.function([x], (x @ W + b).sum(), updates=[(W, W + 1.0), (b, b + x[0, 0])])

# train the model
first = numpy.full((2, n_in), mv.worker_id(), dtype=theano.config.floatX)
assert train(first) == 0
assert numpy.array_equal(W.get_value(), numpy.ones((n_in, n_out)))

# When you are ready to add the delta of the variable to parameter server and sync the latest value,
# you can run this function
W.mv_sync()
mv.barrier()
W.mv_sync()  # now everybody's delta is there
workers = mv.workers_num()
assert numpy.array_equal(W.get_value(), numpy.full((n_in, n_out), workers)), W.get_value()

# If you want to sync all variables created by `sharedvar.mv_shared`, you can use this function
sharedvar.sync_all_mv_shared_vars()
mv.barrier()
sharedvar.sync_all_mv_shared_vars()
assert numpy.array_equal(W.get_value(), numpy.full((n_in, n_out), workers)), "added only once"
assert numpy.array_equal(b.get_value(), numpy.full(n_out, sum(range(workers)))), b.get_value()

# functions that were made before see the values that came from the others
expected = (numpy.ones((1, n_in)) @ W.get_value() + b.get_value()).sum()
assert train(numpy.ones((1, n_in), dtype=theano.config.floatX)) == expected

mv.shutdown()
