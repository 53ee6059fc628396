"""Functions, replicas and training whose workers fail, die or stall, and drivers that do."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.support import (
    HANGS,
    await_state,
    marked_processes,
    run_python,
    wait_until,
    within,
    write_script,
)
from weft.engines.base import Member
from weft.engines.local.pool import workers
from weft.engines.local.processes.linux import readable
from weft.engines.local.team import team as local_team
from weft.errors import UsedConcurrently


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take over the environment."""
    monkeypatch.setenv("WEFT_TEST_DRIVER", str(os.getpid()))


@pytest.fixture
def team() -> Iterator[weft.Team]:
    with weft.Team(3, timeout=20.0) as made:
        made.backend.call(_pid, [()] * 3)  # has the workers load this module
        yield made


@pytest.fixture
def pair() -> Iterator[weft.Team]:
    with weft.Team(2, timeout=20.0) as made:
        made.backend.call(_pid, [()] * 2)
        yield made


def in_driver() -> bool:
    return os.environ["WEFT_TEST_DRIVER"] == str(os.getpid())


def elsewhere(action: Callable[[], Any], here: Callable[[], Any] = lambda: None) -> Any:
    """A function of rows that does one thing in workers and another in the driver."""

    def function(x: Any) -> float:
        if os.environ.get("WEFT_TEST_CALM"):
            return float(x.sum())
        (here if in_driver() else action)()
        return float(x.sum())

    return function


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def still_works(team: weft.Team) -> None:
    """Functions and collectives alike."""
    assert weft.function(np.sum, collect="sum", team=team, split=[0])(np.arange(6.0)) == 15.0
    values = np.ones(3)
    copies = weft.replicate(values, team=team)
    copies.all_reduce("sum")
    assert (copies.get(team.size - 1) == team.size).all()


# exceptions


def test_a_workers_exception_keeps_its_class(team: weft.Team) -> None:
    """It says where it was raised, and the team goes on."""

    def function(x: Any) -> float:
        if not in_driver():
            raise KeyError("lost", 7)
        return float(x.sum())

    with pytest.raises(KeyError, match="lost") as caught:
        weft.function(function, collect="sum", team=team)(np.ones(6))
    assert isinstance(caught.value.__cause__, weft.RemoteTraceback)
    assert re.search(r"rank [12], worker", str(caught.value.__cause__))  # both raise it
    still_works(team)


def test_the_drivers_own_exception_ends_the_others_parts(team: weft.Team) -> None:
    """It is what is raised, and at once: workers are interrupted."""

    def fail() -> None:
        raise ZeroDivisionError("here")

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="here"):
        weft.function(
            elsewhere(lambda: time.sleep(60), fail), collect="sum", team=team, check=None
        )(np.ones(6))
    assert time.monotonic() - start < within(5)
    still_works(team)


@pytest.mark.parametrize("how", ["sleep", "loop"])
def test_the_drivers_part_ends_with_a_workers(team: weft.Team, how: str) -> None:
    """The driver is interrupted while it sleeps or computes, and raises what the worker raised."""

    def fail() -> None:
        raise LookupError("there")

    def compute() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(60 if how == "sleep" else 0)

    start = time.monotonic()
    with pytest.raises(LookupError, match="there"):
        weft.function(elsewhere(fail, compute), collect="sum", team=team, check=None)(np.ones(6))
    assert time.monotonic() - start < within(5)
    still_works(team)


@pytest.mark.parametrize("how", ["log handler", "warning"])
def test_a_message_of_a_worker_that_the_driver_cannot_take(pair: weft.Team, how: str) -> None:
    """What a log handler of the driver raises, or a warning that is an error there, ends the
    driver's part and is raised. Afterwards workers' failures are noticed at once, as before."""

    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("not now")

    def warn() -> None:
        if how == "warning":
            warnings.warn("not now", RuntimeWarning, stacklevel=1)
        logging.getLogger("weft.tests").warning("not now")

    def compute() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            time.sleep(60)

    def fail() -> None:
        raise LookupError("there")

    logger, handler = logging.getLogger("weft.tests"), Raises()
    logger.addHandler(handler)
    start = time.monotonic()
    try:
        with pytest.raises((RuntimeError, RuntimeWarning), match="not now") as caught:
            weft.function(elsewhere(warn, compute), collect="sum", team=pair, check=None)(
                np.ones(6)
            )
    finally:
        logger.removeHandler(handler)
    assert caught.type is (RuntimeWarning if how == "warning" else RuntimeError)
    with pytest.raises(LookupError, match="there"):
        weft.function(elsewhere(fail, compute), collect="sum", team=pair, check=None)(np.ones(6))
    assert time.monotonic() - start < within(10)
    still_works(pair)


