"""A cluster of two hosts, and one beside it: what listens, who is let in, what is refused."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import version as metadata
from pathlib import Path

import pytest

from tests.hosts import Hosts
from tests.support import Outcome, wait_until, within
from weft import __version__

#: the hosts of a file share one cluster
SHARES = True
#: the ports of a node at 2718: gcs, raylet, objects, runtime environments
FEW = {2718, 2719, 2720, 2721}
#: where hosts have their user's key: each its own, as the file systems of real ones may be
CONFIG = "/run/tmp/config"
KEY = f"{CONFIG}/weft/key"
OWN = {"XDG_CONFIG_HOME": CONFIG}

#: asks as a map would, and prints what it is told, and after how many seconds
REACH = """
import json, sys, time
from weft.engines.ray import cluster
from weft.errors import WeftError
began = time.monotonic()
try:
    told = [str(node.name) for node in cluster.reach(sys.argv[1:], None).nodes]
except WeftError as error:
    told = [type(error).__name__, str(error)]
print(json.dumps([told, time.monotonic() - began]))
"""


def weft(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "weft", *arguments]


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", program, *arguments]


def listening(hosts: Hosts, k: int) -> dict[int, str]:
    """The TCP ports at which a host listens, and the address of each, as the kernel writes it."""
    found = {}
    for table in ("tcp", "tcp6"):
        lines = hosts.run_on(k, ["cat", f"/proc/net/{table}"]).out.splitlines()[1:]
        for _, local, _, state, *_ in (line.split() for line in lines):
            if state == "0A":
                address, port = local.split(":")
                found[int(port, 16)] = address
    return found


def reach(hosts: Hosts, k: int, *machines: str, program: str = REACH) -> tuple[list[str], float]:
    """What `cluster.reach` says on a host, and after how many seconds."""
    outcome = hosts.run_on(k, python(program, *machines), env=OWN)
    assert outcome.code == 0, outcome
    told, seconds = json.loads(outcome.out.splitlines()[-1])
    return told, seconds


@pytest.fixture(scope="module")
def opened(_three_hosts: Hosts) -> Iterator[tuple[Hosts, Outcome]]:
    """Three hosts, of which two are a cluster; and what `weft open` said on the first. At the end
    nothing is left of it."""
    hosts = _three_hosts
    first = hosts.run_on(1, weft("open", "--port", "2718", "--max-gpu", "0"), env=OWN)
    assert first.code == 0, first
    copy_key(hosts, first.out)
    second = hosts.run_on(2, weft("open", "--join", "host1:2718", "--max-cpu", "1"), env=OWN)
    assert second.code == 0, second
    assert "gives 1 core and" in second.out
    yield hosts, first
    # the second before the first: its cluster is there, and told
    for k in (2, 1):
        closed = hosts.run_on(k, weft("close"), env=OWN)
        assert closed.code == 0, closed
        assert f"10.78.0.{k}, has left its cluster" in closed.out
        assert not hosts.processes(k)
    for k in (1, 2, 3):
        hosts.run_on(k, ["rm", "-rf", CONFIG])
    left = hosts.leave_nothing()
    assert not left


def copy_key(hosts: Hosts, told: str) -> None:
    """Copy the key to the second host as `weft open` says; what it gives to ssh is run there."""
    line = next(line.strip() for line in told.splitlines() if "ssh MACHINE" in line)
    _, _, command, _, file = shlex.split(line)
    key = hosts.run_on(1, ["cat", file]).out
    assert hosts.run_on(2, f"printf %s {key} | ({command})", env=OWN).code == 0
    assert hosts.run_on(2, ["stat", "-c", "%a", KEY]).out.strip() == "600"


def test_what_the_first_says(opened: tuple[Hosts, Outcome]) -> None:
    """What it gives, how others get the key, and how they join; the key is the user's alone."""
    hosts, first = opened
    assert "this machine, 10.78.0.1, gives" in first.out
    assert "cores and 0 GPUs to the cluster 10.78.0.1:2718" in first.out
    assert "weft open --join 10.78.0.1:2718" in first.out
    token = hashlib.sha256(b"weft cluster " + hosts.run_on(1, ["cat", KEY]).out.encode())
    for process in (*hosts.processes(1), *hosts.processes(2)):
        assert token.hexdigest() not in process.command  # which all users can read
    modes = hosts.run_on(1, ["stat", "-c", "%a", KEY, str(Path(KEY).parent)]).out.split()
    assert modes == ["600", "700"]


