"""A seeded program gets the same random numbers each time, for a given number of ranks."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import run_script


@pytest.fixture
def pair() -> Iterator[weft.Team]:
    with weft.Team(2) as made:
        yield made


TRAINING = """
import torch, weft

def losses(**options):
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 20), torch.nn.Dropout(0.5), torch.nn.Linear(20, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(10, 5), torch.randn(10, 1)
    step = weft.train_step(lambda m, x, y: ((m(x) - y) ** 2).mean(), model, optimizer, **options)
    return [step(x, y) for _ in range(5)]

with weft.Team(2) as team:
    first, second = losses(team=team), losses(team=team)
    assert first == second, (first, second)
    assert losses(team=team, seed=5) == losses(team=team, seed=5) != first
print(first)
"""

FUNCTION = """
import random
import numpy as np, weft

with weft.Team(3) as team:
    noisy = lambda x: x + np.random.rand(len(x)) + random.random()
    f = weft.function(noisy, collect="gather", team=team)

    def values():
        np.random.seed(0)
        random.seed(0)
        return [f(np.zeros(7)).tolist() for _ in range(4)] + [np.random.rand()]

    first, second = values(), values()
    assert first == second
print(first)
"""


@pytest.mark.parametrize("program", [TRAINING, FUNCTION], ids=["training", "function"])
def test_a_seeded_program_gives_the_same_each_time(program: str) -> None:
    """In two processes, and twice in each after seeding again."""
    if "torch" in program:
        pytest.importorskip("torch")
    first, second = run_script(program), run_script(program)
    assert first.code == 0, first
    assert first.out == second.out


def test_no_number_comes_twice(pair: weft.Team) -> None:
    """Not in two ranks, nor in two calls, nor in two functions; also where the driver's own
    generators do not move between calls."""
    np.random.seed(0)
    only_workers = weft.function(_noise, collect="gather", team=pair, check=None)
    other = weft.function(lambda x: _noise(x), collect="gather", team=pair, check=None)  # noqa: PLW0108
    x = np.zeros(6)
    numbers = [f(x) for f in (only_workers, other, only_workers, other)]
    drawn = np.concatenate([one[3:] for one in numbers])
    assert (drawn > 0).all()
    assert len(np.unique(drawn)) == drawn.size
    assert (numbers[0][:3] == 0).all()  # the driver drew none


def _noise(x: Any) -> Any:
    in_worker = "weft.engines.local.pool.worker" in sys.modules
    return np.random.rand(len(x)) if in_worker else np.zeros(len(x))


def test_the_driver_draws_what_it_would_without_weft(pair: weft.Team) -> None:
    """A call takes nothing from the driver's generators, so batches are chosen as in a program
    without weft."""
    np.random.seed(7)
    random.seed(7)
    expected = [(np.random.rand(), random.random()) for _ in range(4)]
    f = weft.function(np.mean, collect="mean", split=[0], team=pair)
    np.random.seed(7)
    random.seed(7)
    found = []
    for _ in range(4):
        f(np.ones(9))
        found.append((np.random.rand(), random.random()))
    assert found == expected


@pytest.mark.parametrize(("engine", "size"), [("serial", 1), ("local", 2)])
def test_seeds_of_teams_and_functions(engine: str, size: int) -> None:
    """From (seed, call, rank), whatever the driver's generators are; these are as before."""

    def draw(x: Any) -> Any:
        return np.random.rand(len(x)) + random.random()

    def values(*, of_team: int | None = None, of_function: int | None = None) -> list[Any]:
        with weft.Team(size, engine=engine, seed=of_team) as team:
            f = weft.function(draw, collect="gather", team=team, seed=of_function)
            return [f(np.zeros(4)).tolist() for _ in range(3)]

    np.random.seed(3)
    state = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    first = values(of_team=1)
    assert state == np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    np.random.seed(4)
    assert values(of_team=1) == first
    assert values(of_team=2) != first
    assert values(of_function=1) == values(of_function=1, of_team=9) == first
    assert len({number for call in first for number in call}) == 12
    with pytest.raises(weft.InvalidType, match="seed='x'"):
        weft.Team(1, seed="x")  # type: ignore[arg-type]
    with pytest.raises(weft.InvalidType, match=r"function\(seed=1\.5\)"):
        weft.function(np.sum, collect="sum", seed=1.5)  # type: ignore[arg-type]


def test_generators_that_only_workers_load(pair: weft.Team) -> None:
    """torch, which the driver has loaded, is seeded in a worker once it is loaded there."""
    torch = pytest.importorskip("torch")

    def draw(x: Any) -> Any:
        return torch.rand(len(x)).tolist()

    f = weft.function(draw, collect="gather", team=pair)
    torch.manual_seed(0)
    first = f(np.zeros(4))
    torch.manual_seed(0)
    assert f(np.zeros(4)) == first
    assert len(set(first)) == 4
