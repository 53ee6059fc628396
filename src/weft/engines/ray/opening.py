"""This machine's node, begun and ended: `weft open --port`, `weft open --join` and `weft close`, or
for one process alone."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.engines.ray import checks, cluster, node
from weft.engines.ray.cluster import Cluster
from weft.engines.ray.node import LOOPBACK, NodeOptions
from weft.engines.ray.token import copy_line, find_token, make_token, no_key
from weft.errors import LaunchError, MachineUnavailable, Stalled
from weft.resources import count_cores, visible_gpus

#: below those that the kernel gives to clients
_PRIVATE_PORTS = 20_000, 32_000
_ATTEMPTS = 20
#: seconds for the nodes of all machines to end
_ALL_END = 30.0


@dataclass(frozen=True)
class Opening:
    """Describe a node to open: the first of a cluster at a port, or one that joins HOST:PORT."""

    port: int | None = None
    join: str | None = None
    #: the most that this machine gives; None: all of its cores, all of its GPUs
    max_cpu: int | None = None
    max_gpu: int | None = None
    #: where others reach this machine; None: decided here
    address: str | None = None


def open_node(opening: Opening) -> str:
    """Start a node of this machine in the background, and return what to tell the user. Raises
    LaunchError, InvalidValue, Refused, MachineUnavailable."""
    options, token = _prepare(opening)
    node.start(options, token)
    return _how_to_join(options)


def serve_node(opening: Opening, opened: Callable[[str], None]) -> None:
    """Start a node that ends with this process, call `opened` when it runs, and return when
    somebody has closed it. Raises what `open_node` does."""
    options, token = _prepare(opening)
    watcher = node.start(replace(options, tied=True), token)
    try:
        opened(_how_to_join(options))
        watcher.wait()
    finally:
        watcher.terminate()
        watcher.wait()


def close_node() -> str:
    """End this user's node on this machine. Return its address, "" if there was none. Raises
    Refused, Stalled."""
    ended = node.end()
    return "" if ended is None else ended.address


def close_cluster(reached: Cluster) -> None:
    """End this user's nodes on the machines that were reached, this machine's last. Raises Stalled
    for those that have not ended in time, MachineUnavailable if the first has ended already."""
    cluster.connect(reached)
    chosen = {member.node_id for member in reached.nodes if not member.is_this}
    for member in cluster.living(reached):
        if member.node_id in chosen:
            cluster.on_node(node.end, member.node_id).remote()  # its process ends with the node
    until = time.monotonic() + _ALL_END
    while others := [one.name for one in _living(reached) if one.node_id in chosen]:
        if time.monotonic() > until:
            raise Stalled(f"the nodes of {', '.join(others)} have not ended in {_ALL_END:.0f} s")
        time.sleep(0.05)
    cluster.disconnect()
    node.end()


def _living(reached: Cluster) -> tuple[cluster.Node, ...]:
    """Return the nodes that live; none once the first has ended, as the others then end, too."""
    try:
        return cluster.living(reached)
    except MachineUnavailable:
        return ()


class PrivateNode:
    """A cluster of this machine alone, for this process alone: it listens on loopback, and ends
    with the process or by `close`."""

    def __init__(self) -> None:
        token = secrets.token_hex(32)
        options = _private_options()
        self._watcher = node.start(options, token)
        try:
            members = cluster.read_members(options.cluster, token)
        except BaseException:
            self.close()
            raise
        #: what this process connects to
        self.cluster = cluster.of_members(options.cluster, members, token, options.address)

    def close(self) -> None:
        """End the node and all of its processes."""
        self._watcher.terminate()
        self._watcher.wait()


def _private_options() -> NodeOptions:
    """Return options with ports that are free now."""
    cores, gpus = count_cores()[0], len(visible_gpus(os.environ))
    labels = checks.labels_of(cluster.own_versions())
    for attempt in range(_ATTEMPTS):
        port = random.SystemRandom().randrange(*_PRIVATE_PORTS)
        first = f"{LOOPBACK}:{port}"
        options = NodeOptions(first, LOOPBACK, cores, gpus, labels, tied=True, private=True)
        try:
            _validate_ports(options)
        except LaunchError:
            if attempt == _ATTEMPTS - 1:
                raise
        else:
            break
    return options


def _prepare(opening: Opening) -> tuple[NodeOptions, str]:
    """Return what a node is started with, and its token, once nothing speaks against it."""
    if node.find() is not None:
        raise node.already_open()
    versions = cluster.own_versions()
    if opening.join is None:
        port = cluster.validate_port(opening.port or cluster.DEFAULT_PORT)
        address, token = opening.address or own_address(), make_token()
        first = f"{address}:{port}"
    else:
        first, token = _find_first(opening.join, versions)
        host, _, text = first.rpartition(":")
        address = opening.address or _address_towards(host, int(text))
    cores, gpus = count_cores()[0], visible_gpus(os.environ)
    capped = opening.max_gpu is not None and opening.max_gpu < len(gpus)
    options = NodeOptions(
        cluster=first,
        address=address,
        cores=cores if opening.max_cpu is None else min(cores, opening.max_cpu),
        gpus=len(gpus[: opening.max_gpu]),
        labels=checks.labels_of(versions),
        visible=",".join(gpus[: opening.max_gpu]) if capped else None,
    )
    _validate_ports(options)
    return options, token


def _find_first(join: str, versions: dict[str, str]) -> tuple[str, str]:
    """Return the address of a cluster's first node, and the token, once it has accepted that and
    has this machine's versions."""
    token = find_token()
    if token is None:
        raise MachineUnavailable(no_key(f"at {join}"))
    name, port = cluster.parse_machine(join)
    answer, members = cluster.ask_first(name, port, token)
    if found := checks.problems([answer], members, versions, join):
        raise MachineUnavailable(f"this machine cannot join:\n{checks.table(found)}")
    return f"{answer.address}:{port}", token


