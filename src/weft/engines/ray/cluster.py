"""Machines reached, all at once, and this process's connection to their cluster.

    reach(machines, port)  ->  connect(cluster)  ->  living(cluster) ...  ->  disconnect()

Names, reachability, key, membership and versions of all machines are checked before anything of Ray
is used, which would retry for long, or wait for ever, and not say what is wrong.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft._core.ray_versions import OLDEST, is_too_old
from weft._version import __version__
from weft.engines.ray import checks, node, rpc
from weft.engines.ray.checks import Answer, Member
from weft.engines.ray.node import OwnNode
from weft.engines.ray.token import find_token, no_key
from weft.errors import (
    EngineUnavailable,
    InvalidValue,
    MachineUnavailable,
    MissingPackage,
)
from weft.resources import host_name

DEFAULT_PORT = 2718
#: where names of weft's actors are
NAMESPACE = "weft"
#: the last port after which there is room for those of workers
_LAST_PORT = 65535 - node.WORKERS[1]
#: seconds for a machine to answer
_ANSWER = 3.0


@dataclass(frozen=True)
class Node:
    """A machine of a cluster."""

    #: Ray's, in hexadecimal digits
    node_id: str
    #: the machine's own name
    name: str
    address: str
    cores: int
    gpus: int
    #: whether this process runs on it
    is_this: bool
    #: bytes that Ray's store there has room for: what is larger it writes to disk, without a word
    store: int = sys.maxsize


@dataclass(frozen=True)
class Cluster:
    """Machines that work together, as this process has reached them."""

    #: HOST:PORT of the first node
    address: str
    #: this machine's, if it takes part, then those that were named
    nodes: tuple[Node, ...]
    #: what its processes want to see; None for a cluster that weft did not start
    key: str | None


# reaching machines


def reach(machines: Sequence[str], port: int | None, *, timeout: float = 10.0) -> Cluster:
    """Return the cluster of this machine and of the named ones, once nothing speaks against any of
    them. Takes no longer than `timeout` seconds.

    Raises MachineUnavailable, with all that is wrong; Refused, Stalled, InvalidValue.
    """
    own, token, versions = node.find(), find_token(), own_versions()
    if port is None:
        port = own.port if own is not None else DEFAULT_PORT
    validate_port(port)
    if token is None:
        raise MachineUnavailable(no_key(own.cluster if own else f"at port {port}"))
    # the rest is for this machine's answer, which takes two calls
    until = time.monotonic() + max(1.0, timeout - 2 * _ANSWER)
    asked = _Asked(own, port, token, until)
    others = asked.others(machines)
    here, members = asked.this_machine(others)
    answers = [here, *others]
    found = checks.problems(answers, members, versions, asked.join)
    if found or own is None or members is None:
        raise MachineUnavailable(
            f"these machines cannot take part:\n{checks.table(found)}{asked.how_to_begin(members)}"
        )
    chosen = [member for answer in answers if (member := checks.find(members, answer))]
    return of_members(own.cluster, chosen, token, own.address)


def of_members(address: str, members: Iterable[Member], token: str, own: str) -> Cluster:
    """Return a cluster with these nodes, each once; `own` is this machine's address."""
    nodes = {member.node_id: _node(member, own) for member in members}
    return Cluster(address, tuple(nodes.values()), token)


def is_the_users() -> bool:
    """Return whether this process is connected to a cluster by the user, and not by weft."""
    ray = sys.modules.get("ray")
    return ray is not None and not _connected and bool(ray.is_initialized())


def of_user() -> Cluster:
    """Return the cluster that the user has connected this process to, or, if none, that RAY_ADDRESS
    names, to which this connects it. Raises MachineUnavailable."""
    global _connected
    ray = load_ray()
    if not ray.is_initialized():
        try:
            ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError) as error:
            address = os.environ.get("RAY_ADDRESS")
            raise MachineUnavailable(f"RAY_ADDRESS={address}: {error}") from error
        _connected = True
        _silence(ray)
    context = ray.get_runtime_context()
    return Cluster(str(context.gcs_address), _ask_ray(ray), None)


