"""Shared variables in several processes: one plain call, and the same in parts.

python examples/synkhronos/example_1.py
"""

import numpy as np
import pytensor
import pytensor.tensor as pt

import synkhronos as synk

synk.fork(2)
s_init = np.ones(2, dtype="float32")
x = pt.matrix("x", dtype="float32")
s = pytensor.shared(s_init, name="s")
f = synk.function([x], updates=[(s, pt.sum(x * s, axis=0))])
synk.distribute()
x_values = np.array([[1, 1], [2, 2], [3, 3], [4, 4]], dtype="float32")

f.as_theano(x_values)
print("\nplain call, s in the master:", s.get_value())
assert (s.get_value() == [10, 10]).all()

s.set_value(s_init)
f(x_values)
print("\nparallel call, s in the master:", s.get_value())
gathered = synk.gather(s)
print("s in all processes:\n", gathered)
assert (gathered == [[3, 3], [7, 7]]).all()

synk.reduce(s, "sum")
print("\nafter reduce, s in the master:", s.get_value())
gathered = synk.gather(s)
print("s in all processes:\n", gathered)
assert (gathered == [[10, 10], [7, 7]]).all()

synk.broadcast(s, s_init)
f(x_values)
synk.all_reduce(s, "sum")
gathered = synk.gather(s)
print("\nafter broadcast, a call and all_reduce, s in all processes:\n", gathered)
assert (gathered == [[10, 10], [10, 10]]).all()
