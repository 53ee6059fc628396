"""Hosts made of namespaces, on which other tests rely: apart, joined, and gone with their maker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.hosts import HUB, REQUIRED, TIMED_OUT, Hosts
from tests.support import HANGS, run_command, wait_until

#: prints who it is, then waits until it is ended
STAYS = """
import os, signal, socket
print(socket.gethostname(), os.environ["OMPI_COMM_WORLD_RANK"], flush=True)
signal.pause()
"""


def test_hosts_are_apart(two_hosts: Hosts) -> None:
    """Each has its name, processes, memory, temporary files and network; files are shared."""
    for k in (1, 2):
        command = "touch /dev/shm/a $TMPDIR/b; hostname; pwd; ls /proc | grep -c '^[0-9]*$'"
        name, folder, processes = two_hosts.run_on(k, command).out.splitlines()
        assert (name, folder) == (f"host{k}", os.getcwd())
        assert int(processes) < 10
        assert two_hosts.files(k) == ["/dev/shm/a", "/run/tmp/b"]
        two_hosts.run_on(k, "rm /dev/shm/a")
        assert two_hosts.files(k) == ["/run/tmp/b"]
    assert len(two_hosts.leave_nothing(within=0)) == 2
    two_hosts.clean()
    assert two_hosts.leave_nothing() == []


def test_hosts_reach_each_other_by_name_unless_cut(two_hosts: Hosts) -> None:
    """And so does the hub, until a link is down, and again when it is up."""
    listen = "import socket; s = socket.create_server(('', 5000)); print(flush=True); s.accept()"
    reach = f"import socket; socket.create_connection(('host2', 5000), {HANGS})"
    for k in (HUB, 1):
        server = two_hosts.start_on(2, [sys.executable, "-c", listen])
        wait_until(lambda job=server: job.out)
        assert two_hosts.run_on(k, [sys.executable, "-c", reach]).code == 0
        assert server.wait().code == 0
    two_hosts.cut(2)
    done = two_hosts.run_on(1, [sys.executable, "-c", reach.replace(str(HANGS), "0.2")])
    assert "TimeoutError" in done.err or "No route to host" in done.err
    assert "No route to host" in two_hosts.run_on(HUB, "/run/agent host2 true").err
    two_hosts.mend(2)
    assert two_hosts.run_on(HUB, "/run/agent host2 hostname").out == "host2\n"
    assert "Could not resolve" in two_hosts.run_on(HUB, "/run/agent host9 true").err


def test_mpirun_starts_ranks_on_hosts(two_hosts: Hosts) -> None:
    """With their arguments and variables; lines tell ranks, and the exit code comes back."""
    script = """
import os, socket, sys
print(socket.gethostname(), sys.argv[1], os.environ["WEFT_EXAMPLE"], "PYTHONPATH" in os.environ)
print("bad", file=sys.stderr)
"""
    outcome = two_hosts.launch(script, (2, 1), "x", env={"WEFT_EXAMPLE": "e"})
    assert sorted(line for line in outcome.out.splitlines() if line) == [
        "[0] host1 x e False",
        "[1] host1 x e False",
        "[2] host2 x e False",
    ]
    assert sorted(line for line in outcome.err.splitlines() if line) == [
        f"[{rank}] bad" for rank in range(3)
    ]
    assert outcome.code == 0
    assert two_hosts.launch("raise SystemExit(3)", 1).code == 3
    assert two_hosts.leave_nothing() == []


def test_ranks_are_found_by_host_and_signalled(two_hosts: Hosts) -> None:
    """A rank that is killed ends the job, of which nothing is left."""
    job = two_hosts.start(STAYS, 2)
    wait_until(lambda: len(job.out.splitlines()) == 4)
    assert [sorted(two_hosts.ranks(k)) for k in (1, 2)] == [[0, 1], [2, 3]]
    assert two_hosts.ranks(HUB) == {}
    os.kill(two_hosts.ranks(2)[3], signal.SIGKILL)
    assert job.wait().code == 128 + signal.SIGKILL
    assert "[2] host2 2" in job.out
    assert two_hosts.leave_nothing() == []


def test_mpirun_is_signalled(two_hosts: Hosts) -> None:
    """Even killed: its daemons end the ranks."""
    job = two_hosts.start(STAYS, 1)
    wait_until(lambda: len(job.out.splitlines()) == 2)
    job.kill(signal.SIGKILL)
    assert job.wait().code == 128 + signal.SIGKILL
    assert two_hosts.leave_nothing() == []


def test_what_takes_too_long_is_ended(two_hosts: Hosts) -> None:
    """With all that it has started, on all hosts, and the output until then."""
    job = two_hosts.start(STAYS, 1)
    wait_until(lambda: len(job.out.splitlines()) == 2)
    outcome = job.wait(timeout=0)
    assert outcome.code == TIMED_OUT
    assert "[1] host2 1" in outcome.out
    assert two_hosts.leave_nothing() == []


def test_hosts_end_with_their_maker(two_hosts: Hosts, tmp_path: Path) -> None:
    """Even if that is killed; others may have hosts of the same names and addresses meanwhile."""
    program = f"""
import signal, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from tests.hosts import Hosts
with Hosts(2) as hosts:
    job = hosts.start({STAYS!r}, 1)
    while len(job.out.splitlines()) < 2:
        pass
    pids = [p.pid for k in range(3) for p in hosts.processes(k)] + hosts._inits
    print(*pids, flush=True)
    signal.pause()
"""
    maker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    with maker:
        assert maker.stdout is not None
        pids = maker.stdout.readline().split()
        assert len(pids) > 10
        maker.kill()
    wait_until(lambda: not any(Path(f"/proc/{int(pid)}").exists() for pid in pids))
    assert two_hosts.run_on(1, "true").code == 0


def test_a_machine_without_hosts_skips_or_fails(tmp_path: Path) -> None:
    """Skipped with a reason; a failure where hosts are required."""
    (tmp_path / "test_it.py").write_text("def test_it(two_hosts): pass")
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import *\nfrom tests.conftest import _two_hosts"
    )
    line = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)]
    folder = Path(__file__).parent.parent
    empty = {"PATH": str(tmp_path)}
    skipped = run_command(line, env={**empty, REQUIRED: "", "PYTHONPATH": str(folder)})
    assert "there is no ip: apt-get install iproute2" in skipped.out
    assert "1 skipped" in skipped.out
    failed = run_command(line, env={**empty, REQUIRED: "required", "PYTHONPATH": str(folder)})
    assert "WEFT_TEST_HOSTS=required, but there is no ip" in failed.out
    assert failed.code == 1
