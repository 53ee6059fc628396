"""`weft status` of a cluster: its machines, what is free on them, and the maps that run there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.engines.ray import checks, cluster
from weft.engines.ray.checks import Member
from weft.engines.ray.cluster import Cluster
from weft.engines.ray.node import OwnNode
from weft.engines.ray.token import find_token, no_key
from weft.errors import format_bytes
from weft.resources import available_memory

#: seconds for the machines to say how they are
_ANSWER = 10.0
#: what the table has for what is unknown
_UNKNOWN = "?"


@dataclass(frozen=True)
class RunningMap:
    """A map's part on one machine: what the method `running` of weft's actors returns several of.
    These are found by their names, in the namespace `cluster.NAMESPACE`."""

    #: of the node
    address: str
    #: whose map it is, as `host1 pid 12`
    driver: str
    #: the function's name
    function: str
    workers: int
    #: how many of the workers have a GPU
    gpus: int
    #: items that were computed here
    done: int
    seconds: float


def describe(own: OwnNode) -> Iterator[str]:
    """Yield lines about the cluster that this machine is in."""
    yield f"cluster {own.cluster}, of which this machine is {own.address}"
    token = find_token()
    if token is None:
        yield no_key(own.cluster)
        return
    answer, members = cluster.ask_first(*cluster.parse_machine(own.cluster), token)
    if members is None:
        yield f"its first node: {answer.refusal}"
        return
    memory, maps = _ask(cluster.of_members(own.cluster, members, token, own.address))
    yield from table(members, memory, maps)
    yield from lines_of_maps(members, maps)


def table(
    members: Sequence[Member], memory: Mapping[str, int], maps: Sequence[RunningMap]
) -> list[str]:
    """Return a line for each machine, below a title. `memory` has the free bytes of those nodes
    that have answered. Pure."""
    versions = {name: checks.NAMES[name] for name in checks.LABELS}
    rows = [["machine", "address", "cores", "free", "GPUs", "free", "memory", *versions.values()]]
    for member in members:
        here = [part for part in maps if part.address == member.address]
        free = memory.get(member.node_id)
        rows.append(
            [
                member.name,
                member.address,
                str(member.cores),
                str(max(0, member.cores - sum(part.workers for part in here))),
                str(member.gpus),
                str(max(0, member.gpus - sum(part.gpus for part in here))),
                _UNKNOWN if free is None else format_bytes(free),
                *(member.versions.get(name, _UNKNOWN) for name in versions),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def lines_of_maps(members: Sequence[Member], maps: Sequence[RunningMap]) -> Iterator[str]:
    """Yield a line for each map on each machine. Pure."""
    names = {member.address: member.name for member in members}
    for part in maps:
        workers = "1 worker" if part.workers == 1 else f"{part.workers} workers"
        yield (
            f"{part.function} of {part.driver}: {workers} on "
            f"{names.get(part.address, part.address)}, {part.done} items in {part.seconds:.0f} s"
        )
    if not maps:
        yield "no map runs on these machines"


def _ask(reached: Cluster) -> tuple[dict[str, int], list[RunningMap]]:
    """Return how much memory is free on each node that answers in time, and the maps there."""
    cluster.connect(reached)
    try:
        ray = cluster.load_ray()
        memory = {
            cluster.on_node(_free_memory, node.node_id).remote(): node.node_id
            for node in reached.nodes
        }
        named = ray.util.list_named_actors(all_namespaces=True)
        actors = [entry["name"] for entry in named if entry["namespace"] == cluster.NAMESPACE]
        maps = [ray.get_actor(name).running.remote() for name in actors]
        done, _ = ray.wait([*memory, *maps], num_returns=len(memory) + len(maps), timeout=_ANSWER)
        answers = {one: answer for one in done if (answer := _answer(ray, one)) is not None}
        free = {memory[one]: answers[one] for one in memory if one in answers}
        return free, [part for one in maps for part in answers.get(one, ())]
    finally:
        cluster.disconnect()


def _answer(ray: Any, asked: Any) -> Any:
    """Return what was answered; None by what has just ended."""
    try:
        return ray.get(asked)
    except ray.exceptions.RayError:
        return None


def _free_memory() -> int:
    return available_memory()[0]
