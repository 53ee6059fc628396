"""How nodes end: whoever is killed, nothing is left, and nobody else's Ray is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import Hosts, Job, Process
from tests.support import wait_until
from weft.engines.ray import node

#: no host needs a key file then
KEY = {"WEFT_KEY": "a key of many letters"}
OPEN = ("open", "--port", "2718")
#: what nodes of one core say when they run
SERVES = "gives 1 core and 0 GPUs to the cluster 10.78.0.1:2718"


def weft(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "weft", *arguments]


def open_both(hosts: Hosts) -> None:
    """Open a node on each host, of clusters of their own, at the same time."""
    jobs = [hosts.start_on(k, weft(*OPEN), env=KEY) for k in (1, 2)]
    for job in jobs:
        outcome = job.wait()
        assert outcome.code == 0, outcome


def find(hosts: Hosts, k: int, words: str) -> list[Process]:
    """The processes of a host that have these words in their command lines."""
    return [process for process in hosts.processes(k) if words in process.command]


def kill(hosts: Hosts, k: int, words: str) -> None:
    """Kill the one process of a host that has these words in its command line."""
    (process,) = find(hosts, k, words)
    os.kill(process.pid, signal.SIGKILL)


def test_killed_processes_of_nodes(two_hosts: Hosts) -> None:
    """The watcher, and `ray start`: the other one ends what is left, folder and all."""
    open_both(two_hosts)
    kill(two_hosts, 1, "node.watch")
    kill(two_hosts, 2, "node.serve")
    assert two_hosts.leave_nothing() == []


@pytest.mark.soak
def test_processes_of_ray_that_die(two_hosts: Hosts) -> None:
    """A node whose raylet or whose gcs_server has died is no node: it ends, all of it."""
    open_both(two_hosts)
    kill(two_hosts, 1, "raylet/raylet")
    kill(two_hosts, 2, "gcs/gcs_server")
    assert two_hosts.leave_nothing(within=10) == []


def test_opening_that_is_interrupted(two_hosts: Hosts) -> None:
    """`weft open` is killed while it waits for Ray, or gets Ctrl-C; also later, when it runs."""

    def starts(k: int) -> Callable[[], bool]:
        return lambda: bool(find(two_hosts, k, "gcs/gcs_server"))

    killed, interrupted = (two_hosts.start_on(k, weft(*OPEN), env=KEY) for k in (1, 2))
    wait_until(starts(1))
    killed.kill(signal.SIGKILL)
    wait_until(starts(2))
    interrupted.kill(signal.SIGINT)
    assert killed.wait().code == 137
    assert interrupted.wait().code == 130
    assert two_hosts.leave_nothing() == []


@pytest.mark.parametrize("k", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_scripts_that_serve(k: int, two_hosts: Hosts) -> None:
    """Playdoh's funworker begins a cluster, or joins one; both return when a program on one of the
    hosts calls `shutdown`, and nobody can join any more."""
    scripts = serve_both(two_hosts)
    assert "weft open --join 10.78.0.1:2718" in scripts[0].out
    program = """
from playdoh import distribute, shutdown
dfun = distribute(abs, machines=["host1", "host2"], port=2718, endaftercall=False)
assert dfun([-1, -2, -3]) == [1, 2, 3]
shutdown(dfun)
"""
    closed = two_hosts.run_on(k, [sys.executable, "-c", program], env=KEY)
    assert (closed.code, closed.out, closed.err) == (0, "", ""), closed
    for script in scripts:
        outcome = script.wait()
        assert (outcome.code, "closed" in outcome.out) == (0, True), outcome
    refused = two_hosts.run_on(2, weft("open", "--join", "host1"), env=KEY)
    assert refused.code == 1
    assert "10.78.0.1  runs no node (nothing listens at port 2718)" in refused.err
    assert two_hosts.leave_nothing() == []


@pytest.mark.soak
def test_a_killed_script_that_serves_the_first_node(two_hosts: Hosts) -> None:
    """Its node ends with it, the others some seconds later."""
    scripts = serve_both(two_hosts)
    scripts[0].kill(signal.SIGKILL)
    assert scripts[0].wait().code == 137
    closed = scripts[1].wait()
    assert (closed.code, "closed" in closed.out) == (0, True), closed
    assert two_hosts.leave_nothing() == []


def serve_both(hosts: Hosts) -> list[Job]:
    """Start a script on each host, of which the second joins the first."""
    program = """