def test_a_driver_that_swallows_the_interruption(pair: weft.Team) -> None:
    """The worker's exception is raised all the same, once, when the driver's part has ended."""

    def fail() -> None:
        raise LookupError("there")

    def compute() -> None:
        with contextlib.suppress(BaseException):
            time.sleep(60)
        for _ in range(1000):
            time.sleep(0)

    with pytest.raises(LookupError, match="there"):
        weft.function(elsewhere(fail, compute), collect="sum", team=pair, check=None)(np.ones(6))
    still_works(pair)


def test_the_driver_in_another_thread(pair: weft.Team) -> None:
    """Its part is interrupted between two steps of the program, and only its thread is."""

    def fail() -> None:
        raise LookupError("there")

    def compute() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.001)

    caught: list[BaseException] = []

    def drive() -> None:
        try:
            weft.function(elsewhere(fail, compute), collect="sum", team=pair, check=None)(
                np.ones(6)
            )
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=drive)
    thread.start()
    thread.join(10)
    assert [type(error) for error in caught] == [LookupError]
    still_works(pair)


def test_a_worker_that_interrupts_itself(pair: weft.Team) -> None:
    """KeyboardInterrupt in a worker is a failure, and its rows are not left out silently."""

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(weft.RemoteError, match="KeyboardInterrupt"):
        weft.function(elsewhere(stop), collect="sum", team=pair, check=None)(np.ones(6))
    still_works(pair)


def test_a_worker_that_exits(pair: weft.Team) -> None:
    """SystemExit in a worker ends neither it nor the driver."""
    with pytest.raises(weft.RemoteError, match="SystemExit"):
        weft.function(elsewhere(lambda: sys.exit(3)), collect="sum", team=pair, check=None)(
            np.ones(6)
        )
    still_works(pair)


def test_arguments_that_cannot_be_sent(team: weft.Team) -> None:
    """Nobody has begun when that is found, so no answer comes later and is taken for another's."""
    f = weft.function(lambda x, w: float(x.sum()), whole=["w"], collect="sum", team=team)
    assert f(np.ones(6), None) == 6.0
    for _ in range(2):
        with pytest.raises(weft.InvalidType, match="cannot be sent"):
            f(np.ones(6), threading.Lock())
        assert f(np.full(6, 2.0), None) == 12.0


def test_results_that_cannot_be_sent(pair: weft.Team) -> None:
    """A worker's result that cannot be pickled is an error that says so; the team goes on."""
    f = weft.function(lambda x: threading.Lock(), collect=None, team=pair)
    with pytest.raises(weft.InvalidType, match="cannot be sent"):
        f(np.ones(6))
    still_works(pair)


# deaths


def test_a_worker_that_dies(team: weft.Team) -> None:
    """The call names it and how; the team then says to restart, and does."""
    weights = np.zeros(3)
    copies = weft.replicate(weights, team=team)
    f = weft.function(
        elsewhere(kill_itself, lambda: time.sleep(60)), collect="sum", team=team, check=None
    )
    start = time.monotonic()
    with pytest.raises(weft.WorkerLost, match=r"(?s)SIGKILL.*rank [12] of a team.*team\.restart"):
        f(np.ones(6))
    assert time.monotonic() - start < within(5)
    with pytest.raises(weft.TeamBroken, match=r"team\.restart\(\)"):
        f(np.ones(6))
    with pytest.raises(weft.TeamBroken, match="SIGKILL"):
        copies.all_reduce()
    weights += 7
    os.environ["WEFT_TEST_CALM"] = "1"
    try:
        team.restart()
        assert f(np.ones(6)) == 6.0
    finally:
        del os.environ["WEFT_TEST_CALM"]
    assert all((copies.get(rank) == 7).all() for rank in range(team.size))
    assert weft.same(weights, team=team)
    still_works(team)


def test_an_idle_worker_that_dies(team: weft.Team) -> None:
    """The next call says so, whether or not it has rows for that worker."""
    f = weft.function(lambda x: os.getpid(), collect=None, team=team)
    pids = team.backend.call(_pid, [()] * team.size)
    os.kill(pids[-1], signal.SIGKILL)
    wait_until(lambda: pids[-1] not in marked_processes())
    with pytest.raises(weft.WorkerLost, match="SIGKILL"):
        f(np.ones(team.size))
    team.restart()
    assert f(np.ones(1)) == os.getpid()
    still_works(team)


