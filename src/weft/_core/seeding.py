"""Random seeds that do not depend on how many workers there are."""

from __future__ import annotations

import hashlib
import random
import sys


def derive(seed: int, index: int) -> int:
    """A 64-bit seed for the `index`-th item or rank of a run with this seed. Pure."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seed_generators(seed: int) -> None:
    """Seed `random`, NumPy's global generator, and torch's where torch is loaded."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed % 2**63)
