"""Tables in memory that every rank reads and writes itself: whole rows, no lost adds, overlap."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import HANGS, await_state, run_python, run_ranks, wait_until, within
from weft._core import updaters
from weft.errors import Disagreement, Stalled, UsageError

#: columns of a row: wide enough that it is not written at once
WIDE = 64
#: rows of a table of one stripe, and of one of three
ONE_STRIPE, THREE_STRIPES = 200, 50_000


@pytest.mark.parametrize("rows", [ONE_STRIPE, THREE_STRIPES])
def test_no_reader_sees_a_row_half_written(rows: int) -> None:
    """While two ranks add to all rows and to some, two read all and some: the elements of a row are
    always alike, and never go back."""

    def body(group: Any, rows: int) -> int:
        table = weft.MatrixTable(rows, WIDE, dtype="int64")
        assert len(table._store._rows.stripes) == (1 if rows == ONE_STRIPE else 6), table  # type: ignore
        whole = np.ones((rows, WIDE), np.int64)
        generator = np.random.default_rng(group.rank)
        group.barrier()
        end = time.monotonic() + 1
        rounds = torn = 0
        latest = np.zeros(rows, np.int64)
        while time.monotonic() < end or rounds < 2:
            rounds += 1
            ids = generator.integers(rows, size=50)
            if group.rank < 2:
                table.add(whole)
                table.add(whole[:50], ids)
                continue
            for named in (ids, None):
                got = table.get(named)
                seen = latest if named is None else latest[named]
                torn += int((got != got[:, :1]).any() or (got[:, 0] < seen).any())
                latest[slice(None) if named is None else named] = got[:, 0]
        group.barrier()
        return torn

    assert run_ranks(4, body, rows) == [0] * 4


def test_no_add_is_lost() -> None:
    """Four ranks, each with two threads and async calls besides, add whole tables, rows and rows
    named several times: every one of them is in the sum."""

    def body(group: Any, exact: bool, rows: int) -> tuple[bool, float]:
        table = weft.MatrixTable(rows, 4, dtype="int64", exact=exact)
        expected = np.zeros((rows, 4), np.int64)
        whole = np.ones((rows, 4), np.int64)
        mine = threading.Lock()
        group.barrier()

        def work(number: int) -> None:
            generator = np.random.default_rng([group.rank, number])
            handles = []
            for turn in range(24):
                ids = generator.integers(rows, size=20)
                ids[5:8] = ids[0]
                delta = generator.integers(10, size=(20, 4))
                with mine:
                    expected[...] += 1
                    np.add.at(expected, ids, delta)
                if turn % 2:
                    table.add(whole)
                    table.add(delta, ids)
                else:
                    handles += [table.add_async(whole), table.add_async(delta, ids)]
            for handle in handles:
                handle.wait()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total = group.all_reduce(expected)
        result = table.get()
        return bool((result == total).all()), float(result.sum() / total.sum())

    def all_tables(group: Any) -> list[tuple[bool, float]]:
        return [body(group, True, 300), body(group, True, 150_000), body(group, False, 300)]

    for small, large, (_, share) in run_ranks(4, all_tables):
        assert small == large == (True, 1.0)
        assert 0.25 <= share <= 1.0  # at least what one rank alone has added; never more than all


def test_calls_of_one_rank_take_effect_in_order() -> None:
    """Async and blocking calls, mixed: a get sees exactly what was added before it."""

    def body(group: Any) -> list[int]:
        table = weft.ArrayTable(1_000_000, dtype="int64")
        one = np.ones(1_000_000, np.int64)
        seen = []
        for _ in range(3):
            table.add_async(one)
            early = table.get_async()
            table.add_async(one)
            table.add(one, range(1_000_000))
            seen += [early.wait(), table.get()]
        assert all((got == got[0]).all() for got in seen)
        return [int(got[0]) for got in seen]

    assert run_ranks(1, body) == [[1, 3, 4, 6, 7, 9]]


@pytest.mark.alone
def test_async_adds_overlap_with_the_callers_work() -> None:
    """While 40 MB are added, NumPy computes on: together they take less than one after the other,
    or as little less as with a plain thread, where others use the cores too."""

    def body(group: Any) -> tuple[list[float], list[float]]:
        table = weft.ArrayTable(10_000_000)
        own, delta = np.zeros(10_000_000, np.float32), np.ones(10_000_000, np.float32)
        work = np.random.default_rng(0).random(400_000)
        table.add(delta)

        def compute() -> None:
            for _ in range(6):
                np.sin(work, out=work)  # lets other threads run, and needs little memory

        def add() -> None:
            for _ in range(3):
                np.add(own, delta, out=own)

        def apart() -> None:
            for _ in range(3):
                table.add(delta)
            compute()

        def beside() -> None:
            handles = [table.add_async(delta) for _ in range(3)]
            compute()
            for handle in handles:
                handle.wait()

        def in_a_thread() -> None:
            thread = threading.Thread(target=add)
            thread.start()
            compute()
            thread.join()

        def seconds(work: Callable[[], None]) -> float:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began

        times = [(seconds(apart), seconds(beside), seconds(in_a_thread)) for _ in range(7)]
        return [b / a for a, b, _ in times], [c / a for a, _, c in times]

    for _ in range(4):
        [(beside, in_a_thread)] = run_ranks(1, body)
        if statistics.median(beside) < max(0.8, statistics.median(in_a_thread) + 0.1):
            return
    pytest.fail(f"no overlap: {beside}, where a thread has {in_a_thread}")


def test_a_table_is_in_memory_once_and_goes_with_its_last_user() -> None:
    """100 MB with as much state cost four ranks 200 MB together; whoever drops it, even who made
    it, leaves it to the others, and when all have, it is gone."""

    def body(group: Any) -> list[float]:
        def shared_megabytes() -> float:
            group.barrier()
            with open("/proc/self/smaps_rollup") as file:
                lines = {line.split(":")[0]: line for line in file}
            return float(group.all_reduce(int(lines["Pss_Shmem"].split()[1]) / 1024))

        before = shared_megabytes()
        table = weft.ArrayTable(25 << 20, updater="momentum")
        if group.rank == 3:
            table.add(np.ones(25 << 20, np.float32))
        amounts = [shared_megabytes() - before]
        if group.rank == 0:  # who made the memory
            del table
        amounts.append(shared_megabytes() - before)
        if group.rank > 0:
            table.add([1, 1], rows=[5, 25 << 19])
            assert table.get([0, 25 << 19]).all()
            group.split(0)
            del table
        else:
            group.split(None)
        end = time.monotonic() + HANGS / 2
        while (after := shared_megabytes() - before) > 10 and time.monotonic() < end:
            pass
        return [*amounts, after]

    for used, left, after in run_ranks(4, body):
        assert 200 <= used < 210
        assert 200 <= left < 210
        assert after < 10


def test_ranks_must_keep_the_same_state() -> None:
    """Updaters of one name with different state would lay out the memory differently."""

    def body(group: Any) -> str:
        names = ["a"] if group.rank else ["a", "b"]
        rule = updaters.custom(lambda rows, state, delta: None, state=names, name="mine")
        with pytest.raises(Disagreement) as caught:
            weft.ArrayTable(8, updater=rule)
        return str(caught.value)

    for text in run_ranks(2, body):
        assert "state=['a']" in text
        assert "state=['a', 'b']" in text


@pytest.mark.parametrize("call", ["get", "add"])
@pytest.mark.parametrize("consistency", ["async", "bsp"])
def test_an_updater_cannot_use_its_own_table(consistency: str, call: str) -> None:
    """It would wait for itself; instead it is told."""
    weft.init(engine="local", timeout=5)

    def rule(rows: Any, state: Any, delta: Any) -> None:
        if call == "get":
            table.get()
        else:
            table.add([1, 1])

    def use() -> None:
        table.add([1, 1])
        table.get()  # under bsp the add is applied now

    table = weft.ArrayTable(2, updater=rule, consistency=consistency)
    with pytest.raises(UsageError, match="thread"):
        use()


def test_a_forked_child_cannot_use_the_table() -> None:
    """Not even by async calls, whose thread is the parent's."""
    outcome = run_python(
        """
import os, sys
import weft
from weft.errors import UsedAfterFork

weft.init(engine="local")
table = weft.ArrayTable(3)
table.add_async([1, 1, 1]).wait()  # its thread still waits for more
if (child := os.fork()) == 0:
    for call in (table.get, table.get_async, lambda: table.add_async([1, 2, 3])):
        try:
            result = call()
            result.wait(5)
        except UsedAfterFork as error:
            print(error.args[0].partition(" belongs")[0], flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(table.get_async().wait())
"""
    )
    assert outcome.out == "table 'table 1'\n" * 3 + "[1. 1. 1.]\n", outcome


