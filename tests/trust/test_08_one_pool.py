"""One pool per process: however many threads and calls use it, it is as large as the machine."""

from __future__ import annotations

import pytest

from tests.support import run_script

#: what each program begins with: two cores, whatever the machine has; `most()` returns how many
#: descendants there were at once while its block ran
BEGIN = """
import contextlib, itertools, os, queue, random, signal, sys, threading, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import weft
from weft.engines.local.pool import workers as pool

def descendants():
    found, pids = [], [os.getpid()]
    while pids:
        pid = pids.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as children:
                    pids += (new := list(map(int, children.read().split())))
                    found += new
    return found

def count_most(action):
    most, over = [0], threading.Event()
    def look():
        while not over.wait(0.01):
            most.append(len(descendants()))
    thread = threading.Thread(target=look)
    thread.start()
    try:
        action()
    finally:
        over.set()
        thread.join()
    return max(most)

def in_threads(count, action):
    failed = []
    def act(number):
        try:
            action(number)
        except BaseException as error:
            failed.append(error)
            raise
    threads = [threading.Thread(target=act, args=(number,)) for number in range(count)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads), failed

def square(x): return x * x
def slowly(x): time.sleep(0.01); return x * x
def squares(start, count): return [x * x for x in range(start, start + count)]

CORES = len(os.sched_getaffinity(0))
"""

