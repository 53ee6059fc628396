"""Workers as their driver sees them: what they are told, and when they end."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import marked_processes, run_python, wait_until
from weft.engines.local.pool import workers as workers_module
from weft.engines.local.pool.driver_state import Captured, capture
from weft.engines.local.pool.messages import (
    CacheFunction,
    Done,
    DropFunction,
    Frames,
    Unreadable,
    Work,
)
from weft.engines.local.pool.payload import Payload, pack, pack_function
from weft.engines.local.pool.remote_worker import FUNCTION_BYTES, Worker
from weft.engines.local.pool.workers import Workers
from weft.engines.local.pool.workers import workers as own_workers
from weft.engines.local.processes.linux import readable
from weft.errors import LaunchError


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> list[CacheFunction]:
    """Every function that is sent from now on."""
    sent: list[CacheFunction] = []
    original = Worker.function_messages

    def function_messages(*arguments: Any) -> Any:
        messages = original(*arguments)
        sent.extend(one for one in messages if isinstance(one, CacheFunction))
        return messages

    monkeypatch.setattr(Worker, "function_messages", function_messages)
    return sent


@pytest.fixture
def worker() -> Iterator[Worker]:
    """A worker of which there is only this side."""
    ours, theirs = socket.socketpair()
    pidfd = os.dup(ours.fileno())
    made = Worker(0, os.getpid(), pidfd=pidfd, frames=Frames(ours), relays=[])
    yield made
    made.close()
    theirs.close()


def test_a_function_is_sent_once_to_each_worker(cached: list[CacheFunction]) -> None:
    """However many items and calls there are; a changed one is sent anew."""

    def adder(amount: Any) -> Any:
        return lambda x: x + amount

    function = adder(1)
    for _ in range(3):
        assert weft.map(function, range(100), n=1) == list(range(1, 101))
    assert len(cached) == 1
    distributed = weft.distribute(function, max_cpu=1)
    for _ in range(3):
        assert distributed([1, 2]) == [2, 3]
    assert len(cached) <= 2
    sent = len(cached)
    weft.map(adder(2), [1], n=1)
    assert len(cached) == sent + 1
    for _ in range(2):
        weft.map(partial(pow, 2), [1, 2], n=1)
    assert len(cached) == sent + 2
    assert all(len(message.function) < 2000 for message in cached)


def test_large_arrays_of_a_function_are_not_in_what_is_sent(cached: list[CacheFunction]) -> None:
    """What it closes over and its shared data are references, for as many workers as there are,
    and for those that come later."""
    large = np.ones((200, 1000))
    with weft.distribute(
        lambda x, data: x + large.sum() + data["a"].sum(), shared_data={"a": large}, max_cpu=2
    ) as distributed:
        assert distributed([1.0, 2.0]) == [400_001.0, 400_002.0]
        weft.shutdown()
        assert distributed([1.0, 2.0]) == [400_001.0, 400_002.0]
    assert cached
    assert all(len(message.function) < 4000 for message in cached)


def test_a_worker_keeps_some_functions(worker: Worker) -> None:
    """Of too many, those used least recently are forgotten, there and here."""

    def tell(number: int) -> list[Any]:
        return _give(worker, number)[:-1]

    for number in range(64):
        assert tell(number) == [CacheFunction(bytes([number]), b"function")]
    assert tell(0) == []
    assert tell(64) == [DropFunction(bytes([1])), CacheFunction(bytes([64]), b"function")]
    assert tell(1)[0] == DropFunction(bytes([2]))
    worker.forget(bytes([0]))
    worker.forget(bytes([99]))
    assert tell(5) == [DropFunction(bytes([0]))]
    assert tell(0) == [CacheFunction(bytes([0]), b"function")]


def test_a_worker_keeps_functions_of_a_megabyte_together(worker: Worker) -> None:
    """A larger one is alone there, and its memory is returned when it is dropped."""
    third = b"x" * (FUNCTION_BYTES // 3)
    for number in range(3):
        assert [type(one) for one in _give(worker, number, data=third)] == [CacheFunction, Work]
    assert _give(worker, 3, data=third)[0] == DropFunction(bytes([0]))
    dropped = _give(worker, 4, data=4 * third)[:-2]
    assert dropped == [DropFunction(bytes([number])) for number in (1, 2, 3)]
    assert _give(worker, 5)[0] == DropFunction(bytes([4]), large=True)


def test_a_function_is_sent_again_if_sending_it_was_interrupted(worker: Worker) -> None:
    """The worker would end with work whose function it does not know."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _give(worker, 0, interrupted)
    assert isinstance(_give(worker, 0)[0], CacheFunction)
    assert len(_give(worker, 0)) == 1