def test_threads_share_a_bsp_table() -> None:
    """A get of one thread and adds of another, on two ranks: a get never sees half a clock."""

    def body(group: Any) -> int:
        table = weft.MatrixTable(20_000, 8, dtype="int64", consistency="bsp")
        whole = np.ones((20_000, 8), np.int64)
        torn = 0
        done = threading.Event()

        def read() -> None:
            nonlocal torn
            while not done.is_set():
                got = table.get()
                torn += bool((got != got[0, 0]).any())

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(60):
            table.add(whole)
        done.set()
        reader.join()
        group.barrier()
        assert (table.get() == 120).all()
        return torn

    assert run_ranks(2, body) == [0, 0]


@pytest.mark.alone
def test_a_deadline_holds_for_all_stripes_together() -> None:
    """Waiting for one stripe after the other, a reader does not begin to count anew at each."""

    def body(group: Any) -> float:
        table = weft.ArrayTable(6_000_000)  # of five stripes
        locks = table._store._rows.stripes  # type: ignore[attr-defined]
        assert len(locks) == 5
        stalled = Path(os.environ["WEFT_TEST_FOLDER"]) / "stalled"
        group.barrier()
        if group.rank:
            with ExitStack() as held:
                for lock in reversed(locks):  # let go from the first on, the last when all is over
                    if lock is locks[-2]:
                        held.callback(wait_until, stalled.exists)
                    else:
                        held.callback(time.sleep, 0.25)
                    held.enter_context(lock.exclusive())
                group.barrier()
            group.barrier()
            return 0.0
        group.barrier()
        began = time.monotonic()
        with pytest.raises(Stalled) as caught:
            table.get(timeout=0.5)
        seconds = time.monotonic() - began
        stalled.touch()
        assert caught.value.ranks == (1,)
        group.barrier()
        return seconds

    # if it began anew, it would wait for 0.25 s three times before the 0.5 s of the last
    assert 0.5 <= run_ranks(2, body)[0] < within(1.0)


