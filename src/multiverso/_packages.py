"""Frameworks are loaded when something of theirs is first used."""

from __future__ import annotations

import importlib
from typing import Any

from weft.errors import MissingPackage


def need(package: str, what: str) -> Any:
    """Return the package that `what` needs, and after which weft's extra is named."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackage(
            f"{what} needs the package {package}, which cannot be loaded here ({error}):\n"
            f"    pip install 'weft[{package}]'"
        ) from error
