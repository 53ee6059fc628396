"""`weft run --hosts`: ranks on several hosts, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import HUB, Hosts, Job
from tests.support import Outcome, run_command, wait_until, write_script
from weft.engines.mpi.survey import is_here, remote_shell

#: joins a launch as weft.init does, says who it is, and then does what is written below
JOINS = """
import os, signal, socket, sys, time
from weft.engines import launched
rank = launched.place().rank
print("up", rank, socket.gethostname(), flush=True)
"""


def weft(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "weft", *arguments]


def run(hosts: Hosts, program: str, *options: str, **other: Any) -> Outcome:
    """Run a program on one rank of each host, unless the options say otherwise."""
    if not any(option.startswith("--host") for option in options):
        options = ("--hosts", "host1,host2", *options)
    return hosts.run_on(HUB, weft("run", *options, str(write_script(program))), **other)


def start(hosts: Hosts, program: str, *options: str) -> Job:
    """Start the same; return when both ranks are there."""
    script = str(write_script(JOINS + program))
    job = hosts.start_on(HUB, weft("run", "--hosts", "host1,host2", *options, script))
    wait_until(lambda: job.out.count("up") == 2 or not job.running)
    assert job.running, job.wait()
    return job


def test_ranks_run_on_the_hosts(two_hosts: Hosts) -> None:
    """Their lines say rank and host; they have arguments, folder and variables, and nothing else
    of the launcher's."""
    program = """
print(sys.argv[1:], os.getcwd(), os.environ["WEFT_TIMEOUT"], os.environ["OMP_NUM_THREADS"])
print([name for name in os.environ if name in ("WEFT_REPORT", "WEFT_EXAMPLE", "SECRET")])
print("no end", end="", file=sys.stderr)
"""
    outcome = two_hosts.run_on(
        HUB,
        weft(
            *("run", "--hosts", "host1:2,host2:2", "-n", "3", "--timeout", "7"),
            *(str(write_script(JOINS + program)), "-x"),
        ),
        env={"OMP_NUM_THREADS": "3", "WEFT_EXAMPLE": "e", "SECRET": "s"},
    )
    names = ["host1", "host1", "host2"]
    assert outcome.code == 0, outcome
    assert sorted(outcome.out.splitlines()) == sorted(
        f"[{rank} {name}] {text}"
        for rank, name in enumerate(names)
        for text in (
            f"up {rank} {name}",
            f"['-x'] {os.getcwd()} 7.0 3",
            "['WEFT_EXAMPLE']",
        )
    )
    assert sorted(outcome.err.splitlines()) == [
        f"[{rank} {name}] no end" for rank, name in enumerate(names)
    ]
    assert two_hosts.leave_nothing() == []


def test_ranks_form_a_group(two_hosts: Hosts) -> None:
    """They meet, add, and end; if one exits early, the others are told."""
    program = """
import sys, weft
group = weft.init()
print(weft.all_reduce(group.rank), group.hosts)
if len(sys.argv) > 1 and group.rank == 1: raise SystemExit(5)
weft.barrier()
"""
    script = str(write_script(program))
    outcome = two_hosts.run_on(HUB, weft("run", "--hosts", "host1,host2:2", script))
    assert outcome.code == 0, outcome
    assert sorted(outcome.out.splitlines()) == [
        f"[{rank} {host}] 3 ('host1', 'host2', 'host2')"
        for rank, host in enumerate(("host1", "host2", "host2"))
    ]
    failed = two_hosts.run_on(HUB, weft("run", "--hosts", "host1,host2", script, "fail"))
    assert failed.code in (1, 5), failed  # of the one that ended first
    assert "[0 host1] weft.errors.PeerLost: group 'world' lost rank 1" in failed.err
    assert two_hosts.leave_nothing() == []


def test_a_hostfile_and_no_prefix(two_hosts: Hosts, tmp_path: Path) -> None:
    """The program may be a module."""
    (tmp_path / "hosts").write_text("host1 slots=1  # first\nhost2:1\n")
    file = str(tmp_path / "hosts")
    line = weft("run", "--hostfile", file, "--no-prefix", "-m", "platform", "--terse")
    outcome = two_hosts.run_on(HUB, line)
    assert outcome.code == 0, outcome
    first, second = outcome.out.splitlines()
    assert first == second
    assert first.startswith("Linux")