import sys
from playdoh import funworker
port = sys.argv[1]
funworker(port=int(port) if port.isdecimal() else port, max_cpu=1, max_gpu=0)
print("closed")
"""
    scripts: list[Job] = []
    for k, port in ((1, "2718"), (2, "host1:2718")):
        scripts.append(hosts.start_on(k, [sys.executable, "-c", program, port], env=KEY))
        wait_until(lambda: SERVES in scripts[-1].out or not scripts[-1].running)
        assert scripts[-1].running, scripts[-1].wait()
    return scripts


@pytest.mark.soak
def test_a_cluster_over_tls(two_hosts: Hosts, tmp_path: Path) -> None:
    """With Ray's own variables: everything works, and who does not encrypt is told so."""
    line = "openssl req -newkey rsa:2048 -nodes -subj /CN=weft"
    names = "subjectAltName=IP:10.78.0.1,IP:10.78.0.2"
    for command in (
        f"{line} -x509 -days 2 -keyout ca.key -out ca.crt",
        f"{line} -keyout tls.key -out tls.csr",
        f"echo {names} > names",
        "openssl x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 "
        "-extfile names -out tls.crt",
    ):
        subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True)
    tls = {
        **KEY,
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": f"{tmp_path}/ca.crt",
        "RAY_TLS_SERVER_CERT": f"{tmp_path}/tls.crt",
        "RAY_TLS_SERVER_KEY": f"{tmp_path}/tls.key",
    }
    without = two_hosts.run_on(1, weft(*OPEN), env={**tls, "RAY_TLS_SERVER_CERT": "/none"})
    assert without.code == 2
    assert "weft: Ray did not start the node: " in without.err
    assert two_hosts.leave_nothing() == []
    for k, options in ((1, OPEN), (2, ("open", "--join", "host1"))):
        opened = two_hosts.run_on(k, weft(*options), env=tls)
        assert opened.code == 0, opened
    status = two_hosts.run_on(2, weft("status"), env=tls)
    assert "  host1    10.78.0.1  " in status.out, status
    assert "no map runs on these machines" in status.out
    plain = two_hosts.run_on(2, weft("status"), env=KEY)
    assert "it does not speak gRPC, or over TLS only" in plain.out, plain
    for k in (2, 1):
        assert two_hosts.run_on(k, weft("close")).code == 0
    assert two_hosts.leave_nothing() == []


def test_a_node_for_one_process(two_hosts: Hosts) -> None:
    """It listens on loopback only, works without the user's key, and ends with the process."""
    program = """
import pathlib, signal, sys
from weft.engines.ray import cluster, opening
private = opening.PrivateNode()
cluster.connect(private.cluster)
import ray
assert ray.get(ray.remote(lambda: 1).remote()) == 1
assert [node.is_this for node in cluster.living(private.cluster)] == [True]
listening = set()
for table in ("tcp", "tcp6"):
    for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
        if line.split()[3] == "0A":
            listening.add(line.split()[1].partition(":")[0][-8:])
assert listening == {"0100007F"}, listening
if sys.argv[1] == "close":
    cluster.disconnect()
    private.close()
print("ready", flush=True)
signal.pause() if sys.argv[1] == "kill" else None
"""
    jobs = [
        two_hosts.start_on(k, [sys.executable, "-c", program, word])
        for k, word in ((1, "kill"), (2, "close"))
    ]
    wait_until(lambda: "ready" in jobs[0].out or not jobs[0].running)
    jobs[0].kill()
    assert jobs[0].wait().code == 137, jobs[0].wait()
    assert jobs[1].wait().code == 0, jobs[1].wait()
    assert two_hosts.leave_nothing() == []


