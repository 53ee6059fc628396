"""Tables over hosts: who waits for whom, what is refused, and what becomes of the rows when
something ends. What tables do is in tests/contracts; random runs are in tests/failures."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import weft
from tests.hosts import Hosts
from tests.support import deadline, launch, wait_until, within

BUSY = """
import os, sys, time
import numpy as np, weft
group = weft.init(timeout=60)
done = sys.argv[1]
table = weft.MatrixTable(2000, 64)
rows = np.arange(1000, 2000)  # of host2
delta = np.ones((1000, 64), np.float32)
table.get(rows)
group.barrier()
if group.rank == 1:
    while not os.path.exists(done):
        sum(range(60_000_000))  # about two seconds in C, in which no other thread of Python runs
else:
    times = []
    for _ in range(25):
        began = time.perf_counter()
        table.get(rows)
        got = time.perf_counter()
        table.add(delta, rows)
        times.append((got - began, time.perf_counter() - got))
    open(done, "w").close()
    print("times", *(f"{1000 * min(part):.3f}" for part in zip(*times)), flush=True)
group.barrier()
assert (table.get(rows) == 25).all()
assert "mpi4py" not in sys.modules  # ranks do not speak MPI
"""


def test_a_computing_rank_delays_nobody(two_hosts: Hosts, tmp_path: Path) -> None:
    """Rows of a host whose only rank holds its interpreter in C are read and updated at once."""
    outcome = two_hosts.launch(BUSY, 1, str(tmp_path / "done"))
    assert outcome.code == 0, outcome
    get, add = re.search(r"times (\S+) (\S+)", outcome.out).groups()  # type: ignore[union-attr]
    assert float(get) < 1000 * within(0.02), outcome
    assert float(add) < 1000 * within(0.02), outcome


MODELS = """
import numpy as np, weft
group = weft.init(timeout=60)
for consistency in ("async", "bsp", weft.ssp(2)):
    model = {"w": np.zeros((300, 2000), np.float32), "n": np.zeros(5, np.int64), "d": np.zeros(3)}
    table = weft.ModelTable(model, consistency=consistency)
    for _ in range(5):
        model["w"] += 1
        model["n"] += 1
        model["d"] += 0.5
        assert table.sync()
    group.barrier()
    if consistency != "bsp":
        table.sync()
    for name, each in (("w", 5), ("n", 5), ("d", 2.5)):
        assert (model[name] == each * group.size).all(), (consistency, name, model[name])
    group.barrier()
print("equal", flush=True)
"""


def test_models(two_hosts: Hosts) -> None:
    """A model of three dtypes: the tables of all exchange at once, and every change is there."""
    outcome = two_hosts.launch(MODELS, 2)
    assert outcome.code == 0, outcome
    assert outcome.out.count("equal") == 4


COPIES = """
import numpy as np, weft
group = weft.init(timeout=60)
table = weft.MatrixTable(100, 8)
away = np.arange(50, 100) if group.rank < 2 else np.arange(50)

def asked():
    lane = table._store._lane
    return lane._memory.words[lane._asked]

table.get(away, consistency=weft.ssp(1))
fetched = []
for clock in range(1, 7):
    table.add(np.ones((100, 8)))
    group.barrier()
    before = asked()
    rows = table.get(away[::-1], consistency=weft.ssp(2))
    fetched.append(asked() - before)
    assert (rows >= (clock - 2) * group.size).all() and (rows == rows[0]).all()
    group.barrier()
print("fetched", *fetched, flush=True)
"""


def test_a_copy_is_fetched_once_for_a_host(two_hosts: Hosts) -> None:
    """Of the two ranks of each host one fetches, every third clock; the other finds it there."""
    outcome = two_hosts.launch(COPIES, 2)
    assert outcome.code == 0, outcome
    found = re.findall(r"\[(\d)\] fetched (.*)", outcome.out)
    by_rank = {int(rank): list(map(int, counts.split())) for rank, counts in found}
    for first, second in ((0, 1), (2, 3)):
        together = [one + other for one, other in zip(by_rank[first], by_rank[second], strict=True)]
        assert together == [0, 0, 1, 0, 0, 1], by_rank


REFUSED = """
import threading
import numpy as np, weft
group = weft.init(timeout=60)

