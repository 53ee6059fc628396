"""All fault points again, for ranks that are late or stopped there."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.failures.test_points import LATE, POINTS, Job, cases, check, size_in_make_test, sizes_of
from tests.support import deadline, marked_processes, wait_until

#: seconds, on an idle machine, in which a job comes to any point, and in which it ends if a rank
#: does not go on: all wait for it at the same time
DEADLINE = 3.0


@pytest.mark.parametrize(("point", "size", "actions"), cases(2))
def test_one_rank_is_late(point: str, size: int, actions: tuple[str, ...], tmp_path: Path) -> None:
    """A rank that is late at any point, within the deadline, is waited for."""
    (delay,) = actions
    with Job(point, delay, size, tmp_path, timeout=20) as job:
        check([job])


@pytest.mark.parametrize("rest", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_rank_is_stopped(size: int, rest: bool, tmp_path: Path) -> None:
    """One that is stopped never hangs or confuses the others. These jobs do little but wait for
    deadlines: each starts when the rank of the one before has stopped, so that no two are busy at
    once."""
    timeout = deadline(DEADLINE)
    with contextlib.ExitStack() as stack:
        jobs = []
        for point in (point for point in POINTS if size in sizes_of(point)):
            if rest == (size_in_make_test(point, kind=3) == size):
                continue
            before = _stopped()
            job = stack.enter_context(Job(point, "stop", size, tmp_path / point, timeout=timeout))
            jobs.append(job)
            wait_until(lambda job=job, before=before: _stopped() - before or job.has_ended())
            if point in LATE:
                for pid in _stopped() - before:
                    os.kill(pid, signal.SIGCONT)
        check(jobs)


def _stopped() -> set[int]:
    return {pid for pid, text in marked_processes().items() if text.startswith("T")}
