"""The states of random generators, and the seeds that derive from them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.engines.generators import DriverStates, Seeds, SeedSource, kept, seeded


def test_workers_are_seeded_where_the_driver_was() -> None:
    """At the first call, and whenever a generator is not as the last call left it."""
    states = DriverStates()
    random.seed(1)
    np.random.seed(1)
    first = states.next()
    assert None not in first.each[:2]
    states.note()
    assert states.next().each[:2] == (None, None)
    states.note()
    np.random.rand()
    only_numpy = states.next()
    assert only_numpy.each[0] is None
    assert only_numpy.each[1] not in (None, first.each[1])
    assert None not in states.next().each[:2]  # a call that failed: nobody has noted its end
    states.note()
    random.random()
    random.seed(1)
    np.random.seed(1)
    again = states.next()
    assert again.each[1] == first.each[1]
    assert DriverStates().next() == first


@pytest.mark.parametrize("steps", [1, 623, 624, 625, 5000])
def test_every_draw_is_seen(steps: int) -> None:
    """Of each generator, however many numbers were drawn."""
    states = DriverStates()
    for draw in (random.random, np.random.rand):
        random.seed(steps)
        np.random.seed(steps)
        states.note()
        for _ in range(steps):
            draw()
        assert [seed for seed in states.next().each[:2] if seed is not None], (draw, steps)


def test_ranks_and_calls_differ() -> None:
    """With one seed: other numbers in each rank and call, the same ones the next time."""

    def numbers() -> list[float]:
        found = []
        source = SeedSource(3)
        for _ in range(2):
            seeds = source.next()
            for rank in range(3):
                with seeded(seeds, rank):
                    found += [random.random(), np.random.rand()]
        return found

    with kept():
        first = numbers()
        assert numbers() == first
    assert len(set(first)) == 12


def test_states_come_back() -> None:
    """After the block, also where it raises; and after a call that seeds the driver's."""
    random.seed(5)
    np.random.seed(5)
    expected = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    with pytest.raises(ZeroDivisionError), kept():
        np.random.seed(random.randrange(10) // 0)
    with seeded(SeedSource(1).next(), 0):
        np.random.rand()
    with seeded(Seeds((1, 1, 1)), 0):
        pass
    assert (random.random(), np.random.rand()) == expected