def living(cluster: Cluster) -> tuple[Node, ...]:
    """Return the nodes of a cluster that live now: those of weft, if it is weft's. Raises
    MachineUnavailable if its first node does not answer."""
    if cluster.key is None:
        asked = _at_once(lambda _: _ask_ray(load_ray()), [""], time.monotonic() + _ANSWER)
        if "" not in asked:  # Ray waits, until it ends the process
            raise MachineUnavailable(f"the cluster at {cluster.address} does not answer any more")
        nodes: tuple[Node, ...] = asked[""]
        return nodes
    own = next((node.address for node in cluster.nodes if node.is_this), "")
    try:
        members = read_members(cluster.address, cluster.key)
    except (OSError, rpc.CallFailed, rpc.WrongToken) as error:
        raise MachineUnavailable(
            f"the first node of the cluster, {cluster.address}, does not answer any more: "
            f"{_refusal(error, parse_machine(cluster.address)[1])}"
        ) from None
    return tuple(_node(member, own) for member in members if "weft" in member.versions)


def parse_machine(text: str) -> tuple[str, int]:
    """Return name and port of HOST or HOST:PORT. Raises InvalidValue."""
    name, colon, port = text.partition(":")
    if not name or (colon and not port.isdecimal()):
        raise InvalidValue(f"{text!r}: expected HOST:PORT, for example bob:{DEFAULT_PORT}")
    return name, validate_port(int(port)) if colon else DEFAULT_PORT


def validate_port(port: int) -> int:
    """Return the port of a cluster. Raises InvalidValue."""
    if not 1 <= port <= _LAST_PORT:
        raise InvalidValue(
            f"port {port}: expected 1 to {_LAST_PORT}, as the ports of workers follow it"
        )
    return port


def own_versions() -> dict[str, str]:
    """Return the versions that the machines of a cluster compare. Raises MissingPackage for a Ray
    that is too old."""
    packages = {name: importlib.metadata.version(name) for name in ("ray", "numpy")}
    if is_too_old(packages["ray"]):
        raise MissingPackage(
            f"Ray {packages['ray']} is installed, and {OLDEST} or later is needed:\n"
            "    pip install 'weft[ray]'"
        )
    return {"python": platform.python_version(), "weft": __version__, **packages}


class _Asked:
    """Machines that are asked whether they take part, all at once, until some time."""

    def __init__(self, own: OwnNode | None, port: int, token: str, until: float) -> None:
        self._own = own
        self._port = port
        self._token = token
        self._until = until
        #: what nodes join
        self.join = own.cluster if own is not None else f"HOST:{port}"

    def how_to_begin(self, members: Sequence[Member] | None) -> str:
        """Return how to begin a cluster, if none of the machines has a node."""
        if self._own is not None or members is not None:
            return ""
        return f"\none machine begins the cluster, HOST: weft open --port {self._port}"

    def others(self, machines: Sequence[str]) -> list[Answer]:
        """Return how each of the other machines answers."""
        answers = _at_once(self._ask, machines, self._until)
        late = "did not answer in time: its name may be looked up in vain"
        return [answers.get(machine) or Answer(machine, "", late) for machine in machines]

    def this_machine(self, others: Sequence[Answer]) -> tuple[Answer, list[Member] | None]:
        """Return how this machine takes part, and the nodes of its cluster, None if unknown. If it
        is in none, one of the others may be the first of the cluster that is meant."""
        own = self._own
        if own is None:
            members = self._find_first(others)
            return Answer(host_name(), "", f"runs no node: weft open --join {self.join}"), members
        if own.port != self._port:
            refusal = f"runs a node of the cluster {own.cluster}, not one at port {self._port}"
            return Answer(host_name(), own.address, refusal), None
        answer, members = ask_first(*parse_machine(own.cluster), self._token)
        refusal = f"its cluster's first node, {own.cluster}: {answer.refusal}"
        return Answer(host_name(), own.address, refusal if answer.refusal else ""), members

    def _ask(self, machine: str) -> Answer:
        if self._own is not None and machine in ("localhost", host_name()):
            return Answer(machine, self._own.address)
        method = "NodeManagerService/GetSystemConfig"
        return _ask(machine, self._port + node.RAYLET, method, self._token, self.join)

    def _find_first(self, others: Sequence[Answer]) -> list[Member] | None:
        addresses = [answer.address for answer in others if answer.address]
        asked = _at_once(
            lambda address: ask_first(address, self._port, self._token), addresses, self._until
        )
        for address, (_, members) in asked.items():
            if members is not None:
                self.join = f"{address}:{self._port}"
                return list(members)
        return None


