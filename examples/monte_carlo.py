"""A Monte Carlo run whose result does not depend on how many workers there are.

    python examples/monte_carlo.py

How far are two random points of a cube from each other, on average? With `seed=` the random
generators are seeded for each item anew, from the seed and the item's index: whoever runs it,
and whenever, draws the same numbers.
"""

import math

import numpy as np

import weft

ITEMS, PAIRS = 64, 20_000


def mean_distance(pairs: int) -> float:
    first, second = np.random.random((2, pairs, 3))
    return float(np.linalg.norm(first - second, axis=1).mean())


runs = {n: weft.map(mean_distance, [PAIRS] * ITEMS, n=n, seed=2718) for n in (1, 2, 3)}
runs[0] = weft.map(mean_distance, [PAIRS] * ITEMS, engine="serial", seed=2718)
assert runs[0] == runs[1] == runs[2] == runs[3], "the same numbers, to the last bit"
assert len(set(runs[1])) == ITEMS, "and every item has drawn its own"

means = np.array(runs[1])
error = means.std(ddof=1) / math.sqrt(ITEMS)
exact = (
    4
    + 17 * math.sqrt(2)
    - 6 * math.sqrt(3)
    + 21 * math.log(1 + math.sqrt(2))
    + 42 * math.log(2 + math.sqrt(3))
    - 7 * math.pi
) / 105
assert abs(means.mean() - exact) < 4 * error, (means.mean(), exact, error)
print(
    f"{means.mean():.6f} +- {error:.6f} with 1, 2 and 3 workers and with none; exact is {exact:.6f}"
)
