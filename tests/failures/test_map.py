"""Maps whose workers die in the middle, functions that do harm, and memory that runs out."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import marked_processes, wait_until, within
from weft.engines.local.memory import blocks
from weft.engines.local.pool import workers
from weft.engines.local.processes.linux import oom_kills


def once(folder: Path) -> Callable[[object], bool]:
    """A function that says True the first time that any process asks it about something."""

    def first(what: object) -> bool:
        try:
            os.close(os.open(folder / f"once{what}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    return first


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)


# what is told


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_lost_worker_is_named(number: int) -> None:
    """The message has item, worker, signal, memory, and what to do."""
    with pytest.raises(weft.WorkerLost) as caught:
        weft.map(lambda x: end_by(number) if x == 3 else x, range(5), n=1)
    loss = caught.value.loss
    assert (caught.value.item, loss.item, loss.code) == (3, 3, -number)
    assert loss.host == os.uname().nodename
    text = str(caught.value)
    assert f"worker 0 (pid {loss.pid}) was killed by {signal.Signals(number).name}" in text
    assert "while it ran item 3" in text
    assert " MB of memory" in text
    assert "retries=1" in text


def test_an_exit_code_is_named() -> None:
    """A function that ends its process is told from one that is killed."""
    with pytest.raises(weft.WorkerLost, match=r"ended with exit code 5 while it ran item 0"):
        weft.map(lambda _: os._exit(5), [1], n=1)


def test_losses_in_the_place_of_results() -> None:
    """on_error='return': the other items have their results, also those of the same chunk."""
    results = weft.map(
        lambda x: end_by(signal.SIGKILL) if x in (30, 77) else x, range(100), on_error="return", n=2
    )
    lost = {index for index, one in enumerate(results) if isinstance(one, weft.WorkerLost)}
    assert lost == {30, 77}
    assert all(results[index].item == index for index in lost)
    assert [one for index, one in enumerate(results) if index not in lost] == [
        index for index in range(100) if index not in lost
    ]


def test_retries_are_counted(tmp_path: Path) -> None:
    """An item is run retries + 1 times and no more; the error says so."""

    def note_and_end(_: int) -> None:
        with open(tmp_path / "runs", "a") as file:
            file.write("x")
        end_by(signal.SIGKILL)

    with pytest.raises(weft.WorkerLost, match=r"for the 3\. time"):
        weft.map(note_and_end, [0], n=2, retries=2)
    assert (tmp_path / "runs").read_text() == "xxx"


def test_items_whose_unpickling_ends_the_worker() -> None:
    """The item is named, though its function was never called."""

    class Deadly:
        def __reduce__(self) -> tuple[Any, ...]:
            return os._exit, (9,)

    results = weft.map(lambda x: 1, [1, Deadly(), 2], n=1, on_error="return")
    assert results[::2] == [1, 1]
    assert results[1].loss.code == 9


def test_arrays_of_the_function_outlive_the_first_worker(tmp_path: Path) -> None:
    """A function that closes over a large array is sent to workers that come later, too."""
    first, large = once(tmp_path), np.ones(1 << 17)

    def total(x: int) -> float:
        if x % 5 == 0 and first(x):
            end_by(signal.SIGKILL)
        return float(large.sum()) + x

    assert weft.map(total, range(20), n=1, retries=1) == [float(1 << 17) + x for x in range(20)]


# functions that do harm


def test_functions_that_fork() -> None:
    """A child that leaves the function, in whichever way, neither replies nor goes on."""

    def fork(x: int) -> tuple[int, int]:
        child = os.fork()
        if child == 0 and x % 3 == 0:
            sys.exit(4)
        if child == 0 and x % 3 == 1:
            return -1, -1
        if child == 0:
            raise SystemExit
        return x, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    codes = {0: 4, 1: 0, 2: 0}
    assert weft.map(fork, range(30), n=2) == [(x, codes[x % 3]) for x in range(30)]


def test_an_exception_in_a_forked_child_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """It is nobody's failure, but is not silent."""

    def fork(_: int) -> int:
        child = os.fork()
        if child == 0:
            raise ValueError("in the child")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert weft.map(fork, [1], n=1) == [1]
    weft.shutdown()
    assert "ValueError: in the child" in capfd.readouterr().err