def raised(call, kind):
    try:
        call()
    except kind as error:
        print(group.rank, type(error).__name__, str(error).replace("\\n", " / "), flush=True)
    else:
        raise AssertionError("nothing was raised")

raised(lambda: weft.MatrixTable(10**9, 10**4), weft.OutOfMemory)
lock = threading.Lock()
raised(lambda: weft.ArrayTable(4, updater=lambda rows, state, delta: lock), weft.InvalidType)
raised(lambda: weft.ArrayTable(3 + group.rank), weft.Disagreement)
raised(lambda: weft.ArrayTable(4, device="cpu:0"), weft.InvalidValue)
table = weft.MatrixTable(3, 2)
raised(lambda: table.add([[1, 2, 3]], [2]), weft.InvalidValue)
raised(lambda: table.get([3]), weft.InvalidValue)
group.barrier()
table.add([[1, 2]], [2])
group.barrier()
assert table.get(2).tolist() == [group.size, 2 * group.size]
one = weft.MatrixTable(1, 3_000_000)  # a row that is longer than other messages
one.add(np.full((1, 3_000_000), group.rank + 1.0))
group.barrier()
assert (one.get() == sum(range(group.size + 1))).all() and one.get([0])[0, -1] == one.get()[0, 0]
"""


def test_what_is_refused(two_hosts: Hosts) -> None:
    """Each host's need and free memory; what cannot be sent to agents; other tables. On all ranks
    alike, and they go on."""
    outcome = two_hosts.launch(REFUSED, (2, 1))
    assert outcome.code == 0, outcome
    memory = re.findall(r"(\d) OutOfMemory (.*)", outcome.out)
    assert {rank for rank, _ in memory} == {"0", "1", "2"}
    assert len({text for _, text in memory}) == 1
    needs = r"host host1 needs 20000\.0 GB, and \S+ GB are free .*; host host2 needs 20000\.0 GB"
    assert re.search(needs, memory[0][1]), memory
    assert outcome.out.count("InvalidType ArrayTable(4,") == 3
    assert "cannot be sent" in outcome.out
    assert outcome.out.count("InvalidValue device='cpu:0' in a group over hosts") == 3
    assert outcome.out.count("Disagreement the ranks of group 'world' made different calls") == 3
    assert all(f"ArrayTable({3 + rank}," in outcome.out for rank in range(3))


TRYING = """
import os, signal
import numpy as np, weft
group = weft.init(timeout=60)

# ranks of one host need each other's adds while one of them reads
table = weft.MatrixTable(8, 4, consistency="bsp")
for turn in range(4):
    assert (table.get(consistency=weft.ssp(1)) == turn * group.size).all()
    table.add(np.ones((8, 4)))

# a rank that does not add reads nothing old either
table = weft.MatrixTable(8, 4)
table.get(consistency=weft.ssp(1))
group.barrier()
if group.rank:
    for _ in range(5):
        table.add(np.ones((8, 4)))
group.barrier()
assert (table.get(consistency=weft.ssp(1)) >= (5 - 1) * (group.size - 1)).all()

# a handler that comes in the middle of a call is refused each time
large, small, refused, seen = weft.MatrixTable(4000, 500), weft.MatrixTable(100, 4), [], []

def handler(*_):
    try:
        seen.append(small.get([0, 99]).sum())
    except weft.UsageError as error:
        refused.append(error)

if group.rank == 0:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    adds = 0
    while len(refused) < 20:
        large.add(np.ones((4000, 500)))
        adds += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert (large.get() == adds).all() and not any(seen)
group.barrier()

