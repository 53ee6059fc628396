"""Lists, tuples and dicts of arrays or models: flattened into leaves and rebuilt, and the names of
a model's parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import InvalidValue

#: the name of a parameter that stands alone
ALONE = "value"
#: None for a leaf; else the kind of container, its keys or class, and the structures of its parts
Structure = Any
THE_VALUE = "the value"


def flatten(value: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Structure] | None:
    """Return the leaves of a value and their structure; None if there is anything but leaves.

    A dict's parts are taken in the order of their keys as text, so that ranks whose dicts were
    filled in another order agree; its keys are kept in the order in which it was filled.

    >>> flatten({"b": [1, 2], "a": (3,)}, lambda x: isinstance(x, int))
    ([3, 1, 2], ('dict', ('b', 'a'), (('tuple', None, (None,)), ('list', None, (None, None)))))
    """
    leaves: list[Any] = []
    try:
        return leaves, _take_apart(value, is_leaf, leaves)
    except (_NotATree, RecursionError):  # a list that contains itself can still be pickled
        return None


def find_other(value: Any, is_leaf: Callable[[Any], Any]) -> tuple[str, Any]:
    """Return where the first thing is that is neither a container nor a leaf, and that thing.

    >>> find_other({"a": 1, "b": [2, None]}, lambda x: isinstance(x, int))
    ("['b'][1]", None)
    """
    if isinstance(value, (list, tuple, dict)) and not is_leaf(value):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if flatten(item, lambda part: bool(is_leaf(part))) is None:
                where, what = find_other(item, is_leaf)
                return f"[{key!r}]{'' if where == THE_VALUE else where}", what
    return THE_VALUE, value


def rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Return the value of this structure with these leaves, in order."""
    if structure is None:
        return next(leaves)
    kind, extra, parts = structure
    values = [rebuild(part, leaves) for part in parts]
    if kind == "list":
        return values
    if kind == "tuple":
        return tuple(values)
    if kind == "named":
        return extra(*values)
    by_key = dict(zip(_sorted(extra), values, strict=True))
    return _DICTS[kind]((key, by_key[key]) for key in extra)


def describe(structure: Structure, leaves: Iterator[Any]) -> str:
    """Return the structure as text: "{'a': float32[3], 'b': [int64[], int64[2]]}"."""
    if structure is None:
        return str(next(leaves))
    kind, extra, parts = structure
    words = [describe(part, leaves) for part in parts]
    if kind == "list":
        return f"[{', '.join(words)}]"
    if kind in _DICTS:
        pairs = zip(_sorted(extra), words, strict=True)
        return "{" + ", ".join(f"{key!r}: {word}" for key, word in pairs) + "}"
    name = extra.__name__ if kind == "named" else ""
    return f"{name}({', '.join(words)})"


_DICTS: dict[str, Callable[..., Any]] = {"dict": dict, "ordered": OrderedDict}


class _NotATree(Exception):
    """A value that is neither a container nor a leaf."""


def _take_apart(value: Any, is_leaf: Callable[[Any], bool], leaves: list[Any]) -> Structure:
    if is_leaf(value):
        leaves.append(value)
        return None
    kind = type(value)
    if kind is list or kind is tuple:
        parts = tuple(_take_apart(item, is_leaf, leaves) for item in value)
        return kind.__name__, None, parts
    if kind is dict or kind is OrderedDict:
        parts = tuple(_take_apart(value[key], is_leaf, leaves) for key in _sorted(value))
        return "dict" if kind is dict else "ordered", tuple(value), parts
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = tuple(_take_apart(item, is_leaf, leaves) for item in value)
        return "named", kind, parts
    raise _NotATree


def _sorted(keys: Iterable[Any]) -> list[Any]:
    return sorted(keys, key=lambda key: (type(key).__name__, repr(key)))


def leaves(value: Any) -> list[tuple[str, Any]]:
    """Return the leaves of lists, tuples and dicts, each with its place; of anything else itself.

    A dict's parts come in the order of their keys as text, so that ranks whose dicts were filled in
    another order agree. A container that contains itself has no leaves.

    >>> leaves({"b": [1, 2], "a": (3,)})
    [("['a'][0]", 3), ("['b'][0]", 1), ("['b'][1]", 2)]
    """
    try:
        return list(_walk("", value))
    except RecursionError:
        return []


def all_are(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether there are leaves, and all are of these kinds."""
    named = leaves(value)
    return bool(named) and all(isinstance(leaf, kinds) for _, leaf in named)


def parameter_name(place: str, name: str = "") -> str:
    """Return the full name of a parameter of the model at a place.

    >>> parameter_name("['a'][0]", "weight"), parameter_name("", "weight"), parameter_name("")
    ("['a'][0].weight", 'weight', 'value')
    """
    return ".".join(filter(None, (place, name))) or ALONE


def unique(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return parameters by name, each once, under its first name; equal names get a number.

    >>> w, b = object(), object()
    >>> list(unique([("w", w), ("b", b), ("again", w), ("b", object())]))
    ['w', 'b', 'b#2']
    """
    seen: set[int] = set()
    parameters: dict[str, Any] = {}
    for name, parameter in named:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            free, number = name, 1
            while free in parameters:
                number += 1
                free = f"{name}#{number}"
            parameters[free] = parameter
    return parameters


def validate_forms(
    forms: Mapping[str, tuple[np.dtype[Any], Sequence[int]]], arrays: Sequence[NDArray[Any]]
) -> None:
    """Raise InvalidValue unless there is an array for each parameter, of its dtype and shape."""
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
        parts = [(key, value[key]) for key in _sorted(value)]
    elif isinstance(value, (list, tuple)):
        parts = list(enumerate(value))
    else:
        yield place, value
        return
    for key, part in parts:
        yield from _walk(f"{place}[{key!r}]", part)