def test_functions_that_close_things() -> None:
    """Without its outputs a worker goes on; without its connection it is lost, at once."""

    def without_outputs(x: int) -> int:
        sys.stdout.close()
        sys.stderr = None  # type: ignore[assignment]
        os.close(1)
        os.close(2)
        return x

    assert weft.map(without_outputs, range(3), n=3) == [0, 1, 2]

    def without_connection(_: int) -> None:
        os.closerange(3, 100)
        threading.Event().wait()

    with pytest.raises(weft.WorkerLost, match="item 0"):
        weft.map(without_connection, [0], n=1)

    with pytest.raises(weft.WorkerLost, match="item 0"):
        weft.map(lambda _: os.execlp("sleep", "sleep", "60"), [0], n=1)


def test_a_closed_output_keeps_nobody_busy() -> None:
    """A pipe at its end is always ready to be read; the driver sleeps all the same."""

    def close_and_compute(x: int) -> int:
        os.close(1)
        os.close(2)
        time.sleep(0.5)
        return x

    before = time.thread_time()
    assert weft.map(close_and_compute, [1, 2], n=2) == [1, 2]
    assert time.thread_time() - before < within(0.25)


def test_a_worker_that_prints_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps neither the others' results nor the deadline waiting."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())

    def shout(x: int) -> int:
        while x == 0:
            os.write(1, b"noise " * 1000 + b"\n")
        return x

    weft.map(abs, [1, 2], n=2)  # until they have started nobody has an item
    with pytest.raises(weft.Stalled, match="has item 0"):
        weft.map(shout, [0, 1, 2], n=2, timeout=within(0.5))


def test_output_in_another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver's stream cannot write is escaped, not lost."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    weft.map(lambda x: print("caf\u00e9"), [1], n=1)
    assert stream.buffer.getvalue() == b"caf\\xe9\n"  # type: ignore[attr-defined]


def test_a_worker_that_is_interrupted_by_somebody_else() -> None:
    """KeyboardInterrupt is the item's failure, as in serial, but does not end the driver."""
    results = weft.map(
        lambda x: end_by(signal.SIGINT) if x == 2 else x, range(4), n=2, on_error="return"
    )
    assert isinstance(results[2], weft.RemoteError)
    assert "KeyboardInterrupt" in str(results[2])
    assert [*results[:2], results[3]] == [0, 1, 3]


