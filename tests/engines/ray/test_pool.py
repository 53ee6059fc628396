"""Maps over two and three hosts: what comes back, what is lost, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.hosts import Hosts, Job, Process
from tests.support import Outcome, wait_until, within

PROGRAMS = Path(__file__).parent / "programs"
SEEDS = Path(__file__).parents[2] / "seeds" / "programs"
OWN = {"WEFT_KEY": "a key of more than sixteen letters"}
RAY = Path(sys.executable).parent / "ray"
WEFT = [sys.executable, "-m", "weft"]
#: two workers on each host
OPEN = [*WEFT, "open", "--max-cpu", "2"]


@pytest.fixture(scope="module")
def cluster(_three_hosts: Hosts) -> Iterator[Hosts]:
    """Three hosts, of which two are a cluster. At the end nothing is left of it."""
    hosts = _three_hosts
    open_both(hosts)
    yield hosts
    close_both(hosts)
    assert not (left := hosts.leave_nothing()), left


def open_both(hosts: Hosts, gpus: Mapping[int, str] = MappingProxyType({}), most: int = 0) -> None:
    """Open a node on two hosts, of which each has GPUs of these names and gives so many at most;
    end first what a test has left open."""
    close_both(hosts)
    for k, where in ((1, ["--port", "2718"]), (2, ["--join", "host1:2718"])):
        line = [*OPEN, *where, "--max-gpu", str(most)]
        visible = {"CUDA_VISIBLE_DEVICES": gpus[k]} if k in gpus else {}
        opened = hosts.run_on(k, line, env={**OWN, **visible})
        assert opened.code == 0, opened


def close_both(hosts: Hosts) -> None:
    for k in (2, 1):
        hosts.run_on(k, [*WEFT, "close"], env=OWN)  # which fails where there is none


def join(hosts: Hosts, k: int) -> None:
    joined = hosts.run_on(k, [*OPEN, "--max-gpu", "0", "--join", "host1:2718"], env=OWN)
    assert joined.code == 0, joined


@pytest.fixture
def drive(cluster: Hosts) -> Callable[..., Outcome]:
    """Run a program on the first host, to its end."""

    def run(*line: str, env: dict[str, str] | None = None, timeout: float = 200) -> Outcome:
        done = cluster.run_on(
            1, [sys.executable, *line], env={**OWN, **(env or {})}, timeout=timeout
        )
        if done.code != 0:
            pytest.fail(str(done))
        return done

    return run


def test_what_comes_back(cluster: Hosts, drive: Callable[..., Outcome], tmp_path: Path) -> None:
    """Values, exceptions, modules, arrays, seeds, output: as from one host, with their host."""
    folder = tmp_path / "near"
    shutil.copytree(PROGRAMS, folder)
    (tmp_path / "empty").mkdir()
    assert cluster.run_on(2, ["mount", "--bind", str(tmp_path / "empty"), str(tmp_path)]).code == 0
    try:
        done = drive(str(folder / "values.py"), env={"SET_BY_THE_PROGRAM": "no"})
    finally:
        cluster.run_on(2, ["umount", str(tmp_path)])
    lines = done.out.splitlines()
    assert lines[-1] == "ended with 1 thread"
    for x in range(4):
        (printed,) = [line for line in lines if line.endswith(f"printed {x}")]
        (logged,) = [line for line in lines if line.endswith(f"logged {x}")]
        host = "host1" if x < 2 else "host2"
        assert printed.startswith(f"[{host} ")
        assert logged.startswith(f"LOG [{host} ")
        assert f"UserWarning: warned {x}" in done.err


def test_arrays_that_several_items_use(cluster: Hosts) -> None:
    """They cross once to each host, whoever runs the items, and lie there once; some seconds after
    the last map no host has them any more."""
    line = [sys.executable, str(PROGRAMS / "repeated.py")]
    driver = cluster.start_on(1, line, env=OWN)
    assert wait_until(lambda: "done" in driver.out or not driver.running)
    assert driver.running, driver.wait()
    actors = [of_host(cluster, k, "ray::HostActor").pid for k in (1, 2)]
    assert wait_until(lambda: all(weft_memory(pid) < 1_000_000 for pid in actors))
    driver.kill()
    driver.wait()


def weft_memory(pid: int) -> int:
    """How many bytes of weft's shared memory a process has mapped and used."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            counts = "/memfd:weft" in line
        elif counts and name == "Rss:":
            total += int(words[0]) * 1024
    return total


def test_the_contract_of_pools(drive: Callable[..., Outcome], tmp_path: Path) -> None:
    """What tests/contracts/test_pool.py asks of every engine's pool, with a driver on a host."""
    drive(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner")),
        str(Path(__file__).parents[2] / "contracts" / "test_pool.py"),
        env={"WEFT_TEST_POOLS": "ray"},
        timeout=280,
    )


