"""How the items of a map are cut into chunks, where some prove longer than was expected."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import within
from weft._core.schedule import MOST_BYTES
from weft.engines.local.pool.payload import Payload

#: seconds of a long item, where time is measured
LONG = 0.3


def meet(item: tuple[Path, int, int] | None) -> bool:
    """Whether so many items, each of which waits for the others, run at the same time."""
    import time

    if item is None:
        return True
    folder, index, number = item
    (folder / str(index)).touch()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if len(list(folder.iterdir())) == number:
            return True
        time.sleep(0.001)
    return False


def run_short_ones(n: int) -> None:
    """Have it known that items are short."""
    assert all(weft.map(meet, [None] * 100, n=n))


def all_meet(folder: Path, number: int) -> bool:
    """Whether so many items come to as many workers."""
    folder.mkdir()
    return all(weft.map(meet, [(folder, index, number) for index in range(number)], n=number))


def test_items_that_were_always_short_and_now_are_not(tmp_path: Path) -> None:
    """Each of two workers has one of two items, however short they were."""
    run_short_ones(2)
    assert all_meet(tmp_path / "met", 2)


def sleep_or_meet(item: float | tuple[Path, int, int] | None) -> bool:
    import time

    if isinstance(item, float):
        time.sleep(item)
        return True
    return meet(item)


def test_what_a_worker_has_not_begun_runs_elsewhere(tmp_path: Path) -> None:
    """Two items that wait for each other come in one chunk, after one that takes long."""
    weft.map(sleep_or_meet, [None] * 100, n=2)
    (tmp_path / "met").mkdir()
    both = [(tmp_path / "met", index, 2) for index in range(2)]
    assert all(weft.map(sleep_or_meet, [0.05, *both, None, 0.05, None, None, None], n=2))


def test_as_many_items_as_workers_run_side_by_side(tmp_path: Path) -> None:
    """Four items come to four workers."""
    run_short_ones(4)
    assert all_meet(tmp_path / "met", 4)


def sleep(seconds: float) -> float:
    import time

    if seconds:
        time.sleep(seconds)
    return seconds


@pytest.mark.alone
@pytest.mark.parametrize("short", [20, 1000])
def test_long_items_after_many_short_ones(short: int) -> None:
    """Of the long ones each worker gets half: who has several gives them back."""
    items = [0.0] * short + [LONG / 2] * 8
    weft.map(sleep, [0.0] * 100, n=2)
    began = time.perf_counter()
    assert weft.map(sleep, items, n=2) == items
    assert time.perf_counter() - began < within(1.3 * sum(items) / 2)


def write_and_sleep(item: tuple[Path, float]) -> str:
    import time

    path, seconds = item
    with path.open("a") as file:
        file.write("x")
    time.sleep(seconds)
    return path.name


def test_every_item_is_begun_once(tmp_path: Path) -> None:
    """Short and long ones mixed, more workers than cores."""
    paths = [tmp_path / str(index) for index in range(300)]
    for _ in range(5):
        weft.map(write_and_sleep, [(tmp_path / "before", 0.0)] * 50, n=3)
        items = [(path, 0.004 * (index % 4 == 3)) for index, path in enumerate(paths)]
        assert weft.map(write_and_sleep, items, n=3) == [path.name for path in paths]
        assert [path.stat().st_size for path in paths] == [1] * 300
        for path in paths:
            path.unlink()


def die_once(folder: Path, item: tuple[int, float]) -> int:
    import time

    index, seconds = item
    time.sleep(seconds)
    marker = folder / "died"
    if index == 0 and seconds and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return index


def test_a_worker_dies_in_an_item_that_proves_long(tmp_path: Path) -> None:
    """It is run again, or named as lost; the others of its chunk are run."""
    function = partial(die_once, tmp_path)
    weft.map(function, [(1, 0.0)] * 50, n=2)
    items = [(index, 0.1) for index in range(6)]
    assert weft.map(function, items, n=2, retries=1) == list(range(6))
    (tmp_path / "died").unlink()
    weft.map(function, [(1, 0.0)] * 50, n=2)
    with pytest.raises(weft.WorkerLost) as caught:
        weft.map(function, items, n=2)
    assert caught.value.item == 0


def first_number(array: Any) -> float:
    return float(array[0])


def test_large_arrays_of_a_function_that_had_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short its items were, no more than a few megabytes are copied for one worker."""
    weft.map(first_number, [np.zeros(3)] * 100, n=2)
    sizes: list[int] = []
    original = Payload.release

    def release(packed: Payload) -> None:
        sizes.append(packed.shared)
        original(packed)

    monkeypatch.setattr(Payload, "release", release)
    arrays = [np.full(1 << 17, float(index)) for index in range(20)]  # 1 MB each
    assert weft.map(first_number, arrays, n=2) == list(map(float, range(20)))
    assert 0 < max(sizes) <= MOST_BYTES


def print_and_sleep(seconds: float) -> float:
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print("at work", flush=True)
        time.sleep(0.001)
    return seconds


@pytest.mark.alone
def test_a_worker_that_prints_all_the_time(capfd: pytest.CaptureFixture[str]) -> None:
    """The other worker gets its items all the same."""
    weft.map(print_and_sleep, [0.0] * 100, n=2)
    began = time.perf_counter()
    weft.map(print_and_sleep, [LONG] * 4, n=2)
    assert time.perf_counter() - began < within(3.5 * LONG)
    assert "at work" in capfd.readouterr().out