def test_a_ray_of_the_users_own_beside(two_hosts: Hosts) -> None:
    """A process uses one or the other, one after the other; Ray's own commands find theirs, and it
    lives when ours has ended."""
    ray = str(Path(sys.executable).parent / "ray")
    line = f"{ray} start --head --port 6400 --include-dashboard false --disable-usage-stats"
    home = {"HOME": "/run/tmp/home", **KEY}  # where Ray looks for a token
    own = two_hosts.start_on(
        1, f"mkdir $HOME; {line} --node-ip-address 10.78.0.1 --num-cpus 1", env=home
    )
    ours = two_hosts.run_on(1, weft(*OPEN), env=home)
    assert (own.wait().code, ours.code) == (0, 0), (own.wait(), ours)
    theirs = {one.pid for one in two_hosts.processes(1) if "weft-" not in one.command}
    program = """
import os
from weft.engines.ray import cluster
from weft.errors import EngineUnavailable
ours = cluster.reach([], 2718)
for _ in range(2):
    theirs = cluster.of_user()
    assert theirs.address == os.environ["RAY_ADDRESS"]
    assert [(node.cores, node.is_this) for node in theirs.nodes] == [(1, True)]
    assert cluster.living(theirs) == theirs.nodes
    try:
        cluster.connect(ours)
        print("connected to two")
    except EngineUnavailable as error:
        assert "connected to the Ray cluster at 10.78.0.1:6400, and a" in str(error)
    cluster.disconnect()
    cluster.connect(ours)
    import ray
    assert ray.get_runtime_context().gcs_address == "10.78.0.1:2718"
    there = cluster.on_node(lambda: os.getpid(), ours.nodes[0].node_id)
    assert ray.get(there.remote()) != os.getpid()
    cluster.disconnect()
"""
    environment = {**home, "RAY_ADDRESS": "10.78.0.1:6400"}
    used = two_hosts.run_on(1, [sys.executable, "-c", program], env=environment)
    found = two_hosts.run_on(1, "cat $TMPDIR/ray/ray_current_cluster")  # what ray.init() reads
    assert two_hosts.run_on(1, weft("close"), env=KEY).code == 0
    left = two_hosts.processes(1)
    two_hosts.clean()
    assert (used.code, used.out) == (0, ""), used
    assert found.out.strip() == "10.78.0.1:6400", found
    servers = {one.pid for one in left if "gcs_server" in one.command or "raylet/" in one.command}
    assert len(servers) == 2
    assert servers <= theirs
    assert not [one for one in left if "weft" in one.command.partition("/bin/")[2]]


@pytest.mark.soak
def test_clusters_of_two_users(two_hosts: Hosts) -> None:
    """On one machine, of different ports and keys: each finds its own, and ends no other."""
    other = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--"]
    theirs = {"WEFT_KEY": "another key of many letters"}
    for line, env in ((weft(*OPEN), KEY), ([*other, *weft("open", "--port", "2900")], theirs)):
        opened = two_hosts.run_on(1, line, env=env)
        assert opened.code == 0, opened
    program = """
import weft
assert weft.map(abs, [-1, -2], engine="ray") == [1, 2]
import ray
print(ray.get_runtime_context().gcs_address)
"""
    run = [sys.executable, "-c", program]
    assert two_hosts.run_on(1, run, env=KEY).out == "10.78.0.1:2718\n"
    assert two_hosts.run_on(1, [*other, *run], env=theirs).out == "10.78.0.1:2900\n"
    assert two_hosts.run_on(1, [*other, *weft("close")], env=theirs).code == 0
    assert two_hosts.run_on(1, run, env=KEY).out == "10.78.0.1:2718\n"
    wrong = two_hosts.run_on(1, weft("open", "--join", "host1:2718"), env=KEY)
    assert "is open already" in wrong.err
    assert two_hosts.run_on(1, weft("close"), env=KEY).code == 0
    assert two_hosts.leave_nothing() == []


def test_folders_of_nodes_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray makes sockets in them; private ones."""
    long = tmp_path / ("x" * 40)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = Path(node._make_folder())
    try:
        assert folder.parent == Path("/tmp")
        session = "session_2026-11-19_20-20-38_884732_4194304/sockets/plasma_store"
        assert len(f"{folder}/{session}") <= 107
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        folder.rmdir()
