"""The last version's third and fifth demo, and its tests: variables that differ in each process."""

import numpy as np
import pytensor as theano
import pytensor.tensor as T

import synkhronos as synk

size = synk.fork()
dtype = theano.config.floatX
ROWS = 30  # in each process

rows_of_each = theano.shared(np.ones([ROWS, 4], dtype=dtype), name="rows_of_each")
factors = theano.shared(np.zeros([4, 5], dtype=dtype), name="factors")
product = rows_of_each.dot(factors)
f = synk.function(
    inputs=[],
    sliceable_shareds=[rows_of_each],
    outputs=[
        T.mean(product, axis=0),
        (T.sum(product, axis=0), "sum"),
        (rows_of_each, "gather"),
    ],
)
synk.distribute()
assert synk.get_lengths(rows_of_each) == [ROWS] * size
assert synk.get_shapes(factors) == [(4, 5)] * size


def close(one, other):
    return np.allclose(one, other, rtol=1e-4, atol=1e-5)


rng = np.random.default_rng(1)
all_rows = rng.normal(size=(ROWS * size, 4)).astype(dtype)
values = rng.normal(size=(4, 5)).astype(dtype)
synk.scatter(rows_of_each, synk.data(value=all_rows))
synk.broadcast(factors, values)
assert np.array_equal(synk.gather(rows_of_each, nd_up=0), all_rows)
assert np.array_equal(synk.get_value(1, rows_of_each), all_rows[ROWS : 2 * ROWS])
for copy in synk.gather(factors):
    assert np.array_equal(copy, values)

one_list = rng.integers(0, ROWS, size=20)
several_lists = [rng.integers(0, ROWS, size=20) for _ in range(size)]
slices = [slice(i, 20 + i) for i in range(size)]
for batch_s in (None, slice(10, 30), list(one_list), one_list, slices, several_lists):
    several = isinstance(batch_s, list) and not isinstance(batch_s[0], np.integer)
    chosen = batch_s if several else [batch_s or slice(None) if batch_s is None else batch_s] * size
    rows = np.concatenate(
        [all_rows[rank * ROWS : (rank + 1) * ROWS][own] for rank, own in enumerate(chosen)]
    )
    for num_slices in (1, 4):
        mean, total, gathered = f(batch_s=batch_s, num_slices=num_slices)
        assert close(mean, rows.dot(values).mean(axis=0))
        assert close(total, rows.dot(values).sum(axis=0))
        assert np.array_equal(gathered, rows)

stacked = np.asarray(synk.gather(rows_of_each, nd_up=1))
synk.all_reduce(rows_of_each, op="avg")
for value in np.array(synk.gather(rows_of_each, nd_up=1)):
    assert close(value, stacked.mean(axis=0))
synk.set_value(rank=1, shared_vars=rows_of_each, values=stacked[1])
assert np.array_equal(synk.get_value(1, rows_of_each), stacked[1])
synk.all_gather(rows_of_each)
assert synk.get_shapes(rows_of_each) == [(ROWS * size, 4)] * size
longer = np.arange(24, dtype=dtype).reshape(6, 4)
synk.set_value(1, rows_of_each, longer)
assert synk.get_lengths(rows_of_each)[1] == 6
assert np.array_equal(synk.get_value(1, rows_of_each), longer)
