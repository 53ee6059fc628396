"""How many workers each host has, and whether they have GPUs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.engines.ray.actors import Place

if TYPE_CHECKING:
    from weft.engines.base import PoolOptions
    from weft.engines.ray.cluster import Node


def place(nodes: Sequence[Node], options: PoolOptions) -> tuple[list[Place], bool]:
    """Return how much of each host is used, and whether it is its GPUs."""
    caps = [_caps(node, options) for node in nodes]
    gpus = [gpu for _, gpu in caps]
    if options.gpu_policy == "prefer_gpu":
        uses_gpus = any(gpus)
    else:
        uses_gpus = options.gpu_policy == "require_all" and all(gpus)
    cores = [core for core, _ in caps]
    counts = gpus if uses_gpus else cores
    if uses_gpus and options.most_gpus is not None:
        counts = spread(counts, options.most_gpus, at_most=True)
    if options.size is not None:
        counts = spread(counts, options.size, at_most=uses_gpus)
    places = [
        Place(node, count, max(core, 1), gpus=count if uses_gpus else 0)
        for node, count, core in zip(nodes, counts, cores, strict=True)
        if count
    ]
    return places, uses_gpus


def place_later(node: Node, options: PoolOptions, *, uses_gpus: bool) -> Place | None:
    """Return how much is used of a host that joins later; None if it is not to be used, as the
    number of workers or GPUs was given, or it has no GPU."""
    cores, gpus = _caps(node, options)
    count = gpus if uses_gpus else cores
    if options.size is not None or not count or (uses_gpus and options.most_gpus is not None):
        return None
    return Place(node, count, max(cores, 1), gpus=gpus if uses_gpus else 0)


def lacking(nodes: Sequence[Node], options: PoolOptions) -> list[str]:
    """Return the names of the hosts without a GPU that is to be used."""
    return [node.name for node in nodes if not _caps(node, options)[1]]


def _caps(node: Node, options: PoolOptions) -> tuple[int, int]:
    """Return the most cores and GPUs used of a host; the caller's caps, and the GPUs that its
    process may use, are for this one."""
    if not node.is_this:
        return node.cores, node.gpus
    cores = node.cores if options.max_cpu is None else min(node.cores, options.max_cpu)
    gpus = node.gpus if options.max_gpu is None else min(node.gpus, options.max_gpu)
    return cores, gpus if options.visible is None else min(gpus, len(options.visible))


def spread(counts: Sequence[int], size: int, *, at_most: bool = False) -> list[int]:
    """Return how many of `size` workers each host gets, in proportion to these counts, and no more
    than these with `at_most`.

    >>> spread([4, 4], 2), spread([6, 2], 4), spread([1, 1], 4), spread([2, 0], 1)
    ([1, 1], [3, 1], [2, 2], [1, 0])
    """
    total = sum(counts)
    if at_most:
        size = min(size, total)
    given = [0] * len(counts)
    for _ in range(size):
        # to the one that is furthest below its part
        behind = [
            (one / count if count else float("inf"), index)
            for index, (one, count) in enumerate(zip(given, counts, strict=True))
        ]
        _, index = min(behind)
        given[index] += 1
    return given