def test_few_ports_are_open(opened: tuple[Hosts, Outcome]) -> None:
    """Although all that Ray can have besides is installed: no dashboard, client server, metrics."""
    import grpc  # noqa: F401  with it, `ray start` opens the client server
    import prometheus_client  # noqa: F401  with it, metrics

    hosts, _ = opened
    assert set(listening(hosts, 1)) == FEW
    assert set(listening(hosts, 2)) == FEW - {2718}


def test_machines_are_reached_and_connected(opened: tuple[Hosts, Outcome]) -> None:
    """By name, by address, by any name of this machine; with what they give. The process is
    connected once, its environment is as before, and a cluster of the user's own is refused."""
    hosts, _ = opened
    program = """
import json, os, sys
from weft.engines.ray import cluster
from weft.errors import EngineUnavailable
reached = cluster.reach(["localhost", "host2", "10.78.0.2", "host1"], 2718)
assert [(node.name, node.address, node.is_this) for node in reached.nodes] == [
    ("host1", "10.78.0.1", True), ("host2", "10.78.0.2", False)
], reached.nodes
assert reached.nodes[1].cores == 1 and reached.nodes[1].gpus == 0
assert reached.nodes == cluster.living(reached)
before = {name: text for name, text in os.environ.items() if name.startswith("RAY_")}
assert "RAY_AUTH_TOKEN" not in before
cluster.connect(reached)
cluster.connect(reached)
assert not any(name.startswith("RAY_AUTH") for name in os.environ)
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
def where():
    import socket
    return socket.gethostname()
names = [
    ray.remote(where).options(num_cpus=0, scheduling_strategy=On(node.node_id, soft=False)).remote()
    for node in reached.nodes
]
assert ray.get(names) == ["host1", "host2"]
elsewhere = cluster.Cluster("10.78.0.9:2718", reached.nodes, reached.key)
try:
    cluster.connect(elsewhere)
except EngineUnavailable as error:
    print(error)
cluster.disconnect()
assert not ray.is_initialized()
cluster.disconnect()
"""
    outcome = hosts.run_on(1, python(program), env=OWN)
    assert outcome.code == 0, outcome
    assert outcome.out == (
        "this process is connected to the Ray cluster at 10.78.0.1:2718, and a process can have "
        "one connection only; call ray.shutdown() to use that at 10.78.0.9:2718\n"
    )
    assert outcome.err == ""


def test_all_that_is_wrong_is_one_table(opened: tuple[Hosts, Outcome]) -> None:
    """An unknown name, a machine that is cut off, one without a node: told within ten seconds, and
    nothing of those that are right."""
    hosts, _ = opened
    told, seconds = reach(hosts, 1, "host2", "nosuchhost", "host3", "10.78.0.77")
    assert told[0] == "MachineUnavailable"
    lines = {line.split()[0]: line for line in told[1].splitlines()[1:]}
    assert told[1].startswith("these machines cannot take part:\n")
    assert set(lines) == {"nosuchhost", "host3", "10.78.0.77"}
    assert "unknown name (" in lines["nosuchhost"]
    assert "10.78.0.3   runs no node: weft open --join 10.78.0.1:2718" in lines["host3"]
    assert lines["10.78.0.77"].endswith(("(No route to host)", "behind a firewall"))
    assert seconds < within(10)


