"""Single numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.adapters import numbers, scalars
from weft.errors import InvalidValue

PYTHONS = [True, 3, -(2**63), 2**63 - 1, 0.1, 1 + 2j]
NUMPYS = [np.int8(-3), np.uint64(2**64 - 1), np.float16(0.1), np.complex64(1j), np.bool_(True)]


@pytest.mark.parametrize("value", [*PYTHONS, *NUMPYS])
def test_numbers_come_back_as_they_were(value: Any) -> None:
    """An array of one element and back: the same value of the same type."""
    (adapter,) = (one for one in (numbers, scalars) if one.is_mine(value))
    array, element = adapter.view(value)
    assert array.shape == ()
    assert adapter.describe(value) == (element, array.dtype, (), "cpu")
    back = adapter.deliver(array, element)
    assert type(back) is type(value)
    assert back == value


def test_ranks_may_mix_pythons_numbers_and_numpys() -> None:
    """What they are called does not tell one from the other."""
    assert numbers.view(1.0)[1] == scalars.view(np.float64(1))[1] == "float64"
    assert numbers.view(1)[1] == scalars.view(np.int64(1))[1] == "int64"


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_ints_that_do_not_fit_are_refused(value: int) -> None:
    """The message names the value and the way out."""
    with pytest.raises(InvalidValue, match=f"{value} does not fit 64 bits; reduce it as a float"):
        numbers.view(value)


@pytest.mark.parametrize("value", ["1", None, [1], np.ones(1), np.str_("1")])
def test_other_things_are_no_numbers(value: Any) -> None:
    """Texts, lists and arrays are not single numbers."""
    assert not numbers.is_mine(value)
    assert not scalars.is_mine(value)
