"""PyTensor is loaded when something of its is first used."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
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


#: calls of Python's that PyTensor nests for each operation that comes after another, at most
_CALLS = 10
#: the most calls that are ever allowed, as Synkhronos allowed them
_MOST = 50_000
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def deep_enough(expressions: Sequence[Any]) -> Iterator[None]:
    """Raise Python's recursion limit, in the block, as PyTensor needs it for graphs as deep as
    these: it goes through them by functions that call themselves."""
    from pytensor.graph.traversal import ancestors

    variables = [one for one in expressions if hasattr(one, "owner")]
    operations = sum(one.owner is not None for one in ancestors(variables))
    needed = min(_CALLS * operations, _MOST)
    if needed <= sys.getrecursionlimit():
        yield
        return
    with _one_at_a_time:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(max(before, needed))
        try:
            yield
        finally:
            sys.setrecursionlimit(before)
