"""An object's values, whatever library's it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weft
from weft.adapters import models


def test_arrays_and_containers_of_them() -> None:
    """They are read in the order of their keys, written in place, and are their own parts."""
    tree = {"b": np.zeros(2), "a": [np.ones(3)]}
    assert [array.shape for array in models.read(tree)] == [(3,), (2,)]
    kept = tree["b"]
    models.assign(tree, [np.full(3, 5.0), np.full(2, 6.0)])
    assert kept.tolist() == [6.0, 6.0]
    models.validate(tree)
    assert models.parts(tree)[1] is kept


def test_shapes_that_change() -> None:
    """Tensors and holders take values of other shapes; NumPy's arrays say that they cannot."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(2)
    models.assign(tensor, [np.ones(5, np.float32)])
    assert tensor.tolist() == [1.0] * 5
    with pytest.raises(weft.InvalidValue, match=r"\[\[3\]\].*\[\[2\]\].*weft\.Holder"):
        models.assign(np.zeros(2), [np.zeros(3)])


@pytest.mark.parametrize("value", [5, "text", None, [], object(), {"a": np.zeros(2), "b": "text"}])
def test_what_has_no_values(value: Any) -> None:
    """It has no parts either, and the error names its class."""
    assert models.parts(value) == []
    for use in (models.read, models.validate):
        with pytest.raises(weft.InvalidType, match=f"a {type(value).__name__} has no values"):
            use(value)
