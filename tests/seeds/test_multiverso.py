"""The session part of Multiverso's tutorial, with its imports as written."""

from __future__ import annotations

from tests.support import launch, run_python

TUTORIAL = """
import multiverso as mv
mv.init()
print(mv.workers_num())
print(mv.worker_id())
print(mv.is_master_worker())
assert mv.num_workers() == mv.workers_num() and mv.server_id() == mv.worker_id()
if mv.is_master_worker():
    mv.barrier()
else:
    mv.barrier()
mv.shutdown()
"""


def test_as_a_single_process() -> None:
    """One process is worker 0 of 1."""
    assert run_python(TUTORIAL).out == "1\n0\nTrue\n"


def test_with_two_workers() -> None:
    """Each worker knows its number; worker 0 is the master."""
    outcome = launch(TUTORIAL, 2)
    assert sorted(outcome.out.splitlines()) == [
        "[0] 0",
        "[0] 2",
        "[0] True",
        "[1] 1",
        "[1] 2",
        "[1] False",
    ]
