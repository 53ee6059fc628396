"""`share`: an array in memory that several processes see."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from weft._core.shared import SharedArray
from weft.adapters import lookup
from weft.engines import registry
from weft.errors import InvalidType, InvalidValue

__all__ = ["SharedArray", "share"]


def share(array: ArrayLike, *, readonly: bool = False) -> SharedArray:
    """Return a copy of `array` in shared memory, as an ndarray.

    Pickling it, or a slice of it, sends a reference: whoever unpickles that, in any process of this
    user on this machine, sees the same memory. Nothing is copied, and what one process writes the
    others see. The memory is freed when the last view in the last process is gone; a pickle that is
    never loaded keeps it for as long as this process lives. The pickle does not contain the
    values: to save them, pickle `shared.copy()` or use `numpy.save`.

    >>> import numpy, weft
    >>> shared = weft.share(numpy.arange(6.0).reshape(2, 3))
    >>> shared[1].sum()
    np.float64(12.0)

    An array that is shared already is returned as it is. With `readonly` the result cannot be
    written to, here or where it is unpickled.

    Where the local engine cannot run (other than Linux on x86-64), the result is a copy in ordinary
    memory, and so is a pickle of it.

    Raises InvalidType for arrays of Python objects, and for what would lose something on the way: a
    DataFrame its columns, a masked array its mask, a list of numbers and strings its numbers.
    Raises OutOfMemory.
    """
    for part in _parts(array):
        _refuse_loss(part)
    try:
        source = np.asanyarray(array)
    except ValueError as error:
        raise InvalidValue(
            f"share() got a {type(array).__name__} that is no array: {error}; expected rows of "
            "equal length"
        ) from None
    if source.dtype.hasobject:
        raise InvalidType(
            f"share() got {type(array).__name__} as an array of dtype {source.dtype} with Python "
            "objects, which cannot be shared; expected numbers, strings of fixed length or records "
            "of these: of a dict or an object share the arrays in it, of an array of objects "
            "array.astype(float)"
        )
    if source.dtype.kind in "SU" and not isinstance(array, (np.ndarray, np.generic)):
        _refuse_changed_strings(array, source)
    shared: SharedArray = registry.choose(None, "share").load().share(source, readonly=readonly)
    return shared


#: what lists are mostly made of
_PLAIN = frozenset((bool, int, float, complex, str, bytes))


def _parts(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield a value, or what is in a list or tuple: all but numbers and strings."""
    if depth > 64 or not isinstance(value, (list, tuple)):  # NumPy has no more dimensions
        yield value
    elif not _PLAIN.issuperset(map(type, value)):
        for part in value:
            yield from _parts(part, depth + 1)


def _refuse_loss(value: Any) -> None:
    """Raise InvalidType for what would be an array, but not with all that it is."""
    kind = type(value).__name__
    if isinstance(value, np.ma.MaskedArray):
        trouble, line = "a mask", "share .filled(value), or .data and .mask"
    elif isinstance(value, np.matrix):
        trouble, line = "a multiplication of its own", "share numpy.asarray(matrix)"
    elif hasattr(value, "toarray"):  # SciPy's sparse matrices
        trouble, line = "a sparse form", "share .toarray(), or the arrays that it consists of"
    elif isinstance(value, (np.ndarray, np.generic)) or not hasattr(value, "__array__"):
        return
    elif lookup.of(value) is not None:
        _refuse_tensor(value)
        return
    elif hasattr(value, "to_numpy"):  # pandas, polars
        trouble, line = (
            "names of rows or columns",
            "share .to_numpy(), and send the names beside it",
        )
    else:
        trouble, line = "more than its values", "share numpy.asarray(value)"
    raise InvalidType(
        f"share() got {kind} with {trouble}, which shared memory would not keep; {line}"
    )


def _refuse_tensor(tensor: Any) -> None:
    """Raise InvalidType for a tensor of torch without a NumPy form."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        return
    _, element = lookup.named("torch").view(tensor)  # refuses other devices and layouts
    if tensor.requires_grad:
        raise InvalidType(
            "share() got a tensor that requires grad, which an array cannot; share tensor.detach()"
        )
    if element == "bfloat16":
        raise InvalidType(
            "share() got a tensor of bfloat16, which NumPy does not have; share tensor.float()"
        )


def _refuse_changed_strings(value: Any, strings: NDArray[Any]) -> None:
    """Raise InvalidType for what NumPy makes strings of, unless these are the strings given."""
    for given, string in zip(np.asarray(value, object).flat, strings.flat, strict=True):
        if given != string:
            raise InvalidType(
                f"share() got {given!r:.100} among strings, which would be {string!r:.100} in "
                "shared memory; share numbers and strings apart, and bytes as "
                "numpy.frombuffer(data, numpy.uint8)"
            )
