"""What the processes of benchmarks/functions.py do: one party of a row each, when told to.

    functions.py                       a party's process
                                       makes ready, calls once
      <------ the first result ------
      ------- how many calls ------->  clock, calls, clock
      <------ seconds of a call -----
      ------- end of input --------->  ends

So all parties of a row are ready at once, and all but one wait for input, which takes no time.
A party of two processes gets its line twice; the later of the two counts.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float32]

RANKS = 2
BATCH, LAYERS = 1024, (784, 800, 800, 10)
LENGTH, WIDTH = 500_000, 100  # float32: 200 MB
BLOCK = 1_000  # rows that a function works on at a time, so that they stay in the cache

#: a call returns a number by which parties are compared
Call = Callable[[], float]


class Place(NamedTuple):
    """Which of a party's processes this one is, and a folder that is theirs."""

    rank: int
    size: int
    folder: Path


def main() -> None:
    program, rank, size, folder = sys.argv[1:]
    with PROGRAMS[program](Place(int(rank), int(size), Path(folder))) as call:
        print(call(), flush=True)
        for line in sys.stdin:
            count = int(line)
            began = time.perf_counter()
            for _ in range(count):
                call()
            print((time.perf_counter() - began) / count, flush=True)


# the empty call


def nothing(_rows: Any) -> float:
    return 0.0


@contextlib.contextmanager
def empty_call(_: Place) -> Iterator[Call]:
    import numpy as np

    import weft

    with weft.Team(RANKS) as team:
        function = weft.function(nothing, collect="sum", team=team)
        yield partial(function, np.zeros(RANKS))


@contextlib.contextmanager
def map_of_two(_: Place) -> Iterator[Call]:
    import weft

    yield lambda: sum(weft.map(nothing, range(RANKS), n=RANKS))
    weft.shutdown()


# a step of training


def network() -> tuple[Any, Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[Any] = []
    for before, after in itertools.pairwise(LAYERS):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def batch(place: Place) -> tuple[Any, Any]:
    """This process's rows."""
    import torch

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LAYERS[0], generator=generator)
    y = torch.randint(LAYERS[-1], (BATCH,), generator=generator)
    own = slice(BATCH * place.rank // place.size, BATCH * (place.rank + 1) // place.size)
    return x[own].clone(), y[own].clone()


def loss(model: Any, x: Any, y: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(x), y)


def step(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    optimizer.zero_grad()
    value = loss(model, x, y)
    value.backward()
    optimizer.step()
    return float(value.item())


@contextlib.contextmanager
def train_step(place: Place) -> Iterator[Call]:
    import weft

    model, optimizer = network()
    with weft.Team(RANKS) as team:
        yield partial(weft.train_step(loss, model, optimizer, team=team), *batch(place))


@contextlib.contextmanager
def train(place: Place) -> Iterator[Call]:
    """One process, or one of two that know nothing of each other."""
    yield partial(step, *network(), *batch(place))


@contextlib.contextmanager
def train_ddp(place: Place) -> Iterator[Call]:
    import torch.distributed
    from torch.nn.parallel import DistributedDataParallel

    meet = f"file://{place.folder / 'meet'}"
    torch.distributed.init_process_group(
        "gloo", init_method=meet, rank=place.rank, world_size=place.size
    )
    model, _ = network()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    yield partial(step, replica, optimizer, *batch(place))
    torch.distributed.destroy_process_group()


# a function of NumPy's over 200 MB


def computed(x: Array) -> float:
    """A sum over rows that takes longer to compute than to read."""
    import numpy as np

    total = 0.0
    for start in range(0, len(x), BLOCK):
        total += float(np.exp(np.sin(x[start : start + BLOCK])).sum(dtype=np.float64))
    return total


def array() -> Array:
    import numpy as np

    return np.random.default_rng(0).random((LENGTH, WIDTH), dtype=np.float32)


def halves(x: Array) -> list[Array]:
    return [x[LENGTH * rank // RANKS : LENGTH * (rank + 1) // RANKS] for rank in range(RANKS)]


@contextlib.contextmanager
def function_of_array(_: Place, *, shared: bool) -> Iterator[Call]:
    import weft

    x = weft.share(array()) if shared else array()
    with weft.Team(RANKS) as team:
        yield partial(weft.function(computed, collect="sum", team=team), x)


@contextlib.contextmanager
def half_of_array(place: Place) -> Iterator[Call]:
    """One of two processes that know nothing of each other."""
    yield partial(computed, halves(array())[place.rank].copy())


@contextlib.contextmanager
def joblib_of_array(place: Place, *, shared: bool) -> Iterator[Call]:
    """Shared: a file, mapped; else joblib makes such files itself, in each call."""
    import joblib

    x = array()
    if shared:
        file = place.folder / "array.joblib"
        joblib.dump(x, file)
        x = joblib.load(file, mmap_mode="r")
    temporary = str(place.folder)
    with joblib.Parallel(n_jobs=RANKS, temp_folder=temporary) as parallel:
        yield lambda: sum(parallel(joblib.delayed(computed)(half) for half in halves(x)))


@contextlib.contextmanager
def pool_of_array(_: Place, *, shared: bool) -> Iterator[Call]:
    """Shared: inherited by fork; else pickled in each call."""
    import multiprocessing

    x = array()
    if shared:
        inherited.append(x)
    with multiprocessing.get_context("fork").Pool(RANKS) as pool:
        if shared:
            yield lambda: sum(pool.map(computed_inherited, range(RANKS)))
        else:
            yield lambda: sum(pool.map(computed, halves(x)))


#: what processes that are forked from now on inherit
inherited: list[Any] = []


def computed_inherited(rank: int) -> float:
    return computed(halves(inherited[0])[rank])


PROGRAMS: dict[str, Callable[[Place], contextlib.AbstractContextManager[Call]]] = {
    "empty call": empty_call,
    "map of two": map_of_two,
    "train_step": train_step,
    "train": train,
    "train ddp": train_ddp,
    "shared": partial(function_of_array, shared=True),
    "plain": partial(function_of_array, shared=False),
    "half": half_of_array,
    "joblib shared": partial(joblib_of_array, shared=True),
    "joblib plain": partial(joblib_of_array, shared=False),
    "pool shared": partial(pool_of_array, shared=True),
    "pool plain": partial(pool_of_array, shared=False),
}


if __name__ == "__main__":
    main()
