"""Which adapter takes which value."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

import weft.adapters
from tests.support import run_python
from weft.adapters import lookup
from weft.errors import MissingPackage


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.ones(3), "numpy"),
        (np.array(["text"]), "numpy"),
        (np.zeros(2, "i4,f8"), "numpy"),
        (np.ma.masked_array([1]), "numpy"),
        (torch.ones(3), "torch"),
        (torch.nn.Parameter(torch.ones(3)), "torch"),
        (np.array([None]), None),
        (np.array([1], [("field", object)]), None),
        (3, None),
        (np.float32(3), None),
        ([np.ones(3)], None),
        ("text", None),
        (None, None),
    ],
)
def test_each_array_has_its_adapter(value: Any, name: str | None) -> None:
    """Arrays and tensors have one, objects and what holds them none."""
    found = lookup.of(value)
    assert (found and found.NAME) == name


@pytest.mark.parametrize("value", [True, 3, 2.5, 1j, np.int8(1), np.float16(2), np.bool_(True)])
def test_numbers_have_one_where_they_are_asked_for(value: Any) -> None:
    """`of_array_or_number` takes single numbers, and arrays as `of` does."""
    found, array = lookup.of_array_or_number(value), lookup.of_array_or_number(np.ones(1))
    assert found is not None
    assert array is not None
    assert ("scalar" if isinstance(value, np.generic) else "number") == found.NAME
    assert array.NAME == "numpy"
    assert lookup.of_array_or_number("3") is None


def test_torch_is_not_loaded_for_numpys_arrays() -> None:
    """A program without tensors does without torch."""
    outcome = run_python(
        "import sys, numpy\n"
        "from weft.adapters import lookup\n"
        "print(lookup.of(numpy.ones(1)).NAME, lookup.of('x'), 'torch' in sys.modules)"
    )
    assert outcome.out == "numpy None False\n", outcome


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that come to a rank without torch raise an error with the pip line."""
    monkeypatch.setattr(lookup, "_loaded", {})
    monkeypatch.delattr(weft.adapters, "torch", raising=False)
    monkeypatch.setitem(sys.modules, "weft.adapters.torch", None)  # type: ignore[arg-type]
    with pytest.raises(MissingPackage, match=r"pip install 'weft\[torch\]'"):
        lookup.named("torch")