def test_what_is_told_besides(opened: tuple[Hosts, Outcome]) -> None:
    """How a cluster begins where there is none, that ports are no part of names, and that there is
    nothing to close."""
    hosts, _ = opened
    program = """
import weft
for machines, port in ((["host3:2718"], None), (["host3"], 2900)):
    try:
        weft.map(abs, [1], machines=machines, port=port)
    except weft.WeftError as error:
        print(type(error).__name__, error)
"""
    key = {"WEFT_KEY": "a key of many letters"}
    told = hosts.run_on(3, python(program), env=key).out
    assert told == (
        "InvalidValue machines=['host3:2718']: expected names without a port, as port= is for all "
        "of them:\n    machines=['host3', ...], port=2718\n"
        "MachineUnavailable these machines cannot take part:\n"
        "  host3  -          runs no node: weft open --join HOST:2900\n"
        "  host3  10.78.0.3  runs no node: weft open --join HOST:2900\n"
        "one machine begins the cluster, HOST: weft open --port 2900\n"
    )
    closed = hosts.run_on(3, weft("close"), env=key)
    assert closed.code == 1
    assert (
        closed.err == "weft: this machine is in no cluster, and no pipe is open: nothing to close\n"
    )


def test_a_machine_that_is_no_node(opened: tuple[Hosts, Outcome]) -> None:
    """Is told how to join, with its key or without; it does not hang."""
    hosts, _ = opened
    told, seconds = reach(hosts, 3, "host1", "host2")
    assert told[0] == "MachineUnavailable"
    assert "this machine has no key for the cluster at port 2718: copy it" in told[1]
    assert seconds < within(1)
    refused = hosts.run_on(3, weft("open", "--join", "host1"), env=OWN)
    assert refused.code == 1
    assert "this machine has no key for the cluster at host1: copy it" in refused.err
    key = hosts.run_on(1, ["cat", KEY]).out
    told, _ = reach_with(hosts, 3, key, "host1", "host2")
    assert "host3  -  runs no node: weft open --join 10.78.0.1:2718" in told[1], told
    told, seconds = reach_with(hosts, 3, "another key of many letters", "host1", "host2")
    assert told[1].count("has another key than this machine") == 2
    assert seconds < within(1)
    wrong = hosts.run_on(
        3, weft("open", "--join", "host1"), env={"WEFT_KEY": "another key of many letters"}
    )
    assert wrong.code == 1
    assert "this machine cannot join:\n  host1  10.78.0.1  has another key than" in wrong.err
    assert wrong.seconds < within(5)


def reach_with(
    hosts: Hosts, k: int, key: str, *machines: str, program: str = REACH
) -> tuple[list[str], float]:
    """The same with another key."""
    outcome = hosts.run_on(k, python(program, *machines), env={"WEFT_KEY": key})
    told, seconds = json.loads(outcome.out.splitlines()[-1])
    return told, seconds


def test_versions_that_differ(opened: tuple[Hosts, Outcome]) -> None:
    """Another patch of Python is none that matters; another minor version is, and another weft."""
    hosts, _ = opened
    faked = "import platform, weft._version\nplatform.python_version = lambda: {!r}\n" + REACH
    own = platform.python_version().rpartition(".")[0]
    told, _ = reach(hosts, 1, "host2", program=faked.format(f"{own}.99"))
    assert told == ["host1", "host2"]
    told, _ = reach(hosts, 1, "host2", program=faked.format("3.99.1"))
    assert f"has Python {platform.python_version()}, this machine has Python 3.99.1" in told[1]
    faked = "import weft._version\nweft._version.__version__ = '9.9+new'\n"
    told, _ = reach(hosts, 1, "host2", program=faked + REACH)
    assert f"has weft {__version__}, this machine has weft 9.9+new; install the same" in told[1]
    cli = "import sys\nfrom weft import cli\ncli.main(sys.argv[1:])"
    line = python(faked + cli, "open", "--join", "host1")
    refused = hosts.run_on(3, line, env={"WEFT_KEY": hosts.run_on(1, ["cat", KEY]).out})
    assert refused.code == 1
    assert "this machine cannot join:" in refused.err
    assert "this machine has weft 9.9+new" in refused.err


