"""The introductory example of February 2017, from which seed 002 is, and its first demo."""

import numpy as np
import pytensor as theano
import pytensor.tensor as T

import synkhronos as synk

size = synk.fork()

x, y, v = T.matrix("x"), T.matrix("y"), T.vector("v")
total = theano.shared(np.ones((1, 5)), name="total")
z = T.mean(x.dot(y), axis=0)
f = synk.function([x, y], z, broadcast_inputs=[y])
f_sum = synk.function([x, y], T.sum(x.dot(y), axis=0), reduce_ops="sum", scatter_inputs=[x])
g = synk.function([v], updates={total: total + v}, broadcast_inputs=[v])
own = synk.function([x, y], z, collect_modes=[None], broadcast_inputs=[y])
synk.distribute()

rng = np.random.default_rng(1)
left, right = rng.normal(size=(101, 7)), rng.normal(size=(7, 5))
r = f(left, right)
assert np.allclose(r, f.as_theano(left, right))
assert np.allclose(r, left.dot(right).mean(axis=0))

column_sums = f_sum(left, right)
assert np.allclose(
    column_sums, f_sum.as_theano(left[:40], right) + f_sum.as_theano(left[40:], right)
)

x_shmem, y_shmem = f.get_input_shmems()
assert np.allclose(f(x_shmem[:50], y_shmem), left[:50].dot(right).mean(axis=0))
own_rows = len(left) // size
assert np.allclose(own(left, right), left[:own_rows].dot(right).mean(axis=0))

g(column_sums)  # everybody adds all of it
gathered = synk.gather(shared_vars=total, nd_up=1)
assert gathered.shape == (size, 1, 5)
assert np.allclose(gathered, 1 + column_sums)
synk.reduce(op="sum")
assert np.allclose(total.get_value(), size * (1 + column_sums))
synk.broadcast(functions=[g])
assert np.allclose(synk.gather(total), size * (1 + column_sums))
