"""How ranks find each other, and who is not let in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support import HANGS, deadline, launch, run_python, wait_until, within
from weft._core.launch import environment
from weft.engines.local.meeting import rendezvous
from weft.engines.local.meeting.rendezvous import Identity
from weft.engines.local.processes.channel import Channel, Hello, Listener, Rejected
from weft.engines.local.processes.linux import this_process
from weft.errors import MissingRank, Refused

RANK = """
import sys, weft
try:
    group = weft.init()
    group.barrier()
    print("joined", group.rank)
except weft.WeftError as error:
    print(type(error).__name__, getattr(error, "ranks", ()), str(error).splitlines()[0])
"""


def start(rank: int, size: int, job: str, *arguments: str, **extra: str) -> subprocess.Popen[str]:
    """One rank, as a launcher without a launcher's care would start it."""
    place = environment(rank=rank, size=size, job=job, memory=-1, launcher=0)
    return subprocess.Popen(
        [sys.executable, "-c", extra.pop("code", RANK), *arguments],
        env={**os.environ, **place, **extra},
        stdout=subprocess.PIPE,
        text=True,
    )


#: comes to weft.init when all that were started have come as far
TOGETHER = """
import os, sys, time, weft, weft.engines.local.group
open(sys.argv[1] + "/ready" + os.environ["WEFT_RANK"], "w").close()
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.005)
"""


def start_together(folder: Path, *ranks: tuple[int, int], **extra: str) -> list[str]:
    """What ranks say, each of some number of ranks, that come to `init` at the same time."""
    job = os.urandom(8).hex()
    started = [start(*rank, job, str(folder), code=TOGETHER + RANK, **extra) for rank in ranks]
    wait_until(lambda: len(list(folder.glob("ready*"))) == len(ranks))
    (folder / "go").touch()
    return outputs(*started)


def outputs(*processes: subprocess.Popen[str]) -> list[str]:
    return [process.communicate(timeout=HANGS)[0].strip() for process in processes]


def test_ranks_meet_without_our_launcher() -> None:
    """Any program that sets the variables can start ranks, in any order."""
    job = os.urandom(8).hex()
    ranks = [start(rank, 3, job) for rank in (2, 0, 1)]
    assert sorted(outputs(*ranks)) == ["joined 0", "joined 1", "joined 2"]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_rank_is_named_by_everyone(missing: int, tmp_path: Path) -> None:
    """Within the timeout every rank that came says which one did not."""
    began, timeout = time.monotonic(), deadline(1)
    ranks = [(rank, 3) for rank in range(3) if rank != missing]
    for text in start_together(tmp_path, *ranks, WEFT_TIMEOUT=f"{timeout:g}"):
        assert text.startswith(
            f"MissingRank ({missing},) rank {missing} of 3 did not come within {timeout:g} s"
        )
    assert time.monotonic() - began < timeout + within(4)


def test_a_rank_comes_only_once() -> None:
    """Of two processes with the same rank one is turned away; the group forms with the other."""
    job = os.urandom(8).hex()
    first = start(0, 3, job)
    both = [start(1, 3, job), start(1, 3, job)]
    loser = wait_until(lambda: [process for process in both if process.poll() is not None])[0]
    (told,) = outputs(loser)
    assert told.startswith("Refused")
    assert "rank 1 is already here as process" in told
    both.remove(loser)
    last = start(2, 3, job)
    assert sorted(outputs(first, *both, last)) == ["joined 0", "joined 1", "joined 2"]


def test_rank_0_comes_only_once() -> None:
    """Of two processes that are rank 0 one finds its address taken."""
    job = os.urandom(8).hex()
    both = [start(0, 2, job), start(0, 2, job)]
    loser = wait_until(lambda: [process for process in both if process.poll() is not None])[0]
    (told,) = outputs(loser)
    assert told.startswith("Refused")
    assert "is rank 0 running twice?" in told
    both.remove(loser)
    assert outputs(start(1, 2, job), *both) == ["joined 1", "joined 0"]


def test_another_version_is_refused() -> None:
    """Ranks of two versions of weft do not form a group, and both sides say why."""
    job = os.urandom(8).hex()
    newer = "import weft._version\nweft._version.__version__ = '9.9'\n" + RANK
    ranks = [start(0, 2, job), start(1, 2, job, code=newer)]
    for text in outputs(*ranks):
        assert "rank 1 runs weft 9.9 and rank 0 runs weft" in text
        assert text.startswith("Refused")


