"""Rows as numbers, and what their absence comes to."""

from __future__ import annotations

import numpy as np
import pytest

from weft._core.functions import Partial, Task, compute, join
from weft._core.partition import Bounds, RowSlice, choose
from weft.errors import InvalidType, InvalidValue


def test_bounds_of_slices() -> None:
    """Each slice of a task gets the numbers of its first row and of the one after its last."""
    task = Task([RowSlice(Bounds(), slice(10, 17))], {}, 7, 3, None)
    found = compute(lambda bounds: [bounds[np.newaxis]], task, ["gather"])
    assert found.outputs[0].tolist() == [[10, 13], [13, 15], [15, 17]]
    assert found.rows == 7


def test_a_mean_of_no_rows() -> None:
    """Is what the function made of none."""
    assert np.isnan(join([Partial(np.float64("nan"), 0)], "mean"))
    assert join([Partial(np.array(2.0), 0), Partial(np.array(4.0), 0)], "mean") == 3


def test_the_option_that_was_wrong() -> None:
    """Is named as the user named it."""
    with pytest.raises(InvalidValue, match="batch_s=4: expected the first 0 to 3 rows"):
        choose(4, 3, "batch_s")
    with pytest.raises(InvalidValue, match="batch_s has the row 3"):
        choose([3], 3, "batch_s")
    with pytest.raises(InvalidType, match="batch_s is a list"):
        choose([0.5], 3, "batch_s")
