"""Ranks that another launcher started: mpirun and torchrun for real, others by what they set.

MPICH and Open MPI do not share an environment, and srun needs a cluster: a process
that starts ranks with the variables of those launchers stands in for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.support import (
    HANGS,
    Outcome,
    command,
    launch,
    mpirun,
    run_command,
    run_python,
    run_ranks,
    within,
    write_script,
)
from weft.engines.base import Group

#: what stands in for a launcher; "*" is the rank
PARENT = """
import json, os, subprocess, sys
variables, size, *line = sys.argv[1:]
ranks = []
for rank in range(int(size)):
    mine = {name: value.replace("*", str(rank)) for name, value in json.loads(variables).items()}
    ranks.append(subprocess.Popen(line, env={**os.environ, **mine}))
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""

#: ranks share an output here, so each writes its line at once
MEET = """
import sys, weft
group = weft.init(timeout=30)
group.barrier()
sys.stdout.write(f"rank {group.rank} of {group.size} {type(group).__name__}\\n")
"""

#: as MEET, but says who the members are
MEMBERS = """
import sys, weft
group = weft.init(timeout=30)
for _ in range(50):
    group.barrier()
roster = group._meeting.roster
sys.stdout.write(f"{[roster.process(rank).pid for rank in range(group.size)]}\\n")
"""


def mpich(size: int) -> dict[str, str]:
    """What MPICH's and Intel MPI's proxies set."""
    return {
        "PMI_RANK": "*",
        "PMI_SIZE": str(size),
        "PMI_FD": "10*",
        "MPI_LOCALNRANKS": str(size),
        "MPI_LOCALRANKID": "*",
    }


