"""Random seeds that do not depend on how many workers there are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def derive(seed: int, index: int) -> int:
    """Return a 64-bit seed for the `index`-th item or rank of a run with this seed. Pure."""
    import hashlib

    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seed_generators(seed: int) -> None:
    """Seed `random`, NumPy's global generator, and torch's, now or when torch is loaded."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's generators, now or when torch is loaded: that takes seconds, and torch begins
    with the same seed in every process."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed % 2**63)
        return
    _later.seed = seed
    if _later not in sys.meta_path:
        sys.meta_path.insert(0, _later)


class _Later:
    """An import hook that seeds torch when it is loaded. It finds no modules itself."""

    seed = 0

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_seed(module: ModuleType) -> None:
                execute(module)
                seed_torch(self.seed)

            spec.loader.exec_module = execute_and_seed  # type: ignore[method-assign]
        return spec


_later = _Later()
