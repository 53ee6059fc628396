"""What the examples of Playdoh's later releases did: `map` of a function, of a lambda, with shared
data and with another module; `map_async`; and the first release's `map` and its manager."""

import time

from numpy import arange, array_equal, diag, ones, sum
from numpy.linalg import inv
from playdoh_external import external_fun

from playdoh import *


def square(x):
    return x**2


def slow_square(x):
    time.sleep(0.01)
    return x**2


def add(x, shared_data):
    return x + shared_data["x0"]


def with_module(x):
    return external_fun(x) ** 2


def column_sums(x):
    return sum(x, axis=0)


if __name__ == "__main__":
    assert map(square, [1, 2], cpu=2) == [1, 4]
    assert map(lambda x: x * x, [1, 2], cpu=MAXCPU) == [1, 4]
    assert map(with_module, [1, 2], codedependencies=["playdoh_external.py"]) == [4, 9]

    rows = arange(60_000.0).reshape(30_000, 2)
    first, second = map(add, [rows, 2 * rows], cpu=2, shared_data={"x0": rows})
    assert array_equal(first, 2 * rows)
    assert array_equal(second, 3 * rows)

    task = map_async(slow_square, [1, 2], cpu=2)
    assert task.get_result() == [1, 4]

    inv_a, inv_b = map(inv, [diag([1, 2]), diag([4, 5])], max_cpu=2)
    assert inv_a.tolist() == [[1, 0], [0, 0.5]]
    assert inv_b.tolist() == [[0.25, 0], [0, 0.2]]

    dfun = distribute(column_sums, max_cpu=1, machines=["localhost"])
    assert dfun(ones((5, 8))).tolist() == [5] * 8

    if CANUSEGPU:
        assert map(square, [2, 3], gpu=1) == [4, 9]
    print("done")
