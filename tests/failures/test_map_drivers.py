"""Maps whose fork server or driver is hurt in the middle, and workers that are killed at random."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import weft
from tests.failures.test_map import once
from tests.support import (
    HANGS,
    marked_processes,
    run_python,
    take_terminal,
    wait_until,
    within,
    write_script,
)
from weft.engines.local.pool import workers
from weft.engines.local.processes.linux import readable


def _fork_server() -> subprocess.Popen[bytes]:
    process = workers.workers()._process
    assert process is not None
    return process


def test_a_fork_server_that_is_killed_between_two_maps() -> None:
    """The next map starts another."""
    assert weft.map(abs, [-1], n=2) == [1]
    _fork_server().kill()
    wait_until(lambda: all(readable(one.pidfd) for one in workers.workers()._idle))
    assert weft.map(abs, [-1, -2, -3], n=2) == [1, 2, 3]


def test_a_fork_server_that_is_killed_in_the_middle(tmp_path: Path) -> None:
    """Its workers go with it, and their children; the items are run again from another."""
    weft.map(abs, [1], n=2)
    server = _fork_server().pid
    first = once(tmp_path)

    def kill_server(x: int) -> int:
        if x == 2 and first("server"):
            subprocess.Popen(["sleep", "60"])
            os.kill(server, signal.SIGKILL)
            threading.Event().wait()
        return x

    began = time.monotonic()
    assert weft.map(kill_server, range(6), n=2, retries=2) == list(range(6))
    assert time.monotonic() - began < within(5.0)
    with pytest.raises(weft.WorkerLost, match="cause unknown"):
        weft.map(lambda _: os.kill(os.getppid(), signal.SIGKILL) or time.sleep(9), [0], n=1)


AT_A_TERMINAL = """
import weft

def ask(_):
    with open("/dev/tty") as terminal:
        return terminal.readline()

try:
    weft.map(ask, [1], n=1)
except OSError as error:
    print("refused:", error.strerror)
"""


def test_a_function_that_asks_at_the_terminal() -> None:
    """There is none for it: a process in the background that reads from its terminal is stopped,
    and its map would hang."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(write_script(AT_A_TERMINAL))],
        stdin=theirs,
        stdout=subprocess.PIPE,
        preexec_fn=take_terminal,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=HANGS)
    finally:
        process.kill()
        os.close(ours)
        os.close(theirs)
    assert output == "refused: No such device or address\n"


def test_a_fork_server_that_is_stopped_is_ended() -> None:
    """Shutdown does not wait for it for ever."""
    weft.map(abs, [1], n=2)
    os.kill(_fork_server().pid, signal.SIGSTOP)
    began = time.monotonic()
    weft.shutdown()
    assert time.monotonic() - began < within(5.0)
    assert not marked_processes()


def test_a_function_made_before_shutdown_is_ended_by_the_next() -> None:
    """Workers that start after a shutdown belong to the next one."""
    function = weft.distribute(abs)
    assert function([-1]) == [1]
    weft.shutdown()
    assert not marked_processes()
    assert function([-2]) == [2]
    weft.shutdown()
    assert not marked_processes()


# the driver

DRIVER = """
import os, sys, time
import numpy as np
import weft

def work(x):
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    time.sleep(60)

import sys
weft.map(work, [np.ones(1 << 17)] * 4, n=2)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program in the middle of a map: both workers compute."""
    folder = tmp_path / "running"
    folder.mkdir()
    script = DRIVER.replace("sys.argv[1]", repr(str(folder)))
    with subprocess.Popen(
        [sys.executable, str(write_script(script))], stderr=subprocess.PIPE
    ) as process:
        wait_until(lambda: len(list(folder.iterdir())) == 2)
        yield process
        process.kill()


