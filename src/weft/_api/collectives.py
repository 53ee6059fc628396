"""Collectives of the default group: what its ranks move and combine together.

All six take

    out       arrays to write the result to, instead of new memory
    async_op  whether to return a handle with `wait()` and `done()` at once; until it is done the
              arrays belong to the call
    timeout   seconds that the call may wait for other ranks

After Stalled or an interrupt in a collective this rank is out of step with the others: it goes on
with `group.survivors()`, as after PeerLost.
"""

from __future__ import annotations

from typing import Any

from weft._api.session import group


def broadcast(
    value: Any,
    root: int = 0,
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return the root's value on every rank.

    >>> import weft
    >>> group = weft.init()
    >>> weft.broadcast({"rate": 0.1})
    {'rate': 0.1}
    >>> weft.shutdown()

    Only the root's `value` counts; the others may pass None, or arrays like the root's. Arrays, CPU
    tensors, and lists, tuples and dicts of these travel as they are, any other object as a pickle.
    The root gets its own value back.

    Raises InvalidValue, InvalidType, Disagreement, PeerLost, Stalled, NotInitialized,
    UsedConcurrently.
    """
    return group().broadcast(value, root, out=out, async_op=async_op, timeout=timeout)


def scatter(
    value: Any,
    root: int = 0,
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return a copy of this rank's part of the root's rows.

    Parts follow each other in rank order and differ by one row at most; with fewer rows than ranks
    some ranks get none. Each array of a list, tuple or dict is cut by its rows; a list or tuple of
    other objects is cut by its items. Only the root's `value` counts; the others pass None.

    >>> import numpy, weft
    >>> group = weft.init()
    >>> weft.scatter(numpy.arange(3))
    array([0, 1, 2])
    >>> weft.shutdown()

    Raises InvalidValue, InvalidType, Disagreement, PeerLost, Stalled, NotInitialized,
    UsedConcurrently.
    """
    return group().scatter(value, root, out=out, async_op=async_op, timeout=timeout)


def gather(
    value: Any,
    root: int = 0,
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return all ranks' rows, joined in rank order, at the root; None elsewhere.

    Ranks may have different numbers of rows; the other axes and the dtype must agree. An array
    without axes counts as one row. Each array of a list, tuple or dict is gathered by itself.
    Anything else, single numbers too, comes as a list with one object for each rank.

    >>> import numpy, weft
    >>> group = weft.init()
    >>> weft.gather(numpy.ones((2, 3))).shape
    (2, 3)
    >>> weft.gather("a string")
    ['a string']
    >>> weft.shutdown()

    Raises InvalidValue, InvalidType, Disagreement, PeerLost, Stalled, NotInitialized,
    UsedConcurrently.
    """
    return group().gather(value, root, out=out, async_op=async_op, timeout=timeout)


def all_gather(
    value: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None
) -> Any:
    """Return what `gather` returns, on every rank.

    >>> import numpy, weft
    >>> group = weft.init()
    >>> weft.all_gather(numpy.ones((2, 3))).shape
    (2, 3)
    >>> weft.shutdown()

    Raises what `gather` raises.
    """
    return group().all_gather(value, out=out, async_op=async_op, timeout=timeout)


def reduce(
    value: Any,
    op: str = "sum",
    root: int = 0,
    *,
    weight: float | None = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Return what `all_reduce` returns, at the root; None elsewhere.

    >>> import numpy, weft
    >>> group = weft.init()
    >>> weft.reduce(numpy.array([1, 2]), "max")
    array([1, 2])
    >>> weft.shutdown()

    Raises what `all_reduce` raises.
    """
    return group().reduce(
        value, op, root, weight=weight, out=out, async_op=async_op, timeout=timeout
    )


def all_reduce(
    value: Any,
    op: str = "sum",
    *,
    weight: float | None = None,
    out: Any = None,
    async_op: bool = False,
    timeout: float | None = None,
) -> Any:
    """Combine the ranks' numbers element by element, and return the result on every rank.

    The result has the same bits on every rank, and in every run with the same placement: ranks are
    summed in rank order within a host, then in the order of hosts.

    value   an array or CPU tensor of numbers, a single number, or a list, tuple or dict of these,
            which travel together; the result is of the same type.
    op      "sum", "mean", "prod", "min" or "max". float16 and bfloat16 are summed in float32; the
            mean of integers is taken in float64 and cast back as NumPy casts, towards zero (of
            Python's own ints it is a float).
    weight  this rank's weight in the mean, such as its number of rows: the mean of the parts' means
            is then the mean of all rows, however unevenly they are spread. A rank of weight 0 does
            not count, even if it has NaN.
    out     may be `value` itself.

    Large arrays of `weft.share` are reduced in place, without a copy.

    >>> import numpy, weft
    >>> group = weft.init()
    >>> weft.all_reduce(numpy.array([1.0, 2.0]), "mean", weight=3)
    array([1., 2.])
    >>> weft.all_reduce({"loss": 0.5, "rows": 10})
    {'loss': 0.5, 'rows': 10}
    >>> weft.all_reduce(numpy.ones(3), async_op=True).wait()
    array([1., 1., 1.])
    >>> weft.shutdown()

    Raises InvalidValue, InvalidType, Disagreement, PeerLost, Stalled, NotInitialized,
    UsedConcurrently.
    """
    return group().all_reduce(value, op, weight=weight, out=out, async_op=async_op, timeout=timeout)
