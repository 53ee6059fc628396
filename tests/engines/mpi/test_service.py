"""What becomes of a group over hosts when something ends: everybody is told who, where and how, at
once, and nothing stays on any host."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest

from tests.hosts import Hosts
from tests.support import deadline, wait_until

#: sums until something happens to some ranks at the twentieth; what a rank then sees
PROGRAM = """
import functools, os, signal, sys, time
import numpy as np
import weft
from weft.engines.mpi import engine

what, victims = sys.argv[1], [int(rank) for rank in sys.argv[2].split(",")]
size, goes_on = int(sys.argv[3]), sys.argv[4] == "on"
group = weft.init(timeout=float(sys.argv[5]))
say = functools.partial(print, f"rank {group.rank}:", flush=True)
say("ready")
try:
    for n in range(10**6):
        if n == 20 and group.rank in victims:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif what == "stop-speaker":
                os.kill(engine._speaker._process.pid, signal.SIGSTOP)
            elif what == "speaker":
                os.kill(engine._speaker._process.pid, signal.SIGKILL)
            elif what == "raise":
                raise RuntimeError("as asked")
            elif what == "exit":
                sys.exit(3)
        group.all_reduce(np.ones(size))
        time.sleep(0.001)
except weft.WeftError as error:
    began = time.monotonic()
    say("saw", str(error).replace("\\n", " / "))
    say("kind", type(error).__name__, *error.ranks)
    if not goes_on:
        raise
    group = group.survivors(timeout=30)
    large = group.all_reduce(np.full(300_000, 1.0))
    say("next", group.rank, group.size, group.generation, *large[:1])
"""

SMALL, LARGE = "8", "300000"


def run(hosts: Hosts, what: str, victims: str, *, size: str = SMALL, ft: bool = False) -> Any:
    """The outcome, and what each rank has seen: the class of the error, and the lost ranks."""
    timeout = str(deadline(4)) if what.startswith("stop") else "60"
    goes_on = "on" if ft else "no"
    outcome = hosts.launch(PROGRAM, 2, what, victims, size, goes_on, timeout, ft=ft)
    assert not (left := hosts.leave_nothing()), (left, outcome)
    return outcome, seen(outcome.out)


def seen(out: str) -> dict[int, tuple[str, ...]]:
    """By rank: the class of its error, and the lost ranks."""
    lines = re.findall(r"rank (\d): kind (.*)$", out, re.MULTILINE)
    return {int(rank): tuple(words.split()) for rank, words in lines}


@pytest.mark.parametrize(
    ("what", "victims", "size"),
    [
        ("kill", "3", SMALL),
        ("kill", "2", LARGE),  # the rank whose speaker is its host's agent
        ("raise", "3", SMALL),
        ("exit", "1", LARGE),
    ],
)
def test_a_rank_ends(two_hosts: Hosts, what: str, victims: str, size: str) -> None:
    """Plain mpirun ends the job, at once if a rank was killed; before that all that had the time
    have seen who, and how."""
    outcome, saw = run(two_hosts, what, victims, size=size)
    assert outcome.code == {"kill": 137, "raise": 1}.get(what, outcome.code or 1), outcome
    if what == "kill" and not saw:
        return
    assert set(saw.values()) == {("PeerLost", victims)}, outcome
    how = {"kill": "ended", "raise": "ending after an exception|exit code 1", "exit": "left|exit"}
    host = f"host{1 + int(victims) // 2}"
    assert re.search(rf"lost rank {victims}.*{host}.*({how[what]})", outcome.out), outcome
    # where the agent has ended with its rank, the ranks of its host know no others
    everybody = "23" if set(saw) == {3} and victims == "2" else "0123"
    rows = [f"/ +{rank} +host{1 + int(rank) // 2} " for rank in "0123" if rank in everybody]
    assert re.search(".*".join(rows), outcome.out), outcome


def test_a_rank_that_stops(two_hosts: Hosts) -> None:
    """The others wait until their deadline, and are shown who did not come."""
    outcome, saw = run(two_hosts, "stop", "3")
    assert outcome.code != 0, outcome
    assert saw
    assert {words[0] for words in saw.values()} <= {"Stalled", "PeerLost"}
    assert re.search(r"saw rank 3 of group 'world' did not come in time", outcome.out), outcome
    assert re.search(r"3 +host2 +\d+ +stopped", outcome.out), outcome


def test_an_agent_that_stops(two_hosts: Hosts) -> None:
    """Its ranks say which process has stopped, the others which host does not answer."""
    outcome, saw = run(two_hosts, "stop-speaker", "0")
    assert outcome.code != 0, outcome
    assert saw
    assert {words[0] for words in saw.values()} <= {"Stalled", "PeerLost"}, outcome
    told = r"saw the agent of host host1 \(process \d+, stopped\) of group 'world' did not come"
    assert re.search(told, outcome.out) or "host host1 does not answer" in outcome.out, outcome


def test_a_speaker_ends(two_hosts: Hosts) -> None:
    """Its rank cannot go on without it, and says so; the job ends, by mpirun perhaps before all
    ranks have told what they saw."""
    outcome, saw = run(two_hosts, "speaker", "2")
    assert outcome.code != 0, outcome
    assert saw, outcome
    assert all(words[0] == "PeerLost" for words in saw.values()), outcome
    own = r"rank 2: saw the process that stands for rank 2 in MPI ended"
    assert re.search(own, outcome.out) if 2 in saw else "2" in saw[min(saw)], outcome


def test_mpirun_ends(two_hosts: Hosts) -> None:
    """Killed itself, it takes the job with it."""
    job = two_hosts.start(PROGRAM, 2, "nothing", "9", SMALL, "no", "60")
    wait_until(lambda: job.out.count("ready") == 4)
    job.kill(signal.SIGKILL)
    assert job.wait().code == 128 + signal.SIGKILL
    assert two_hosts.leave_nothing() == []


def test_a_host_is_cut_off(two_hosts: Hosts) -> None:
    """Both sides reach their deadlines, and say who does not answer; no rank, and nothing that
    stands for one, stays. mpirun's own daemon waits until it can tell what they have printed."""
    job = two_hosts.start(PROGRAM, 2, "nothing", "9", SMALL, "no", str(deadline(3)))
    wait_until(lambda: job.out.count("ready") == 4)
    two_hosts.cut(2)
    for k in (1, 2):
        wait_until(lambda k=k: all(process.rank is None for process in two_hosts.processes(k)))
    assert "host host2 does not answer" in job.out + job.err
    two_hosts.mend(2)
    assert job.wait(40).code != 0


