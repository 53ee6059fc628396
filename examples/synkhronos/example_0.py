"""The introductory example: a function over split data gives what the plain one gives.

python examples/synkhronos/example_0.py
"""

import numpy as np
import pytensor
import pytensor.tensor as pt

import synkhronos as synk

n = synk.fork(2)

x = pt.matrix("x", dtype="float32")
y = pt.vector("y", dtype="float32")
z = pt.mean(x.dot(y), axis=0)
f_plain = pytensor.function([x, y], z)
f = synk.function([x], z, bcast_inputs=[y])
synk.distribute()

x_values = np.random.rand(100, 10).astype("float32")
y_values = np.random.rand(10).astype("float32")

from_plain = f_plain(x_values, y_values)
from_synk = f(x_values, y_values)
from_master_alone = f.as_theano(x_values, y_values)

assert np.allclose(from_plain, from_synk)
assert np.allclose(from_plain, from_master_alone)
print(f"{n} processes: all assertions passed")
