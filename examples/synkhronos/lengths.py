"""Variables of different lengths in the processes: scattered, changed, gathered.

python examples/synkhronos/lengths.py
"""

import numpy as np
import pytensor
import pytensor.tensor as pt

import synkhronos as synk

n = synk.fork(2)
rows = pytensor.shared(np.zeros((1, 2), dtype="float32"), name="rows")
factor = pt.scalar("factor", dtype="float32")
scale = synk.function(
    [], (rows.sum(), "sum"), bcast_inputs=[factor], updates=[(rows, rows * factor)]
)
mean = synk.function([], rows.mean(), sliceable_shareds=[rows])

values = np.arange(10, dtype="float32").reshape(5, 2)
synk.scatter(rows, values)
print("lengths:", synk.get_lengths(rows), "shapes:", synk.get_shapes(rows))
assert synk.get_lengths(rows) == [2, 3]

assert scale(2) == values.sum()  # what it was before the update
assert (synk.gather(rows, nd_up=0) == 2 * values).all()
assert np.isclose(mean(), 2 * values.mean())  # weighted by how many rows each process has
assert np.isclose(mean(batch_s=[[1], [0, 2]]), 2 * values[[1, 2, 4]].mean())

synk.set_value(1, rows, values, batch=slice(0, 4))  # another length in one process only
print("lengths:", synk.get_lengths(rows))
assert (synk.get_value(1, rows) == values[:4]).all()
assert (rows.get_value() == 2 * values[:2]).all()  # this process's own

synk.all_gather(rows)
expected = np.concatenate([2 * values[:2], values[:4]])
assert (rows.get_value() == expected).all()
assert (synk.get_value(1, rows) == expected).all()
print(f"{n} processes: gathered {len(expected)} rows of both into each, none added, none left off")