@pytest.mark.parametrize(
    ("what", "victims", "size"),
    [
        ("kill", "3", LARGE),
        ("kill", "2", SMALL),  # another speaker of its host takes over
        ("kill", "0,1", SMALL),
        ("speaker", "0", SMALL),
        ("raise", "1", SMALL),
        ("raise", "2", SMALL),  # its speaker, the agent, ends a second later: another takes over
        pytest.param("kill", "0", LARGE, marks=pytest.mark.soak),
        pytest.param("kill", "1,2", LARGE, marks=pytest.mark.soak),
        pytest.param("speaker", "3", SMALL, marks=pytest.mark.soak),
        pytest.param("exit", "2", LARGE, marks=pytest.mark.soak),
        pytest.param("kill", "2,3", LARGE, marks=pytest.mark.soak),
    ],
)
def test_survivors_go_on(two_hosts: Hosts, what: str, victims: str, size: str) -> None:
    """Where MPI lets them (ULFM): they see at once who was lost, and form the next generation."""
    outcome, saw = run(two_hosts, what, victims, size=size, ft=True)
    lost = {int(rank) for rank in victims.split(",")}
    remain = sorted({0, 1, 2, 3} - lost)
    for rank in remain:
        kind, *ranks = saw[rank]
        assert kind == "PeerLost", outcome
        assert {int(r) for r in ranks} & lost, outcome
    following = re.findall(r"rank (\d): next (\d) (\d) 1 ([\d.]+)$", outcome.out, re.MULTILINE)
    expected = [
        (str(r), str(i), str(len(remain)), f"{len(remain)}.0") for i, r in enumerate(remain)
    ]
    assert sorted(following) == expected, outcome