@pytest.mark.alone
def test_a_whole_add_that_has_begun_goes_on() -> None:
    """An add of its own deadline that meets a held stripe half way waits for it all the same; if it
    has to give up at the group's deadline, the error says how much was added."""

    def body(group: Any) -> Any:
        usual, group.timeout = group.timeout, 3.0
        table = weft.ArrayTable(4_000_000)  # which has this deadline
        group.timeout = usual
        last = table._store._rows.stripes[-1]  # type: ignore[attr-defined]
        told = Path(os.environ["WEFT_TEST_FOLDER"]) / "told"
        seen = []
        for holds_on in (False, True):
            group.barrier()
            if group.rank == 1:
                with last.exclusive():
                    group.barrier()
                    if holds_on:
                        wait_until(told.exists)
                    else:  # until its own deadline is over while it waits
                        await_state(group, 0, lambda s: s.operation.startswith("waiting for"))
                        time.sleep(0.3)
            else:
                group.barrier()
                try:
                    table.add(np.ones(4_000_000), timeout=0.1)
                    seen.append("added")
                except Stalled as error:
                    seen.append(error.message)
                    told.touch()
            group.barrier()
        return seen, table.get()[[0, -1]].tolist()

    (added, stalled), ends = run_ranks(2, body)[0]
    assert added == "added"
    assert "held by rank 1; table 'table 1' has got 2 of 3 parts of the delta" in stalled
    assert ends == [2.0, 1.0]
