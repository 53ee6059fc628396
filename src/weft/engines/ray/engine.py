"""The ray engine's functions, as the registry lists them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.engines.base import Pool, PoolOptions
    from weft.engines.ray.actors import Place
    from weft.engines.ray.cluster import Cluster, Node
    from weft.engines.ray.opening import PrivateNode


def open_node(
    *,
    port: int | None = None,
    join: str | None = None,
    max_cpu: int | None = None,
    max_gpu: int | None = None,
    address: str | None = None,
) -> str:
    """Make this machine begin a cluster at a port, or join that at HOST:PORT, until `close_node`.
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
    """Make this machine leave its cluster, and return its address; "" if it was in none. Raises
    Refused, Stalled."""
    from weft.engines.ray import opening

    return opening.close_node()


def close_cluster(reached: Cluster) -> None:
    """Make all machines leave a cluster, where they are this user's. Raises Stalled."""
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
    """Return a pool of workers on this machine and others. Raises MachineUnavailable, which lists
    what is wrong with any of them, EngineUnavailable, LaunchError."""
    from weft.engines.ray import placement
    from weft.engines.ray.actors import Actors
    from weft.engines.ray.pool import RayPool

    reached = _reach(options)
    places, uses_gpus = placement.place(reached.nodes, options)
    if options.gpu_policy == "require_all" and not uses_gpus:
        _warn_of_cpus(placement.lacking(reached.nodes, options))
    addresses = {node.address for node in reached.nodes}

    def place_later(node: Node) -> Place | None:
        if options.machines and node.address not in addresses:
            return None
        return placement.place_later(node, options, uses_gpus=uses_gpus)

    return RayPool(Actors(reached, places, place_later), uses_gpus=uses_gpus)


#: seconds in which all machines are to answer
_REACH = 10.0
#: what was reached last, by what was asked for
_reached: dict[tuple[Any, ...], Cluster] = {}
#: the node that this process has started for itself
_private: PrivateNode | None = None


def _reach(options: PoolOptions) -> Cluster:
    """Return a cluster to which this process is connected. Machines that were reached before and
    live are not asked again."""
    from weft.engines.ray import actors, cluster

    asked = (options.machines, options.port, os.environ.get("RAY_ADDRESS"))
    known = _reached.get(asked)
    if actors.is_lost():
        close()
        known = None
    if known is None or not actors.is_up_to_date(known):
        named = options.machines or options.port is not None
        known = cluster.reach(options.machines, options.port, timeout=_REACH) if named else _any()
        _reached.clear()
        _reached[asked] = known
    cluster.connect(known)
    return known


def _any() -> Cluster:
    """Return the user's own cluster of Ray, all of that which this machine is in, or one of this
    process's own."""
    global _private
    from weft.engines.ray import cluster, node, opening

    if os.environ.get("RAY_ADDRESS") or cluster.is_the_users():
        return cluster.of_user()
    if node.find() is not None:
        known = cluster.reach((), None, timeout=_REACH)
        return replace(known, nodes=cluster.living(known))
    if _private is None:
        _private = opening.PrivateNode()
    return _private.cluster


def _warn_of_cpus(lacking: list[str]) -> None:
    from weft._core.failures import warn_caller

    if lacking:
        warn_caller(
            f"gpu_policy='require_all': {', '.join(lacking)} has no GPU that may be used, so all "
            "machines use their CPUs; 'prefer_gpu' uses the GPUs of those that have some"
        )


def prestart() -> None:
    """Start nothing: what takes time is on other machines."""


def shut_down(reached: Cluster) -> None:
    """End the actors of this process and, where weft has opened it, the cluster. Raises Stalled."""
    opened = reached.key is not None and _private is None
    close()
    if opened:
        close_cluster(reached)


def close() -> None:
    """End the actors of this process, its connection to a cluster, and the node that it has started
    for itself. Nodes that were opened are ended by `close_node`."""
    global _private
    _reached.clear()
    if actors := sys.modules.get("weft.engines.ray.actors"):
        actors.close_all()
    if cluster := sys.modules.get("weft.engines.ray.cluster"):
        cluster.disconnect()
    private, _private = _private, None
    if private is not None:
        private.close()