def test_a_node_of_another_cluster(opened: tuple[Hosts, Outcome]) -> None:
    """With the same key, it is told; and its ports are taken for others."""
    hosts, _ = opened
    key = {"WEFT_KEY": hosts.run_on(1, ["cat", KEY]).out}
    third = hosts.run_on(3, weft("open", "--port", "2718"), env=key)
    assert third.code == 0, third
    told, _ = reach(hosts, 1, "host2", "host3")
    assert "10.78.0.3  runs a node of another cluster; on it: weft close, then" in told[1]
    again = hosts.run_on(3, weft("open", "--port", "2800"), env=key)
    assert (again.code, again.out) == (2, "")
    assert "this machine's node is open already (weft status)" in again.err
    told, _ = reach_with(hosts, 3, key["WEFT_KEY"], "host1", program=AT_2800)
    assert "runs a node of the cluster 10.78.0.3:2718, not one at port 2800" in told[1]
    status = hosts.run_on(3, weft("status"), env=key)
    assert "10.78.0.3" in status.out
    assert hosts.run_on(3, weft("close"), env=key).code == 0
    assert not hosts.processes(3)


AT_2800 = REACH.replace("None", "2800")


def test_status(opened: tuple[Hosts, Outcome]) -> None:
    """The machines, what is free, their versions, and a map that runs: told on each of them."""
    hosts, _ = opened
    program = """
import signal
import weft
def wait(item):
    print("item", item, flush=True)
    signal.pause()
weft.distribute(wait, machines=["host2"], max_cpu=1)([0, 1])
"""
    driver = hosts.start_on(1, python(program), env=OWN)
    wait_until(lambda: driver.out.count("item") == 2 or not driver.running)
    told = hosts.run_on(2, weft("status"), env=OWN)
    strangers = hosts.run_on(3, python(STRANGERS, *map(str, set(listening(hosts, 1)) - FEW)))
    driver.kill()
    driver.wait()
    assert told.code == 0, told
    lines = told.out.splitlines()
    assert lines[0] == "cluster 10.78.0.1:2718, of which this machine is 10.78.0.2"
    assert lines[1].split()[-4:] == ["Python", "weft", "Ray", "NumPy"]
    versions = [platform.python_version(), __version__, metadata("ray"), metadata("numpy")]
    for line, row in zip(lines[2:4], (["host1", "10.78.0.1"], ["host2", "10.78.0.2"]), strict=True):
        assert line.split()[:2] == row
        assert line.split()[-4:] == versions
        assert " GB " in line or " MB " in line
    assert lines[3].split()[2:4] == ["1", "0"]
    parts = [rf"wait of host1 pid \d+: 1 worker on host{k}, 0 items in \d+ s" for k in (1, 2)]
    assert all(map(re.fullmatch, parts, sorted(lines[4:6]))), lines
    assert told.err == ""
    refused = [int(port) for port in strangers.out.split()]
    assert len(refused) >= 2, strangers  # of the driver, and of the actor
    assert all(2728 <= port <= 2777 for port in refused)
    assert strangers.err == ""
    alone = hosts.run_on(3, weft("status"), env=OWN)
    assert alone.out == "weft: no pipe is open, and this machine is in no cluster\n"


#: prints the ports of the first host that refuse a task without a token, and with a wrong one
STRANGERS = """
import sys
from weft.engines.ray import rpc
for port in sys.argv[1:]:
    refusals = 0
    for token in (None, "0" * 64):
        try:
            rpc.call(f"host1:{port}", "CoreWorkerService/PushTask", token=token, timeout=5)
        except rpc.WrongToken:
            refusals += 1
    print(port if refusals == 2 else f"let in at {port}")
"""


