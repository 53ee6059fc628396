"""`playdoh` under another name, which its documents use too."""

from __future__ import annotations

from playdoh import *  # noqa: F403  the same names, whatever they are
from playdoh import __all__ as __all__
