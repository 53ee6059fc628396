"""Small arrays are treated as one, large ones stay where they are, and all get what is theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft._core import arrays as core_arrays
from weft._core.arithmetic import address
from weft._core.arrays import Arrays, Coalescing, flat

DTYPES = ("float32", "float64", "int8")
#: lengths around the border, in bytes of int8
lengths = st.sampled_from([0, 1, 3, 1000, core_arrays._LARGE - 1, core_arrays._LARGE])


def arrays_of(kinds: list[tuple[str, int]]) -> tuple[Coalescing, list[Any]]:
    values = [np.arange(length).astype(dtype) for dtype, length in kinds]
    found = Arrays.of(values)
    assert found is not None
    return Coalescing(found.leaves), [flat(view) for view in found.views]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), lengths), max_size=8))
def test_what_is_joined_is_spread_again(kinds: list[tuple[str, int]]) -> None:
    """Whatever was done to the joined arrays has been done to each."""
    groups, arrays = arrays_of(kinds)
    expected = [array * 2 for array in arrays]
    joined = groups.coalesce(arrays)
    targets = groups.targets(joined, arrays)
    for target in targets:
        target[...] = target * 2
    groups.scatter_back(targets, arrays)
    for array, wanted in zip(arrays, expected, strict=True):
        assert np.array_equal(array, wanted)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), lengths), max_size=8))
def test_small_ones_of_a_kind_are_one(kinds: list[tuple[str, int]]) -> None:
    """One array for the small ones of each dtype, and each large one where it is."""
    groups, arrays = arrays_of(kinds)
    joined = groups.coalesce(arrays)
    large = [array for array in arrays if array.nbytes >= core_arrays._LARGE]
    small = {array.dtype for array in arrays if array.nbytes < core_arrays._LARGE}
    assert len(joined) == len(groups.elements) == len(large) + len(small)
    assert {address(one) for one in large} <= {address(one) for one in joined}


def test_bfloat16_is_not_uint16() -> None:
    """Numbers that lie alike in memory, but are others, stay apart."""
    import torch

    found = Arrays.of([torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.uint16)])
    assert found is not None
    assert Coalescing(found.leaves).elements == ("bfloat16", "uint16")
