"""`map` and `map_async`: one function, many items, all cores, the same answer.

What they do is in `maps.py`, which is loaded while the first workers start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from weft.engines import registry

if TYPE_CHECKING:
    from weft._api.maps import MapHandle


def map(  # what the built-in does, on all cores
    fun: Callable[..., Any],
    items: Iterable[Any],
    *,
    n: int | None = None,
    gpus: int | None = None,
    engine: str | None = None,
    shared_data: Mapping[str, Any] | None = None,
    seed: int | None = None,
    retries: int = 0,
    on_error: str = "raise",
    progress: bool | str = False,
    timeout: float | None = None,
) -> list[Any]:
    """`[fun(item) for item in items]`, computed by `n` worker processes: by default one per core.

    >>> import weft
    >>> weft.map(lambda x: x * x, [1, 2, 3])
    [1, 4, 9]

    Functions of any kind travel, also lambdas and those of a notebook. Large arrays go through
    shared memory. Workers stay alive for the next call. `items` may be a generator: it is asked
    for more only when a worker is free.

    gpus         how many GPUs to use at most: one worker for each, which sees only this one. Where
                 there are none the cores are used. A function with a parameter `use_gpu` is told.
    shared_data  a dict that every call gets: `fun(item, shared_data)`. Its arrays lie in
                 read-only shared memory, once for all workers.
    seed         seeds `random`, NumPy and torch before each item from (seed, index of the item):
                 the results do not depend on the number of workers.
    retries      how often an item whose worker died is run again, on a fresh one.
    on_error     "raise": the first failure ends the others and is raised, with the worker's
                 traceback as its cause. "return": the exception is in the place of its result.
    progress     True, or a label: shows a bar.
    timeout      seconds for all of it.
    engine       "local", or "serial": in this process, for debugging.

    Items that are short are sent several at a time. If a worker dies, those that it had together
    with the lost one are run again.

    Raises what `fun` raises, WorkerLost, Stalled, InvalidType for what cannot be pickled.
    """
    registry.prestart(engine)
    from weft._api.maps import Options, make_map

    options = Options(n, gpus, engine, shared_data, seed, retries, on_error, progress, timeout)
    return make_map("map", fun, items, options).run()


def map_async(
    fun: Callable[..., Any],
    items: Iterable[Any],
    *,
    n: int | None = None,
    gpus: int | None = None,
    engine: str | None = None,
    shared_data: Mapping[str, Any] | None = None,
    seed: int | None = None,
    retries: int = 0,
    on_error: str = "raise",
    progress: bool | str = False,
    timeout: float | None = None,
) -> MapHandle:
    """`map` that returns at once, with a handle. A thread of this process looks after the workers.

    >>> import weft
    >>> handle = weft.map_async(abs, [-1, -2])
    >>> handle.wait()
    [1, 2]
    """
    registry.prestart(engine)
    from weft._api.maps import MapHandle, Options, make_map

    options = Options(n, gpus, engine, shared_data, seed, retries, on_error, progress, timeout)
    return MapHandle(make_map("map_async", fun, items, options))