def test_without_machines(cluster: Hosts) -> None:
    """On a host without a node: a node of the program's own, then the user's own Ray."""
    folder = "/run/tmp/own"
    line = [sys.executable, str(PROGRAMS / "alone.py"), folder]
    done = cluster.run_on(3, line, timeout=120)
    assert done.out == "done\n", str(done)
    cluster.run_on(3, ["rm", "-rf", folder, f"{folder}_latest"])


class Driver:
    """A program on a host that runs maps one after the other, while a test kills."""

    def __init__(
        self,
        hosts: Hosts,
        k: int,
        *maps: tuple[str, dict[str, Any]],
        env: Mapping[str, str] = MappingProxyType(OWN),
    ) -> None:
        self._hosts = hosts
        line = [sys.executable, "-u", str(PROGRAMS / "losses.py"), json.dumps(maps)]
        self.job: Job = hosts.start_on(k, line, env=env)

    def begins(self, name: str) -> None:
        """Wait until a map is under way."""
        assert self._waits_for(lambda out: f"BEGIN {name}" in out)

    def ended(self, name: str) -> Any:
        """How a map ended."""

        def find(out: str) -> Any:
            lines = [line[4:] for line in out.splitlines(True) if line.startswith("END ")]
            found = dict(json.loads(line) for line in lines if line.endswith("\n"))
            return found.get(name)

        return self._waits_for(find)

    def ends_well(self) -> None:
        """Wait for the end of the program: it has lived on, and Ray has said nothing."""
        outcome = self.job.wait()
        assert (outcome.code, outcome.err) == (0, ""), outcome
        lines = [line.split()[0] for line in outcome.out.splitlines()]
        assert set(lines) <= {"BEGIN", "END", "pid"}, outcome
        assert "lives" in outcome.out

    def _waits_for(self, look: Callable[[str], Any]) -> Any:
        def waited() -> Any:
            return look(self.job.out) or (not self.job.running and "ended")

        found = wait_until(waited)
        assert found != "ended", self.job.wait()
        return found


def of_host(hosts: Hosts, k: int, words: str, least: int = 1) -> Process:
    """The process of a host with these words in its command line that was started last, once there
    are so many."""

    def find() -> list[Process]:
        found = [one for one in hosts.processes(k) if words in one.command]
        return found if len(found) >= least else []

    return max(wait_until(find), key=lambda one: one.inner)


def test_losses(cluster: Hosts) -> None:
    """Of a worker, an actor, a silent actor and a whole host: items are run elsewhere as retries
    allow, else named with their host; the map goes on, and the next one too. A host that joins is
    used."""
    again, kept = {"retries": 1}, {"on_error": "return"}
    driver = Driver(
        cluster,
        1,
        ("worker", again),
        ("actor", {}),
        ("kept", kept),
        ("silent", again),
        ("join", {"until": "host3"}),
    )
    driver.begins("worker")
    os.kill(of_host(cluster, 2, "fork_server", 3).pid, signal.SIGKILL)
    assert driver.ended("worker") == [24, [], ["host1", "host2"]]
    driver.begins("actor")
    os.kill(of_host(cluster, 2, "ray::HostActor").pid, signal.SIGKILL)
    kind, text = driver.ended("actor")
    assert kind == "WorkerLost"
    assert "host2 was lost (its process has ended) while it ran item" in text
    assert "retries=1 runs such items again on another host" in text
    driver.begins("kept")
    os.kill(of_host(cluster, 2, "ray::HostActor").pid, signal.SIGKILL)
    done, lost, hosts = driver.ended("kept")
    assert done + len(lost) == 24
    assert 1 <= len(lost) <= 6, lost
    assert all("host2 was lost" in one for one in lost)
    assert "host1" in hosts
    driver.begins("silent")
    stopped = of_host(cluster, 2, "ray::HostActor").pid
    os.kill(stopped, signal.SIGSTOP)
    assert driver.ended("silent")[:2] == [24, []]
    driver.begins("join")
    join(cluster, 3)
    assert driver.ended("join")[1:] == [[], ["host1", "host2", "host3"]]
    assert cluster.run_on(3, [*WEFT, "close"], env=OWN).code == 0
    driver.ends_well()


