"""Forked children: what they inherit stays theirs, what is the parent's stays the parent's."""

from __future__ import annotations

from pathlib import Path

from tests.locking import MAKE_LOCK
from tests.support import launch, run_python, run_script


def test_memory_that_a_child_sees_is_not_reused() -> None:
    """The parent drops its array and shares others: the child still reads what it inherited, and
    when the child has ended the memory is free again."""
    outcome = run_python(
        """
import multiprocessing, os, time, numpy as np, weft
from weft.engines.local.memory import blocks

def read(array, go, answer):
    go.wait()
    answer.put(float(array.sum()))

context = multiprocessing.get_context("fork")
go, answer = context.Event(), context.Queue()
child = context.Process(target=read, args=(weft.share(np.full(1000, 7.0)), go, answer))
child.start()
others = [weft.share(np.zeros(1000)) for _ in range(50)]
go.set()
print(answer.get(timeout=20))
child.join()
answer.close(); answer.join_thread()
del others
weft.share(np.zeros(10))
server = blocks._here.server
print(len(server._entries), len(server._children))
"""
    )
    assert outcome.out in ("7000.0\n0 0\n", "7000.0\n1 0\n"), outcome


def test_attached_memory_that_a_child_sees_is_not_reused() -> None:
    """The same for an array that the parent had from another process."""
    outcome = run_python(
        """
import os, pickle, subprocess, sys, numpy as np, weft
OWNER = '''
import pickle, sys, weft, numpy as np
first = weft.share(np.full(1000, 7.0))
sys.stdout.buffer.write(pickle.dumps(first)); sys.stdout.flush()
del first
sys.stdin.buffer.readline()
others = [weft.share(np.zeros(1000)) for _ in range(50)]
print("shared", flush=True)
sys.stdin.buffer.readline()
'''
owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=-1, stdout=-1)
array = pickle.load(owner.stdout)
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.read(read, 1)
    os._exit(0 if array.sum() == 7000 else 1)
del array
owner.stdin.write(b"go\\n"); owner.stdin.flush()
assert owner.stdout.readline() == b"shared\\n"
os.write(write, b"x")
print("exit code", os.waitpid(child, 0)[1])
owner.communicate(b"end\\n")
"""
    )
    assert outcome.out == "exit code 0\n", outcome


def test_a_child_that_unwinds_does_not_release_the_parents_lock() -> None:
    """A child forked inside `with lock...` leaves the block; the parent still holds the lock."""
    outcome = launch(
        MAKE_LOCK
        + """
import os, weft
from weft.errors import Stalled
group = weft.init()
lock = make_lock(group)
for mode in (lock.shared, lock.exclusive):
    group.barrier()
    if group.rank == 0:
        with mode():
            child = os.fork()
            if child == 0:
                raise SystemExit
            os.waitpid(child, 0)
            group.barrier()
            group.barrier()
    else:
        group.barrier()
        try:
            with lock.exclusive(timeout=0.2):
                print("taken")
        except Stalled as error:
            print("held by", error.ranks)
        group.barrier()
""",
        2,
        options=("--no-prefix",),
    )
    assert outcome.out == "held by (0,)\n" * 2, outcome


def test_locks_in_a_child_and_after_shutdown() -> None:
    """A lock says that it cannot be used, as its group does."""
    outcome = launch(
        MAKE_LOCK
        + """
import os, weft
group = weft.init()
lock = make_lock(group)

def attempt():
    try:
        with lock.exclusive():
            return "taken"
    except weft.WeftError as error:
        return type(error).__name__

if os.fork() == 0:
    print(attempt(), flush=True)
    os._exit(0)
os.wait()
weft.shutdown()
print(attempt())
""",
        1,
        options=("--no-prefix",),
    )
    assert outcome.out == "UsedAfterFork\nNotInitialized\n", outcome


def test_a_child_does_not_keep_workers_alive(tmp_path: Path) -> None:
    """Forked while a map uses a worker, it outlives the team that has the worker next: that ends
    when the team is closed."""
    outcome = run_script(
        f"""
import os, threading, time, weft
from pathlib import Path
from weft.engines.local.pool.workers import workers

go = Path({str(tmp_path)!r}) / "go"

def wait(_):
    while not go.exists():
        time.sleep(0.01)

def alive(worker):
    return Path(f"/proc/{{worker.pid}}").exists()

thread = threading.Thread(target=lambda: weft.map(wait, [1], n=1), daemon=True)
thread.start()
while not any(worker.busy for worker in workers()._everyone):
    time.sleep(0.01)
read, write = os.pipe()
child = os.fork()
if child == 0:
    os.close(write)
    os.read(read, 1)  # until the parent ends
    os._exit(0)
end = time.monotonic() + 60
while len(os.listdir(f"/proc/{{child}}/fd")) > len(os.listdir("/proc/self/fd")) - 6:
    assert time.monotonic() < end  # a connection, a pidfd, two outputs; the server's, a pipe's
go.touch()
thread.join()
team = weft.Team(2)
(worker,) = team.backend._team_workers.workers
print(worker in workers()._everyone, alive(worker))
team.close()
end = time.monotonic() + 60
while alive(worker) and time.monotonic() < end:
    time.sleep(0.01)
print(alive(worker))
"""
    )
    assert outcome.out == "True True\nFalse\n", outcome
