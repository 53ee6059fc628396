"""Playdoh's second example: a function of columns, with its matrix split over all CPUs.

    python examples/playdoh/column_sums.py

The program is the one of its documentation; only the check at the end is new.
"""

from numpy import sum


def fun(x):
    return sum(x, axis=0)


if __name__ == "__main__":
    from numpy import array_equal, ones

    from distfun import *

    dfun = distribute(fun)
    x = ones((5, 4))
    y = dfun(x)
    print(y, "as without workers")

    assert array_equal(y, fun(x)), y