def test_standard_input(two_hosts: Hosts) -> None:
    """Lines reach rank 0; without any its end is seen at once, and others have none."""
    program = "import sys; print(repr(sys.stdin.readline()))"
    line = " ".join(weft("run", "--hosts", "host1,host2", str(write_script(program))))
    given = two_hosts.run_on(HUB, f"echo hello | {line}")
    assert sorted(given.out.splitlines()) == ["[0 host1] 'hello\\n'", "[1 host2] ''"]
    without = two_hosts.run_on(HUB, f"{line} < /dev/null")
    assert sorted(without.out.splitlines()) == ["[0 host1] ''", "[1 host2] ''"], without


@pytest.mark.parametrize(
    ("program", "code", "told"),
    [
        ("if rank == 1: sys.exit(3)\nsignal.pause()", 3, "exited with non-zero status"),
        ("if rank == 1: 1 / 0\nsignal.pause()", 1, "[1 host2] ZeroDivisionError"),
        ("if rank == 1: os.kill(os.getpid(), 9)\nsignal.pause()", 137, "exited on\nsignal 9"),
    ],
    ids=["exit", "exception", "kill"],
)
def test_a_rank_that_fails_ends_all(two_hosts: Hosts, program: str, code: int, told: str) -> None:
    """The exit code is its own, and what it said is shown."""
    outcome = run(two_hosts, JOINS + program)
    assert outcome.code == code, outcome
    assert told in outcome.err
    assert two_hosts.leave_nothing() == []


def test_a_rank_that_is_lost_while_others_go_on(two_hosts: Hosts) -> None:
    """With --keep-going mpirun ends with 0; weft run does not."""
    program = JOINS + "if rank == 1: os.kill(os.getpid(), 9)\nprint('done', flush=True)"
    outcome = run(two_hosts, program, "--keep-going")
    assert outcome.code == 1, outcome
    assert "[0 host1] done" in outcome.out
    assert "weft run: rank 1 (host2) did not end as it should" in outcome.err
    assert two_hosts.leave_nothing() == []


def test_a_host_that_is_cut_off(two_hosts: Hosts) -> None:
    """mpirun notices, ends the job, and ends with 0; weft run does not."""
    job = start(two_hosts, "signal.pause()")
    wait_until(lambda: all(map(two_hosts.is_quiet, (HUB, 1, 2))))
    two_hosts.cut(2)
    outcome = job.wait()
    assert outcome.code == 1, outcome
    assert "lost communication with a remote daemon" in outcome.err
    assert "rank 0 (host1), 1 (host2) did not end as it should" in outcome.err
    assert two_hosts.leave_nothing() == []


