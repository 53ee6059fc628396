"""What a group over hosts takes and refuses; what it does is in tests/contracts."""

from __future__ import annotations

import os
import sys

from tests.hosts import Hosts
from tests.support import launch, run_command, write_script


def test_a_group_of_one_host(two_hosts: Hosts) -> None:
    """It is one of the local engine."""
    script = """
import weft
group = weft.init(timeout=60)
here = group.split(group.hosts.index(group.hosts[group.rank]))
print(type(here).__name__, here.hosts, here.all_reduce(1), flush=True)
"""
    outcome = two_hosts.launch(script, 2)
    assert outcome.code == 0, outcome
    assert outcome.out.count("LocalGroup ('host1', 'host1') 2") == 2
    assert outcome.out.count("LocalGroup ('host2', 'host2') 2") == 2


def test_tensors(two_hosts: Hosts) -> None:
    """Go over hosts from CPU memory; of those without values the error says what to do, and on
    which rank; the other ranks are told."""
    script = """
import torch, weft
torch.set_num_threads(1)
group = weft.init(timeout=60)
assert torch.equal(group.all_reduce(torch.full((3, 2), 1.5)), torch.full((3, 2), 3.0))
large = torch.arange(300_000, dtype=torch.bfloat16)
assert torch.equal(group.broadcast(large if group.rank else None, root=1), large)
elsewhere = torch.ones(3, device="meta" if group.rank else "cpu")
try:
    group.all_reduce(elsewhere)
except weft.WeftError as error:
    print(type(error).__name__, error.__notes__ if group.rank else str(error), flush=True)
print(group.all_reduce(torch.ones(1)), flush=True)
"""
    outcome = two_hosts.launch(script, 1)
    assert outcome.code == 0, outcome
    assert "[1] InvalidType ['on rank 1 of 2, on host host2']" in outcome.out, outcome
    assert "[0] Disagreement the ranks of group 'world' made different calls" in outcome.out
    told = "a tensor on meta, which has no values; make it on a device that has"
    assert told in outcome.out, outcome.out
    assert outcome.out.count("tensor([2.])") == 2, outcome


def test_by_name_on_one_host() -> None:
    """`engine="mpi"` works with all ranks on one host, too, and alone without a launcher."""
    script = """
import weft
group = weft.init(engine="mpi", timeout=60)
table = weft.ArrayTable(3, updater="adam", consistency="bsp")
table.add([1, 2, 3])
signs = (table.get() < 0).all()
print(type(group).__name__, group.all_reduce(1), signs, flush=True)
"""
    outcome = launch(script, 2, launcher="mpirun")
    assert outcome.code == 0, outcome
    assert outcome.out.splitlines() == ["MpiGroup 2 True"] * 2
    alone = run_command([sys.executable, str(write_script(script))])
    assert alone.out == "LocalGroup 1 True\n", alone


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


def test_long_headers(two_hosts: Hosts) -> None:
    """A rank's description of 20,000 arrays takes several steps, those of the others one."""
    script = """
import numpy as np, weft
group = weft.init(timeout=60)
for root in range(group.size):
    arrays = [np.full(2, 1000 * root + i % 999, np.int16) for i in range(20000)]
    found = group.broadcast(arrays if group.rank == root else None, root=root)
    assert all(map(np.array_equal, found, arrays))
named = {f"{i:050}": np.full(2 + group.rank, i + group.rank) for i in range(5000)}
found = group.all_gather(named)
for i, rows in enumerate(found.values()):
    parts = [np.full(2 + rank, i + rank) for rank in range(group.size)]
    assert np.array_equal(rows, np.concatenate(parts))
print("equal", flush=True)
"""
    outcome = two_hosts.launch(script, (2, 1))
    assert outcome.code == 0, outcome
    assert outcome.out.count("equal") == 3


def test_leaving_soon_after_a_call(two_hosts: Hosts) -> None:
    """Whatever the last rank of a host has done before it leaves, the others are told at once, and
    what they still need of its host comes."""
    script = """
import signal, time, numpy as np, weft
large = np.ones(16 << 20, np.float32)

def interrupt(*_):
    raise KeyboardInterrupt

def interrupted(group):
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    try:
        while True:
            group.all_reduce(large)
    except KeyboardInterrupt:
        pass

def refused(group):
    try:
        group.all_reduce("text")
    except weft.InvalidType:
        pass

def nothing(group):
    pass

for turn in range(24):
    group = weft.init(timeout=60)
    group.barrier()
    if group.rank == 0:
        (interrupted, refused, nothing)[turn % 3](group)
        time.sleep(0.002 * turn)
        weft.shutdown()
        continue
    if turn % 3 == 1:
        time.sleep(0.1)
    try:
        while True:
            group.all_reduce(large)
    except weft.WeftError as error:
        print(type(error).__name__, flush=True)
    weft.shutdown()
"""
    outcome = two_hosts.launch(script, 1, timeout=120)
    assert outcome.code == 0, outcome
    assert outcome.out.count("Disagreement") == 8, outcome
    assert outcome.out.count("PeerLost") == 16, outcome


def test_next_generation_right_after_a_large_call(three_hosts: Hosts) -> None:
    """A rank that has its result may ask for survivors while its agent still sends to others."""
    script = """
import numpy as np, weft
group = weft.init(timeout=60)
large = np.ones(3 << 20, np.float32)
for turn in range(10):
    if turn % 2:
        assert (group.all_reduce(large) == group.size).all()
    else:
        assert (group.broadcast(large, root=turn % group.size) == 1).all()
    group = group.survivors()
print(group.size, group.generation, flush=True)
"""
    outcome = three_hosts.launch(script, 1, timeout=120)
    assert outcome.code == 0, outcome
    assert outcome.out.count("3 10") == 3, outcome


def test_sessions_after_broken_calls(two_hosts: Hosts) -> None:
    """What a broken call has left under way does not reach a later session's calls."""
    script = """
import numpy as np, weft, weft.engines.mpi.collectives as collectives
large = np.ones(8 << 20, np.float32)

def give_up(*_, **__):
    raise KeyboardInterrupt

sum_here = collectives.HostCollectives._sum_here
for turn in range(3):
    group = weft.init(timeout=60).survivors()
    if group.rank == 0:
        collectives.HostCollectives._sum_here = give_up
    try:
        group.all_reduce(large)
    except (KeyboardInterrupt, weft.PeerLost):
        pass
    collectives.HostCollectives._sum_here = sum_here
    weft.shutdown()
    group = weft.init(timeout=60)
    assert (group.all_reduce(large * (turn + 2)) == group.size * (turn + 2)).all()
    weft.shutdown()
print("equal", flush=True)
"""
    outcome = two_hosts.launch(script, 1, timeout=120)
    assert outcome.code == 0, outcome
    assert outcome.out.count("equal") == 2, outcome
