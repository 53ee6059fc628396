"""NumPy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.adapters import numpy as adapter
from weft.errors import InvalidType


@pytest.mark.parametrize(
    ("array", "element"),
    [
        (np.ones(3, "f2"), "float16"),
        (np.ones((2, 2), bool), "bool"),
        (np.array("2020", "M8[Y]"), "datetime64[Y]"),
        (np.array(["ab"]), "str64"),
        (np.zeros(2, "i4,f8"), "[('f0', '<i4'), ('f1', '<f8')]"),
    ],
)
def test_arrays_are_their_own_view(array: Any, element: str) -> None:
    """The same memory, under the name of its numbers."""
    view, name = adapter.view(array)
    assert view is array
    assert name == element
    assert adapter.describe(array) == (element, array.dtype, array.shape, "cpu")
    assert adapter.deliver(array, element) is array


def test_subclasses_are_seen_as_arrays() -> None:
    """Records are viewed as the array that they are."""
    records = np.zeros(3, "i4,f8").view(np.recarray)
    view, _ = adapter.view(records)
    assert type(view) is np.ndarray
    assert np.shares_memory(view, records)


def test_another_byte_order_is_a_copy_that_takes_no_results() -> None:
    """It is turned into the machine's own order, and cannot be written through."""
    view, element = adapter.view(np.array([1, 2], ">i4"))
    assert view.dtype.isnative
    assert view.tolist() == [1, 2]
    assert element == "int32"
    assert adapter.describe(np.array([1, 2], ">i4")) == ("int32", view.dtype, (2,), "cpu")
    assert not view.flags.writeable


def test_masks_are_not_lost_in_silence() -> None:
    """A masked array is refused, and the message says what to pass instead."""
    with pytest.raises(InvalidType, match=r"\.filled\(value\), or \.data and \.mask"):
        adapter.view(np.ma.masked_array([1, 2], [True, False]))


def test_objects_are_not_arrays() -> None:
    """Whatever holds Python objects is not moved as an array."""
    assert not adapter.is_mine(np.array([None]))
    assert not adapter.is_mine(np.zeros(1, [("field", object)]))
    assert adapter.is_mine(np.zeros(1, "i4,f8"))