def test_a_function_is_dropped_if_sending_that_was_interrupted(worker: Worker) -> None:
    """Whether it was to be forgotten or made room, else it would stay in the worker for good."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in range(64):
        _give(worker, number)
    worker.forget(bytes([7]))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            _give(worker, 7, interrupted)
    assert _give(worker, 8)[0] == DropFunction(bytes([7]))
    assert [type(one) for one in _give(worker, 7)] == [CacheFunction, Work]
    with pytest.raises(KeyboardInterrupt):
        _give(worker, 64, interrupted)
    assert _give(worker, 64)[0] == DropFunction(bytes([0]))
    assert [type(one) for one in _give(worker, 64)] == [Work]


def test_a_team_keeps_warm_workers_while_it_starts_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long that takes; if it fails, they end when nobody has used them for a while."""
    pool = own_workers()
    monkeypatch.setattr(workers_module, "IDLE", 1.0)
    original, starts = Workers.start, list[bool]()

    def slow(self: Workers, gpu: str | None, check: Any) -> Worker:
        lent = [one.pidfd for one in pool._everyone if one not in pool._idle and one.pidfd >= 0]
        starts.append(any(readable(pidfd, 1.5) for pidfd in lent))
        if len(starts) == 1:
            raise LaunchError("no more")
        return original(self, gpu, check)

    weft.shutdown()
    weft.map(abs, [1], n=1)
    (first,) = pool._everyone
    monkeypatch.setattr(Workers, "start", slow)
    with pytest.raises(LaunchError, match="no more"):
        pool.lend_for_good([None, None], 1)
    assert readable(first.pidfd, 60)
    monkeypatch.setattr(Workers, "start", original)
    weft.map(abs, [1], n=1)
    monkeypatch.setattr(Workers, "start", slow)
    with weft.Team(3) as team:
        assert weft.function(lambda x: x, collect="gather", team=team)(np.ones(6)).sum() == 6
    assert not any(starts)


def _give(
    worker: Worker,
    number: int,
    send: Callable[..., None] | None = None,
    data: bytes = b"function",
) -> list[Any]:
    """Give it work with a function of that number; what was sent."""
    function, sent = Payload(), list[Any]()
    function.data, function.pickled, function.digest = data, len(data), bytes([number])
    work = Work(function.digest, 0, b"", None, keep_going=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.frames, "send", send or (lambda *messages: sent.extend(messages)))
        worker.give(function, work)
    return sent


def test_workers_are_warm_until_shutdown(tmp_path: Path) -> None:
    """The next call has the same ones; more are started when more are asked for; `shutdown` ends
    them all, and what started them."""

    numbers = itertools.count()

    def pids(n: int) -> set[int]:
        """All of so many workers: each has an item, and none ends before all have begun."""
        folder = tmp_path / str(next(numbers))
        folder.mkdir()

        def meet(_: int) -> int:
            (folder / str(os.getpid())).touch()
            wait_until(lambda: len(list(folder.iterdir())) == n)
            return os.getpid()

        return set(weft.map(meet, range(n), n=n))

    two = pids(2)
    assert len(two) == 2
    assert pids(2) == two
    assert pids(1) < two
    four = pids(4)
    assert four > two
    assert len(marked_processes()) == 5
    weft.shutdown()
    wait_until(lambda: not marked_processes())
    assert not any(Path(f"/proc/{pid}").exists() for pid in four)
    assert pids(1).isdisjoint(four)


def test_workers_share_nothing_with_each_other() -> None:
    """What a function changes in its process is seen by later items there, and nowhere else."""

    def count(_: int) -> tuple[int, int]:
        os.environ["COUNT"] = str(int(os.environ.get("COUNT", "0")) + 1)
        return os.getpid(), int(os.environ["COUNT"])

    found = weft.map(count, range(10), n=2)
    for pid in {pid for pid, _ in found}:
        counts = [number for one, number in found if one == pid]
        assert counts == list(range(1, len(counts) + 1))
    assert "COUNT" not in os.environ
    assert weft.map(lambda _: os.read(0, 10), [1], n=1) == [b""]


