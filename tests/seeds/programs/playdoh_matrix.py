"""Seed 004, example 2: a function of columns, whose argument is split and results pasted."""

from numpy import sum


def fun(x):
    return sum(x, axis=0)


if __name__ == "__main__":
    from numpy import ones

    from distfun import *

    dfun = distribute(fun)
    x = ones((5, 4))
    y = dfun(x)
    print(y)
