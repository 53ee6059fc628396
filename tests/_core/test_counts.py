"""Whole numbers as users give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weft
from weft._core.arguments import whole
from weft.errors import InvalidType


@pytest.mark.parametrize("value", [2, np.int64(2), np.uint8(2), np.array(2)])
def test_whole_numbers(value: Any) -> None:
    """Those of NumPy become Python's own."""
    assert whole(value) == 2
    assert type(whole(value)) is int


@pytest.mark.parametrize("value", [True, np.True_, np.array(True), 2.0, np.float64(2), "2", None])
def test_what_is_none(value: Any) -> None:
    assert whole(value) is None


def test_numpys_numbers_are_numbers_everywhere() -> None:
    """Programs compute how many workers, items and seconds they want."""
    one, two = np.int64(1), np.int64(2)
    found = weft.map(
        abs, [-1, -2], n=two, gpus=np.int64(0), retries=one, seed=two, timeout=np.float32(60)
    )
    assert found == [1, 2]
    assert weft.map_async(abs, [-1], n=two, timeout=two * 10).wait(two * 10) == [1]
    assert weft.distribute(abs, max_cpu=two, max_gpu=one, retries=one, seed=one)([-1]) == [1]
    with weft.Team(two, timeout=np.int64(60)) as team:
        f = weft.function(
            lambda x, w: x * w, split=one - 1, whole=[one], collect="gather", team=team
        )
        assert f(np.arange(5), 2, num_slices=two, batch=two).tolist() == [0, 2]
        copies = weft.replicate(np.zeros(2), team=team)
        copies.set(one, [3.0, 4.0])
        assert copies.get(one).tolist() == [3, 4]
    assert weft.ssp(two) == weft.ssp(2)


@pytest.mark.parametrize("wrong", [True, np.True_, 2.0])
def test_what_is_no_whole_number_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidType, match="whole number"):
        weft.map(abs, [1], n=wrong)
    with pytest.raises(InvalidType, match="whole number"):
        weft.map(abs, [1], retries=wrong)
    with pytest.raises(InvalidType, match="whole number"):
        weft.distribute(abs, max_cpu=wrong)