def test_a_working_folder_that_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map from within it is refused and says what to do; elsewhere the same workers go on."""
    pid = weft.map(lambda _: os.getpid(), [0], n=1)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(LaunchError, match=r"(?s)has been deleted.*   os.chdir\(folder\)"):
        weft.map(abs, [-1], n=1)
    monkeypatch.chdir(tmp_path)
    assert weft.map(lambda _: os.getcwd(), [0], n=1) == [str(tmp_path)]
    assert weft.map(lambda _: os.getpid(), [0], n=1) == pid


def test_a_folder_that_a_worker_cannot_enter(tmp_path: Path) -> None:
    """It computes in no other one: every call is answered by an error that names the folder, until
    the driver has changed to one that can be entered."""
    gone = tmp_path / "gone"
    workers = own_workers()
    (worker,), _ = workers.lend_for_good([None], 1)
    function, items = pack_function(abs), pack([-1], 0)
    work = Work(function.digest, 0, items.data, None, keep_going=False)
    state = capture().state

    def answer() -> Any:
        worker.give(function, work)
        return wait_until(worker.receive)

    worker.bring_up_to_date(Captured(state._replace(folder=str(gone))), {})
    told = answer()
    assert isinstance(told, Unreadable)
    assert told.about_function
    assert told.failure.kind == "LaunchError"
    assert (
        f"cannot enter the driver's working folder '{gone}' (No such file" in told.failure.message
    )
    assert "os.chdir(folder)" in told.failure.message
    worker.bring_up_to_date(Captured(state._replace(folder=str(tmp_path))), {})
    assert isinstance(answer(), Done)
    worker.close()


#: what a worker does with memory, and what it and its children see in their environment
MEMORY = """
import ctypes, os, resource, subprocess, sys
import weft

def faults(_):
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def take_and_free():
        pieces = [libc.malloc(1 << 20) for _ in range(20)]
        for piece in pieces:
            ctypes.memset(piece, 1, 1 << 20)
        for piece in reversed(pieces):
            libc.free(piece)

    take_and_free()
    take_and_free()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    take_and_free()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def variables(_):
    program = "import os; print(sorted(name for name in os.environ if 'MALLOC' in name))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    return sorted(name for name in os.environ if "MALLOC" in name), eval(out)

print(weft.map(faults, [0], n=1)[0], weft.map(variables, [0], n=1)[0])
"""


@pytest.mark.parametrize(
    ("environment", "keeps", "seen"),
    [
        ({}, True, []),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False, ["MALLOC_TRIM_THRESHOLD_"]),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, False, []),
    ],
)
def test_what_a_worker_frees_is_there_for_its_next_call(
    environment: dict[str, str], keeps: bool, seen: list[str]
) -> None:
    """Without a page fault for each of 5,000 pages, unless the user has set glibc's variables; the
    function and what it starts see those of the user only."""
    faults, variables = run_python(MEMORY, env=environment).out.split(maxsplit=1)
    assert (int(faults) < 500) == keeps
    assert variables.strip() == str((seen, seen))


def test_a_forked_child_has_workers_of_its_own() -> None:
    """A function that was distributed before the fork works in both, with different workers."""
    distributed = weft.distribute(lambda _: os.getpid(), max_cpu=1)
    (before,) = distributed([0])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(distributed([0])[0]).encode())
            weft.shutdown()
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read) as file:
        found = int(file.read())
    assert found not in (before, os.getpid(), child)
    assert distributed([0]) == [before]


def test_threads_that_map_first_share_one_fork_server() -> None:
    """However many come at the same moment."""
    outcome = run_python(
        """
import os, threading
import weft
together = threading.Barrier(8)

def go():
    together.wait()
    assert weft.map(abs, [-1, -2], n=2) == [1, 2]

threads = [threading.Thread(target=go) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
def is_fork_server(pid):
    parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
    return int(parent) == os.getpid() and "fork_server" in open(f"/proc/{pid}/cmdline").read()

servers = 0
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        servers += is_fork_server(pid)
    except OSError:
        pass  # it has ended
print(servers)
"""
    )
    assert outcome.out.strip() == "1", outcome


def test_a_prestarted_fork_server_that_was_killed_is_replaced() -> None:
    """The first map does not fail for what happened before it."""
    outcome = run_python(
        """
import weft
from weft.engines import registry
registry.prestart(None)
from weft.engines.local.pool import interpreter
process = interpreter._ready[0][1]
process.kill()
process.wait()
print(weft.map(abs, [-1, -2]))
"""
    )
    assert outcome.out.strip() == "[1, 2]", outcome
