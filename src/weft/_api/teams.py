"""Which team does the work, and what all its workers see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft._api import session
from weft._core.counts import whole
from weft.engines.local.system import check_system
from weft.engines.serial_team import SerialPool
from weft.errors import InvalidType, InvalidValue, UnknownEngine

if TYPE_CHECKING:
    from weft.engines.base import Pool
    from weft.engines.local.workers import Workers

_ENGINES = ("local", "serial")


def make_team(
    engine: str | None,
    size: int | None,
    *,
    gpus: Sequence[str] = (),
    named_pipe: bool | str | None = None,
) -> Pool:
    """A team of so many workers, by default one per core; with `gpus` one for each of them."""
    if engine is not None:
        check_engine(engine)
    size = check_size(size)
    if engine == "serial":
        return SerialPool()
    check_system()  # first: elsewhere the rest cannot even be loaded
    cores = share_of_cores()
    size = size or cores
    if named_pipe is None or named_pipe is False:
        from weft.engines.local.team import LocalPool

        return LocalPool(size, own_workers(), cores=cores, gpus=gpus)
    from weft.engines.local import named
    from weft.engines.local.team import LocalPool

    pipe = named.check_name(named_pipe)
    channel, pool = named.connect(pipe)  # now: that nobody serves it is said here
    channel.close()
    return LocalPool(min(size, pool.size), own_workers(pipe), cores=cores, gpus=gpus)


def check_engine(engine: object) -> None:
    """Raise unless there is such an engine with workers."""
    if engine not in _ENGINES:
        raise UnknownEngine(f"engine={engine!r}: known are {', '.join(map(repr, _ENGINES))}")


def check_size(size: object) -> int | None:
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


def own_workers(pipe: str | None = None) -> Workers:
    """The workers of this process, which end with it."""
    from weft.engines.local.workers import close_workers, workers

    session.at_shutdown(close_workers)
    return workers(pipe)


def put_all(pool: Pool, shared_data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return shared data with its arrays stored once for all workers, read-only."""
    if shared_data is None:
        return None
    return {key: _put(pool, value) for key, value in shared_data.items()}


def _put(pool: Pool, value: Any) -> Any:
    import numpy as np

    return pool.put(value, readonly=True) if isinstance(value, np.ndarray) else value
