"""Workers that are hurt at every fault point: the driver of a map gets the right results, or is
told whom it lost and how, and nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import deadline, run_python
from weft import faults

#: what a worker passes on its way through a chunk, if its items and results are large arrays
POINTS = [point for point in faults.POINTS if point.startswith("work")] + [
    "share.attach",
    "share.attached",
]
#: how it may end, and the code that is told of
ENDS = {"kill": -signal.SIGKILL, "segv": -signal.SIGSEGV, "exit=7": 7, "raise": 1}
#: how it ends at each point in `make test`; the rest is left to `make soak`
IN_MAKE_TEST = {point: list(ENDS)[number % 3] for number, point in enumerate(POINTS)}
IN_MAKE_TEST["work.done"] = "raise"

Hurt = Callable[[str], None]


@pytest.fixture
def hurt(monkeypatch: pytest.MonkeyPatch) -> Hurt:
    """Has something happen to the workers that are started from now on."""
    return lambda fault: monkeypatch.setenv(faults.VARIABLE, fault)


def arrays(count: int) -> list[Any]:
    return [np.full(1 << 14, float(index)) for index in range(count)]


def check(results: list[Any]) -> None:
    for index, result in enumerate(results):
        assert result.shape == (1 << 14,)
        assert np.all(result == 2.0 * index)


def cases() -> list[Any]:
    return [
        pytest.param(point, end, marks=() if IN_MAKE_TEST[point] == end else pytest.mark.soak)
        for point in POINTS
        for end in ENDS
        if point.startswith("work") or end != "raise"  # the others raise in items' own unpickling
    ]


@pytest.mark.parametrize(("point", "end"), cases())
def test_a_worker_that_ends_is_told_of(point: str, end: str, hurt: Hurt) -> None:
    """WorkerLost names the item, the worker and how it ended, wherever it does."""
    hurt(f"{point}:0:{end}")
    if point in ("worker.started", "worker.cached"):  # it had nothing yet
        check(weft.map(lambda x: x * 2, arrays(3), n=1))
        return
    if point == "work.replied":  # the results may have come, or not
        results = weft.map(lambda x: x * 2, arrays(3), n=1, on_error="return")
        lost = [one for one in results if isinstance(one, weft.WorkerLost)]
        assert len(lost) <= 1
        assert all(one.loss.code == ENDS[end] for one in lost)
        return
    with pytest.raises(weft.WorkerLost) as caught:
        weft.map(lambda x: x * 2, arrays(3), n=1)
    loss = caught.value.loss
    assert (loss.item, loss.worker, loss.code) == (0, 0, ENDS[end])
    assert loss.memory > 1 << 20
    assert not loss.out_of_memory


@pytest.mark.parametrize(("point", "end"), cases())
def test_a_worker_that_ends_is_replaced(point: str, end: str, hurt: Hurt) -> None:
    """With retries= the results are right, and the workers are as many as before."""
    hurt(f"{point}:0:{end}")
    check(weft.map(lambda x: x * 2, arrays(12), n=2, retries=1))
    check(weft.map(lambda x: x * 2, arrays(12), n=2))


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_that_is_late_is_waited_for(point: str, hurt: Hurt) -> None:
    """Nothing is lost, whatever comes late."""
    hurt(f"{point}:0:delay=0.2")
    check(weft.map(lambda x: x * 2, arrays(6), n=2))


#: a driver whose worker is stopped. Nothing is known of the function: each item is sent by itself
STOPPED = r"""
import numpy as np, re, sys, weft
arrays = [np.full(1 << 14, float(index)) for index in range(2)]
try:
    weft.map(lambda x: x * 2, arrays, n=1, timeout=float(sys.argv[1]))
except weft.Stalled as error:
    if re.search(r"worker 0 \(pid \d+\) has item (0|1)", str(error)):
        print("told")
    else:
        raise
"""


def test_a_worker_that_is_stopped() -> None:
    """The deadline holds, also while the memory of results is attached, and says who has what. The
    worker has to start before it: all drivers wait at the same time."""
    seconds = str(deadline(5))
    with ThreadPoolExecutor(len(POINTS)) as pool:
        outcomes = pool.map(
            lambda point: run_python(STOPPED, seconds, env={faults.VARIABLE: f"{point}:0:stop"}),
            POINTS,
        )
        for point, outcome in zip(POINTS, outcomes, strict=True):
            assert outcome.out == "told\n", f"{point}: {outcome}"


@pytest.mark.parametrize("end", ENDS)
def test_workers_that_all_end_at_once(end: str, hurt: Hurt) -> None:
    """Each item is told of; there is no endless starting of workers."""
    hurt(f"worker.started:*:{end}")
    results = weft.map(abs, [1, 2, 3], n=2, retries=1, on_error="return")
    assert [type(one) for one in results] == [weft.WorkerLost] * 3
    assert [one.loss.code for one in results] == [ENDS[end]] * 3
