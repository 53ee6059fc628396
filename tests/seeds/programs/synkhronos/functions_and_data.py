"""The last version's first, second and fourth demo: modes, slices, Data, batches."""

import numpy as np
import pytensor as theano
import pytensor.tensor as T

import synkhronos as synk

synk.fork()
dtype = theano.config.floatX
x, y = T.matrix("x"), T.matrix("y")
product = x.dot(y)
f = synk.function(
    inputs=[x],
    bcast_inputs=[y],
    outputs=[
        T.mean(product, axis=0),
        (T.sum(product, axis=0), "sum"),
        (T.max(product, axis=0), "max"),
    ],
)
synk.distribute()

rng = np.random.default_rng(1)
left = rng.normal(size=(1001, 7)).astype(dtype)
right = rng.normal(size=(7, 5)).astype(dtype)
expected = f.as_theano(left, right)
shared_left, shared_right = f.build_inputs(left, right)
for found in (f(shared_left, shared_right), f(shared_left, shared_right, num_slices=4)):
    for one, other in zip(found, expected, strict=True):
        assert np.allclose(one, other)

for batch in (90, slice(5, 95), slice(95, 1001), rng.integers(0, 1001, size=77)):
    rows = left[:batch] if isinstance(batch, int) else left[batch]
    found = f(shared_left, shared_right, batch=batch)
    for one, other in zip(found, f.as_theano(rows, right), strict=True):
        assert np.allclose(one, other), batch

# Data: like an array, of any shape with as many axes
small, other = (rng.normal(size=(5, 4)).astype(dtype) for _ in range(2))
data = synk.data(small)
assert np.array_equal(data.data, small)
assert (data.shape, len(data), data.size) == ((5, 4), 5, 20)
assert np.array_equal(data[2:4], small[2:4])
data[3] = 0
assert not data[3].any()
data[:] = other
assert np.array_equal(data.data, other)
data.set_value(np.ones((2000, 10), dtype), oversize=1.1)
assert data.size == 20000
assert data.alloc_size == 22000
data.set_value(np.ones((2100, 10), dtype))
assert (len(data), data.alloc_size) == (2100, 22000)
data.set_length(2000)
data[:] = 2
assert data.shape == (2000, 10)
less = rng.normal(size=(100, 8))
data.set_value(less.astype(dtype))
assert (data.shape, data.alloc_size) == ((100, 8), 22000)
data.free_memory()
data.set_value(less.astype(dtype))
assert data.alloc_size == 800
data.set_value(less.astype("float32"), force_cast=True)
assert data.dtype == dtype
