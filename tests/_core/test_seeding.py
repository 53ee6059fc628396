"""Seeds."""

from __future__ import annotations

import random

import numpy as np

from weft._core.seeding import derive, seed_generators


def test_seeds_differ_by_run_and_index_and_never_change() -> None:
    """A fixed function of both: programs repeat between releases."""
    assert derive(0, 0) == 5857645148978988075
    seeds = {derive(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500


def test_generators_repeat() -> None:
    """random and NumPy draw the same numbers after the same seed."""

    def draw() -> tuple[float, float]:
        seed_generators(derive(1, 2))
        return random.random(), float(np.random.rand())

    assert draw() == draw()