def only_nodes(hosts: Hosts, k: int) -> list[str]:
    """What runs on a host besides the processes of its node."""
    words = ("gcs_server", "raylet", "Agent", "dashboard", "engines.ray import node")
    return [one.command for one in hosts.processes(k) if not any(w in one.command for w in words)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_leaves_nothing(cluster: Hosts, number: int) -> None:
    """Killed or interrupted in the middle of a map: no actor and no worker stays on any host."""
    driver = Driver(cluster, 1, ("ends", {}))
    driver.begins("ends")
    assert any("HostActor" in one for one in only_nodes(cluster, 2))
    driver.job.kill(number)
    driver.job.wait()
    left: list[str] = []
    deadline = time.monotonic() + within(8)
    while time.monotonic() < deadline:
        left = [line for k in (1, 2) for line in only_nodes(cluster, k)]
        if not left:
            break
        time.sleep(0.05)
    assert not left


BLOCKS = {
    "playdoh_lists": ("distribute(inv, max_cpu=2", "0.5 0.3333333333333333\n"),
    "playdoh_matrix": ("distribute(fun", "[5. 5. 5. 5.]\n"),
    "playdoh_shared_data": ("distribute(fun", "done\n"),
    "playdoh_usage": ("distribute(fun", "done\n"),  # ends with shutdown(dfun)
}


def test_the_programs_of_the_seed(
    cluster: Hosts, drive: Callable[..., Outcome], tmp_path: Path
) -> None:
    """As they are written, with the names of machines; each of these takes part, this one too. The
    last one ends them all."""
    everyone = tmp_path / "everyone.py"
    everyone.write_text(
        "import runpy, socket, sys, playdoh, weft\n"
        "machines = ['bobs-machine']\n"
        "where = playdoh.distribute(lambda _: socket.gethostname(), machines=machines)(None)\n"
        "assert sorted(where) == ['host1'] * 2 + ['host2'] * 2, where\n"
        "one = weft.distribute(lambda _: socket.gethostname(), max_cpu=1, machines=machines)\n"
        "assert sorted(one(None)) == ['host1'] + ['host2'] * 2\n"
        "assert playdoh.map(pow, [2, 3], [5, 2], machines=machines) == [32, 9]\n"
        "assert playdoh.map_async(abs, [-1, 2], machines=machines).get_result() == [1, 2]\n"
        "uses = weft.distribute(lambda x, use_gpu: use_gpu, gpu_policy='prefer_gpu',\n"
        "    machines=machines)\n"
        "assert uses([1, 2]) == [False, False]\n"
        "for path in sys.argv[1:]: runpy.run_path(path, run_name='__main__')\n"
    )
    run_the_seeds_programs(cluster, drive, tmp_path, "['bobs-machine', 'host1']", everyone)
    for k in (1, 2):  # shutdown(dfun) has ended the workers of all machines
        assert not cluster.processes(k)


def run_the_seeds_programs(
    cluster: Hosts, drive: Callable[..., Outcome], folder: Path, machines: str, *first: Path
) -> None:
    """Run them with these machines, one after the other in the program `first`, if there is one."""
    for k in range(1, cluster.count + 1):
        names = cluster.run_on(k, "echo 10.78.0.2 bobs-machine >> /run/names; cat /run/names")
        assert "bobs-machine" in names.out
    scripts = []
    for name, (call, _) in BLOCKS.items():
        text = (SEEDS / f"{name}.py").read_text()
        assert call in text
        scripts.append(folder / f"{name}.py")
        scripts[-1].write_text(text.replace(call, f"{call}, machines={machines}, port=2718"))
    lines = [[*map(str, first), *map(str, scripts)]] if first else [[str(one)] for one in scripts]
    printed = "".join(drive(*line).out for line in lines)
    assert printed == "".join(printed for _, printed in BLOCKS.values())


def test_the_first_host_is_lost(cluster: Hosts) -> None:
    """In the middle of a map of another host's driver: it is told, and its process lives on. The
    cluster is another one, as the test before has closed all machines."""
    open_both(cluster)
    driver = Driver(cluster, 2, ("head", {}), ("after", {"machines": ["host1"]}))
    driver.begins("head")
    os.kill(of_host(cluster, 1, "gcs/gcs_server").pid, signal.SIGKILL)
    kind, text = driver.ended("head")
    assert kind == "WorkerLost", text
    kind, text = driver.ended("after")
    assert kind == "MachineUnavailable", text
    driver.ends_well()
    close_both(cluster)


def test_a_lost_node_and_a_cut_link(cluster: Hosts) -> None:
    """In the middle of a map: its items are run elsewhere, or are named with the host; the actor
    and the workers that nobody can tell end themselves, the node ends when it learns of it."""
    open_both(cluster)
    driver = Driver(cluster, 1, ("raylet", {"retries": 1}))
    driver.begins("raylet")
    os.kill(of_host(cluster, 2, "raylet/raylet").pid, signal.SIGKILL)
    assert driver.ended("raylet")[:2] == [24, []]
    driver.ends_well()
    assert wait_until(lambda: not cluster.processes(2))
    join(cluster, 2)
    driver = Driver(cluster, 1, ("cut", {"on_error": "return"}), ("after", {"retries": 1}))
    driver.begins("cut")
    cluster.cut(2)
    began = time.monotonic()
    done, lost, _ = driver.ended("cut")
    assert time.monotonic() - began < within(20)
    assert done + len(lost) == 24
    assert 1 <= len(lost) <= 6, lost
    assert all("host2 was lost" in one for one in lost)
    assert wait_until(lambda: not only_nodes(cluster, 2))  # still cut off
    assert driver.ended("after") == [24, [], ["host1"]]
    driver.ends_well()
    cluster.mend(2)
    assert wait_until(lambda: not cluster.processes(2))
    close_both(cluster)


@pytest.mark.soak
def test_losses_of_a_ray_of_the_users_own(cluster: Hosts) -> None:
    """With Ray's own settings, by which it takes half a minute until it counts a host as lost."""
    close_both(cluster)
    options = "--disable-usage-stats --num-cpus 2 --temp-dir /run/tmp/r --node-ip-address"
    environment = {"HOME": "/run/tmp/home", "RAY_ADDRESS": "10.78.0.1:6400"}
    for k, where in ((1, "--head --port 6400 --include-dashboard false"), (2, "--address $TO")):
        line = f"mkdir $HOME; TO=$RAY_ADDRESS; unset RAY_ADDRESS; {RAY} start {where} {options}"
        started = cluster.run_on(k, f"{line} 10.78.0.{k}", env=environment)
        assert started.code == 0, started
    again = {"retries": 1}
    driver = Driver(cluster, 1, ("actor", again), ("cut", again), env=environment)
    driver.begins("actor")
    os.kill(of_host(cluster, 2, "ray::HostActor").pid, signal.SIGKILL)
    assert driver.ended("actor")[:2] == [24, []]
    driver.begins("cut")
    cluster.cut(2)
    began = time.monotonic()
    assert driver.ended("cut")[:2] == [24, []]
    assert time.monotonic() - began < within(20)
    driver.ends_well()
    assert wait_until(lambda: not any("HostActor" in one for one in only_nodes(cluster, 2)))
    cluster.clean()


@pytest.mark.soak
def test_three_hosts(cluster: Hosts, drive: Callable[..., Outcome], tmp_path: Path) -> None:
    """Seeds give the same numbers and workers share their host's cores on any number of hosts; the
    programs of the seed run on three; whatever is lost while items are taken, results are right."""
    open_both(cluster)
    join(cluster, 3)
    assert drive(str(PROGRAMS / "three.py")).out == "done\n"
    line = [sys.executable, str(PROGRAMS / "three.py"), "survive"]
    driver = cluster.start_on(1, line, env=OWN)
    assert wait_until(lambda: "MAP" in driver.out or not driver.running)
    moments = random.Random(5)
    while driver.running:
        time.sleep(moments.uniform(0.3, 1.5))
        for actor in cluster.processes(moments.choice([2, 3])):
            if "ray::HostActor" in actor.command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(actor.pid, signal.SIGKILL)
    outcome = driver.wait()
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert outcome.out.endswith("done\n")
    run_the_seeds_programs(cluster, drive, tmp_path, "['bobs-machine', 'host3', 'host1']")
    assert not any(cluster.processes(k) for k in (1, 2, 3))


def test_gpus_of_all_machines(cluster: Hosts) -> None:
    """Policies and caps, with names of GPUs in the place of GPUs; the cluster is a new one, and a
    script of Playdoh's is its third machine."""
    open_both(cluster, {1: "GPU-1a", 2: "GPU-2a,GPU-2b,GPU-2c"}, most=2)
    script = "import playdoh; playdoh.funworker(port='host1:2718', max_cpu=1, max_gpu=0)"
    gpus = {"CUDA_VISIBLE_DEVICES": "GPU-3a"}
    third = cluster.start_on(3, [sys.executable, "-c", script], env={**OWN, **gpus})
    assert wait_until(lambda: "gives 1 core and 0 GPUs" in third.out or not third.running)
    done = cluster.run_on(1, [sys.executable, str(PROGRAMS / "gpus.py")], env=OWN)
    assert (done.code, done.out) == (0, "done\n"), done
    told = cluster.run_on(1, [*WEFT, "status"], env=OWN).out
    rows = [line.split()[0:6] for line in told.splitlines() if "10.78.0." in line][1:]
    assert [(row[0], row[4]) for row in rows] == [("host1", "1"), ("host2", "2"), ("host3", "0")]
    assert cluster.run_on(3, [*WEFT, "close"], env=OWN).code == 0
    assert third.wait().code == 0
    close_both(cluster)
