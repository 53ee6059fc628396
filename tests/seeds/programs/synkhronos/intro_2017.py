"""The introductory example of February 2017, from which seed 002 is, and its first demo."""

import numpy as np
import pytensor as theano
import pytensor.tensor as T

import synkhronos as synk

size = synk.fork()
dtype = theano.config.floatX

x, y, v = T.matrix("x"), T.matrix("y"), T.vector("v")
total = theano.shared(np.ones((1, 5), dtype=dtype), name="total")
z = T.mean(x.dot(y), axis=0)
f = synk.function([x, y], z, broadcast_inputs=[y])
f_sum = synk.function([x, y], T.sum(x.dot(y), axis=0), reduce_ops="sum", scatter_inputs=[x])
g = synk.function([v], updates={total: total + v}, broadcast_inputs=[v])
own = synk.function([x, y], z, collect_modes=[None], broadcast_inputs=[y])
synk.distribute()


def close(one, other):
    return np.allclose(one, other, rtol=1e-4, atol=1e-5)


rng = np.random.default_rng(1)
left, right = (rng.normal(size=shape).astype(dtype) for shape in ((101, 7), (7, 5)))
r = f(left, right)
assert close(r, f.as_theano(left, right))
assert close(r, left.dot(right).mean(axis=0))

column_sums = f_sum(left, right)
assert close(column_sums, f_sum.as_theano(left[:40], right) + f_sum.as_theano(left[40:], right))

x_shmem, y_shmem = f.get_input_shmems()
assert close(f(x_shmem[:50], y_shmem), left[:50].dot(right).mean(axis=0))
own_rows = len(left) // size
assert close(own(left, right), left[:own_rows].dot(right).mean(axis=0))

g(column_sums)  # everybody adds all of it
gathered = synk.gather(shared_vars=total, nd_up=1)
assert gathered.shape == (size, 1, 5)
assert close(gathered, 1 + column_sums)
synk.reduce(op="sum")
assert close(total.get_value(), size * (1 + column_sums))
synk.broadcast(functions=[g])
assert close(synk.gather(total), size * (1 + column_sums))
