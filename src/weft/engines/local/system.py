"""Whether this system can run the local engine."""

from __future__ import annotations

import platform
import sys
from functools import cache

from weft.errors import EngineUnavailable


@cache
def check_system() -> None:
    """Refuse where the memory model of `waiting.py` does not hold."""
    machine = platform.machine()
    if sys.platform != "linux" or machine != "x86_64":
        raise EngineUnavailable(
            f"the local engine needs Linux on x86-64, this is {sys.platform} on {machine}; "
            "run one process, with engine='serial'"
        )
