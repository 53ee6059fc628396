"""Arrays of a call that a worker sees without a word to their owner, and those that it keeps."""

from __future__ import annotations

import builtins
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import run_script, wait_until
from weft.engines.local.memory import blocks
from weft.engines.local.memory.segment import Segment, new_name

ARRAYS = [np.full(50_000, float(number)) for number in range(8)]


def count_references(array: np.ndarray[Any, Any]) -> tuple[float, int, int]:
    """In a worker: what it has been given, and how many blocks it has told their owner of."""
    client = blocks._here.client
    return float(array.sum()), len(client._remote_references), len(client._borrowed)


def test_only_the_first_array_of_a_segment_is_asked_for() -> None:
    """The next ones lie in memory that is mapped already, and are of use until the answer."""
    found = [weft.map(count_references, [array], n=1)[0] for array in ARRAYS]
    assert [one[0] for one in found] == [array.sum() for array in ARRAYS]
    assert found[0][1:] == (1, 0)
    assert {one[1:] for one in found[1:]} == {(0, 1)}


def keep(array: np.ndarray[Any, Any]) -> None:
    vars(builtins).setdefault("weft_kept", []).append(array)


def keep_a_view(array: np.ndarray[Any, Any]) -> None:
    keep(array[10:20])


def keep_in_a_thread(array: np.ndarray[Any, Any]) -> None:
    """A thread that outlives the call has it."""

    def hold(own: np.ndarray[Any, Any]) -> None:
        asked.wait()
        keep(own[-1:].copy())

    asked = threading.Event()
    thread = threading.Thread(target=hold, args=(array,), daemon=True)
    thread.start()
    vars(builtins).setdefault("weft_asked", []).append((asked, thread))


def keep_and_fail(array: np.ndarray[Any, Any]) -> None:
    keep(array)
    raise ValueError("after that")


def kept(_: Any) -> list[float]:
    for asked, thread in vars(builtins).get("weft_asked", []):
        asked.set()
        thread.join()
    return [float(array[-1]) for array in vars(builtins)["weft_kept"]]


def kept_references(_: Any) -> int:
    vars(builtins)["weft_kept"].clear()
    return len(blocks._here.client._remote_references)


@pytest.mark.parametrize("how", [keep, keep_a_view, keep_in_a_thread, keep_and_fail])
def test_what_a_function_keeps_stays_as_it_is(how: Callable[..., None]) -> None:
    """Whatever else comes into that memory later: its owner was told before the answer."""
    weft.shutdown()
    for array in ARRAYS:
        weft.map(how, [array], n=1, on_error="return")
        weft.map(count_references, [np.full(50_000, -1.0)], n=1)
    assert weft.map(kept, [None], n=1) == [[float(number) for number in range(8)]]


def test_what_is_kept_no_longer_is_given_back() -> None:
    """The references end with the arrays."""
    weft.shutdown()
    for array in ARRAYS:
        weft.map(keep, [array], n=1)
    assert weft.map(count_references, [ARRAYS[0]], n=1)[0][1] == len(ARRAYS)
    assert weft.map(kept_references, [None], n=1) == [0]


def test_arrays_of_a_function_of_a_team() -> None:
    """Rows of a plain array, given again and again, are right however often."""

    def rows(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        x += 1  # its own
        return x * 2

    with weft.Team(2) as team:
        function = weft.function(rows, collect="gather", team=team)
        for number in range(10):
            x = np.full((1000, 100), float(number))
            np.testing.assert_array_equal(function(x.copy()), (x + 1) * 2)


def large(_: Any) -> np.ndarray[Any, Any]:
    return np.ones(50_000)


def keep_and_map(array: np.ndarray[Any, Any]) -> None:
    """Results of a map of its own come from owners that the worker had nothing from before."""
    keep(array)
    weft.map(large, [0, 1], n=2)


def test_a_function_that_gets_arrays_from_others_too() -> None:
    """The one that it has borrowed from is not hung up on for them."""
    weft.shutdown()
    for array in ARRAYS[:3]:
        weft.map(count_references, [array], n=1)
        weft.map(keep_and_map, [array], n=1)
    weft.map(count_references, [np.full(50_000, -1.0)], n=1)
    assert weft.map(kept, [None], n=1) == [[0.0, 1.0, 2.0]]


def fork_and_die(item: tuple[np.ndarray[Any, Any], str]) -> None:
    """The worker ends at once, and leaves a child that has its array."""
    array, path = item
    if os.fork() == 0:
        os.setsid()  # out of the reach of who ends the worker's own group
        Path(path).with_suffix(".born").touch()
        wait_until(Path(path).with_suffix(".go").exists)
        Path(path).write_text(str(set(array.tolist())))
        array[:] = -7
        Path(path).with_suffix(".done").touch()
        os._exit(0)
    wait_until(Path(path).with_suffix(".born").exists)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_child_that_outlives_the_worker(tmp_path: Path) -> None:
    """Neither does it see what comes into that memory later, nor does anybody see its own."""
    weft.shutdown()
    weft.map(count_references, [ARRAYS[1]], n=1)
    file = tmp_path / "seen"
    with pytest.raises(weft.WorkerLost):
        weft.map(fork_and_die, [(np.full(50_000, 5.0), str(file))], n=1)
    shared = [weft.share(np.full(50_000, 9.0)) for _ in range(4)]
    file.with_suffix(".go").touch()
    wait_until(file.with_suffix(".done").exists)
    assert file.read_text() == "{5.0}"
    assert {float(one[0]) for one in shared} == {9.0}


def test_what_an_interrupted_finalizer_left_is_done_before_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that is interrupted as it drops an array, and then has nothing to do, does not keep
    the array's memory from its owner until its next call."""
    segment, calls = Segment.create(4096), []

    def dropped() -> None:
        calls.append("dropped")
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "unraisablehook", lambda _: calls.append("interrupted"))
    block = blocks._here.mapped.open(new_name(), segment, 0, 4096, dropped)
    del block
    assert calls == ["dropped", "interrupted"]
    for _ in range(2):
        blocks.retain_borrowed()
        assert calls == ["dropped", "interrupted", "dropped"]


ENDED_OWNERS = """
import os, signal
import numpy as np, weft

def large(number):
    return os.getpid(), np.full(200_000, number)

def connections():
    folder = "/proc/self/fd"
    paths = [path for fd in os.listdir(folder) if os.path.lexists(path := f"{folder}/{fd}")]
    names = map(os.readlink, paths)
    return sum(name.startswith(("socket:", "anon_inode:[pidfd]")) for name in names)

counts = []
for _ in range(6):
    pids = {pid for pid, _ in weft.map(large, range(4), n=2)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        pass
    counts.append(connections())
assert counts[-1] < counts[1] + 8, counts  # four more in each round if none is closed
"""


def test_connections_to_owners_that_have_ended_are_closed() -> None:
    """Though their memory is still mapped, for others to use it again."""
    outcome = run_script(ENDED_OWNERS)
    assert outcome.code == 0, outcome
