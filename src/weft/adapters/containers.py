"""Lists, tuples and dicts of parameters, which the adapters of models have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import InvalidValue

#: the name of a parameter that stands alone
ALONE = "value"


def leaves(value: Any) -> list[tuple[str, Any]]:
    """What hangs in lists, tuples and dicts, each with its place; the value itself if it is none.

    A dict's parts come in the order of their keys' texts, so that ranks whose dicts were filled in
    another order agree. What holds itself has no leaves.

    >>> leaves({"b": [1, 2], "a": (3,)})
    [("['a'][0]", 3), ("['b'][0]", 1), ("['b'][1]", 2)]
    """
    try:
        return list(_walk("", value))
    except RecursionError:
        return []


def all_are(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Whether there are leaves, and all of these kinds."""
    found = leaves(value)
    return bool(found) and all(isinstance(leaf, kinds) for _, leaf in found)


def joined(place: str, name: str = "") -> str:
    """The name of a parameter of the model at a place.

    >>> joined("['a'][0]", "weight"), joined("", "weight"), joined("[1]"), joined("")
    ("['a'][0].weight", 'weight', '[1]', 'value')
    """
    return ".".join(filter(None, (place, name))) or ALONE


def once(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Parameters by name, each under its first one; another of the same name gets a number.

    >>> w, b = object(), object()
    >>> list(once([("w", w), ("b", b), ("again", w), ("b", object())]))
    ['w', 'b', 'b#2']
    """
    seen: set[int] = set()
    found: dict[str, Any] = {}
    for name, parameter in named:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found[_free(name, found)] = parameter
    return found


def refuse_misfits(
    forms: Mapping[str, tuple[np.dtype[Any], Sequence[int]]], arrays: Sequence[NDArray[Any]]
) -> None:
    """Raise unless there is one array for each parameter, of the dtype and shape it is read in."""
    if len(arrays) != len(forms):
        raise InvalidValue(f"{len(arrays)} arrays for {len(forms)} parameters: pass one for each")
    for (name, (dtype, shape)), array in zip(forms.items(), arrays, strict=True):
        if array.dtype != dtype or array.shape != tuple(shape):
            raise InvalidValue(
                f"{array.dtype}{list(array.shape)} for {name}, which is {dtype}{list(shape)}: "
                "pass an array of that dtype and shape"
            )


def _walk(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (type(key).__name__, repr(key)))
        parts = [(key, value[key]) for key in keys]
    elif isinstance(value, (list, tuple)):
        parts = list(enumerate(value))
    else:
        yield place, value
        return
    for key, part in parts:
        yield from _walk(f"{place}[{key!r}]", part)


def _free(name: str, taken: dict[str, Any]) -> str:
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}#{number}"
    return free
