"""What a group over hosts takes and refuses; what it does is in tests/contracts."""

from __future__ import annotations

import os
import sys

from tests.hosts import Hosts
from tests.support import launch, run_command, write_script


def test_tables_are_refused(two_hosts: Hosts) -> None:
    """With the line that makes a group of each host, which has tables."""
    script = """
import numpy as np, weft
group = weft.init(timeout=60)
try:
    weft.ArrayTable(3)
except weft.EngineUnavailable as error:
    print(str(error).splitlines()[0], flush=True)
here = group.split(group.hosts.index(group.hosts[group.rank]))
print(type(here).__name__, here.hosts, here.all_reduce(1), flush=True)
"""
    outcome = two_hosts.launch(script, 2)
    assert outcome.code == 0, outcome
    assert outcome.out.count("a table of 4 ranks on 2 hosts: tables over hosts are not part") == 4
    assert outcome.out.count("LocalGroup ('host1', 'host1') 2") == 2
    assert outcome.out.count("LocalGroup ('host2', 'host2') 2") == 2


def test_by_name_on_one_host() -> None:
    """`engine="mpi"` works with all ranks on one host, too, and alone without a launcher."""
    script = """
import weft
group = weft.init(engine="mpi", timeout=60)
print(type(group).__name__, group.all_reduce(1), flush=True)
"""
    outcome = launch(script, 2, launcher="mpirun")
    assert outcome.code == 0, outcome
    assert outcome.out.splitlines() == ["MpiGroup 2"] * 2
    alone = run_command([sys.executable, str(write_script(script))])
    assert alone.out == "LocalGroup 1\n", alone


def test_ranks_of_another_launcher() -> None:
    """torchrun's ranks do not speak MPI: spread over hosts they are told what would."""
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env = {**variables, "TORCHELASTIC_RUN_ID": "example"}
    for engine, words in (("None", "span hosts"), ("'mpi'", "were not started by an MPI launcher")):
        script = write_script(f"import weft\nweft.init(engine={engine})")
        outcome = run_command([sys.executable, str(script)], env=env)
        assert outcome.code == 1
        assert "EngineUnavailable" in outcome.err, outcome
        assert words in outcome.err, outcome
        assert "mpirun, srun or" in outcome.err, outcome


def test_without_mpi4py(two_hosts: Hosts) -> None:
    """The error has the pip line, and names host and rank."""
    script = """
import importlib.util, weft
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "mpi4py" else find(name, *rest)
weft.init(timeout=30)
"""
    outcome = two_hosts.launch(script, 1)
    assert outcome.code != 0
    assert "MissingPackage" in outcome.err, outcome
    assert "pip install 'weft[mpi]'" in outcome.err
    assert any(f"rank {rank} on host host{rank + 1}" in outcome.err for rank in (0, 1)), outcome
    assert os.path.exists(sys.executable)