def ask_first(name: str, port: int, token: str) -> tuple[Answer, list[Member] | None]:
    """Return how a cluster's first node answers, and the nodes that live, None if it refuses."""
    answer = _ask(name, port, "NodeInfoGcsService/GetClusterId", token)
    if answer.refusal:
        return answer, None
    return answer, read_members(f"{answer.address}:{port}", token)


def _ask(machine: str, port: int, method: str, token: str, join: str = "") -> Answer:
    try:
        found = socket.getaddrinfo(machine, port, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it cannot be one"
        return Answer(machine, "", f"unknown name ({reason})")
    address = str(found[0][4][0])
    try:
        rpc.call(f"{address}:{port}", method, token=token, timeout=_ANSWER)
    except (OSError, rpc.CallFailed, rpc.WrongToken) as error:
        return Answer(machine, address, _refusal(error, port, join))
    return Answer(machine, address)


def _refusal(error: Exception, port: int, join: str = "") -> str:
    """Return why a machine does not take part, by what came of a call to a port of it."""
    if isinstance(error, rpc.WrongToken):
        return "has another key than this machine"
    if isinstance(error, ConnectionRefusedError):
        hint = f": weft open --join {join}" if join else f" (nothing listens at port {port})"
        return f"runs no node{hint}"
    if isinstance(error, TimeoutError):
        return f"did not answer within {_ANSWER:g} s: off, cut off, or behind a firewall"
    if isinstance(error, rpc.CallFailed):
        return f"something else than a node listens at port {port}: {error}"
    return f"cannot be reached ({getattr(error, 'strerror', None) or error})"


def read_members(address: str, token: str | None, timeout: float = _ANSWER) -> list[Member]:
    """Return the nodes of a cluster that live: the first one, then the others by name. Raises what
    `rpc.call` does."""
    from ray.core.generated import gcs_service_pb2

    method = "NodeInfoGcsService/GetAllNodeInfo"
    reply: Any = gcs_service_pb2.GetAllNodeInfoReply()
    reply.ParseFromString(rpc.call(address, method, token=token, timeout=timeout))
    infos = [info for info in reply.node_info_list if info.state == 0]  # of GcsNodeInfo: ALIVE
    infos.sort(key=lambda info: (not info.is_head_node, info.node_manager_hostname))
    return [
        Member(
            node_id=info.node_id.hex(),
            name=info.node_manager_hostname,
            address=info.node_manager_address,
            cores=int(info.resources_total.get("CPU", 0)),
            gpus=int(info.resources_total.get("GPU", 0)),
            labels=dict(info.labels),
            store=int(info.resources_total.get("object_store_memory", sys.maxsize)),
        )
        for info in infos
    ]


def _ask_ray(ray: Any) -> tuple[Node, ...]:
    """Return the nodes of the cluster that this process is connected to."""
    own = ray.get_runtime_context().get_node_id()
    return tuple(
        Node(
            node_id=found["NodeID"],
            name=found["NodeManagerHostname"],
            address=found["NodeManagerAddress"],
            cores=int(found["Resources"].get("CPU", 0)),
            gpus=int(found["Resources"].get("GPU", 0)),
            is_this=found["NodeID"] == own,
            store=int(found["Resources"].get("object_store_memory", sys.maxsize)),
        )
        for found in ray.nodes()
        if found["Alive"]
    )


def _node(member: Member, own: str) -> Node:
    is_this = member.address == own
    return Node(
        member.node_id,
        member.name,
        member.address,
        member.cores,
        member.gpus,
        is_this,
        member.store,
    )


def _at_once(ask: Callable[[str], Any], machines: Sequence[str], until: float) -> dict[str, Any]:
    """Return what `ask` returns for each machine, but for those that it takes longer for. Nothing
    waits for the threads of these: a name may be looked up for minutes."""
    answers: dict[str, Any] = {}
    unique = dict.fromkeys(machines)

    def answer(machine: str) -> None:
        answers[machine] = ask(machine)

    threads = [threading.Thread(target=answer, args=(name,), daemon=True) for name in unique]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(answers)


# this process's connection


def connect(cluster: Cluster) -> None:
    """Connect this process to a cluster, unless it is. Raises EngineUnavailable if it is connected
    to another one, which is the user's, or if this machine has no port for it."""
    global _connected
    ray = load_ray()
    if ray.is_initialized():
        address = str(ray.get_runtime_context().gcs_address)
        if address != cluster.address:
            raise EngineUnavailable(
                f"this process is connected to the Ray cluster at {address}, and a process can "
                f"have one connection only; call ray.shutdown() to use that at {cluster.address}"
            )
        return
    if cluster.key is not None:
        _validate_room(parse_machine(cluster.address)[1])
    own = next((node.address for node in cluster.nodes if node.is_this), None)
    with _settings(cluster.key), _own_addresses(cluster.address):
        ray.init(
            address=cluster.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=own,
        )
    _connected = True
    _silence(ray)


def _validate_room(port: int) -> None:
    """Raise EngineUnavailable if no port is left for this process: Ray would end it."""
    first, last = (port + offset for offset in node.WORKERS)
    for number in range(first, last + 1):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", number))
            return
    raise EngineUnavailable(
        f"all ports from {first} to {last} of this machine are in use, of which each program that "
        "uses the cluster, and each of its workers here, needs one; wait until some have ended"
    )


def _silence(ray: Any) -> None:
    """Keep Ray from printing to the user's stdout what becomes of its processes, page by page, as
    it does until it disconnects. What is lost is for weft to tell."""
    worker = ray._private.worker.global_worker
    worker.threads_stopped.set()
    worker.gcs_error_subscriber.close()


def on_node(function: Callable[[], Any], node_id: str) -> Any:
    """Return a function of Ray that runs on a node, beside whatever else runs there."""
    ray = load_ray()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)


def disconnect() -> None:
    """Disconnect this process, unless the user has connected it."""
    global _connected
    if _connected:
        _connected = False
        load_ray().shutdown()
        _reread_settings()


#: whether this process is connected, and by `connect`
_connected = False

#: what Ray reads in a process that connects to a cluster
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    # by default it ends the process a minute after the first node has gone
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
}


def load_ray() -> Any:
    """Import and return Ray."""
    with _environment(_SETTINGS):  # some are read when it is imported
        return importlib.import_module("ray")


@contextlib.contextmanager
def _settings(token: str | None) -> Iterator[None]:
    """Make Ray use a token, which it reads once and keeps."""
    if token is None:
        yield
        return
    settings = {**_SETTINGS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    with _environment(settings):
        _reread_settings()
        yield


def _reread_settings() -> None:
    """Make Ray read its variables again: it keeps what they were when it was imported."""
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _own_addresses(address: str) -> Iterator[None]:
    """Keep Ray from putting another address of this machine in place of that for loopback."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = before and parse_machine(address)[0] != node.LOOPBACK
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
