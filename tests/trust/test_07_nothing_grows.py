"""What a finished call has sent is gone: workers, fork server and driver stay as they were."""

from __future__ import annotations

import pytest

from tests.support import run_script

#: what each program begins with: `grown()` returns by how many MB the largest process has grown
MEASURE = """
import os, time
import weft

def memory():
    \"\"\"The memory in MB of this process and its descendants, by pid.\"\"\"
    found, pids = {}, [os.getpid()]
    while pids:
        pid = pids.pop()
        with open(f"/proc/{pid}/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        found[pid] = int(lines["VmRSS"].split()[0]) / 1024
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            pids += map(int, children.read().split())
    return found

def grown():
    now = memory()
    assert now.keys() == before.keys(), (now, before)
    return max(now[pid] - before[pid] for pid in now)

def flat(megabytes):
    deadline = time.monotonic() + 60  # a worker is told without being asked whether it has heard
    while grown() > megabytes and time.monotonic() < deadline:
        time.sleep(0.02)
    print("grown by", round(grown()), "MB")
    assert grown() < megabytes

import numpy  # before the start: some of the programs load it
weft.map(lambda x: numpy.ones(x).sum(), [1, 2, 3, 4], n=2)
before = memory()
"""

#: memory that nobody uses goes back to the system sooner, so that a program need not wait for it
SOON = """
from weft.engines.local.memory import blocks, server
server.WARM_SECONDS = blocks.WARM_SECONDS = 1.0
"""

PROGRAMS = {
    "long lists in closures, shared_data and distributed functions": """
for k in range(3):
    data = list(range(k * 10**7, k * 10**7 + 10**6))
    assert weft.map(lambda i: data[i], range(4), n=2) == data[:4]
    shared = {"data": data}
    first = weft.map(lambda i, shared: shared["data"][i], [0, 1], n=2, shared_data=shared)
    assert first == data[:2]
    with weft.distribute(lambda i: data[i], max_cpu=2) as function:
        assert function([0, 1]) == function([0, 1]) == data[:2]
del data, shared, function
""",
    "a thousand closures": """
for k in range(1000):
    text = str(k) * 3000
    assert weft.map(lambda i: len(text) + i, range(2), n=2) == [len(text), len(text) + 1]
""",
    "closures over almost a megabyte each": """
for k in range(30):
    data = [float(i + k) for i in range(10**5)]
    assert weft.map(lambda i: data[i], range(2), n=2) == data[:2]
""",
    "large items and results": """
for k in range(3):
    data = list(range(k * 10**7, k * 10**7 + 10**6))
    assert weft.map(lambda part: part, [data, data], n=2) == [data, data]
    assert weft.map(len, [str(k) * 10**7] * 2, n=2) == [10**7] * 2
del data
""",
    "calls that end while others use the workers": """
for k in range(3):
    data = list(range(k * 10**7, k * 10**7 + 10**6))
    slow = weft.map_async(lambda x: time.sleep(0.02) or x, range(6), n=2)
    assert weft.map(lambda i: data[i], range(2), n=2) == data[:2]
    assert slow.wait() == list(range(6))
del data, slow
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_maps_leave_the_workers_as_they_were(program: str) -> None:
    """Within 50 MB of the start, which a single one of these lists takes."""
    outcome = run_script(f"{SOON}{MEASURE}{PROGRAMS[program]}flat(50)")
    assert outcome.code == 0, outcome


FUNCTIONS = """
team = weft.Team(2)
rows = numpy.ones(4)
weft.function(lambda x: x.sum(), collect="sum", team=team)(rows)
before = memory()
for k in range(3):
    data = list(range(k * 10**7, k * 10**7 + 10**6))
    function = weft.function(lambda x: x * 0 + data[1], collect="gather", team=team)
    assert function(rows).tolist() == [data[1]] * 4
del data, function
weft.function(lambda x: x.sum(), collect="sum", team=team)(rows)
flat(50)
"""


def test_functions_that_are_gone_are_dropped_by_the_team() -> None:
    """At its next call, whatever that is."""
    outcome = run_script(MEASURE + FUNCTIONS)
    assert outcome.code == 0, outcome


TRAINING = """
import torch

torch.manual_seed(0)
team = weft.Team(2)
x = torch.randn(8, 1500)

def train():
    model = torch.nn.Linear(1500, 1500)  # 9 MB
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = lambda model, x: model(x).square().mean()
    step = weft.train_step(loss, model, optimizer, team=team)
    used_too = weft.train_step(loss, model, torch.optim.SGD(model.parameters(), lr=0.2), team=team)
    first = step(x)
    del step
    assert used_too(x) < first  # it has the same copies

for _ in range(12):  # memory of collectives is kept for a while, and used again
    train()
before = memory()
for _ in range(24):
    train()
weft.function(lambda x: x.sum(), collect="sum", team=team)(numpy.ones(4))
flat(50)
"""


def test_models_of_training_steps_that_are_gone_are_dropped() -> None:
    """A program that tries many models, one after the other."""
    pytest.importorskip("torch")
    outcome = run_script(MEASURE + TRAINING)
    assert outcome.code == 0, outcome


def test_a_team_drops_before_it_registers() -> None:
    """A function whose values change is there once, not twice."""
    program = """
team = weft.Team(2)
numbers = []
for k in range(3):
    if numbers:
        team.backend.drop(numbers.pop())
    numbers.append(team.backend.register([k], "a list"))
count = lambda member: len(member.registered)
assert team.backend.call(count, [()] * 2) == [1, 1]
team.backend.drop(numbers.pop())
assert team.backend.call(count, [()] * 2) == [0, 0]
"""
    outcome = run_script(MEASURE + program)
    assert outcome.code == 0, outcome