def test_results_that_cannot_be_unpickled() -> None:
    """They fail, and are named; what else was in their chunk is kept."""

    class TwoArguments(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(first)

    results = weft.map(
        lambda x: TwoArguments("a", "b") if x == 40 else x, range(80), n=2, on_error="return"
    )
    assert isinstance(results[40], weft.InvalidType)
    assert "the result of item 40" in str(results[40])
    assert "TwoArguments.__init__" in str(results[40])
    assert [one for one in results if isinstance(one, int)] == [x for x in range(80) if x != 40]


def test_what_a_function_started_ends_with_its_worker() -> None:
    """Processes of a worker that was killed are ended, by the fork server."""

    def start_and_end(_: int) -> None:
        subprocess.Popen(["sleep", "60"])
        end_by(signal.SIGKILL)

    with pytest.raises(weft.WorkerLost):
        weft.map(start_and_end, [0], n=1)
    weft.shutdown()
    wait_until(lambda: not marked_processes(), seconds=2.0)


def test_a_served_worker_that_dies_is_not_given_back() -> None:
    """With one call per worker, a worker may end when it has had its own."""

    def end_later(_: None) -> int:
        threading.Timer(0.05, os._exit, [0]).start()
        time.sleep(0.3 * (os.getpid() % 2))
        return os.getpid()

    with weft.distribute(end_later, max_cpu=2) as function:
        for _ in range(3):
            with contextlib.suppress(weft.WorkerLost):
                function(None)
    assert weft.map(abs, [-1], n=2) == [1]


# memory


def test_a_function_without_memory_raises_memory_error() -> None:
    """Too little address space is the item's MemoryError, and the worker goes on."""

    def take(x: int) -> int:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 32, resource.RLIM_INFINITY))
        return len(bytes(x))

    results = weft.map(take, [10, 1 << 33, 20], n=1, on_error="return")
    assert results[::2] == [10, 20]
    assert isinstance(results[1], MemoryError)


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 200 MB, where this process may make one."""
    root = Path("/sys/fs/cgroup")
    version_1 = root / "memory"
    folder = (version_1 if version_1.is_dir() else root) / f"weft-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if version_1.is_dir() else "memory.max"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (folder / limit).write_text(str(200 << 20))
        except OSError as error:
            pytest.skip(f"memory is not limited by this cgroup: {error}")
        yield folder
    finally:
        weft.shutdown()
        wait_until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


@pytest.mark.alone  # the kernel counts such kills for the whole machine, and errors tell of them
def test_the_kernel_kills_for_want_of_memory(small_cgroup: Path) -> None:
    """WorkerLost says that it was the OOM killer, and of a later kill that it was not."""
    if not Path("/proc/vmstat").exists() or "oom_kill" not in Path("/proc/vmstat").read_text():
        pytest.skip("this kernel does not count its kills")
    entry = str(small_cgroup / "cgroup.procs")

    def take(x: int) -> int:
        if x == 1:
            Path(entry).write_text(str(os.getpid()))
            Path("/proc/self/oom_score_adj").write_text("1000")
            return len(b"x" * (400 << 20))
        if x == 2:
            end_by(signal.SIGKILL)
        return x

    before = oom_kills()
    results = weft.map(take, range(4), n=1, on_error="return")
    assert results[::3] == [0, 3]
    if oom_kills() == before:
        pytest.skip("the kernel here counts no kills, or did not need to")
    assert results[1].loss.out_of_memory
    assert "for want of memory" in str(results[1])
    assert results[1].loss.memory > 100 << 20
    assert results[2].loss.code == -signal.SIGKILL
    assert not results[2].loss.out_of_memory


def kept_blocks() -> int:
    return len(blocks._here.server._entries)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_memory_that_nobody_attaches_is_given_back(number: int) -> None:
    """Items that were on their way to a worker that is no more are not held for ever."""
    before = kept_blocks()
    weft.map(abs, [1], n=1)
    victim = workers.workers()._idle[0].pid
    with contextlib.suppress(weft.WorkerLost, weft.Stalled):
        items = (_hurt(victim, number, np.ones(1 << 17)) for _ in range(1))
        weft.map(np.sum, items, n=1, timeout=0.3)
    wait_until(lambda: kept_blocks() == before)


def _hurt(pid: int, number: int, item: Any) -> Any:
    os.kill(pid, number)
    return item


def test_a_map_that_ends_while_a_worker_loads_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process goes on with a module half loaded: the next map has it loaded by another."""
    loaded, go_on = tmp_path / "loaded", tmp_path / "go on"
    code = f"""
import os, time
with open({str(loaded)!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
while not os.path.exists({str(go_on)!r}):
    time.sleep(0.005)
"""
    (tmp_path / "slow_to_load.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(_: int) -> int:
        import slow_to_load  # type: ignore[import-not-found]  # written above

        return int(slow_to_load.os.getpid())

    first = weft.map_async(load, [0], n=1)
    wait_until(loaded.exists)
    first.cancel()
    go_on.touch()
    [pid] = weft.map(load, [0], n=1)
    pids = [int(line) for line in loaded.read_text().split()]
    assert pids[-1] == pid
    assert len(set(pids)) == len(pids) == 2