def test_a_fork_server_that_is_killed(pair: weft.Team) -> None:
    """Its workers end with it, so the team has lost them; another starts the next."""
    total = weft.function(np.sum, collect="sum", team=pair)
    assert total(np.arange(4)) == 6
    server = workers.workers()._process
    assert server is not None
    (worker,) = pair.backend._team_workers.workers  # type: ignore[attr-defined]
    server.kill()
    wait_until(lambda: readable(worker.pidfd))
    with pytest.raises(weft.WorkerLost, match="rank 1"):
        total(np.arange(4))
    pair.restart()
    assert total(np.arange(4)) == 6


@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
def test_a_worker_that_dies_in_a_collective(team: weft.Team, call: str) -> None:
    """The collectives of replicas name it as functions do."""
    copies = weft.replicate(np.zeros(3), team=team)
    pids = team.backend.call(_pid, [()] * team.size)
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(weft.WorkerLost, match="SIGKILL"):
        getattr(copies, call)()
    team.restart()
    getattr(copies, call)()
    still_works(team)


def _pid(member: Member) -> int:
    return os.getpid()


def test_a_driver_that_waits_for_the_dead(team: weft.Team) -> None:
    """A worker that dies while the driver is in a collective: WorkerLost, not PeerLost."""
    with pytest.raises(weft.WorkerLost, match="SIGKILL"):
        team.backend.call(_die_or_meet, [()] * team.size)
    team.restart()
    still_works(team)


def _die_or_meet(member: Member) -> None:
    if member.rank == member.size - 1:
        kill_itself()
    member.group.barrier()


# collectives left half way


def test_a_worker_that_fails_before_a_collective(team: weft.Team) -> None:
    """Those that wait for it there are ended, and its exception is what is raised; the ranks meet
    again in the next call."""
    with pytest.raises(OverflowError, match="rank 1"):
        team.backend.call(_fail_or_meet, [(1,)] * team.size)
    still_works(team)
    with pytest.raises(OverflowError, match="rank 0"):
        team.backend.call(_fail_or_meet, [(0,)] * team.size)
    still_works(team)


def _fail_or_meet(member: Member, rank: int) -> None:
    if member.rank == rank:
        raise OverflowError(f"rank {member.rank}")
    member.group.all_reduce(np.ones(1000), "sum")


def test_ranks_that_disagree(pair: weft.Team) -> None:
    """Replicas whose shapes differ cannot be summed: everybody hears it, and the team goes on."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3)
    copies = weft.replicate(tensor, team=pair)
    copies.set(1, np.zeros(5, np.float32))
    with pytest.raises(weft.Disagreement):
        copies.all_reduce("sum")
    copies.broadcast()
    copies.all_reduce("sum")
    still_works(pair)


# stalls


def test_a_function_that_stalls(pair: weft.Team) -> None:
    """After the timeout: Stalled names the rank; what sleeps is interrupted and stays usable."""
    f = weft.function(elsewhere(lambda: time.sleep(60)), collect="sum", team=pair, check=None)
    with impatient(pair), pytest.raises(weft.Stalled, match=r"0\.5 s have passed, and rank 1"):
        f(np.ones(6))
    still_works(pair)


@contextlib.contextmanager
def impatient(team: weft.Team) -> Iterator[None]:
    """While it lasts, workers that were started with patience have half a second to answer."""
    backend: Any = team.backend
    usual, group = backend._timeout, backend.member.group
    backend._timeout = group.timeout = 0.5
    yield
    backend._timeout = group.timeout = usual


@pytest.mark.parametrize("collective", [False, True])
def test_a_worker_that_is_stopped(
    pair: weft.Team, collective: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot even be interrupted is ended, and the team restarts."""
    monkeypatch.setattr(local_team, "_GRACE", 1.0)  # so that it need not wait for longer
    values = np.ones(3)
    copies = weft.replicate(values, team=pair)
    pids = pair.backend.call(_pid, [()] * 2)
    os.kill(pids[1], signal.SIGSTOP)
    f = weft.function(np.sum, collect="sum", split=[0], team=pair)
    with impatient(pair), pytest.raises(weft.Stalled):
        copies.all_reduce() if collective else f(np.ones(6))
    with pytest.raises(weft.TeamBroken):
        copies.get(1)
    pair.restart()
    still_works(pair)


