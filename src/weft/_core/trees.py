"""Lists, tuples and dicts of arrays: taken apart into leaves, and put together again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

#: None for a leaf; else the kind of container, what it needs besides its parts, and the parts
Structure = Any
THE_VALUE = "the value"


def flatten(value: Any, is_leaf: Callable[[Any], bool]) -> tuple[list[Any], Structure] | None:
    """The leaves of a value and how they hang together; None if something else hangs there too.

    A dict's parts are taken in the order of their keys' texts, so that ranks whose dicts were
    filled in another order agree; its keys are kept in the order in which it was filled.

    >>> flatten({"b": [1, 2], "a": (3,)}, lambda x: isinstance(x, int))
    ([3, 1, 2], ('dict', ('b', 'a'), (('tuple', None, (None,)), ('list', None, (None, None)))))
    """
    leaves: list[Any] = []
    try:
        return leaves, _take_apart(value, is_leaf, leaves)
    except (_NotATree, RecursionError):  # a list that holds itself can still be pickled
        return None


def find_other(value: Any, is_leaf: Callable[[Any], Any]) -> tuple[str, Any]:
    """The first thing in a value that is neither a container nor a leaf, and where it is.

    >>> find_other({"a": 1, "b": [2, None]}, lambda x: isinstance(x, int))
    ("['b'][1]", None)
    """
    if isinstance(value, (list, tuple, dict)) and not is_leaf(value):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            if flatten(item, lambda one: bool(is_leaf(one))) is None:
                where, what = find_other(item, is_leaf)
                return f"[{key!r}]{'' if where == THE_VALUE else where}", what
    return THE_VALUE, value


def rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    """The value of which these are the leaves, in order."""
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
    """The tree in words: "{'a': float32[3], 'b': [int64[], int64[2]]}"."""
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
