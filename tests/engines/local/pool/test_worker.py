"""What a worker does with a chunk."""

from __future__ import annotations

import math
import random
import sys
import time
import weakref
from typing import Any

import numpy as np
import pytest

from weft._core.failures import Failure, restore
from weft._core.schedule import TIMED
from weft.engines.local.pool.worker import carry_out


class Noted(list[int]):
    """All that was ever written to its place 0."""

    def __setitem__(self, place: Any, index: Any) -> None:
        assert place == 0
        self.append(index)


def run(function: Any, items: list[Any], **options: Any) -> Any:
    noted = Noted()
    options = {"first": 0, "seed": None, "keep_going": False, "longest": math.inf, **options}
    values: list[Any] = []
    failures: list[tuple[int, Failure]] = []
    carry_out(function, items, values, failures, noted=noted, **options)
    return values, {position: restore(one, "here") for position, one in failures}, noted


def fails_on(bad: set[int]) -> Any:
    def function(x: int) -> int:
        if x in bad:
            raise ValueError(x)
        return x * 10

    return function


def test_items_run_in_order_and_are_noted_first() -> None:
    """Each index is noted before its call, counted from the chunk's first."""
    assert run(lambda x: x + 1, [1, 2, 3], first=7) == ([2, 3, 4], {}, [7, 8, 9])
    assert run(lambda x: x, []) == ([], {}, [])


def test_a_failure_ends_the_chunk() -> None:
    """Without keep_going nothing after it is run; what ran before is there."""
    values, failures, noted = run(fails_on({2, 3}), [1, 2, 3, 4])
    assert values == [10, None]
    assert [(position, type(error), error.args) for position, error in failures.items()] == [
        (1, ValueError, (2,))
    ]
    assert noted == [0, 1]


def test_keep_going_runs_the_rest() -> None:
    """With it every item is run, and every failure told, by position."""
    values, failures, noted = run(fails_on({2, 3}), [1, 2, 3, 4], first=5, keep_going=True)
    assert values == [10, None, None, 40]
    assert {position: error.args for position, error in failures.items()} == {1: (2,), 2: (3,)}
    assert noted == [5, 6, 7, 8]


def test_an_exit_is_the_items_and_an_interrupt_the_drivers() -> None:
    """SystemExit is a failure like others; KeyboardInterrupt ends the chunk."""
    values, failures, _ = run(sys.exit, [3, 4], keep_going=True)
    assert values == [None, None]
    assert [str(error) for error in failures.values()] == ["SystemExit: 3", "SystemExit: 4"]

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted, [1], keep_going=True)


def test_an_interrupt_leaves_the_results_before_it() -> None:
    """Those of the items that were over, failures too."""

    def function(x: int) -> float:
        if x == 3:
            raise KeyboardInterrupt
        return 1 / x

    values: list[Any] = []
    failures: list[tuple[int, Failure]] = []
    with pytest.raises(KeyboardInterrupt):
        carry_out(
            function,
            [1, 0, 2, 3, 4],
            values,
            failures,
            first=0,
            seed=None,
            keep_going=True,
            noted=[0],
            longest=math.inf,
        )
    assert values == [1, None, 0.5]
    assert [position for position, _ in failures] == [1]


def test_what_has_not_begun_is_given_back_when_items_take_long() -> None:
    """At least one is run; a failure counts too; in a large chunk some more may be run."""
    values, failures, noted = run(fails_on(set()), [1, 2, 3], longest=0.0)
    assert (values, failures, noted) == ([10], {}, [0])
    values, failures, noted = run(fails_on({1}), [1, 2, 3], keep_going=True, longest=0.0)
    assert (values, list(failures), noted) == ([None], [0], [0])
    many = range(TIMED + 1)
    values, _, _ = run(fails_on(set()), [*many], longest=0.0)
    assert len(values) == 1
    values, failures, _ = run(fails_on({0}), [*many], keep_going=True, longest=0.0)
    assert (values, list(failures)) == ([None], [0])
    values, _, noted = run(lambda x: x == 500 and time.sleep(1.0), [*many], longest=1.0)
    assert 500 < len(values) <= 532
    assert noted == [*range(len(values))]
    values, failures, _ = run(fails_on({3, 700}), [*many], keep_going=True, longest=math.inf)
    assert len(values) == len(many)
    assert list(failures) == [3, 700]


def test_an_item_is_gone_when_its_call_is_over() -> None:
    """A chunk of large items holds only the one that is being worked on."""

    class Item:
        pass

    items = [Item() for _ in range(3)]
    alive = [weakref.ref(item) for item in items]

    def function(item: Item) -> int:
        del item
        return sum(reference() is not None for reference in alive)

    values, _, _ = run(function, items)
    # the interpreter may hold the one whose call this is
    assert all(count <= 3 - index for index, count in enumerate(values))
    assert alive[0]() is alive[1]() is alive[2]() is None


def test_seeds_depend_on_the_item_only() -> None:
    """The same item draws the same numbers in whatever chunk it is; others draw different ones."""

    def draw(_: Any) -> tuple[float, float]:
        return random.random(), float(np.random.rand())

    whole, _, _ = run(draw, [0] * 6, seed=11)
    parts = [run(draw, [0] * 2, seed=11, first=first)[0] for first in (0, 2, 4)]
    assert [one for part in parts for one in part] == whole
    assert len(set(whole)) == 6
    assert run(draw, [0] * 6, seed=12)[0] != whole
    state = random.getstate()
    run(lambda x: x, [1])
    assert random.getstate() == state