# what an updater raises in an agent: long, or of a class that cannot be loaded
class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one)

def picky(rows, state, delta):
    if delta.max() > 6:
        raise ValueError("x" * 6_000_000)
    if delta.max() > 5:
        raise Odd(1, 2)
    rows += delta

table = weft.MatrixTable(8, 4, updater=picky)
group.barrier()
away = 7 if group.rank < 2 else 0
for value, kind in ((7, RuntimeError), (6, RuntimeError)):
    try:
        table.add(np.full((1, 4), value), [away])
    except kind as error:
        assert len(str(error)) < 2000
    else:
        raise AssertionError("nothing was raised")
group.barrier()
table.add(np.ones((8, 4)))
group.barrier()
assert (table.get() == group.size).all()

# a forked child is no rank: what it drops stays
if (child := os.fork()) == 0:
    del table
    os._exit(0)
os.waitpid(child, 0)
group.barrier()
assert (table.get() == group.size).all()
print("went on", flush=True)
"""


def test_what_ranks_may_do_to_each_other(two_hosts: Hosts) -> None:
    """Reads that accept old rows, handlers, updaters that raise, forks: nobody waits for ever, and
    no number is wrong."""
    outcome = two_hosts.launch(TRYING, 2)
    assert outcome.code == 0, outcome
    assert outcome.out.count("went on") == 4, outcome


NO_MEMORY = """
import socket, sys
if socket.gethostname() == "host2":
    import importlib.abc
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "weft.engines.mpi.tables":  # which only agents load
                sys.meta_path.remove(self)
                from weft.engines.local.memory import blocks
                blocks.allocate = self.refusing(blocks.allocate)
        def refusing(self, allocate):
            def once(size):
                if 1_000_000 < size < 2_000_000 and not self.refused:
                    self.refused = True
                    raise MemoryError("as this test wants it")
                return allocate(size)
            return once
        refused = False
    sys.meta_path.insert(0, Finder())
"""

TWO_TABLES = """
import numpy as np, weft
group = weft.init(timeout=60)
try:
    weft.MatrixTable(3000, 200)
except weft.SetupError as error:
    print("refused", error, flush=True)
one, other = weft.MatrixTable(8, 4), weft.MatrixTable(8, 4)
group.barrier()
one.add(np.ones((8, 4)))
group.barrier()
assert (one.get() == group.size).all() and not other.get().any()
print("right", flush=True)
"""


def test_a_table_that_one_host_has_no_memory_for(two_hosts: Hosts, tmp_path: Path) -> None:
    """All ranks are refused alike, and the tables that follow are each a table of its own."""
    (tmp_path / "sitecustomize.py").write_text(NO_MEMORY)
    outcome = two_hosts.launch(TWO_TABLES, 1, env={"PYTHONPATH": str(tmp_path)})
    assert outcome.code == 0, outcome
    assert outcome.out.count("refused") == outcome.out.count("as this test wants it") == 2, outcome
    assert outcome.out.count("right") == 2, outcome


#: agents that have little room for requests
LITTLE_ROOM = """
import importlib.abc, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "weft.engines.mpi.agent":  # which only agents load
            sys.meta_path.remove(self)
            import weft.engines.mpi.tables as tables
            tables._MOST_HELD = 1 << 20
sys.meta_path.insert(0, Finder())
"""

STUCK = """
import os, signal, sys, time
import numpy as np, weft
group = weft.init(timeout=60)
stuck, other = weft.MatrixTable(100_000, 8), weft.MatrixTable(8, 4)
done = sys.argv[1]
pids = group.all_gather([os.getpid()])
group.barrier()
if group.rank == 0:
    with stuck._store._own.table.exclusive():
        group.broadcast(np.ones(1))
        os.kill(os.getpid(), signal.SIGSTOP)
else:
    group.broadcast(None)
if group.rank == 1:
    while not os.path.exists(done):
        time.sleep(0.001)
    os.kill(pids[0][0], signal.SIGCONT)