def test_an_mpirun_that_does_not_end_is_killed(two_hosts: Hosts) -> None:
    """Some seconds after a rank has told that it failed: mpirun waits for its daemon on the host
    that was cut off, which it has not noticed."""
    program = """
from weft._core.launch import FAILED, mark
while os.path.exists(sys.argv[1]): time.sleep(0.01)
os.write(2, mark(FAILED))
signal.pause()
"""
    waits = write_script("")
    script = str(write_script(JOINS + program))
    line = weft("run", "--hosts", "host1,host2", script, str(waits))
    job = two_hosts.start_on(HUB, line, env={"PRTE_MCA_oob_tcp_keepalive_time": "600"})
    wait_until(lambda: job.out.count("up") == 2)
    two_hosts.cut(2)
    waits.unlink()
    outcome = job.wait()
    assert outcome.code == 137, outcome
    assert "weft run: mpirun did not end when told to, and was killed" in outcome.err
    wait_until(lambda: not two_hosts.processes(1), 3)
    two_hosts.clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_job(two_hosts: Hosts, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM, as one process: nothing is left."""
    job = start(two_hosts, "signal.pause()")
    job.kill(number)
    assert job.wait().code == 128 + number
    assert two_hosts.leave_nothing() == []


def test_signals_that_are_passed_on(two_hosts: Hosts) -> None:
    """SIGUSR1 reaches all ranks, which may save their work and end."""
    job = start(
        two_hosts,
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit())\nprint('ready', flush=True)\n"
        "while True: time.sleep(0.01)",
    )
    wait_until(lambda: job.out.count("ready") == 2)
    job.kill(signal.SIGUSR1)
    assert job.wait().code == 0
    assert two_hosts.leave_nothing() == []


def test_a_killed_launcher_takes_its_ranks_along(two_hosts: Hosts) -> None:
    """mpirun is told to end when it dies."""
    job = start(two_hosts, "signal.pause()")
    job.kill(signal.SIGKILL)
    job.wait()
    assert two_hosts.leave_nothing() == []


# what is refused


def test_hosts_that_cannot_run_ranks_are_listed(two_hosts: Hosts) -> None:
    """Each with the reason, before any rank runs; with a table."""
    folder = Path(sys.executable).parent.parent
    two_hosts.run_on(2, f"mount -t tmpfs tmpfs {folder}")
    try:
        outcome = run(two_hosts, "print('ran')", "--hosts", "host1,host2,host9")
    finally:
        two_hosts.run_on(2, f"umount {folder}")
    assert outcome.code == 2, outcome
    assert "weft: these hosts cannot run the ranks:" in outcome.err
    assert f"  - host2: has no Python at {sys.executable} (" in outcome.err
    assert "  - host9: cannot be reached: ssh: Could not resolve hostname host9" in outcome.err
    assert "host1: " not in outcome.err
    assert "Traceback" not in outcome.err
    assert "ran" not in outcome.out


def test_hosts_without_the_program(two_hosts: Hosts) -> None:
    """A host that is cut off, and one where the script's folder is another."""
    script = write_script("print('ran')")
    two_hosts.run_on(1, f"mount -t tmpfs tmpfs {script.parent}")
    two_hosts.cut(2)
    try:
        line = weft("run", "--hosts", "host1,host2", str(script))
        outcome = two_hosts.run_on(HUB, line)
    finally:
        two_hosts.mend(2)
        two_hosts.run_on(1, f"umount {script.parent}")
    assert outcome.code == 2, outcome
    assert f"  - host1: there is no script {str(script)!r}" in outcome.err
    assert "  - host2: cannot be reached: ssh: connect to host host2" in outcome.err


def test_hosts_of_one_name(two_hosts: Hosts) -> None:
    """Are told before MPI could hang."""
    two_hosts.run_on(2, "hostname host1")
    try:
        outcome = run(two_hosts, "print('ran')")
    finally:
        two_hosts.run_on(2, "hostname host2")
    assert outcome.code == 2, outcome
    assert "host1 and host2 are different hosts that are both called 'host1'" in outcome.err


@pytest.mark.parametrize(
    ("hidden", "told"),
    [
        ("importlib.util.find_spec", "the package mpi4py, which is not installed"),
        ("shutil.which", "there is no mpirun, neither beside this Python nor in PATH"),
    ],
)
def test_a_machine_without_mpi(hidden: str, told: str, tmp_path: Path) -> None:
    """The pip line is printed."""
    (tmp_path / "s.py").write_text("")
    code = f"""
import importlib.util, shutil
from weft import cli
{hidden} = lambda *_, **__: None
cli.main(["run", "--hosts", "localhost:2", {str(tmp_path / "s.py")!r}])
"""
    outcome = run_command([sys.executable, "-c", code])
    assert outcome.code == 1, outcome
    assert told in outcome.err
    assert "pip install 'weft[mpi]'" in outcome.err
    assert "Traceback" not in outcome.err


def test_which_hosts_are_this_one() -> None:
    """By name and by address; they need no ssh."""
    assert is_here("localhost")
    assert is_here("127.0.0.1")
    assert is_here(socket.gethostname())
    assert not is_here("192.0.2.1")


def test_what_reaches_other_hosts() -> None:
    """What mpirun was told to use, else ssh that asks no questions."""
    assert remote_shell({"PRTE_MCA_plm_ssh_agent": "rsh -x : ssh"}) == ["rsh", "-x"]
    assert remote_shell({"HYDRA_LAUNCHER_EXEC": "/a"}) == ["/a"]
    assert remote_shell({})[:3] == ["ssh", "-o", "BatchMode=yes"]
