"""`weft doctor --hosts`: what hosts have, side by side."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

from tests.hosts import HUB, Hosts
from tests.support import Outcome
from weft import __version__


def doctor(hosts: Hosts, *options: str) -> Outcome:
    return hosts.run_on(HUB, [sys.executable, "-m", "weft", "doctor", *options])


def rows(outcome: Outcome) -> dict[str, list[str]]:
    """The table: a label, and what each host has."""
    lines = outcome.out.partition("\n\n")[0].splitlines()[1:]
    return {line[2:10].strip(): line[10:].split() for line in lines}


def test_asking_mpi_leaves_nothing(two_hosts: Hosts) -> None:
    """MPI is initialized to learn its thread level; its files are gone afterwards."""
    outcome = two_hosts.run_on(1, [sys.executable, "-m", "weft", "doctor", "--json"])
    assert '"serialized"' in outcome.out, outcome
    assert two_hosts.files(1) == []


def test_hosts_that_agree(two_hosts: Hosts) -> None:
    """A column for each, in the order in which they were named; the exit code is 0."""
    outcome = doctor(two_hosts, "--hosts", "host2,host1")
    assert outcome.code == 0, outcome
    assert outcome.out.splitlines()[0].split() == ["host2", "host1"]
    found = rows(outcome)
    assert found["name"] == ["host2", "host1"]
    assert found["Python"] == [platform.python_version()] * 2
    assert found["weft"] == [__version__] * 2
    assert found["NumPy"] == [np.__version__] * 2
    assert found["mpi4py"] == [version("mpi4py")] * 2
    assert found["MPI"][:2] == ["Open", "MPI"]
    assert outcome.out.endswith("\n\nNothing would go wrong.\n")


def test_hosts_that_differ(two_hosts: Hosts, tmp_path: Path) -> None:
    """Another weft there, another NumPy: marked in the table, and told."""
    weft = Path(sys.modules["weft"].__file__ or "").parent
    (tmp_path / "_version.py").write_text('__version__ = "0.0.1"\n')
    two_hosts.run_on(2, f"mount --bind {tmp_path}/_version.py {weft}/_version.py")
    try:
        outcome = doctor(two_hosts, "--hosts", "host1,host2")
    finally:
        two_hosts.run_on(2, f"umount {weft}/_version.py")
    assert outcome.code == 1
    assert rows(outcome)["weft"] == [__version__, "0.0.1", "<"]
    assert f"weft is not the same on all hosts (0.0.1, {__version__})" in outcome.out


def test_hosts_that_cannot_run_ranks(three_hosts: Hosts) -> None:
    """One that is cut off, one without Python, two of one name: each with the reason."""
    environment = Path(sys.executable).parent.parent
    three_hosts.cut(3)
    three_hosts.run_on(2, f"mount -t tmpfs tmpfs {environment}")
    outcome = doctor(three_hosts, "--json", "--hosts", "host1,host2,host3")
    three_hosts.mend(3)
    three_hosts.run_on(2, f"umount {environment}; hostname host3")
    same = doctor(three_hosts, "--hosts", "host1,host2,10.78.0.3")
    three_hosts.run_on(2, "hostname host2")
    assert outcome.code == 1, outcome
    told = json.loads(outcome.out)
    assert told["usable"] is False
    without_python, cut_off = told["warnings"]
    assert without_python.startswith(f"host2: has no Python at {sys.executable}")
    assert cut_off.startswith("host3: cannot be reached: ssh: connect to host host3 port 22")
    assert told["hosts"]["host1"]["facts"]["weft"] == __version__
    assert same.code == 1, same
    assert "  - host2 and 10.78.0.3 are different hosts that are both called 'host3'" in same.out
