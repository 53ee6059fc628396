"""Seed 004, "Usage" and "Cleaning up memory": several calls, then `finished` and `shutdown`."""

from playdoh import *


def fun(x):
    return 10 * x


dfun = distribute(fun)
y = dfun([1, 2, 3])
assert y == [10, 20, 30]
try:
    dfun([1])
except RuntimeError as error:
    assert "endaftercall=False" in str(error)
else:
    raise SystemExit("a second call was let through")

dfun = distribute(fun, endaftercall=False)
assert [dfun([n, n + 1]) for n in range(3)] == [[0, 10], [10, 20], [20, 30]]
finished(dfun)
other = distribute(fun, endaftercall=False)
assert other([4]) == [40]
shutdown(other)
print("done")
