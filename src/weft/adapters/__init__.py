"""Whose arrays: what weft needs to know of one library's arrays to move and reduce them.

Each adapter is a module, loaded at the first sight of its type:

    NAME                      how ranks tell each other which adapter to use
    is_mine(value)            whether it can be moved as an array
    view(value)               the same memory as a NumPy array, and the name of its elements
    deliver(array, element)   a NumPy array that weft made, as this library's

bfloat16, which NumPy does not have, is viewed as uint16 under its own name.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np

from weft.adapters import numbers, numpy, scalars
from weft.errors import MissingPackage

_loaded: dict[str, ModuleType] = {one.NAME: one for one in (numpy, numbers, scalars)}


def of(value: Any) -> ModuleType | None:
    """The adapter of an array; None if the value is nobody's array."""
    if isinstance(value, np.ndarray):
        return numpy if numpy.is_mine(value) else None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return named("torch")
    return None


def of_array_or_number(value: Any) -> ModuleType | None:
    """The adapter of an array or a single number."""
    return of(value) or next((one for one in (scalars, numbers) if one.is_mine(value)), None)


def named(name: str) -> ModuleType:
    """The adapter that another rank spoke of."""
    if name not in _loaded:
        try:
            _loaded[name] = importlib.import_module(f"weft.adapters.{name}")
        except ImportError as error:
            raise MissingPackage(
                f"another rank sent an array of {name}, which cannot be loaded here ({error}):\n"
                f"    pip install 'weft[{name}]'"
            ) from error
    return _loaded[name]