if group.rank == 2:
    stuck.add(np.ones((100_000, 8)))
if group.rank == 3:
    lane = group._meeting.lanes[stuck._store._sharding.room]._memory
    while lane.words[lane.asked_at(0)] < 1:
        time.sleep(0.001)  # until rank 2 has asked
    for _ in range(10):
        other.add(np.ones((1, 4)), [0])
    assert (other.get([0]) == 10).all() and not os.path.exists(done)
    open(done, "w").close()
group.barrier()
assert (stuck.get() == 1).all()
print("went on", flush=True)
"""


def test_a_stopped_holder_of_a_lock(two_hosts: Hosts, tmp_path: Path) -> None:
    """Requests for its table, for which there is no more room, do not hold up those for others."""
    (tmp_path / "sitecustomize.py").write_text(LITTLE_ROOM)
    outcome = two_hosts.launch(
        STUCK, 2, str(tmp_path / "done"), env={"PYTHONPATH": str(tmp_path)}, timeout=90
    )
    assert outcome.code == 0, outcome
    assert outcome.out.count("went on") == 4, outcome


SAVE = """
import sys
import numpy as np, weft
group = weft.init(timeout=60)
path, first = sys.argv[1], sys.argv[2] == "save"
if first:
    table = weft.MatrixTable(np.arange(35.0).reshape(7, 5), updater="adam", consistency="bsp")
else:
    table = weft.load(path)
for turn in range(3):
    table.add(np.full((7, 5), turn + 1.0))
if first:
    table.save(path)
rows = table.get()
assert table._store.steps == 3 * group.size + (0 if first else int(sys.argv[3]))
if group.is_master:
    np.save(path + sys.argv[2] + ".npy", rows)
"""


def test_a_checkpoint_fits_any_number_of_hosts(
    two_hosts: Hosts, three_hosts: Hosts, tmp_path: Path
) -> None:
    """Saved on two hosts, loaded on one, two and three: the same rows, state and steps."""
    path = tmp_path / "table"
    outcome = two_hosts.launch(SAVE, 1, str(path), "save")
    assert outcome.code == 0, outcome
    arrays = safetensors.numpy.load_file(path)
    assert np.array_equal(arrays["rows"], np.load(f"{path}save.npy"))
    assert arrays["mean"].all()
    outcomes = [
        two_hosts.launch(SAVE, 1, str(path), "two", "6"),
        launch(SAVE, 2, str(path), "one", "6"),
        three_hosts.launch(SAVE, (1, 1, 0), str(path), "of three", "6"),
    ]
    assert all(outcome.code == 0 for outcome in outcomes), outcomes
    after = [np.load(f"{path}{name}.npy") for name in ("two", "one", "of three")]
    assert all(np.array_equal(rows, after[0]) for rows in after)
    three = three_hosts.launch(SAVE, 1, str(path), "three", "6")
    assert three.code == 0, three


KILLED = """
import contextlib, gc, os, signal, sys, time
import numpy as np, weft
from weft.engines.mpi import engine
group = weft.init(timeout=60)
what, victims, path = sys.argv[1], [int(v) for v in sys.argv[2].split(",")], sys.argv[3]
processes = group.all_gather([os.getpid(), engine._speaker._process.pid])