# drivers


def test_ctrl_c(team: weft.Team) -> None:
    """It ends the call, also while workers are in a collective, and the team goes on."""
    with pytest.raises(KeyboardInterrupt), pressing(begun().exists):
        team.backend.call(_sleep_or_meet, [()] * team.size)
    still_works(team)
    begun().unlink()
    with pytest.raises(KeyboardInterrupt), pressing(begun().exists):
        weft.function(elsewhere(_begin_and_sleep), collect="sum", team=team, check=None)(np.ones(6))
    still_works(team)


@contextlib.contextmanager
def pressing(*moments: Callable[[], Any]) -> Iterator[None]:
    """Ctrl-C whenever the next of these has become true."""

    def press() -> None:
        for moment in moments:
            wait_until(moment)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def begun() -> Path:
    """A file that is made when a call is where it should be."""
    return Path(os.environ["WEFT_TEST_FOLDER"]) / "begun"


def _begin_and_sleep() -> None:
    begun().touch()
    time.sleep(60)


def _sleep_or_meet(member: Member) -> None:
    if member.rank == 0:
        for rank in range(1, member.size):
            await_state(member.group, rank, lambda state: state.operation.startswith("barrier"))
        _begin_and_sleep()
    member.group.barrier()


def test_ctrl_c_twice(pair: weft.Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one while the first is attended to ends what still runs; no answer is left over."""
    attended = threading.Event()
    interrupt = workers.Worker.interrupt

    def interrupt_and_tell(worker: workers.Worker) -> None:
        interrupt(worker)
        attended.set()

    monkeypatch.setattr(workers.Worker, "interrupt", interrupt_and_tell)
    with pytest.raises(KeyboardInterrupt), pressing(begun().exists, attended.is_set):
        weft.function(elsewhere(_deaf), collect="sum", team=pair, check=None)(np.ones(6))
    with pytest.raises(weft.TeamBroken):
        weft.function(np.sum, collect="sum", split=[0], team=pair)(np.ones(6))
    pair.restart()
    still_works(pair)


def _deaf() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    _begin_and_sleep()


PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import weft

def slow(x):
    print("computing", flush=True)
    time.sleep(60)

weft.function(slow, collect=None, team=weft.Team(3))(np.ones(6))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_ends_leaves_nothing(number: int) -> None:
    """However it ends, in the middle of a call: its workers end too."""
    process = subprocess.Popen(
        [sys.executable, str(write_script(PROGRAM))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"computing\n"
    process.send_signal(number)
    process.wait(HANGS)
    process.stdout.close()
    wait_until(lambda: not marked_processes())


def test_a_program_that_just_ends() -> None:
    """Without close or shutdown, with a default team and a guard's thread: silently."""
    outcome = run_python(
        "import weft, numpy, time\n"
        "f = weft.function(lambda x: (time.sleep(0.1), x.mean())[1], collect='mean')\n"
        "print(f(numpy.ones(4)))\n"
    )
    assert (outcome.code, outcome.out, outcome.err) == (0, "1.0\n", ""), outcome


def test_a_forked_child(pair: weft.Team) -> None:
    """It cannot use its parent's team, can make one of its own, and does not keep the parent's
    workers alive."""
    f = weft.function(np.sum, collect="sum", split=[0], team=pair)
    assert f(np.ones(6)) == 6.0
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                f(np.ones(6))
            except weft.TeamBroken as error:
                code = 0 if "forked" in str(error) else 2
            with weft.Team(2) as own:
                g = weft.function(np.sum, collect="sum", split=[0], team=own)
                code += 0 if g(np.ones(4)) == 4.0 else 4
            theirs.recv()
        os._exit(code)
    pids = pair.backend.call(_pid, [()] * 2)
    assert f(np.ones(6)) == 6.0
    pair.close()
    wait_until(lambda: pids[1] not in marked_processes())
    ours.send("end")
    assert os.waitpid(child, 0)[1] == 0
    ours.close()
    theirs.close()


def test_calls_in_the_middle_of_calls(team: weft.Team) -> None:
    """A function that calls its own team is told so."""
    inner = weft.function(np.sum, collect="sum", split=[0], team=team)
    outer = weft.function(
        lambda x: inner(x) if in_driver() else 0.0, collect="sum", team=team, check=None
    )
    with pytest.raises(UsedConcurrently, match="serial"):
        outer(np.ones(6))
    still_works(team)
