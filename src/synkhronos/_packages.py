"""PyTensor is loaded when something of its is first used."""

from __future__ import annotations

from typing import Any

from weft.errors import MissingPackage


def pytensor(what: str) -> Any:
    """Return the package, which `what` needs. Raises MissingPackage."""
    try:
        import pytensor as found
        import pytensor.tensor
    except ImportError as error:
        raise MissingPackage(
            f"{what} needs the package pytensor, which cannot be loaded here ({error}):\n"
            "    pip install 'weft[pytensor]'"
        ) from error
    return found
