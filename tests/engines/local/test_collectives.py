"""Collectives: what only shows when ranks are at different places at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import run_ranks
from weft.engines.base import Group
from weft.errors import Disagreement, InvalidValue


@pytest.mark.parametrize("length", [4, 5000])
def test_a_refusal_does_not_overtake_a_reader(length: int) -> None:
    """A rank that refuses a call and makes the next one leaves alone what others still read."""

    def body(group: Group, length: int) -> Any:
        found = []
        for _ in range(2):  # the second time it is prepared
            found.append(group.all_reduce(np.full(length, 1.0)))
            try:
                group.all_reduce(np.ones(length), op="sum" if group.rank == 0 else "no such")
            except (InvalidValue, Disagreement):
                found.append(group.all_reduce(np.full(length, 100.0)))
        return found

    # rank 0 has met the others and reads late
    for turn in (1, 3):
        slow = {"WEFT_FAULT": f"collective.met@{turn}:0:delay=0.3"}
        for result in run_ranks(2, body, length, env=slow):
            assert [set(one.tolist()) for one in result] == [{2.0}, {200.0}] * 2


def test_bits_do_not_depend_on_where_the_result_goes() -> None:
    """A rank whose out= is not aligned gets the bits of the others, also where it was prepared."""

    def body(group: Group) -> list[bytes]:
        random = np.random.default_rng(group.rank)
        found = []
        for turn in range(40):
            value = random.normal(size=1) + 1j * random.normal(size=1)
            out = np.empty(1, complex)
            if group.rank == 1:
                out = np.empty(17, np.uint8)[1:].view(complex)
            found.append(group.all_reduce(value, "prod", out=out if turn else None).tobytes())
        return found

    one, two, three = run_ranks(3, body)
    assert one == two == three
