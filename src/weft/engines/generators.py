"""The global random generators of a process: `random`'s, NumPy's and torch's.

The workers of a team get the same random numbers whenever the driver's generators are seeded alike:

    the driver's generator                      the worker's, of rank r
    is as the last call left it           ->    goes on where it was
    has another state, or no call before  ->    is seeded from (that state, r)

With `seed=` all ranks' are seeded from (seed, call, r), and the driver's have their states back
after the call. Nothing is drawn from the driver's generators: what it draws itself is what it would
draw in a program without weft.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from weft._core.seeding import derive, seed_torch

#: the modules, each loaded or not
_MODULES = ("random", "numpy.random", "torch")


class Seeds(NamedTuple):
    """Describe what the generators of all ranks derive from in one call."""

    #: for each of the modules; None: it is not loaded in the driver, or goes on where it was
    each: tuple[int | None, ...]
    #: whether the driver's generators are seeded too, and have their states back afterwards
    driver_too: bool = False


class SeedSource:
    """Gives the seeds for call after call, from one number."""

    def __init__(self, seed: int) -> None:
        self.seed, self._calls = seed, 0

    def next(self) -> Seeds:
        self._calls += 1
        return Seeds((derive(self.seed, self._calls),) * len(_MODULES), driver_too=True)


class DriverStates:
    """Gives the seeds for the calls of a team, from the states of this process's generators."""

    def __init__(self) -> None:
        #: the state in which the last call left each generator; None: there was none, or it failed
        self._left: list[bytes | None] = [None] * len(_MODULES)

    def next(self) -> Seeds:
        states = _states()
        changed = [
            None if state == left else state for state, left in zip(states, self._left, strict=True)
        ]
        self.forget()
        return Seeds(tuple(None if state is None else _hash(state) for state in changed))

    def note(self) -> None:
        """Note the states at the end of a call."""
        self._left = _states()

    def forget(self) -> None:
        """Make the next call seed the workers' generators: who knows what they have drawn."""
        self._left = [None] * len(_MODULES)


@contextmanager
def seeded(seeds: Seeds, rank: int) -> Iterator[None]:
    """Seed the generators of a rank for a call."""
    if rank > 0:
        _seed(seeds, rank)
        yield
    elif seeds.driver_too:
        with kept():
            _seed(seeds, rank)
            yield
    else:
        yield


def _seed(seeds: Seeds, rank: int) -> None:
    for_random, for_numpy, for_torch = seeds.each
    if for_random is not None:
        import random

        random.seed(derive(for_random, rank))
    if for_numpy is not None:
        import numpy as np

        np.random.seed(derive(for_numpy, rank) % 2**32)
    if for_torch is not None:
        torch = sys.modules.get("torch")
        seed = derive(for_torch, rank) % 2**63
        if torch is None:
            seed_torch(seed)
            return
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 70 us
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@contextmanager
def kept() -> Iterator[None]:
    """Give the generators their states back at the end of a block."""
    random, numpy, torch = map(sys.modules.get, _MODULES)
    states: list[Any] = [
        random and random.getstate(),
        numpy and numpy.get_state(),
        torch and torch.get_rng_state(),
        torch and torch.cuda.is_initialized() and torch.cuda.get_rng_state_all(),
    ]
    try:
        yield
    finally:
        if random is not None:
            random.setstate(states[0])
        if numpy is not None:
            numpy.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(states[2])
            if states[3]:
                torch.cuda.set_rng_state_all(states[3])


# the states of the driver's generators, as bytes; None for one that is not loaded


def _states() -> list[bytes | None]:
    modules = zip(map(sys.modules.get, _MODULES), _READERS, strict=True)
    return [None if module is None else read(module) for module, read in modules]


_READERS: tuple[Callable[[Any], bytes], ...] = (
    lambda random: pickle.dumps(random.getstate()),
    lambda numpy: pickle.dumps(numpy.get_state()),
    lambda torch: torch.default_generator.get_state().numpy().tobytes(),
)


def _hash(state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
