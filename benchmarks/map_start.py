"""A program that maps once: how long until it has a result?

    python benchmarks/map_start.py weft

It is what a user would write: NumPy imported on top, a function that uses it, two items.
benchmarks/map.py starts it and stops the clock when it prints.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable

import numpy as np

ITEMS = [1.0, 2.0]


def length(item: float) -> float:
    return float(np.linalg.norm(np.full(16, item)))


def by_weft() -> None:
    import weft

    show(weft.map(length, ITEMS, n=2))


def by_pool(start: str) -> None:
    import multiprocessing

    with multiprocessing.get_context(start).Pool(2) as pool:
        show(pool.map(length, ITEMS))


def by_executor() -> None:
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(2) as executor:
        show(list(executor.map(length, ITEMS)))


def by_joblib() -> None:
    from joblib import Parallel, delayed

    show(Parallel(n_jobs=2)(delayed(length)(item) for item in ITEMS))


def by_ray() -> None:
    from map_peers import started_ray

    with tempfile.TemporaryDirectory() as folder:
        ray = started_ray(folder)
        remote = ray.remote(length)
        show(ray.get([remote.remote(item) for item in ITEMS]))
        ray.shutdown()


def by_dask() -> None:
    from map_peers import started_dask

    with tempfile.TemporaryDirectory() as folder:
        cluster, client = started_dask(folder)
        show(client.gather(client.map(length, ITEMS)))
        client.close()
        cluster.close()


def show(results: list[float]) -> None:
    print(results, flush=True)


WAYS: dict[str, Callable[[], None]] = {
    "weft": by_weft,
    "spawn": lambda: by_pool("spawn"),
    "fork": lambda: by_pool("fork"),
    "executor": by_executor,
    "joblib": by_joblib,
    "ray": by_ray,
    "dask": by_dask,
}

if __name__ == "__main__":
    WAYS[sys.argv[1]]()
