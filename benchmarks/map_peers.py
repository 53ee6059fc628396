"""Maps as weft has them and as its peers do, each used as its own documents advise.

                an array in the call        arrays given before       one array for all items
    Weft        as it is                    weft.share                distribute(shared_data=)
    Pool        pickled                     -                         inherited by fork
    Executor    pickled, as is every item   -                         inherited by fork
    Joblib      becomes a file, mapped      files, mapped             a file, mapped
    Ray         ray.put                     ray.put                   ray.put
    Dask        scatter                     scatter                   scatter to every worker

All have two workers, which are ready when the object is; nothing listens beyond loopback.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.floating[Any]]

WORKERS = 2
RAY_MEMORY = 2_000_000_000  # bytes for all its objects together

#: What a worker does with one item, and with one item and the array that is for all.
Function = Callable[[Any], Any]
Reader = Callable[[Any, Any], Any]
#: A reader that has been given its array: from items to results.
Reading = Callable[[Iterable[Any]], list[Any]]

#: what workers that are forked from now on inherit
inherited: Array | None = None


class Peer(Protocol):
    """Workers that are ready. `common` is the array that all items may read."""

    def __init__(self, common: Array, folder: str) -> None: ...

    def map(self, function: Function, items: Sequence[Any]) -> list[Any]:
        """One result per item; the items are small, or were given before."""

    def map_large(self, function: Function, arrays: Sequence[Array]) -> list[Any]:
        """One result per array, which the workers get in this call."""

    def given(self, arrays: Sequence[Array]) -> list[Any] | None:
        """Items for `map` that stand for arrays the workers can reach already; None: no way."""

    def reading(self, reader: Reader) -> Reading:
        """A map of reader(item, common), where the workers can reach `common` already. The one
        made before may end."""

    def reading_in_call(self, reader: Reader) -> Reading | None:
        """The same, where the workers get `common` in each call; None: no way."""

    def close(self) -> None: ...


class Weft:
    def __init__(self, common: Array, folder: str) -> None:
        import weft

        self.weft, self.common = weft, {"common": common}
        self.finish_last: Callable[[], None] = lambda: None
        self.map(nothing, range(WORKERS))

    def map(self, function: Function, items: Sequence[Any]) -> list[Any]:
        return self.weft.map(function, items, n=WORKERS)

    map_large = map

    def given(self, arrays: Sequence[Array]) -> list[Any]:
        return [self.weft.share(array) for array in arrays]

    def reading(self, reader: Reader) -> Reading:
        self.finish_last()
        function = partial(read_shared, reader)
        distributed = self.weft.distribute(function, shared_data=self.common, max_cpu=WORKERS)
        self.finish_last = distributed.finished
        return lambda items: distributed(list(items))

    def reading_in_call(self, reader: Reader) -> Reading:
        function = partial(read_shared, reader)
        return partial(self.weft.map, function, n=WORKERS, shared_data=self.common)

    def close(self) -> None:
        self.weft.shutdown()


def read_shared(reader: Reader, item: Any, shared_data: dict[str, Array]) -> Any:
    return reader(item, shared_data["common"])


class Pool:
    def __init__(self, common: Array, folder: str) -> None:
        import multiprocessing

        inherit(common)
        self.pool = multiprocessing.get_context("fork").Pool(WORKERS)

    def map(self, function: Function, items: Sequence[Any]) -> list[Any]:
        return self.pool.map(function, items)

    map_large = map

    def given(self, arrays: Sequence[Array]) -> None:
        return None

    def reading(self, reader: Reader) -> Reading:
        return partial(self.pool.map, partial(read_inherited, reader))

    def reading_in_call(self, reader: Reader) -> None:
        return None

    def close(self) -> None:
        self.pool.close()
        self.pool.join()


class Executor:
    def __init__(self, common: Array, folder: str) -> None:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        inherit(common)
        fork = multiprocessing.get_context("fork")
        self.executor = ProcessPoolExecutor(WORKERS, mp_context=fork)
        self.map(nothing, range(WORKERS))

    def map(self, function: Function, items: Sequence[Any]) -> list[Any]:
        return list(self.executor.map(function, items))

    map_large = map

    def map_chunked(self, function: Function, items: Sequence[Any]) -> list[Any]:
        """In chunks as long as Pool would make them."""
        length = -(-len(items) // (4 * WORKERS))
        return list(self.executor.map(function, items, chunksize=length))

    def given(self, arrays: Sequence[Array]) -> None:
        return None

    def reading(self, reader: Reader) -> Reading:
        return partial(self.map, partial(read_inherited, reader))

    def reading_in_call(self, reader: Reader) -> None:
        return None

    def close(self) -> None:
        self.executor.shutdown()


def inherit(array: Array) -> None:
    global inherited
    inherited = array


def read_inherited(reader: Reader, item: Any) -> Any:
    return reader(item, inherited)


class Joblib:
    def __init__(self, common: Array, folder: str) -> None:
        import joblib

        self.joblib, self.folder, self.common = joblib, folder, common
        self.parallel = joblib.Parallel(n_jobs=WORKERS).__enter__()
        self.map(nothing, range(WORKERS))

    def map(self, function: Function, items: Sequence[Any]) -> list[Any]:
        return list(self.parallel(self.joblib.delayed(function)(item) for item in items))

    def map_large(self, function: Function, arrays: Sequence[Array]) -> list[Any]:
        # the same workers; the files of one call end with it, those of a context later
        parallel = self.joblib.Parallel(n_jobs=WORKERS)
        return list(parallel(self.joblib.delayed(function)(array) for array in arrays))

    def given(self, arrays: Sequence[Array]) -> list[Any]:
        return [self.mapped_file(array, f"{number}") for number, array in enumerate(arrays)]

    def reading(self, reader: Reader) -> Reading:
        common = self.mapped_file(self.common, "common")
        return lambda items: list(
            self.parallel(self.joblib.delayed(reader)(item, common) for item in items)
        )

    def reading_in_call(self, reader: Reader) -> Reading:
        return lambda items: list(
            self.joblib.Parallel(n_jobs=WORKERS)(
                self.joblib.delayed(reader)(item, self.common) for item in items
            )
        )

    def mapped_file(self, array: Array, name: str) -> Any:
        path = f"{self.folder}/{name}"
        self.joblib.dump(array, path)
        return self.joblib.load(path, mmap_mode="r")

    def close(self) -> None:
        from joblib.externals.loky import get_reusable_executor

        self.parallel.__exit__(None, None, None)
        get_reusable_executor().shutdown(wait=True)


class Ray:
    def __init__(self, common: Array, folder: str) -> None:
        self.ray, self.common = started_ray(folder), common
        self.remote: Callable[[Any], Any] = functools.cache(self.ray.remote)
        self.map(nothing, range(WORKERS))

    def map(self, function: Function, items: Sequence[Any]) -> list[Any]:
        remote = self.remote(function)
        return list(self.ray.get([remote.remote(item) for item in items]))

    def map_large(self, function: Function, arrays: Sequence[Array]) -> list[Any]:
        return self.map(function, self.given(arrays))

    def given(self, arrays: Sequence[Array]) -> list[Any]:
        return [self.ray.put(array) for array in arrays]

    def reading(self, reader: Reader) -> Reading:
        return partial(self.read, reader, self.ray.put(self.common))

    def reading_in_call(self, reader: Reader) -> Reading:
        return lambda items: self.read(reader, self.ray.put(self.common), items)

    def read(self, reader: Reader, common: Any, items: Iterable[Any]) -> list[Any]:
        remote = self.remote(reader)
        return list(self.ray.get([remote.remote(item, common) for item in items]))

    def close(self) -> None:
        self.ray.shutdown()


class Dask:
    def __init__(self, common: Array, folder: str) -> None:
        self.cluster, self.client = started_dask(folder)
        self.common = common
        self.map(nothing, range(WORKERS))

    def map(self, function: Function, items: Sequence[Any]) -> list[Any]:
        return self.results(self.client.map(function, items, pure=False))

    def map_large(self, function: Function, arrays: Sequence[Array]) -> list[Any]:
        return self.map(function, self.given(arrays))

    def given(self, arrays: Sequence[Array]) -> list[Any]:
        # hashing the data would take four times as long as sending it
        return list(self.client.scatter(list(arrays), hash=False, direct=True))

    def reading(self, reader: Reader) -> Reading:
        return partial(self.read, reader, self.sent_to_all())

    def reading_in_call(self, reader: Reader) -> Reading:
        return lambda items: self.read(reader, self.sent_to_all(), items)

    def sent_to_all(self) -> Any:
        return self.client.scatter(self.common, hash=False, direct=True, broadcast=True)

    def read(self, reader: Reader, common: Any, items: Iterable[Any]) -> list[Any]:
        submit = partial(self.client.submit, reader, pure=False)
        return self.results([submit(item, common) for item in items])

    def results(self, futures: Sequence[Any]) -> list[Any]:
        return list(self.client.gather(futures, direct=True))

    def close(self) -> None:
        self.client.close()
        self.cluster.close()


def nothing(_item: int) -> None:
    """What workers are asked for until they are there."""


def started_ray(folder: str) -> Any:
    ray: Any = importlib.import_module("ray")
    ray.init(
        address="local",
        num_cpus=WORKERS,
        include_dashboard=False,
        object_store_memory=RAY_MEMORY,
        log_to_driver=False,
        logging_level="error",
        _temp_dir=folder,
    )
    return ray


def started_dask(folder: str) -> tuple[Any, Any]:
    distributed: Any = importlib.import_module("distributed")
    cluster = distributed.LocalCluster(
        n_workers=WORKERS,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=None,
        local_directory=folder,
    )
    return cluster, distributed.Client(cluster)


MAKE: dict[str, type[Peer]] = {
    "weft": Weft,
    "pool": Pool,
    "executor": Executor,
    "joblib": Joblib,
    "ray": Ray,
    "dask": Dask,
}
