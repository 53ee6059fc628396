"""The ray engine's functions, as the registry lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from weft.errors import EngineUnavailable

if TYPE_CHECKING:
    from weft.engines.base import Pool, PoolOptions
    from weft.engines.ray.cluster import Cluster


def open_node(
    *,
    port: int | None = None,
    join: str | None = None,
    max_cpu: int | None = None,
    max_gpu: int | None = None,
    address: str | None = None,
) -> str:
    """Have this machine begin a cluster at a port, or join that at HOST:PORT, until `close_node`.
    Return what to tell the user.

    Raises LaunchError, MachineUnavailable, InvalidValue, Refused.
    """
    from weft.engines.ray import opening

    return opening.open_node(opening.Opening(port, join, max_cpu, max_gpu, address))


def serve_node(
    *,
    port: int | None = None,
    join: str | None = None,
    max_cpu: int | None = None,
    max_gpu: int | None = None,
    opened: Callable[[str], None],
) -> None:
    """Do as `open_node` until somebody calls `close_node`, or this process ends. Calls `opened`
    with what to tell the user. Raises the same."""
    from weft.engines.ray import opening

    opening.serve_node(opening.Opening(port, join, max_cpu, max_gpu), opened)


def close_node() -> str:
    """Have this machine leave its cluster, and return its address; "" if it was in none. Raises
    Refused, Stalled."""
    from weft.engines.ray import opening

    return opening.close_node()


def close_cluster(reached: Cluster) -> None:
    """Have all machines leave a cluster, where they are this user's. Raises Stalled."""
    from weft.engines.ray import opening

    opening.close_cluster(reached)


def status() -> Iterator[str]:
    """Yield lines about the cluster that this machine is in; none if it is in none."""
    from weft.engines.ray import node

    own = node.find()
    if own is not None:
        from weft.engines.ray.status import describe

        yield from describe(own)


def make_pool(options: PoolOptions) -> Pool:
    """Raise EngineUnavailable: maps over machines are not there yet."""
    raise EngineUnavailable("engine='ray' is not part of this release; use 'local' for one machine")


def prestart() -> None:
    """Start nothing: what takes time is on other machines."""


def close() -> None:
    """End nothing: nodes are ended by `close_node`."""
