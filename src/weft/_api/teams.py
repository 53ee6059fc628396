"""Which team does the work, and what all its workers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft._api import session
from weft._core.counts import whole
from weft.engines import registry
from weft.engines.base import PoolOptions
from weft.errors import InvalidType, InvalidValue

if TYPE_CHECKING:
    from weft.engines.base import Pool


def make_pool(
    engine: str | None,
    size: int | None,
    *,
    gpus: Sequence[str] = (),
    named_pipe: bool | str | None = None,
) -> Pool:
    """A team of so many workers, by default one per core; with `gpus` one for each of them."""
    # workers behind a pipe come from who launches, or not at all
    offer = "pool" if named_pipe is None or named_pipe is False else "launch"
    row = registry.choose(engine, offer)
    options = PoolOptions(validate_size(size), share_of_cores(), gpus, named_pipe)
    made: Pool = row.load().make_pool(options)
    return made


def validate_size(size: object) -> int | None:
    """A number of workers, if one is given."""
    if size is None:
        return None
    number = whole(size)
    if number is None:
        raise InvalidType(f"n={size!r}: expected a whole number of workers, or None")
    if number < 1:
        raise InvalidValue(f"n={size}: expected one worker or more, or None for one per core")
    return number


def share_of_cores() -> int:
    """The cores for the workers of this process: it shares the machine with the other ranks."""
    return session.plan_here().threads


def put_all(pool: Pool, shared_data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return shared data with its arrays stored once for all workers, read-only."""
    if shared_data is None:
        return None
    return {key: _put(pool, value) for key, value in shared_data.items()}


def _put(pool: Pool, value: Any) -> Any:
    import numpy as np

    return pool.put(value, readonly=True) if isinstance(value, np.ndarray) else value
