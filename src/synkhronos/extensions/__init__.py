"""What training needs beside functions and collectives: `updates` and `train`."""

from __future__ import annotations

from synkhronos.extensions import train, updates

__all__ = ["train", "updates"]
