"""Fit a line on rows that are spread over the ranks: average the gradients, in place.

    weft run -n 2 examples/average.py          or alone: python examples/average.py

The fit is that of one process on all rows, although no rank sees more than its share and the
shares are uneven.
"""

import numpy as np

import weft

group = weft.init()
generator = np.random.default_rng(1)
x = generator.normal(size=(1001, 3))
y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * generator.normal(size=1001)

# rank 0 has the data, the others get their rows
rows, answers = weft.scatter([x, y] if weft.is_master() else None)

weights = np.zeros(3)
for _ in range(200):
    gradient = 2 * rows.T @ (rows @ weights - answers) / len(rows)
    weft.all_reduce(gradient, "mean", weight=len(rows), out=gradient)
    weights -= 0.1 * gradient

expected = np.linalg.lstsq(x, y, rcond=None)[0]
assert np.allclose(weights, expected), (weights, expected)
agreed = weft.all_gather(weights[None])
assert (agreed == weights).all()
print(f"rank {group.rank} of {group.size}: {len(rows)} rows, weights {weights.round(3)}")
