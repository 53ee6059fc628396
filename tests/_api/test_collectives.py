"""The collectives as module functions: what the default group does."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import run_ranks
from weft._api import collectives
from weft.engines.base import Group
from weft.errors import Disagreement, NotInitialized

NAMES = ("broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce")


def test_the_examples_in_the_docstrings_are_true() -> None:
    """Every example prints what it says."""
    result = doctest.testmod(collectives)
    assert result.failed == 0
    assert result.attempted >= 15


@pytest.mark.parametrize("name", NAMES)
def test_functions_and_methods_take_the_same(name: str) -> None:
    """A module function has the parameters of the group's method, under the same defaults."""
    function = inspect.signature(getattr(weft, name)).parameters
    method = inspect.signature(getattr(Group, name)).parameters
    assert list(function.values()) == [p for p in method.values() if p.name != "self"]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_group_there_are_no_collectives(name: str) -> None:
    """Before weft.init() each says what is missing."""
    with pytest.raises(NotInitialized, match=r"weft\.init\(\)"):
        getattr(weft, name)(np.ones(2))


def test_the_default_group_does_them() -> None:
    """Each function does in the world what its method does, options and all, and knows its line."""

    def body(group: Group) -> str:
        rank, size = group.rank, group.size
        assert weft.broadcast(rank, 1) == 1
        assert weft.scatter(np.arange(4), root=1).tolist() == [2 * rank, 2 * rank + 1]
        gathered = weft.gather(np.array([rank]), 1)
        assert gathered is None if rank == 0 else gathered.tolist() == [0, 1]
        assert weft.all_gather("x") == ["x"] * size
        out = np.empty(2)
        assert weft.reduce(np.ones(2), "max", 0, out=out) is (out if rank == 0 else None)
        assert weft.all_reduce(np.full(2, 4.0 * rank), "mean", weight=rank, out=out) is out
        assert out.tolist() == [4, 4]
        assert weft.all_reduce(1, async_op=True).wait(timeout=30) == size
        try:
            if rank:
                weft.all_reduce(np.ones(2))
            else:
                weft.all_gather(np.ones(2))
        except Disagreement as error:
            return str(error).partition("\n")[0]
        return ""

    first, second = run_ranks(2, body)
    assert first == second
    assert "rank 0 called all_gather(float64[rows]) at" in first
    assert first.count("test_collectives.py:") == 2


def test_survivors_take_over_the_functions() -> None:
    """After survivors() the module functions act on the new generation."""

    def body(group: Group) -> Any:
        weft.all_reduce(np.ones(3))
        group.survivors()
        return weft.all_reduce(np.ones(3)).tolist(), weft.group().generation

    assert run_ranks(2, body) == [([2.0] * 3, 1)] * 2
