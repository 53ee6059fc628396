"""Workers that start workers of their own, and why that does not go on without end.

    the program     depth 0     starts workers
    its workers     depth 1     start workers within their share of the cores
    theirs          depth 2     likewise
    theirs          depth 3     do not: NestedTooDeep

A worker that is importing a module starts none at any depth: they would import it too, and so on.

This module loads little: it is asked before anything else of a first map is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import FrameType

from weft.errors import NestedTooDeep

#: the variable with the depth of a process; what a worker starts inherits it
DEPTH = "WEFT_DEPTH"

#: the depth at which workers start none
_DEEPEST = 3

#: whether this process is a worker
_is_worker = False


def become_worker() -> None:
    """Note that this process is a worker from now on."""
    global _is_worker
    _is_worker = True


def depth(environment: Mapping[bytes, bytes]) -> int:
    """Return how many drivers are above a process with this environment."""
    digits = environment.get(DEPTH.encode(), b"").decode()
    return int(digits) if digits.isdecimal() else 0


def validate() -> None:
    """Raise NestedTooDeep if workers of this process could go on starting workers without end."""
    if _is_worker and (module := module_being_imported(sys._getframe())) is not None:
        name, where = module.f_globals.get("__name__"), module.f_code.co_filename
        raise NestedTooDeep(
            f"the module {name!r} ({where}:{module.f_lineno}) starts workers while it is imported, "
            "and a worker has imported it to find a function: its own workers would import it "
            "again, and so on without end. Do it inside a function, or only in the program:\n"
            '    if __name__ == "__main__":'
        )
    if depth(os.environb) >= _DEEPEST:
        raise NestedTooDeep(
            f"workers were started by workers {_DEEPEST} levels deep, and the innermost starts no "
            "more; have it do the work itself:\n"
            '    weft.map(fun, items, engine="serial")    or    weft.Team(engine="serial")'
        )


def module_being_imported(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the innermost module that this thread is importing, as seen from a frame;
    None if it is importing none."""
    module = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib"):
            return module or frame
        if module is None and code.co_name == "<module>":
            module = frame
        frame = frame.f_back
    return None
