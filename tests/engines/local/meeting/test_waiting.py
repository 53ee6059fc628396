"""Waiting that blocks in the kernel, notices deaths and deadlines, and loses no wake-up."""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import AWAIT_STATE, launch, run_ranks, wait_until, within
from weft.engines.local.group import LocalGroup
from weft.errors import Stalled

pytestmark = pytest.mark.alone


def stalled() -> Path:
    """A file that rank 0 makes when it has waited in vain."""
    return Path(os.environ["WEFT_TEST_FOLDER"]) / "stalled"


def test_a_waiting_rank_sleeps() -> None:
    """Waiting costs under 2 % of a core."""

    def body(group: LocalGroup) -> float:
        group.barrier()
        if group.rank == 0:
            time.sleep(2.0)
        before = time.process_time()
        group.barrier()
        return (time.process_time() - before) / 2.0

    assert run_ranks(2, body)[1] < within(0.02)


def test_barriers_in_all_speeds() -> None:
    """Ranks that come at once, or after any pause around the change from spinning to sleeping,
    all pass every barrier, without waiting for a slice to end."""

    def body(group: LocalGroup) -> float:
        began = time.monotonic()
        for step in range(400):
            if step % 2 == group.rank:
                end = time.perf_counter() + (step % 40) * 10e-6
                while time.perf_counter() < end:
                    pass
            group.barrier()
        return time.monotonic() - began

    # 400 lost wake-ups would take 8 s
    assert max(run_ranks(2, body)) < within(3.0)


def test_a_deadline_raises_stalled_with_the_table() -> None:
    """Stalled names who is missing, and shows where each rank is; the group goes on after it."""

    def body(group: LocalGroup) -> Any:
        group.barrier()
        if group.rank == 1:
            wait_until(stalled().exists)
            group.barrier()
            return None
        began = time.monotonic()
        with pytest.raises(Stalled) as caught:
            group.barrier(timeout=0.1)
        waited = time.monotonic() - began
        stalled().touch()
        group.barrier()  # the same meeting, waited for again
        return caught.value, waited

    error, waited = run_ranks(2, body)[0]
    assert 0.1 <= waited < within(0.3)
    assert error.ranks == (1,)
    mine, other = error.states
    assert (mine.rank, mine.status, mine.operation) == (0, "alive", "barrier")
    assert (other.rank, other.status, other.operation) == (1, "alive", "after barrier")
    assert "test_waiting.py:" in mine.line
    assert mine.host == other.host == os.uname().nodename
    assert mine.line in str(error)
    assert other.line != mine.line
    assert isinstance(error, TimeoutError)


def test_a_timeout_of_zero_looks_once() -> None:
    """timeout=0 passes if all are here, and raises at once if not."""

    def body(group: LocalGroup) -> float:
        group.barrier()
        if group.rank == 1:
            wait_until(stalled().exists)  # rank 0 has come: it goes on waiting there
            group.barrier(timeout=0)
            return 0.0
        began = time.monotonic()
        with pytest.raises(Stalled):
            group.barrier(timeout=0)
        waited = time.monotonic() - began
        stalled().touch()
        group.barrier()
        return waited

    assert run_ranks(2, body)[0] < within(0.1)


def test_a_stopped_peer_is_shown_as_stopped() -> None:
    """The table tells a peer that was stopped by a signal from one that computes."""

    def body(group: LocalGroup) -> Any:
        group.barrier()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            group.barrier()
            return None
        peer = group._meeting.roster.process(1).pid
        stat = Path(f"/proc/{peer}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        try:
            group.barrier(timeout=0.1)
        except Stalled as error:
            return error.states[1].status
        finally:
            os.kill(peer, signal.SIGCONT)
            group.barrier()

    assert run_ranks(2, body)[0] == "stopped"


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("os._exit(3)", "exit code 3"),
        ("sys.exit(4)", "exit code 4"),
        ("sys.exit(0)", "exit code 0"),
        ("raise RuntimeError", "exit code 1"),
        ("weft.shutdown(); time.sleep(2)", "left"),
    ],
)
def test_how_a_peer_ended(end: str, status: str) -> None:
    """PeerLost says how each rank ended, and where it was; within 100 ms of a kill."""
    outcome = launch(
        AWAIT_STATE
        + f"""
import os, signal, sys, time
import weft
group = weft.init()
group.barrier()
if group.rank == 1:
    await_state(group, 0, lambda state: state.operation == "barrier")
    time.sleep(0.05)  # until it sleeps
    print("END", time.monotonic())
    {end}
else:
    try:
        group.barrier()
    except weft.PeerLost as error:
        print("LOST", time.monotonic(), error.ranks, error.states[1].status, sep="|")
        print("LINE", error.states[1].line, error.states[1].operation, sep="|")
""",
        2,
        options=("--no-prefix", "--keep-going"),
    )
    ended = next(float(x.split()[1]) for x in outcome.out.splitlines() if x.startswith("END"))
    lost = next(x.split("|") for x in outcome.out.splitlines() if x.startswith("LOST"))
    assert lost[2:] == ["(1,)", status], outcome
    assert float(lost[1]) - ended < within(0.1 if status.startswith("killed") else 0.3), outcome
    assert "after barrier" in outcome.out


def test_a_peer_that_arrived_and_then_died_has_arrived() -> None:
    """Death right after arriving does not fail the barrier it arrived at, only the next."""
    outcome = launch(
        AWAIT_STATE
        + """
import os, signal, time
import weft
group = weft.init()
group.barrier()
if group.rank == 1:
    try:
        group.barrier(timeout=0)
    except weft.Stalled:  # it has come before the other, and stays there
        os.kill(os.getpid(), signal.SIGKILL)
await_state(group, 1, lambda state: state.status != "alive")
group.barrier()
print("passed")
try:
    group.barrier()
except weft.PeerLost as error:
    print("then lost", error.ranks)
""",
        2,
        options=("--no-prefix",),
    )
    assert outcome.out == "passed\nthen lost (1,)\n", outcome


def test_a_few_dozen_kills() -> None:
    """PeerLost within 100 ms of SIGKILL, every time, in waits of every age."""
    latencies = []
    for number in range(8):
        outcome = launch(
            AWAIT_STATE
            + f"""
import os, signal, time
import weft
group = weft.init()
for kill in range(3):
    victim = ({number} + kill) % group.size
    group.barrier()
    if group.rank == victim:
        for rank in set(range(group.size)) - {{victim}}:
            await_state(group, rank, lambda state: state.operation == "barrier")
        time.sleep(({number} + 8 * kill) * 0.011)
        print("END", kill, time.monotonic(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except weft.PeerLost as error:
        print("LOST", kill, time.monotonic(), flush=True)
        assert error.ranks == (victim,)
    group = group.survivors()
""",
            4,
            options=("--no-prefix", "--keep-going"),
        )
        lines = [line.split() for line in outcome.out.splitlines()]
        ended = {kill: float(moment) for what, kill, moment in lines if what == "END"}
        lost = [(kill, float(moment)) for what, kill, moment in lines if what == "LOST"]
        assert (len(ended), len(lost)) == (3, 3 + 2 + 1), outcome
        latencies += [moment - ended[kill] for kill, moment in lost]
    assert max(latencies) < within(0.1), sorted(latencies)[-5:]
    assert statistics.median(latencies) < within(0.05)