def _how_to_join(options: NodeOptions) -> str:
    """Return what to tell the user of a node that runs."""
    gives = f"{_some(options.cores, 'core')} and {_some(options.gpus, 'GPU')}"
    lines = [f"this machine, {options.address}, gives {gives} to the cluster {options.cluster}"]
    if options.is_first:
        lines += [
            "on each other machine, which needs the same key (once):",
            f"    {copy_line()}",
            f"    weft open --join {options.cluster}",
        ]
    return "\n".join(lines)


def _some(count: int, thing: str) -> str:
    return f"1 {thing}" if count == 1 else f"{count} {thing}s"


def _validate_ports(options: NodeOptions) -> None:
    """Raise LaunchError if the address is not this machine's, or a port of the node is in use."""
    with socket.socket() as probe:
        try:
            probe.bind((options.address, 0))
        except OSError:
            raise LaunchError(
                f"--address {options.address}: expected an address of this machine, at which "
                "others reach it, in numbers"
            ) from None
    offset = 0 if options.is_first else node.RAYLET
    last = options.port + node.RUNTIME_ENV
    for port in range(options.port + offset, last + 1):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError as error:
                raise LaunchError(
                    f"port {port} of this machine cannot be used ({error.strerror}): a node needs "
                    f"{options.port} to {last}, and its workers {options.port + node.WORKERS[0]} "
                    f"to {options.port + node.WORKERS[1]}; choose another port for the whole "
                    f"cluster, for example\n    weft open --port {_another(options.port)}"
                ) from None


def _another(port: int) -> int:
    """Return a port whose node has no port in common with one at this port."""
    after = port + node.WORKERS[1] + 1
    return after if after + node.WORKERS[1] < 1 << 16 else cluster.DEFAULT_PORT


def own_address() -> str:
    """Return the address at which other machines reach this one: that of its name, else that of
    its way to the outside, else any. Raises LaunchError if it has none but loopback."""
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET):
            if not str(address[0]).startswith("127."):
                return str(address[0])
    with contextlib.suppress(OSError):
        return _address_towards("192.0.2.1", 9)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        line = ["hostname", "-I"]
        listed = subprocess.run(line, capture_output=True, text=True, timeout=5, check=False).stdout
        for word in listed.split():
            if "." in word:
                return word
    raise LaunchError("this machine has no address but loopback: no other can reach it")


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the way to another. Sends nothing. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, port))
        return str(way.getsockname()[0])
