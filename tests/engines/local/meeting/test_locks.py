"""Locks between processes and threads that survive their holder."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.locking import MAKE_LOCK, make_lock
from tests.support import HANGS, await_state, launch, run_ranks, within
from weft.engines.local.group import LocalGroup
from weft.errors import Stalled, UsageError


@pytest.mark.parametrize("threads", [1, 3])
def test_exclusive_excludes_everybody(threads: int) -> None:
    """A counter without atomics, raised under the lock by processes and threads, is exact."""

    def body(group: LocalGroup, threads: int) -> int:
        from weft.engines.local.memory import blocks
        from weft.engines.local.memory.segment import BlockHandle

        lock = make_lock(group)
        path = os.environ["WEFT_TEST_FOLDER"] + "/reference"
        if group.rank == 0:
            block = blocks.allocate(64)
            block.words[0] = 0
            with open(path, "wb") as file:
                file.write(blocks.export(block.buffer).encode())
        group.barrier()
        with open(path, "rb") as file:
            block = blocks.attach(BlockHandle.decode(file.read()))
        group.barrier()

        def work() -> None:
            for _ in range(300):
                with lock.exclusive():
                    value = block.words[0]
                    if value % 7 == 0:
                        time.sleep(0)  # let others in, if the lock does
                    block.words[0] = value + 1

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        group.barrier()
        return int(block.words[0])

    assert run_ranks(3, body, threads) == [900 * threads] * 3


def test_readers_share_and_writers_wait_for_them() -> None:
    """All ranks hold the lock shared at once; a writer gets in only when the last has left."""

    def body(group: LocalGroup) -> tuple[float, float]:
        lock = make_lock(group)
        with lock.shared():
            group.barrier()  # would never return if readers excluded each other
            if group.rank == 1:  # the writer waits already
                await_state(group, 0, lambda state: state.operation.startswith("waiting for"))
            left = time.monotonic()
        if group.rank != 0:
            return left, 0.0
        with lock.exclusive():
            return left, time.monotonic()

    results = run_ranks(3, body)
    assert results[0][1] >= max(left for left, _ in results)


def test_a_writer_is_not_starved_by_readers() -> None:
    """Readers that come and go without pause do not keep a writer out."""

    def body(group: LocalGroup) -> int:
        lock = make_lock(group)
        over = Path(os.environ["WEFT_TEST_FOLDER"]) / "over"
        taken = 0
        group.barrier()
        if group.rank == 0:
            for _ in range(20):
                with lock.exclusive(timeout=HANGS / 4):
                    taken += 1
            over.touch()
        while not over.exists():
            with lock.shared():
                time.sleep(0.001)
        return taken

    assert run_ranks(3, body) == [20, 0, 0]


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_the_death_of_a_holder_is_told_to_the_next(mode: str) -> None:
    """Killed in exclusive mode: the next holders, shared and exclusive, learn who it was, once.
    Killed in shared mode: nobody is held up, and there is nothing to tell."""
    outcome = launch(
        MAKE_LOCK
        + f"""
import os, signal, time, weft
group = weft.init()
lock = make_lock(group)
group.barrier()
if group.rank == 1:
    with lock.{mode}():
        os.kill(os.getpid(), signal.SIGKILL)
while True:
    try:
        group.barrier()
    except weft.PeerLost:
        break
group = group.survivors()
news = []
for rank in range(group.size):
    if group.rank == rank:
        with lock.shared() as died:
            news.append(died)
        with lock.exclusive() as died:
            news.append(died)
        with lock.exclusive() as died:
            news.append(died)
    group.barrier()
print(news)
""",
        3,
        options=("--keep-going", "--no-prefix"),
    )
    told = "[1, 1, None]" if mode == "exclusive" else "[None, None, None]"
    assert sorted(outcome.out.splitlines()) == sorted([told, "[None, None, None]"]), outcome


def test_a_wait_with_a_deadline_says_who_holds_it() -> None:
    """Stalled names the holder in exclusive mode, and the reader that a writer waits for."""

    def body(group: LocalGroup) -> list[Any]:
        lock = make_lock(group)
        found = []
        for mode in (lock.exclusive, lock.shared):
            group.barrier()
            if group.rank == 1:
                with mode():
                    group.barrier()
                    group.barrier()
            else:
                group.barrier()
                began = time.monotonic()
                try:
                    with lock.exclusive(timeout=0.2):
                        found.append("taken")
                except Stalled as error:
                    found.append((error.ranks, time.monotonic() - began))
                    assert error.states[0].operation.startswith("waiting for"), error
                group.barrier()
        group.barrier()
        with lock.exclusive(timeout=HANGS / 4):
            return found

    for ranks, waited in run_ranks(2, body)[0]:
        assert ranks == (1,)
        assert 0.2 <= waited < within(1.0)


def test_misuse_is_an_error_and_not_a_deadlock() -> None:
    """Taking the lock again in the same thread raises; afterwards it works as before."""
    group = weft.init(engine="local")
    assert isinstance(group, LocalGroup)
    lock = make_lock(group)
    for again in (lock.exclusive, lock.shared):
        with lock.exclusive(), pytest.raises(UsageError, match="holds the lock already"), again():
            pass
        with lock.exclusive(timeout=0):
            pass


def test_ctrl_c_while_waiting_or_holding() -> None:
    """KeyboardInterrupt leaves the lock as if it had not been taken."""
    group = weft.init(engine="local")
    assert isinstance(group, LocalGroup)
    lock = make_lock(group)
    release, held = threading.Event(), threading.Event()

    def hold() -> None:
        with lock.exclusive():
            held.set()
            release.wait(HANGS)

    def press() -> None:
        await_state(group, 0, lambda state: state.operation.startswith("waiting for"))
        os.kill(os.getpid(), signal.SIGINT)

    threads = [threading.Thread(target=hold), threading.Thread(target=press)]
    threads[0].start()
    held.wait(HANGS)
    threads[1].start()
    with pytest.raises(KeyboardInterrupt), lock.exclusive():
        pass
    release.set()
    for thread in threads:
        thread.join()
    with pytest.raises(KeyboardInterrupt), lock.exclusive():
        raise KeyboardInterrupt
    with lock.exclusive(timeout=HANGS / 4), pytest.raises(Stalled):
        _in_thread(lambda: lock.exclusive(timeout=0.05).__enter__())


def _in_thread(call: Any) -> None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in caught:
        raise error
