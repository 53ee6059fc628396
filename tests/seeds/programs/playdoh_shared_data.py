"""Seed 004, "Using shared_data": large data that every worker sees."""

from numpy import arange

from playdoh import *


def fun(x, shared_data):
    data1 = shared_data["key1"]
    return x * data1.sum() + shared_data["key2"]


dfun = distribute(fun, shared_data={"key1": arange(100_000), "key2": 1})
assert dfun([1, 2, 3]) == [n * 4999950000 + 1 for n in (1, 2, 3)]
print("done")