def end_all(*_):
    # the first rank of this host, its speaker, which is the agent, then this rank and its speaker,
    # before that has noticed that it is to take the agent's place
    os.kill(processes[victims[0]][0], signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(processes[victims[0]][1], 0)
    for process in reversed(processes[group.rank]):
        os.kill(process, signal.SIGKILL)

table = weft.MatrixTable(400_000, 8)  # 12 MB
clock = weft.MatrixTable(8, 8, consistency="bsp")
counting = weft.MatrixTable(8, 8, updater="adam")
ones, whole = np.ones((8, 8)), np.ones((400_000, 8), np.float32)
table.add(whole)
clock.add(ones)
assert (clock.get() == group.size).all()
table.save(path)
mine = 0 if group.rank < group.size // 2 else 399_999
if group.rank in victims:
    for _ in range(3):
        table.add(np.full((2, 8), 100.0), [0, 399_999])  # these have returned
    print("begins", flush=True)
    if len(victims) > 1:
        signal.signal(signal.SIGALRM, end_all)
    if group.rank == victims[-1]:
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # if nobody handles it, it kills
    while True:
        if what == "save":
            table._store.read_piece("rows", 0, 400_000)
        elif what == "get":
            table.get()
        else:
            table.add(whole)
while table.get([mine])[0, 0] < 300 * len(victims):
    time.sleep(0.005)
try:
    for _ in range(30 if len(victims) == 1 else 10**6):  # a lost host ends it
        table.add(ones, [0, 1, 2, 3, 399_996, 399_997, 399_998, 399_999])
        if len(victims) == 1:  # when a host is lost, ranks see it at different adds
            clock.add(ones)
            clock.get()
    print(f"rank {group.rank} went on", flush=True)
except weft.RowsLost as error:
    print(f"rank {group.rank} lost {error.host} {error.rows} {error.ranks}", flush=True)
    table.add(np.ones((1, 8)), [mine])  # the own rows are there
    for some in (clock, counting):  # whoever counts an add would tell the lost host of it
        some.add(np.ones((1, 8)), [0])
assert table.get([mine])[0, 0] >= 300 * len(victims)
group = group.survivors(timeout=60)
again = weft.load(path, into=table)
assert again is table and table.group is group
assert (again.get() == 4).all(), again.get()
group.barrier()
again.add(np.ones((400_000, 8), np.float32))
group.barrier()
assert (again.get([0, 399_999]) == 4 + group.size).all()
print(f"rank {group.rank} restored", flush=True)

if group.rank == 0 and len(victims) > 1:
    del clock, counting, some  # the last tables of the first generation
    gc.collect()
    while not os.path.exists(path + ".freed"):
        time.sleep(0.001)
    print("freed", flush=True)
"""


@pytest.mark.parametrize(
    "what",
    [
        "add",
        pytest.param("get", marks=pytest.mark.soak),
        pytest.param("save", marks=pytest.mark.soak),
    ],
)
def test_a_rank_is_killed(two_hosts: Hosts, what: str, tmp_path: Path) -> None:
    """With ULFM: what it had added is there, whatever it was in the middle of; the others go on,
    and the checkpoint loads into the next generation."""
    outcome = two_hosts.launch(KILLED, 2, what, "3", str(tmp_path / "saved"), ft=True, timeout=90)
    assert outcome.out.count("went on") == 3, outcome
    assert outcome.out.count("restored") == 3, outcome


#: agents whose tables' messages are nearly always the first to notice that a peer has failed, and
#: who tell when they have given up the lanes of the first generation
NOTICED_BY_TABLES = """
import importlib.abc, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "weft.engines.mpi.agent":  # which only agents load
            sys.meta_path.remove(self)
            from weft.engines.mpi.tables import Tables
            Tables.turn, Tables._look = self.repeated(Tables.turn), self.telling(Tables._look)
    def repeated(self, turn):
        return lambda tables: any([turn(tables) for _ in range(50)])
    def telling(self, look):
        def wrapper(tables):
            had = {*tables._lanes}
            look(tables)
            if had > {*tables._lanes}:
                open(PATH, "w").close()
        return wrapper
sys.meta_path.insert(0, Finder())
"""


def test_a_host_is_lost(two_hosts: Hosts, tmp_path: Path) -> None:
    """With ULFM: calls that need its rows raise, with host and rows; the others go on, and the
    checkpoint brings the rows back. Its last agent tells nobody, and the others notice it by
    messages of tables."""
    program = NOTICED_BY_TABLES.replace("PATH", repr(str(tmp_path / "saved.freed")))
    (tmp_path / "sitecustomize.py").write_text(program)
    outcome = two_hosts.launch(
        *(KILLED, 2, "add", "2,3", str(tmp_path / "saved")),
        env={"PYTHONPATH": str(tmp_path)},
        ft=True,
        timeout=90,
    )
    assert sorted(re.findall(r"rank (\d) lost", outcome.out)) == ["0", "1"], outcome
    assert outcome.out.count("lost host2 range(200000, 400000) (2, 3)") == 2, outcome
    assert outcome.out.count("restored") == 2, outcome
    assert outcome.out.count("freed") == 1, outcome


TAKEN_OVER = """
import os, select, signal, sys
import numpy as np, weft
from weft.engines.mpi import engine
group = weft.init(timeout=60)
what, folder = sys.argv[1:]
def plus(rows, state, delta):
    rows += delta  # an updater whose adds are counted
FIRST, WATCHER = 2, 3  # the first rank of host2, whose speaker is the agent there, and the other
processes = group.all_gather([os.getpid(), engine._speaker._process.pid])
large = weft.MatrixTable(300_000, 4)  # of which each rank adds to its column
small = weft.MatrixTable(8, 4, updater=plus)
clock = weft.MatrixTable(8, 4, consistency="bsp")
small.save(os.path.join(folder, "saved"))
column = np.zeros((300_000, 4), np.float32)
column[:, group.rank] = 1
group.barrier()

told = {large: 0, small: 0}

def add(table, *arguments):
    try:
        table.add(*arguments)
    except weft.PeerLost as error:  # the agent was killed in the middle of just this add
        assert "in the middle of this add" in str(error)
        told[table] += 1

def turn():
    add(large, column)
    add(small, column[:6], [0, 1, 2, 5, 6, 7])
    clock.add(column[:8])
    clock.get()
    large.get([0, 299_999])

if group.rank == WATCHER:
    poll = select.poll()
    poll.register(os.pidfd_open(processes[FIRST][what == "speaker"]))
TURNS = 30
returned = os.open(os.path.join(folder, "turns"), os.O_CREAT | os.O_RDWR)
for done in range(TURNS):
    if done == 10 and group.rank == FIRST and what == "rank":
        signal.setitimer(signal.ITIMER_REAL, 0.02)  # nobody handles it: it kills
    if done == 10 and group.rank == WATCHER and what == "speaker":
        os.kill(processes[FIRST][1], signal.SIGKILL)
    if done == 20:
        if group.rank == WATCHER:
            assert poll.poll()
        elif group.rank == FIRST and what == "rank":
            signal.pause()
    turn()
    if group.rank == FIRST:
        os.pwrite(returned, f"{done + 1:4}".encode(), 0)
found = large.get()
assert sum(told.values()) <= 1
for table, rows in ((large, found), (small, small.get([0, 1, 2, 5, 6, 7]))):
    mine = rows[:, group.rank]
    assert TURNS - told[table] <= mine.min() and mine.max() <= TURNS, (told, mine)
rows = clock.get()[:, group.rank]
# who ends while it applies a clock for all may take a part of it along, and that is told
assert (rows == TURNS).all() or clock.interrupted, rows
if what == "rank":
    returned, lost = int(os.pread(returned, 4, 0)), found[:, FIRST]
    assert returned <= lost.min() and lost.max() <= returned + 1, (returned, lost)
    steps = small._store.steps
print(f"rank {group.rank} has all", flush=True)
if what == "rank":
    group = group.survivors(timeout=60)
    again = weft.load(os.path.join(folder, "saved"), into=small, updater=plus)
    group.barrier()
    again.add(np.ones((8, 4), np.float32))
    group.barrier()
    assert (again.get() == group.size).all(), again.get()
    print(f"rank {group.rank} restored, {steps} steps", flush=True)
"""


@pytest.mark.parametrize("what", ["rank", "speaker"])
def test_an_agent_is_lost(two_hosts: Hosts, what: str, tmp_path: Path) -> None:
    """With ULFM: where the first rank of a host ends, or only the process that stands for it in
    MPI, another process of the host serves its rows. All adds are there, once, and nobody sees
    more of it than a pause."""
    outcome = two_hosts.launch(TAKEN_OVER, 2, what, str(tmp_path), ft=True, timeout=90)
    assert outcome.out.count("has all") == (3 if what == "rank" else 4), outcome
    if what == "rank":
        steps = re.findall(r"restored, (\d+) steps", outcome.out)
        assert len(steps) == 3, outcome
        assert len(set(steps)) == 1, outcome


HALF_DONE = """
import os, signal, time
import numpy as np, weft
group = weft.init(timeout=60)
def plus(rows, state, delta):
    rows += delta  # an updater whose adds are counted
table = weft.MatrixTable(8, 4, updater=plus)
whole = weft.MatrixTable(300_000, 8)
table.add(np.ones((2, 4)), [1, 6])
group.barrier()
if group.rank == 1:
    lane, rank = table._store._lane, 1
    memory = lane._memory

    def update(*_):  # of the own host's rows, while the other host carries out the request
        number = memory.words[memory.asked_at(rank)]
        while memory.words[memory.answered_at(rank, number)] < number:
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    table._store._own.update = whole._store._own.update = update
    (whole.add(np.ones((300_000, 8))) if WHOLE else table.add(np.ones((3, 4)), [0, 5, 7]))
subject = whole if WHOLE else table
while not subject.interrupted:
    time.sleep(0.001)
(found,) = subject.interrupted
print(f"rank {group.rank} found {found.rank} {found.rows}", flush=True)
if not WHOLE:
    assert (table.get([5, 7]) == 1).all()
table.add(np.ones((1, 4)), [0])
while table._store.steps != (5 if WHOLE else 6):  # three, the half one, and the two since
    time.sleep(0.001)
assert subject.interrupted == (found,)
print("equal", flush=True)
"""


@pytest.mark.parametrize(("whole", "rows"), [(False, "(5, 7)"), (True, "range(150000, 300000)")])
def test_an_add_that_reached_one_host(two_hosts: Hosts, whole: bool, rows: str) -> None:
    """With ULFM: a rank that dies when one host has its add and the others have not: it is listed
    as interrupted, everywhere alike, and the updater's steps are the same on all hosts."""
    program = HALF_DONE.replace("WHOLE", str(whole))
    outcome = two_hosts.launch(program, (2, 1), ft=True, timeout=90)
    assert sorted(re.findall(r"(rank \d found .*)", outcome.out)) == [
        f"rank {rank} found 1 {rows}" for rank in (0, 2)
    ], outcome
    assert outcome.out.count("equal") == 2, outcome


CUT_SHORT = """
import time
import numpy as np, weft
group = weft.init(timeout=60)
table = weft.MatrixTable(8, 4)
whole = weft.MatrixTable(8, 4)
group.barrier()
if group.rank == 0:
    adds = 0
    for subject, rows in ((table, [0, 7]), (table, [0, 7]), (TABLE, ROWS)):
        try:
            subject.add(np.ones((8 if rows is None else len(rows), 4)), rows)
            adds += 1
        except weft.PeerLost as error:
            print("told", str(error).splitlines()[0], flush=True)
    for _ in range(2):  # by another agent, who goes on
        table.add(np.ones((2, 4)), [0, 7])
    assert adds == 2
    assert (table.get([7]) == 4).all(), table.get()
    print("went on", flush=True)
while table.get([7])[0, 0] < 4:  # a host whose ranks have left has nobody to take over
    time.sleep(0.001)
"""


@pytest.mark.parametrize(
    ("table", "rows", "told"),
    [("table", "[3, 5, 6]", "2 rows of that host"), ("whole", "None", "rows 4 to 7 of that host")],
)
def test_an_agent_ends_in_the_middle_of_an_add(
    two_hosts: Hosts, table: str, rows: str, told: str
) -> None:
    """With ULFM: who has made the add is told which rows may have got it; the next agent makes it
    no second time, and serves what follows."""
    program = CUT_SHORT.replace("TABLE", table).replace("ROWS", rows)
    fault = {"WEFT_FAULT": "table.adding@3:-1:kill"}  # no rank is -1: only in agents
    outcome = two_hosts.launch(program, (1, 2), env=fault, ft=True, timeout=90)
    words = rf"told table .* host host2 ended in the middle .*{told}"
    assert re.search(words, outcome.out), outcome
    assert outcome.out.count("went on") == 1, outcome


def test_a_rank_is_killed_without_ulfm(two_hosts: Hosts, tmp_path: Path) -> None:
    """The job ends, not with 0, and the checkpoint that was complete loads."""
    path = tmp_path / "saved"
    outcome = two_hosts.launch(KILLED, 1, "add", "1", str(path), timeout=90)
    assert outcome.code not in (0, 124), outcome
    assert not two_hosts.leave_nothing()
    saved = weft_load(path)
    assert (saved == 2).all()


def weft_load(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    weft.init(engine="serial")
    try:
        rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = weft.load(path).get()
        return rows
    finally:
        weft.shutdown()


SAVING = """
import os, signal, sys
import numpy as np, weft
group = weft.init(timeout=60)
table = weft.MatrixTable(3_000_000, 8)  # 96 MB
table.add(np.ones((3_000_000, 8), np.float32))
print("saves", flush=True)
for turn in range(1000):
    table.save(sys.argv[1])
"""


def test_a_host_dies_while_it_saves(two_hosts: Hosts, tmp_path: Path) -> None:
    """A checkpoint is complete, or it is not there."""
    path = tmp_path / "saved"
    job = two_hosts.start(SAVING, 1, str(path))
    wait_until(lambda: job.out.count("saves") == 2 and (path.exists() or not job.running))
    ranks = two_hosts.ranks(2)
    os.kill(ranks[1], signal.SIGKILL)
    assert job.wait().code != 0
    assert (weft_load(path) == 2).all()
    assert [name for name in os.listdir(tmp_path) if "saved" in name] == ["saved"]


CUT = """
import sys, time
import numpy as np, weft
group = weft.init(timeout=float(sys.argv[1]))
table = weft.MatrixTable(1000, 8)
group.barrier()
print("ready", flush=True)
mine = 0 if group.rank == 0 else 999
calls = {
    "get": lambda: table.get(),
    "add": lambda: table.add(np.ones((1000, 8))),
    "save": lambda: table._store.read_piece("rows", 0, 1000),
}
for name, call in calls.items():
    try:
        while True:
            call()
            time.sleep(0.001)
    except weft.Stalled as error:
        print(f"{name}: {str(error).splitlines()[0]}", flush=True)
table.add(np.ones((1, 8)), [mine])  # the own rows need no network
assert table.get([mine])[0, 0] >= 1
print("own", flush=True)
raise RuntimeError("the network is cut")  # a rank that ends well would wait for the others
"""


def test_a_link_is_cut(two_hosts: Hosts) -> None:
    """In the middle of get, add and saving: both sides reach their deadlines, which name the host;
    the rows of the own host can be used."""
    job = two_hosts.start(CUT, 1, str(deadline(3)))
    wait_until(lambda: job.out.count("ready") == 2)
    two_hosts.cut(2)
    wait_until(lambda: job.out.count("own") >= 1)
    for k in (1, 2):
        wait_until(lambda k=k: all(process.rank is None for process in two_hosts.processes(k)))
    two_hosts.mend(2)
    outcome = job.wait(40)
    assert outcome.code != 0
    for name in ("get", "add", "save"):
        found = re.search(rf"{name}: table .* host host. has not answered in time", outcome.out)
        assert found, outcome