PROGRAMS = {
    "twenty threads": """
def work(number):
    for start in range(number, number + 5):
        assert weft.map(square, range(start, start + 40)) == squares(start, 40)
        assert weft.map(slowly, range(start, start + 3)) == squares(start, 3)
        assert weft.map(square, iter(range(start, start + 40))) == squares(start, 40)

assert count_most(lambda: in_threads(20, work)) <= CORES + 1  # and the fork server
""",
    "handles of map_async": """
def work():
    handles = [weft.map_async(slowly, range(start, start + 5)) for start in range(20)]
    for start, handle in enumerate(handles):
        assert sorted(handle.results()) == list(enumerate(squares(start, 5)))

assert count_most(work) <= CORES + 1
""",
    "as many as were asked for": """
def work(number):
    for start in range(3):
        n = 4 if number == 0 else None
        assert weft.map(slowly, range(start, start + 8), n=n) == squares(start, 8)

assert count_most(lambda: in_threads(8, work)) <= max(4, CORES) + 1
""",
    "once in each worker, beside others": """
def work(number):
    if number:
        assert weft.map(slowly, range(60)) == squares(0, 60)
    else:
        for _ in range(3):
            pids = weft.distribute(lambda: os.getpid())(None)
            assert len(set(pids)) == len(pids) == CORES

assert count_most(lambda: in_threads(4, work)) <= CORES + 1
""",
    "a short map beside a long one": """
begun, short_ended = threading.Event(), []

def items():  # of the long one: it ends when the short ones have
    for item in itertools.count():
        if item == 10:
            begun.set()
        if len(short_ended) == 2:
            return
        yield item

def work(number):
    if number == 0:
        results = weft.map(slowly, items())
        assert results == squares(0, len(results)) and len(results) > 10
    else:
        begun.wait()
        for start in range(5):
            assert weft.map(square, range(start, start + 4)) == squares(start, 4)
        short_ended.append(number)

in_threads(3, work)
""",
    "the rest of the pool for who is left": """
def pid_slowly(x): time.sleep(0.01); return os.getpid()

left = threading.Event()

def work(number):
    if number:
        weft.map(slowly, range(4))
        left.set()
        return
    pids = set()  # those of the workers since the other has left
    with weft.imap(pid_slowly, itertools.count()) as results:
        for pid in results:
            if left.is_set():
                pids.add(pid)
            if len(pids) == CORES:
                return

in_threads(2, work)
""",
    "workers that are killed": """
def work(number):
    for start in range(3):
        assert weft.map(slowly, range(start, start + 12), retries=50) == squares(start, 12)

def kill():
    while not over.wait(0.05):
        victims = descendants()[1:]
        if victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(victims), signal.SIGKILL)

over = threading.Event()
killer = threading.Thread(target=kill)
weft.map(square, range(4))
killer.start()
try:
    in_threads(6, work)
finally:
    over.set()
    killer.join()
assert weft.map(square, range(4)) == squares(0, 4)
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_calls_of_many_threads_share_the_pool(program: str) -> None:
    """They have no more workers than there are cores, and every result is right."""
    outcome = run_script(BEGIN + PROGRAMS[program])
    assert outcome.code == 0, outcome


WITHIN = """
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
def items():
    for start in range(3):
        yield sum(weft.map(square, range(start, start + 4)))

assert weft.map(square, items()) == [sum(squares(start, 4)) ** 2 for start in range(3)]

for index, value in weft.map_async(square, items()).results():
    assert weft.map(square, [index]) == [index * index]

for value in weft.map(square, [3, 4]):
    for _, found in weft.map_async(slowly, range(value)).results():
        assert weft.map(square, [found]) == [found * found]

# one thread's results are another's items
passed = queue.Queue()
def produce():
    for start in range(5):
        for found in weft.map(square, range(start, start + 3)):
            passed.put(found)
    passed.put(None)

thread = threading.Thread(target=produce)
thread.start()
found = weft.map(square, iter(passed.get, None), n=2)
thread.join()
assert found == [x * x for start in range(5) for x in squares(start, 3)]

# a generator of a pool's results that nobody goes on with for a while
from weft._core.items import Job
from weft._api.mapping import make_pool
backend = make_pool("local", 1)
job = Job(backend.prepare(square), range(10), one_each=False)
results = backend.run(job)
first = next(results)
assert weft.map(square, range(5)) == squares(0, 5)
other = threading.Thread(target=lambda: done.append(weft.map(square, range(5))))
done = []
other.start()
other.join(30)
assert done == [squares(0, 5)]
rest = [first, *results]
assert sorted(value for chunk in rest for value in chunk.values) == squares(0, 10)
print("fine")
"""


def test_calls_within_calls_do_not_wait_for_themselves() -> None:
    """On one core: in the generator of the items, between two results, from thread to thread."""
    outcome = run_script(BEGIN + WITHIN)
    assert outcome.out == "fine\n", outcome


WAITING = """
gate = os.path.join(sys.argv[0] + ".gate")
def wait_for_gate(x):
    while not os.path.exists(gate):
        time.sleep(0.01)
    return x

holder = weft.map_async(wait_for_gate, range(CORES))
while len(descendants()) < CORES + 1:
    time.sleep(0.01)
try:
    weft.map(square, [1, 2], timeout=0.3)
except weft.Stalled as error:
    assert f"it waits for a worker: all {CORES} are used" in str(error), error
    assert "1 besides this one" in str(error), error
waiting = weft.map_async(square, [1, 2])
waiting.cancel()
assert waiting.status == "cancelled"

def press(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, press)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    weft.map(square, [1, 2])
    print("not interrupted")
except KeyboardInterrupt:
    pass
waiting = weft.map_async(square, [1, 2])
open(gate, "w").close()
assert holder.wait() == list(range(CORES))
assert waiting.wait() == [1, 4]
assert weft.map(square, range(9)) == squares(0, 9)
assert len(descendants()) == CORES + 1
os.remove(gate)
print("fine")
"""


def test_a_call_that_waits_for_a_worker() -> None:
    """It says so when its deadline comes; it can be cancelled and interrupted."""
    outcome = run_script(BEGIN + WAITING)
    assert outcome.out == "fine\n", outcome


IDLE = """
pool.IDLE = 0.3
assert weft.map(square, range(4), n=3) == squares(0, 4)
team = weft.Team(2)
total = weft.function(lambda x: sum(x), collect="sum", team=team)
assert total([1, 2, 3]) == 6
deadline = time.monotonic() + 30
while len(descendants()) > 2 and time.monotonic() < deadline:
    time.sleep(0.01)
assert len(descendants()) == 2, descendants()  # the fork server and the team's worker
assert total([1, 2, 3]) == 6
assert weft.map(square, range(4), n=3) == squares(0, 4)

# at the very moment when they end
pool._LENDABLE = 2.0
pool.IDLE = 0.02
for seed in range(60):
    assert weft.map(square, range(seed, seed + 6), n=2) == squares(seed, 6)
    time.sleep(0.018 + random.Random(seed).random() * 0.004)
def slow_items():
    for number in range(4):
        time.sleep(0.05)
        yield number
assert weft.map(square, slow_items(), n=2) == squares(0, 4)
assert weft.map_async(square, slow_items(), n=2).wait() == squares(0, 4)
print("fine")
"""


def test_workers_that_nobody_uses_end() -> None:
    """By themselves; those of a team stay. Work that comes too late is done by others."""
    outcome = run_script(BEGIN + IDLE)
    assert outcome.out == "fine\n", outcome


FUNCTIONS = """
import numpy
team = weft.Team(2, timeout=60.0)
doubled = weft.function(lambda x: x * 2, collect="gather", team=team)
summed = weft.function(lambda x: x.sum(), collect="sum", team=team)

def work(number):
    rows = numpy.arange(6.0) + number
    for _ in range(10):
        assert doubled(rows).tolist() == (rows * 2).tolist()
        assert summed(rows) == rows.sum()
        own = weft.function(lambda x: x + number, collect="gather", team=team)
        assert own(rows).tolist() == (rows + number).tolist()

in_threads(8, work)

# the default team is made once, by whoever is first
weft.shutdown()
first = weft.function(lambda x: x.sum(), collect="sum")
in_threads(8, lambda number: first(numpy.ones(4)))
assert len(descendants()) == CORES - 1 + 1

serial = weft.Team(engine="serial")
one = weft.function(slowly, collect=None, team=serial)
in_threads(8, lambda number: one(numpy.ones(1)))

# who waits too long is told for whom
impatient = weft.Team(2, timeout=3.0)
waits = weft.function(lambda x: x, collect="gather", team=impatient)
held, release = threading.Event(), threading.Event()
def hold(member):
    held.set()
    release.wait()
call = lambda: impatient.backend.call(hold, [(), None])
holder = threading.Thread(target=call, name="holder")
holder.start()
held.wait()
try:
    waits(numpy.zeros(2))
except weft.Stalled as error:
    assert "the thread 'holder' is still in the middle of a call of this team" in str(error)
    print("fine")
release.set()
holder.join()
assert waits(numpy.zeros(2)).tolist() == [0.0, 0.0]
"""


def test_functions_of_several_threads_take_turns() -> None:
    """Of one team, the default one, the serial one; in each thread with the right result."""
    outcome = run_script(BEGIN + FUNCTIONS)
    assert outcome.out == "fine\n", outcome


def test_ctrl_c_while_a_function_waits_for_its_turn() -> None:
    """The team is free when the other thread is done."""
    program = """
team = weft.Team(2)
held, release = threading.Event(), threading.Event()
def wait_here(member):
    held.set()
    release.wait()
holder = threading.Thread(target=lambda: team.backend.call(wait_here, [(), None]))
holder.start()
held.wait()
def press(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, press)
total = weft.function(lambda x: sum(x), collect="sum", team=team)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    total([1, 2, 3])
except KeyboardInterrupt:
    print("interrupted")
release.set()
holder.join()
print(total([1, 2, 3]))
"""
    outcome = run_script(BEGIN + program)
    assert outcome.out == "interrupted\n6\n", outcome
