"""Whether this system can run the local engine."""

from __future__ import annotations

import os
import sys
from functools import cache

from weft.errors import EngineUnavailable


@cache
def check_system() -> None:
    """Refuse where the memory model of `waiting.py` does not hold."""
    machine = os.uname().machine if hasattr(os, "uname") else "an unknown machine"
    if sys.platform != "linux" or machine != "x86_64":
        raise EngineUnavailable(
            f"the local engine needs Linux on x86-64, this is {sys.platform} on {machine}; "
            "run one process, with engine='serial'"
        )