def test_long_answers(opened: tuple[Hosts, Outcome]) -> None:
    """Longer than a server of HTTP/2 may send unasked, as of a cluster of a thousand nodes."""
    hosts, _ = opened
    program = """
from ray.core.generated import gcs_service_pb2 as pb2
from weft.engines.ray import rpc
from weft.engines.ray.token import find_token
def call(method, question, reply):
    answer = rpc.call("host1:2718", f"InternalKVGcsService/InternalKV{method}",
                      question.SerializeToString(), token=find_token(), timeout=10)
    reply.ParseFromString(answer)
    return reply
space = dict(namespace=b"weft-test")
values = {b"%d" % k: bytes([k]) * 15_000 for k in range(20)}
for key, value in values.items():
    call("Put", pb2.InternalKVPutRequest(key=key, value=value, **space), pb2.InternalKVPutReply())
asked = pb2.InternalKVMultiGetRequest(keys=list(values), **space)
results = call("MultiGet", asked, pb2.InternalKVMultiGetReply()).results
assert {entry.key: entry.value for entry in results} == values
for key in values:
    call("Del", pb2.InternalKVDelRequest(key=key, **space), pb2.InternalKVDelReply())
"""
    outcome = hosts.run_on(1, python(program), env=OWN)
    assert (outcome.code, outcome.err) == (0, ""), outcome


def test_strangers_are_refused_at_every_port(opened: tuple[Hosts, Outcome]) -> None:
    """Without a token, and with a wrong one, whatever they call; at once."""
    hosts, _ = opened
    program = """
import http.client, sys
from weft.engines.ray import rpc
METHODS = {
    2718: ["NodeInfoGcsService/GetClusterId", "NodeInfoGcsService/GetAllNodeInfo",
           "InternalKVGcsService/InternalKVPut", "JobInfoGcsService/AddJob",
           "ActorInfoGcsService/CreateActor"],
    2719: ["NodeManagerService/RequestWorkerLease", "NodeManagerService/GetSystemConfig"],
    2720: ["ObjectManagerService/Pull", "ObjectManagerService/Push"],
}
for port, methods in METHODS.items():
    for method in methods:
        for token in (None, "0" * 64):
            try:
                rpc.call(f"host1:{port}", method, token=token, timeout=5)
                print("let in", port, method, token)
            except rpc.WrongToken:
                pass
agent = http.client.HTTPConnection("host1", 2721, timeout=5)
agent.request("POST", "/get_or_create_runtime_env", b"")
print(agent.getresponse().status)
"""
    outcome = hosts.run_on(3, python(program))
    assert (outcome.out, outcome.err) == ("401\n", "")


def test_a_port_in_use(opened: tuple[Hosts, Outcome]) -> None:
    """Is named, before anything is started."""
    hosts, _ = opened
    server = hosts.start_on(3, python(LISTENS, "2901"))
    wait_until(lambda: "listens" in server.out)
    key = {"WEFT_KEY": "a key of many letters"}
    refused = hosts.run_on(3, weft("open", "--port", "2900"), env=key)
    server.kill()
    server.wait()
    assert refused.code == 2
    assert "port 2901 of this machine cannot be used (Address already in use)" in refused.err
    assert refused.err.endswith("for example\n    weft open --port 2960\n")
    assert not hosts.processes(3)


def test_no_port_is_left(opened: tuple[Hosts, Outcome]) -> None:
    """Programs that use the cluster need one each, and are told, where Ray would end them."""
    hosts, _ = opened
    server = hosts.start_on(1, python(LISTENS, *map(str, range(2728, 2778))))
    wait_until(lambda: "listens" in server.out)
    told = hosts.run_on(1, weft("status"), env=OWN)
    server.kill()
    server.wait()
    assert told.code == 1
    assert "weft: all ports from 2728 to 2777 of this machine are in use, of which" in told.err


#: listens at the ports that it is given, those of them that are free
LISTENS = """
import contextlib, socket, sys, signal
servers = []
for port in sys.argv[1:]:
    with contextlib.suppress(OSError):
        servers.append(socket.create_server(("", int(port))))
print("listens", flush=True)
signal.pause()
"""
