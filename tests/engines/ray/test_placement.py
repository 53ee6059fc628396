"""How many workers each host has, and whether they have GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from weft.engines.base import PoolOptions
from weft.engines.ray.cluster import Node
from weft.engines.ray.placement import lacking, place, place_later, spread


def node(k: int, cores: int = 4, gpus: int = 0) -> Node:
    return Node(f"id{k}", f"host{k}", f"10.0.0.{k}", cores, gpus, is_this=k == 1)


def placed(nodes: list[Node], **options: Any) -> tuple[list[tuple[str, int, int]], bool]:
    """The workers and the GPUs of each host that is used, and whether GPUs are."""
    places, uses_gpus = place(nodes, PoolOptions(options.pop("size", None), 4, **options))
    return [(one.node.name, one.workers, one.gpus) for one in places], uses_gpus


def test_every_core_of_every_host() -> None:
    """By default; the caller's cap is for its own machine."""
    nodes = [node(1), node(2, cores=2), node(3, cores=8)]
    assert placed(nodes) == ([("host1", 4, 0), ("host2", 2, 0), ("host3", 8, 0)], False)
    capped = [("host1", 1, 0), ("host2", 2, 0), ("host3", 8, 0)]
    assert placed(nodes, max_cpu=1) == (capped, False)
    assert placed(nodes, max_cpu=100) == placed(nodes)


def test_a_number_is_for_all_hosts() -> None:
    """In proportion to their cores; hosts that get none are not used."""
    nodes = [node(1), node(2), node(3)]
    assert placed(nodes, size=2)[0] == [("host1", 1, 0), ("host2", 1, 0)]
    assert [workers for _, workers, _ in placed(nodes, size=14)[0]] == [5, 5, 4]


@pytest.mark.parametrize("size", range(1, 30))
def test_spread_gives_all(size: int) -> None:
    """And nobody more than one above its part."""
    counts = [5, 1, 2, 0]
    given = spread(counts, size)
    assert sum(given) == size
    assert given[3] == 0
    assert all(one <= size * count / 8 + 1 for one, count in zip(given, counts, strict=True))
    assert spread(counts, size, at_most=True) == given or size > 8


def test_policies_span_all_machines() -> None:
    """require_all: GPUs if every machine has one, prefer_gpu: only those that have some."""
    mixed, all_have = [node(1), node(2, gpus=2)], [node(1, gpus=1), node(2, gpus=2)]
    on_cores = [("host1", 4, 0), ("host2", 4, 0)]
    on_gpus = [("host1", 1, 1), ("host2", 2, 2)]
    assert placed(all_have) == (on_cores, False)
    assert placed(mixed, gpu_policy="require_all") == (on_cores, False)
    assert placed(all_have, gpu_policy="require_all") == (on_gpus, True)
    assert placed(mixed, gpu_policy="prefer_gpu") == ([("host2", 2, 2)], True)
    assert placed([node(1), node(2)], gpu_policy="prefer_gpu") == (on_cores, False)
    capped = placed(all_have, gpu_policy="require_all", max_gpu=0)
    assert capped == (on_cores, False)
    assert placed(all_have, gpu_policy="require_all", visible=()) == (on_cores, False)
    assert placed(all_have, gpu_policy="prefer_gpu", visible=["7"]) == (on_gpus, True)
    assert lacking(mixed, PoolOptions(None, 4, gpu_policy="require_all")) == ["host1"]


def test_a_number_of_gpus_is_for_all_hosts() -> None:
    """Cores are used without one, however few GPUs were asked for."""
    nodes = [node(1, gpus=1), node(2, gpus=3)]
    prefer = {"gpu_policy": "prefer_gpu"}
    assert placed(nodes, most_gpus=2, **prefer) == ([("host1", 1, 1), ("host2", 1, 1)], True)
    assert placed(nodes, most_gpus=9, **prefer) == ([("host1", 1, 1), ("host2", 3, 3)], True)
    assert placed([node(1)], most_gpus=1, **prefer) == ([("host1", 4, 0)], False)
    options = PoolOptions(None, 4, gpu_policy="prefer_gpu", most_gpus=2)
    assert place_later(node(4, gpus=1), options, uses_gpus=True) is None
    assert place_later(node(4), options, uses_gpus=False) is not None


def test_hosts_that_join_later() -> None:
    """With all that they give, unless the number of workers was given, or they lack GPUs."""
    joined = place_later(node(4, cores=3), PoolOptions(None, 4), uses_gpus=False)
    assert joined is not None
    assert (joined.workers, joined.gpus) == (3, 0)
    assert place_later(node(4), PoolOptions(2, 4), uses_gpus=False) is None
    assert place_later(node(4), PoolOptions(None, 4), uses_gpus=True) is None