def test_another_size_is_refused(tmp_path: Path) -> None:
    """A rank that was told of another number of ranks is turned away."""
    first, second = start_together(tmp_path, (0, 2), (1, 3), WEFT_TIMEOUT=f"{deadline(2):g}")
    assert "rank 1 was told of 3 ranks and rank 0 of 2" in second
    assert first.startswith("MissingRank (1,)")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused() -> None:
    """A process of another user can neither join a group nor pose as rank 0."""
    job = os.urandom(8).hex()
    address = f"0/{job}/0"
    stranger = (
        "import os, sys\n"
        "import weft\n"
        "from weft.engines.local.processes import channel\n"
        "from weft.engines.local.meeting import rendezvous\n"
        "os.setuid(65534)\n"
        "try:\n"
        f"    channel.Channel.connect({address!r}).receive()\n"
        "except weft.WeftError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    first = start(0, 2, job)
    deadline = time.monotonic() + HANGS / 2
    while "ConnectionRefusedError" in (told := run_python(stranger)).err:
        assert time.monotonic() < deadline
    assert told.out.startswith("Refused process"), told
    assert "weft connects processes of one user only" in told.out
    assert outputs(start(1, 2, job), first) == ["joined 1", "joined 0"]


def test_noise_is_not_a_member() -> None:
    """Garbage, silence and hang-ups at the address do not disturb the group."""
    job = os.urandom(8).hex()
    first = start(0, 2, job)
    deadline = time.monotonic() + HANGS / 2
    address = f"{os.geteuid()}/{job}/0"
    callers = []
    while len(callers) < 3:
        try:
            callers.append(Channel.connect(address))
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
    callers[0]._socket.send(b"not a message")
    callers[1].close()
    assert outputs(start(1, 2, job), first) == ["joined 1", "joined 0"]
    for caller in (callers[0], callers[2]):
        caller.close()


def test_wrong_ranks_and_jobs_are_refused() -> None:
    """A Hello with a rank that does not exist, or of another job, is answered with the reason."""
    identity = Identity(0, 2, os.urandom(8).hex())
    answers = []

    def call() -> None:
        me = this_process()
        for rank, job in ((7, identity.launch), (0, identity.launch), (1, "another")):
            while True:
                try:
                    channel = Channel.connect(identity.address)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.005)
            hello = identity.hello()
            channel.send(Hello(hello.version, job, rank, 2, me.start))
            answers.append(channel.receive(Rejected)[0].reason)
            channel.close()

    thread = threading.Thread(target=call)
    thread.start()
    with pytest.raises(MissingRank):
        rendezvous.assemble(identity, deadline(1))
    thread.join()
    assert "rank 7 does not exist in a group of 2" in answers[0]
    assert "rank 0 does not exist in a group of 2, or is rank 0 itself" in answers[1]
    assert "job 'another' met job" in answers[2]


def test_an_address_has_one_listener() -> None:
    """Two listeners cannot share an address, and it is free again after the first."""
    name = f"test/{os.urandom(8).hex()}"
    first = Listener(name)
    with pytest.raises(Refused, match="taken by another process"):
        Listener(name)
    first.close()
    Listener(name).close()


def test_a_rank_that_fails_before_init_ends_the_job() -> None:
    """Ranks that wait for one that failed before it joined do not wait for the timeout."""
    outcome = launch(
        """
import os
if os.environ["WEFT_RANK"] == "1":
    raise ImportError("no such thing")
import weft
weft.init()
""",
        3,
    )
    assert outcome.code == 1
    assert "weft run: rank 1 " in outcome.err
    assert "ImportError: no such thing" in outcome.err
    assert outcome.seconds < within(4)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_ends_without_init_is_noticed(absent: int) -> None:
    """Even with exit code 0: whoever waits for it is told, long before the timeout."""
    outcome = launch(
        f"""
import os, sys
if os.environ["WEFT_RANK"] == "{absent}":
    sys.exit(0)
import weft
try:
    weft.init(timeout=30)
except weft.PeerLost as error:
    print(error)
""",
        2,
        options=("--no-prefix",),
    )
    assert f"rank {absent} ended before it came to weft.init(): exit code 0" in outcome.out, outcome
    assert outcome.seconds < within(5)
