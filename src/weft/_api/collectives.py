"""Averages, sums, copies and gathered results: what the ranks of the default group do together.

All six take `out`, to write the result there instead of to fresh memory; `async_op`, to return a
handle with `wait()` and `done()` at once, until which the arrays are the call's; and `timeout`, the
seconds that the call may wait for other ranks. After Stalled, or an interrupt, in a collective this
rank is out of step: it goes on with `group.survivors()`, as after PeerLost.
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
    """The root's value, on every rank.

    >>> import weft
    >>> group = weft.init()
    >>> weft.broadcast({"rate": 0.1})
    {'rate': 0.1}
    >>> weft.shutdown()

    `value` counts on the root only; the others may pass None, or arrays like the root's. Arrays,
    CPU tensors, and lists, tuples and dicts of these travel as they are; any other object travels
    as a pickle. The root gets its own value back.

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
    """This rank's part of the root's rows, as a copy.

    Parts follow each other in rank order and differ by one row at most; with fewer rows than
    ranks some get none. Of a list, tuple or dict of arrays each array is cut by its rows; a list
    or tuple of other objects is cut by its items. `value` counts on the root only; the others
    pass None.

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
    """All ranks' rows, one after the other, at the root; None elsewhere.

    Ranks may have different numbers of rows; the other axes and the dtype must agree. An array of
    no dimension counts as one row. Of a list, tuple or dict of arrays each array is gathered by
    itself. Anything else, single numbers too, comes as a list, one object per rank.

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
    """As `gather`, with the result on every rank.

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
    """As `all_reduce`, with the result at the root and None elsewhere.

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
    """The ranks' numbers combined element by element: the same bits on every rank, and in every
    run with the same placement.

    `value`: an array or CPU tensor of numbers, a single number, or a list, tuple or dict of
    these, which travel together; the result is of the same type. `op`: "sum", "mean", "prod",
    "min" or "max". Sums are made in rank order within a host, then in the order of hosts. float16
    and bfloat16 are summed in float32; the mean of integers is taken in float64 and cast back as
    NumPy casts, towards zero (of Python's own ints it is a float).

    `weight`: this rank's weight in the mean, such as its number of rows: then the mean of the
    parts' means is the mean of all rows, however unevenly they are spread. A rank of weight 0
    does not count, even if it has NaN.

    `out` may be `value` itself. Large arrays of `weft.share` are reduced where they are, without
    being copied.

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
