"""The serial engine's functions, as the registry lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft._core.launch import Launched
    from weft._core.shared import SharedArray
    from weft.engines.base import PoolOptions, TeamOptions
    from weft.engines.serial.group import SerialGroup
    from weft.engines.serial.pool import SerialPool, SerialTeam


def join(place: Launched | None, *, timeout: float, start_timeout: float) -> SerialGroup:
    """Return a group of one, whatever the launcher says."""
    from weft.engines.serial.group import SerialGroup

    return SerialGroup(timeout=timeout)


def prestart() -> None:
    """Do nothing: there is nothing to start."""


def make_pool(options: PoolOptions) -> SerialPool:
    """Return a pool without workers."""
    from weft.engines.serial.pool import SerialPool

    return SerialPool()


def make_team(options: TeamOptions) -> SerialTeam:
    """Return a team of the driver alone."""
    from weft.engines.serial.pool import SerialTeam

    return SerialTeam(timeout=options.timeout)


def share(array: Any, *, readonly: bool) -> SharedArray:
    """Return a copy in ordinary memory."""
    from weft.engines.serial import sharing

    return sharing.share(array, readonly=readonly)


def close() -> None:
    """Do nothing: nothing runs."""
