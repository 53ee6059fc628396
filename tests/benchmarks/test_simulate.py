"""The simulation of tables on many hosts: what must hold whatever the numbers are."""

from __future__ import annotations

import json
from dataclasses import replace

import comparison
import pytest
import simulate
import simulation_picture
from simulate import Cluster, Program

from weft._core.tables import ASYNC, BSP, Consistency, ssp

CLUSTER = Cluster(3, ranks=2)
PROGRAM = Program(n_rows=1000, touched=8, compute=0.01, steps=20)


@pytest.mark.parametrize("rule", [ASYNC, ssp(1), ssp(3), BSP], ids=str)
def test_every_rank_makes_its_adds_and_nobody_is_staler_than_allowed(rule: Consistency) -> None:
    """Whatever a rule lets wait goes on; bsp sees everybody's adds, ssp(k) all but k."""
    run = simulate.Run(CLUSTER, PROGRAM, rule)
    outcome = run.outcome()
    assert [rank.adds for rank in run.ranks] == [PROGRAM.steps] * 6
    assert len(run.staleness) == 6 * PROGRAM.steps
    allowed = {"async": PROGRAM.steps, "bsp": 0, "ssp": rule.slack}[rule.name]
    assert max(run.staleness) <= allowed
    assert 0 < outcome.computing <= 1


def test_ranks_that_wait_for_each_other_are_slower() -> None:
    """By so much more the less they may differ."""
    reached = [simulate.simulate(CLUSTER, PROGRAM, rule) for rule in (ASYNC, ssp(2), BSP)]
    assert reached[0].adds_per_second > reached[2].adds_per_second
    assert reached[0].staleness > reached[1].staleness > reached[2].staleness == 0


def test_one_rank_takes_what_it_computes() -> None:
    """Nothing else costs much for who has all rows."""
    program = replace(PROGRAM, spread=0.0)
    outcome = simulate.simulate(Cluster(1, ranks=1), program, BSP)
    assert outcome.adds_per_second == pytest.approx(1 / program.compute, rel=0.01)


@pytest.mark.parametrize(
    "slower",
    [{"latency": 0.02}, {"bandwidth": 1e5}, {"handling": 0.005}, {"applying": 1e5}],
    ids=lambda given: next(iter(given)),
)
def test_what_is_slower_costs_time(slower: dict[str, float]) -> None:
    """Each of the numbers that are given counts."""
    as_it_is = simulate.simulate(CLUSTER, PROGRAM, ASYNC).adds_per_second
    assert simulate.simulate(replace(CLUSTER, **slower), PROGRAM, ASYNC).adds_per_second < (
        0.7 * as_it_is
    )


def test_the_same_seed_gives_the_same() -> None:
    """And another one something else."""
    first, again, other = (simulate.simulate(CLUSTER, PROGRAM, ASYNC, seed) for seed in (0, 0, 1))
    assert first == again != other


def test_the_picture_is_that_of_the_results() -> None:
    """Nobody has to remember to draw it again."""
    found = json.loads((comparison.RESULTS / "simulation.json").read_text())
    assert simulate.PICTURE.read_text() == simulation_picture.draw(found)
