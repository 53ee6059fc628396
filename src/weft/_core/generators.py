"""The global random generators of a process: `random`'s, NumPy's and torch's.

At each call of a team the workers' generators are seeded anew:

    driver                                          worker of rank r
    the states of its generators, unchanged   ->    each seeded from (that state, call, r)
    or seed= and the number of the call       ->    all seeded from (seed, call, r), rank 0 too

So a program that seeds its generators gets the same numbers each time, for a given number of ranks.
Nothing is drawn from the driver's generators: what it draws itself is what a program without weft
would draw.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from weft._core.seeding import derive, seed_torch

#: the modules, each loaded or not
_MODULES = ("random", "numpy.random", "torch")


class Seeds(NamedTuple):
    """What the generators of all ranks derive from in one call."""

    #: for each of the modules; None: it is not loaded in the driver
    each: tuple[int | None, ...]
    #: whether the driver's generators are seeded too, and have their states back afterwards
    driver_too: bool


class SeedSource:
    """Gives the seeds for call after call, from one number."""

    def __init__(self, seed: int) -> None:
        self.seed, self._calls = seed, 0

    def next(self) -> Seeds:
        self._calls += 1
        return Seeds((derive(self.seed, self._calls),) * len(_MODULES), driver_too=True)


class DriverStates:
    """Gives the seeds for call after call, from the states of this process's generators."""

    def __init__(self) -> None:
        #: the last state of each generator, and how many calls have seen it before
        self._seen: list[tuple[bytes, int]] = [(b"", 0)] * len(_MODULES)

    def next(self) -> Seeds:
        return Seeds(tuple(map(self._next, range(len(_MODULES)))), driver_too=False)

    def _next(self, index: int) -> int | None:
        module = sys.modules.get(_MODULES[index])
        if module is None:
            return None
        state = _STATES[index](module)
        before, calls = self._seen[index]
        calls = calls + 1 if state == before else 0
        self._seen[index] = state, calls
        digest = hashlib.blake2b(b"%b/%d" % (state, calls), digest_size=8).digest()
        return int.from_bytes(digest, "little")


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


# the state of each generator, as bytes


def _random_state(random: Any) -> bytes:
    words = random.getstate()[1]  # 624 that are renewed together, and the position of the next
    return repr((words[:8], words[-1])).encode()


def _numpy_state(numpy: Any) -> bytes:
    generator = numpy.get_bit_generator()
    if type(generator).__name__ == "MT19937":  # 624 words and a position; `state` takes 20 us
        return ctypes.string_at(generator.ctypes.state_address, 625 * 4)
    return repr(generator.state).encode()


def _torch_state(torch: Any) -> bytes:
    state: bytes = torch.default_generator.get_state().numpy().tobytes()
    return state


_STATES = (_random_state, _numpy_state, _torch_state)