def test_a_driver_that_is_killed(driver: subprocess.Popen[bytes]) -> None:
    """Within two seconds there is no process left of it."""
    assert len(marked_processes()) == 4
    driver.kill()
    driver.wait()
    wait_until(lambda: not marked_processes(), seconds=2.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_driver_that_is_ended(driver: subprocess.Popen[bytes], number: int) -> None:
    """The same for signals that end it without a word."""
    driver.send_signal(number)
    driver.wait()
    wait_until(lambda: not marked_processes(), seconds=2.0)


@pytest.mark.alone
def test_ctrl_c(driver: subprocess.Popen[bytes]) -> None:
    """The program ends within a second, with one traceback, and leaves nothing."""
    began = time.monotonic()
    driver.send_signal(signal.SIGINT)
    _, err = driver.communicate(timeout=HANGS)
    assert time.monotonic() - began < within(1.0)
    assert not marked_processes()
    assert driver.returncode == -signal.SIGINT
    assert err.count(b"Traceback") == 1, err.decode()
    assert err.endswith(b"KeyboardInterrupt\n")


def test_ctrl_c_several_times() -> None:
    """Functions that swallow interrupts, and users that press again: nothing goes on."""
    outcome = run_python(
        """
import signal, time, weft

pressed, inside = 0, True

def press(*_):
    global pressed
    if inside and pressed < 3:
        pressed += 1
        raise KeyboardInterrupt

def items():
    yield 1
    signal.signal(signal.SIGALRM, press)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.01)
    yield 2

def deaf(x):
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass

try:
    try:
        weft.map(deaf, items(), n=2)
    except KeyboardInterrupt:
        inside = False
except KeyboardInterrupt:
    inside = False
signal.setitimer(signal.ITIMER_REAL, 0)
print(pressed, weft.map(abs, [-1, -2], n=2))
"""
    )
    assert outcome.code == 0, outcome
    assert outcome.out.endswith("[1, 2]\n"), outcome
    assert outcome.out.startswith(("2", "3")), outcome


INTERRUPTED = """
import contextlib, os, random, signal, sys, time
import numpy as np
import weft

inside = False

def press(*_):
    if inside:
        raise KeyboardInterrupt

def double(x):
    return x * 2

def count_pipes():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # a thread may have closed it since
            found += os.readlink(f"/proc/self/fd/{name}").startswith("pipe:")
    return found

signal.signal(signal.SIGALRM, press)
rng = random.Random(int(sys.argv[1]))
items = [np.full(1 << 14, float(index)) for index in range(8)]
weft.map(double, items, n=2)
began = time.monotonic()
for _ in range(5):
    weft.map(double, items, n=2)
usual = (time.monotonic() - began) / 5
pipes, interrupts, longest = count_pipes(), 0, 0.0
end = time.monotonic() + 60
while interrupts < int(sys.argv[2]) and time.monotonic() < end:  # some maps end before it strikes
    signal.setitimer(signal.ITIMER_REAL, 0.0001 + rng.random() * rng.choice([1, 3]) * usual)
    began = time.monotonic()
    try:
        try:
            inside = True
            weft.map(double, items, n=2)
        finally:
            inside = False
    except KeyboardInterrupt:
        inside = False
        interrupts += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    longest = max(longest, time.monotonic() - began)
    for index, result in enumerate(weft.map(double, items, n=2)):
        assert np.all(result == 2.0 * index)
del result
assert count_pipes() == pipes, (count_pipes(), pipes)
print(interrupts, longest)
"""


@pytest.mark.parametrize(
    ("seed", "interrupts"),
    [(1, 12), *(pytest.param(s, 100, marks=pytest.mark.soak) for s in (2, 3))],
)
def test_interrupts_at_random(seed: int, interrupts: int) -> None:
    """Wherever a handler raises in the driver, the next map is right, and has all that it needs."""
    outcome = run_python(INTERRUPTED, str(seed), str(interrupts))
    assert outcome.code == 0, outcome
    struck, longest = outcome.out.split()
    assert int(struck) == interrupts
    assert float(longest) < within(5.0)


def test_exit_in_the_middle_of_a_map_async() -> None:
    """A program that ends takes its map along, also one that waits for its next item."""
    outcome = run_python(
        """
import queue, time, weft
slow = weft.map_async(lambda x: time.sleep(60), range(4), n=2)
items = queue.Queue()
waiting = weft.map_async(abs, iter(items.get, None), n=1)
items.put(-1)
print(next(waiting.results()))
"""
    )
    assert (outcome.code, outcome.out, outcome.err) == (0, "(0, 1)\n", "")
    assert not marked_processes()


def test_a_forked_child_of_a_driver() -> None:
    """It has workers of its own; those of its parent, and its maps, it leaves alone."""
    outcome = run_python(
        """
import os, sys, time, weft
from weft.errors import UsedAfterFork
function = weft.distribute(abs, max_cpu=2)
assert function([-1]) == [1]
handle = weft.map_async(lambda x: time.sleep(0.5) or x, [1, 2], n=2)

def items():
    yield 1
    if os.fork() == 0:
        try:
            handle.wait()
        except UsedAfterFork:
            print(function([-3]), flush=True)
        sys.exit()  # through the parent's map
    os.wait()
    yield 2

print(weft.map(lambda x: x, items(), n=1), handle.wait(), function([-2]))
"""
    )
    assert (outcome.code, outcome.out) == (0, "[3]\n[1, 2] [1, 2] [2]\n"), outcome


@pytest.mark.parametrize("redirection", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_driver_without_outputs(redirection: str, tmp_path: Path) -> None:
    """Programs whose outputs are closed from the start work."""
    script = write_script(
        f"import weft\nresults = weft.map(lambda x: print(x) or -x, [1, 2])\n"
        f"open({str(tmp_path / 'results')!r}, 'w').write(str(results))"
    )
    line = f"exec {sys.executable} {script} {redirection}"
    assert subprocess.run(line, shell=True, timeout=HANGS).returncode == 0
    assert (tmp_path / "results").read_text() == "[-1, -2]"


def test_few_descriptors() -> None:
    """However few are left: the results are right, or the error says what is missing."""
    outcome = run_python(
        """
import os, resource, weft
from weft.errors import LaunchError, OutOfDescriptors
weft.map(abs, [1], n=1)
weft.shutdown()
used = max(map(int, os.listdir("/proc/self/fd")))
for spare in range(0, 16, 2):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, 4096))
    try:
        assert weft.map(abs, [-1, -2, -3], n=3) == [1, 2, 3]
        print("fine")
    except OutOfDescriptors as error:
        assert "ulimit -n" in str(error)
        print("missing")
    except LaunchError as error:
        print("missing")
    weft.shutdown()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    left = max(map(int, os.listdir("/proc/self/fd")))
    assert left <= used + 1, (left, used)
assert weft.map(abs, [-1, -2, -3], n=3) == [1, 2, 3]
"""
    )
    assert outcome.code == 0, outcome
    assert "missing" in outcome.out


# at random

RETRIES = 50


@pytest.mark.parametrize(
    ("seed", "kills"),
    [(1, 15), (2, 15), *(pytest.param(s, 100, marks=pytest.mark.soak) for s in range(10, 30))],
)
def test_workers_killed_at_random(seed: int, kills: int) -> None:
    """With retries the results are right, whichever worker is killed and when."""
    rng = random.Random(seed)
    ends = 0
    while ends < kills:
        stop = threading.Event()
        count = [0]
        killer = threading.Thread(target=_kill_some, args=(rng, stop, count))
        killer.start()
        try:
            items = [np.full(rng.choice([10, 1 << 14]), float(index)) for index in range(60)]
            results = weft.map(lambda x: (time.sleep(0.005), x * 2)[1], items, n=3, retries=RETRIES)
        finally:
            stop.set()
            killer.join()
        assert all(np.all(one == 2.0 * index) for index, one in enumerate(results))
        assert [len(one) for one in results] == [len(one) for one in items]
        ends += count[0]


def _kill_some(rng: random.Random, stop: threading.Event, count: list[int]) -> None:
    """Kill workers, seldom the fork server, until told to stop, or until one more could be one too
    many: on a busy machine workers die faster than they start."""
    while count[0] < RETRIES and not stop.wait(rng.random() * 0.1):
        server = workers.workers()._process
        if server is None:
            continue
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        with contextlib.suppress(OSError, IndexError):
            victim = rng.choice(children.read_text().split())
            os.kill(server.pid if rng.random() < 0.05 else int(victim), signal.SIGKILL)
            count[0] += 1