def srun(size: int) -> dict[str, str]:
    """What srun sets on one node."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "*",
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_TASKS_PER_NODE": str(size),
    }


def by_parent(variables: dict[str, str], size: int, *line: str) -> Outcome:
    """Run a command in `size` processes that have these variables, below one that has not."""
    return run_python(PARENT, json.dumps(variables), str(size), *line)


def lines(outcome: Outcome) -> list[str]:
    """What the ranks printed, in order; they must have succeeded."""
    assert outcome.code == 0, outcome
    return sorted(outcome.out.splitlines())


def everybody(size: int, engine: str = "LocalGroup") -> list[str]:
    """What the ranks of a group print in MEET."""
    return [f"rank {rank} of {size} {engine}" for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_mpirun_meet(size: int) -> None:
    """They know their ranks, meet and split, over shared memory and without mpi4py."""

    def body(group: Group) -> Any:
        for _ in range(100):
            weft.barrier()
        half = group.split(weft.rank() % 2)
        assert half is not None
        half.barrier()
        engine = type(group).__name__
        return weft.rank(), weft.size(), weft.is_master(), engine, "mpi4py" in sys.modules

    expected = [(rank, size, rank == 0, "LocalGroup", False) for rank in range(size)]
    assert run_ranks(size, body, launcher="mpirun") == expected


#: what each rank may use, by its plan and by what was told to libraries
PLAN = """
import os, sys
for name in [name for name in os.environ if name.endswith("_NUM_THREADS")]:
    del os.environ[name]
{before}
import weft
group = weft.init(timeout=30)
half, free = group.split(0), group._meeting.free_cores
assert half._meeting.free_cores == free
threads = int(os.environ["OMP_NUM_THREADS"])
assert threads == group.plan.threads
sys.stdout.write(f"{{len(os.sched_getaffinity(0))}} {{threads}} {{free}}\\n")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two ranks")
def test_a_core_that_the_launcher_bound_is_the_ranks_own() -> None:
    """Each of two ranks has a thread for each hardware thread of its core, and nobody beside it."""
    script = write_script(PLAN.format(before=""))
    line = [*mpirun(2), "--bind-to", "core", sys.executable, str(script)]
    for told in lines(run_command(line)):
        cores, threads, free = told.split()
        assert (threads, free) == (cores, "True")
        assert int(cores) < len(os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_bound_to_one_core_share_it() -> None:
    """Two of three ranks are bound to the first core, the third has all others to itself."""
    bind = """
cores = sorted(os.sched_getaffinity(0))
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
os.sched_setaffinity(0, cores[:1] if rank < 2 else cores[1:])
"""
    script = write_script(PLAN.format(before=bind))
    outcome = run_command([*mpirun(3), "--bind-to", "none", sys.executable, str(script)])
    others = len(os.sched_getaffinity(0)) - 1
    assert lines(outcome) == sorted(["1 1 False", "1 1 False", f"{others} {others} True"])


def test_mpi4py_works_beside_it() -> None:
    """The launcher's variables stay in place for others, and both agree on the rank."""

    def body(group: Group) -> bool:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        group.barrier()
        return (world.rank, world.size) == (group.rank, group.size)

    assert run_ranks(2, body, launcher="mpirun") == [True, True]


@pytest.mark.parametrize("launcher", [mpich, srun])
def test_ranks_of_others_meet(launcher: Any) -> None:
    """By the variables of MPICH, Intel MPI and srun."""
    outcome = by_parent(launcher(3), 3, sys.executable, "-c", MEET)
    assert lines(outcome) == everybody(3)


def test_ranks_of_torchrun_meet(tmp_path: Path) -> None:
    """torchrun's ranks are a group; torch need not be imported in them."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--standalone", "--log-dir", str(tmp_path)]  # a free port; and it leaves its logs
    script = write_script(MEET + "assert 'torch' not in sys.modules")
    outcome = run_command([*torchrun, *options, str(script)])
    assert lines(outcome) == everybody(2)


@pytest.mark.parametrize("engine", ["serial", "local"])
def test_engines_can_be_named_under_mpirun(engine: str) -> None:
    """ "local" is the default there; with "serial" each is for itself."""
    code = MEET.replace("init(", f"init(engine={engine!r}, ")
    expected = everybody(2) if engine == "local" else everybody(1, "SerialGroup") * 2
    assert lines(launch(code, 2, launcher="mpirun")) == expected


def test_meeting_again_under_mpirun() -> None:
    """init, shutdown, init: every round is a group of all."""
    code = """
import sys, weft
for _ in range(5):
    weft.init(timeout=20)
    weft.barrier()
    weft.shutdown()
sys.stdout.write("five rounds\\n")
"""
    assert lines(launch(code, 3, launcher="mpirun")) == ["five rounds"] * 3


@pytest.mark.parametrize("launcher", ["mpirun", "MPICH"])
def test_launches_side_by_side_do_not_meet(launcher: str) -> None:
    """Two launches of the same program at the same time are two groups."""
    script = str(write_script(MEMBERS))
    if launcher == "mpirun":
        line = [*command(2, launcher="mpirun"), script]
    else:
        line = [sys.executable, "-c", PARENT, json.dumps(mpich(2)), "2", sys.executable, script]
    launches = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    groups = [process.communicate(timeout=HANGS)[0].splitlines() for process in launches]
    assert [len(printed) for printed in groups] == [2, 2, 2]
    assert [len(set(printed)) for printed in groups] == [1, 1, 1]
    members = [pid for printed in groups for pid in json.loads(printed[0])]
    assert len(set(members)) == 6


@pytest.mark.parametrize("launcher", ["mpirun", "MPICH"])
def test_a_shell_may_stand_between(launcher: str) -> None:
    """Ranks started by a wrapper find the launcher above it."""
    wrapped = ["bash", "-c", '"$0" "$1"; exit $?', sys.executable, str(write_script(MEET))]
    if launcher == "mpirun":
        outcome = run_command([*mpirun(2), *wrapped])
    else:
        outcome = by_parent(mpich(2), 2, *wrapped)
    assert lines(outcome) == everybody(2)


def test_programs_and_forks_of_a_rank_are_alone() -> None:
    """They inherit mpirun's variables, and yet do not take the rank's place again."""

    def body(group: Group) -> list[str]:
        code = "import weft; print(type(weft.init()).__name__)"
        told = [subprocess.check_output([sys.executable, "-c", code], text=True).strip()]
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, type(weft.init()).__name__.encode())
            os._exit(0)
        os.wait()
        told.append(os.read(read, 100).decode())
        os.close(read)
        os.close(write)
        group.barrier()
        return told

    assert run_ranks(2, body, launcher="mpirun") == [["SerialGroup", "SerialGroup"]] * 2


def test_weft_run_under_mpirun() -> None:
    """Each rank of mpirun may be a `weft run` of its own; what those ranks start is alone."""
    code = """
import subprocess, sys, weft
group = weft.init()
group.barrier()
child = "import weft; print(weft.init().size)"
answer = subprocess.check_output([sys.executable, "-c", child], text=True).strip()
sys.stdout.write(f"rank {group.rank} of {group.size}, its program {answer}\\n")
"""
    line = [*mpirun(2), *command(2, "--no-prefix"), str(write_script(code))]
    expected = [f"rank {rank} of 2, its program 1" for rank in (0, 0, 1, 1)]
    assert lines(run_command(line)) == expected


def test_mpirun_under_a_rank_of_mpirun() -> None:
    """A rank that has joined may start mpirun: that is another job."""
    code = """
import subprocess, sys, weft
weft.init(timeout=30)
if weft.is_master():
    print(subprocess.check_output(sys.argv[1:], text=True), end="")
weft.barrier()
"""
    inner = [*command(3, launcher="mpirun"), str(write_script(MEET))]
    outcome = launch(code, 2, *inner, launcher="mpirun")
    assert lines(outcome) == everybody(3)


def test_a_killed_rank_ends_the_job_of_mpirun() -> None:
    """It ends soon and not with 0; the fixture looks for what is left."""
    code = """
import os, signal, weft
group = weft.init()
group.barrier()
if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
group.barrier()
print("passed")
"""
    outcome = launch(code, 4, launcher="mpirun")
    assert outcome.code != 0, outcome
    assert "passed" not in outcome.out, outcome
    assert outcome.seconds < within(15)


def test_the_cause_of_an_end_is_not_known() -> None:
    """Only its parent learns how a rank ended, and other launchers do not publish it."""
    code = """
import os, signal, weft
group = weft.init()
group.barrier()
if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.barrier()
except weft.PeerLost as error:
    print(error.ranks, error.states[1].status)
"""
    outcome = by_parent(mpich(2), 2, sys.executable, "-c", code)
    assert outcome.out == "(1,) ended, cause unknown\n", outcome


@pytest.mark.parametrize("engine", [None, "local"])
def test_ranks_of_torchrun_that_span_hosts_are_told_so(engine: str | None) -> None:
    """At once, on every rank, each time, and with the variables that say so; others meet by MPI."""
    code = f"""
import weft, weft.errors
for _ in range(2):
    try:
        weft.init(engine={engine!r})
    except weft.errors.EngineUnavailable as error:
        print(error)
print("alone", weft.init(engine="serial").size)
"""
    env = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    outcome = run_python(code, env=env)
    alone, told, again = lines(outcome)
    assert (alone, again) == ("alone 1", told)
    assert told.startswith(
        "this job's 4 ranks span hosts (LOCAL_WORLD_SIZE=2, WORLD_SIZE=4), and meet there by MPI; "
        "start them by mpirun, srun or `weft run --hosts`"
    )


def test_a_rank_that_may_be_elsewhere_is_named() -> None:
    """Where the launcher does not say how many are here, the deadline shows who is not."""
    outcome = run_python(
        "import weft; weft.init(timeout=0.2)", env={"PMI_RANK": "0", "PMI_SIZE": "2"}
    )
    assert "MissingRank: rank 1 of 2 did not come within 0.2 s" in outcome.err
    assert "Is it on another host? That needs the mpi engine" in outcome.err


def test_threads_are_limited_under_mpirun() -> None:
    """More ranks than cores: each is held to one thread, as under `weft run`."""

    def body(group: Group) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    many = len(os.sched_getaffinity(0)) + 1
    assert run_ranks(many, body, launcher="mpirun") == ["1"] * many
