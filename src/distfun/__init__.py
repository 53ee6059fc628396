"""`playdoh` under another name, which its documents use too."""

from __future__ import annotations

from playdoh import DistributedFunction, distribute, finished, shutdown

__all__ = ["DistributedFunction", "distribute", "finished", "shutdown"]
