"""`weft run` as a user meets it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import HANGS, command, launch, within
from weft.engines.local.meeting.launcher import first_failure
from weft.resources import THREAD_VARIABLES, count_cores


def test_output_is_prefixed_and_whole_lines() -> None:
    """Every line carries its rank, stdout and stderr stay apart, lines are not mixed."""
    outcome = launch(
        """
import sys, weft
rank = weft.init().rank
for number in range(200):
    sys.stdout.write(f"out {rank} "); sys.stdout.write(f"{number}\\n")
print("err", rank, file=sys.stderr)
print("no line end", end="")
""",
        3,
    )
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    for rank in range(3):
        expected = [f"[{rank}] out {rank} {number}" for number in range(200)]
        assert [line for line in lines if line.startswith(f"[{rank}] out")] == expected
        assert f"[{rank}] no line end" in lines
        assert f"[{rank}] err {rank}" in outcome.err.splitlines()


def test_the_prefix_can_be_switched_off() -> None:
    """--no-prefix passes lines on as they are."""
    outcome = launch("print('plain')", 2, options=("--no-prefix",))
    assert outcome.out == "plain\nplain\n"


def test_arguments_and_modules(tmp_path: Path) -> None:
    """Everything after the script or module is the program's, options too."""
    (tmp_path / "tool.py").write_text("import sys; print(sys.argv[1:], __name__)")
    expected = "['-n', '5', '--timeout', 'x'] __main__\n"
    for program in (["tool.py"], ["-m", "tool"]):
        done = subprocess.run(
            [*command(1, "--no-prefix"), *program, "-n", "5", "--timeout", "x"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=HANGS,
        )
        assert done.stdout == expected, done


def test_rank_0_has_the_terminal_input() -> None:
    """Standard input goes to rank 0, the others read nothing."""
    script = "import os, sys; print(os.environ['WEFT_RANK'], repr(sys.stdin.read()))"
    path = Path(os.environ["WEFT_TEST_FOLDER"]) / "reader.py"
    path.write_text(script)
    done = subprocess.run(
        [*command(2, "--no-prefix"), str(path)],
        input="hello",
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert sorted(done.stdout.splitlines()) == ["0 'hello'", "1 ''"]


def test_every_rank_leads_a_session() -> None:
    """Linux shares cores out between sessions first: what else runs in the launcher's does not
    keep a rank waiting. And each can be ended with what it has started."""
    outcome = launch("import os; print(os.getpid(), os.getpgrp(), os.getsid(0))", 3)
    told = [list(map(int, line.split()[1:])) for line in outcome.out.splitlines()]
    assert len(told) == 3, outcome
    assert all(pid == group == session for pid, group, session in told)


@pytest.mark.alone
def test_the_first_failure_is_told_with_its_last_lines() -> None:
    """The launcher names the rank that failed first, shows its traceback, exits with its code."""
    outcome = launch(
        """
import sys, weft
group = weft.init()
group.barrier()
if group.rank == 1:
    raise ValueError("the cause")
group.barrier()
""",
        3,
    )
    assert outcome.code == 1
    told = outcome.err.partition("weft run: rank 1 ")[2]
    assert "failed first: exit code 1" in told
    assert "ValueError: the cause" in told
    assert "PeerLost" in outcome.err  # the survivors' own errors are printed too
    assert outcome.seconds < within(4)


@pytest.mark.alone
def test_exit_codes_are_passed_on() -> None:
    """sys.exit(5) in a rank is exit code 5; a computing rank is ended within two seconds."""
    began = time.monotonic()
    outcome = launch(
        """
import sys, time, weft
group = weft.init()
group.barrier()
if group.rank == 0:
    sys.exit(5)
time.sleep(30)
""",
        2,
    )
    assert outcome.code == 5
    assert time.monotonic() - began < within(3.5)


@pytest.mark.alone
def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    """Within two seconds of the failure every rank is gone."""
    outcome = launch(
        """
import signal, sys, time, weft
signal.signal(signal.SIGTERM, signal.SIG_IGN)
group = weft.init()
group.barrier()
failed = time.time()
if group.rank == 0:
    sys.exit(6)
time.sleep(30)
""",
        2,
    )
    assert outcome.code == 6
    assert outcome.seconds < within(4)


def test_keep_going_lets_the_survivors_work() -> None:
    """With --keep-going the others can regroup; the exit code still tells of the failure."""
    outcome = launch(
        """
import os, signal, weft
group = weft.init()
group.barrier()
if group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.barrier()
except weft.PeerLost as error:
    assert error.ranks == (1,), error
    group = group.survivors()
for _ in range(100):
    group.barrier()
print("went on as", group.rank, "of", group.size, "in generation", group.generation)
""",
        4,
        options=("--keep-going",),
    )
    assert outcome.code == 137
    assert sorted(line[4:] for line in outcome.out.splitlines()) == [
        f"went on as {rank} of 3 in generation 1" for rank in range(3)
    ]


def test_threads_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's libraries get cores // ranks threads; the user's own variable wins."""
    script = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ.get('MKL_NUM_THREADS'))"
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    cores, _ = count_cores()
    outcome = launch(script, 2, options=("--no-prefix",))
    share = max(1, cores // 2)
    assert outcome.out.splitlines() == [f"{share} {share}"] * 2
    outcome = launch(script, 2, options=("--no-prefix",), env={"OMP_NUM_THREADS": "7"})
    assert outcome.out.splitlines() == ["7 None"] * 2


def test_two_jobs_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    """Programs started side by side form groups of their own."""
    script = tmp_path / "job.py"
    script.write_text(
        "import weft, sys\n"
        "group = weft.init()\n"
        "for _ in range(50): group.barrier()\n"
        "print(sys.argv[1], group.size)\n"
    )
    jobs = [
        subprocess.Popen(
            [*command(size, "--no-prefix"), str(script), f"job{number}"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        for number, size in enumerate((2, 3, 2))
    ]
    for number, (job, size) in enumerate(zip(jobs, (2, 3, 2), strict=True)):
        out, _ = job.communicate(timeout=HANGS)
        assert out.splitlines() == [f"job{number} {size}"] * size


@pytest.mark.parametrize(
    ("failed", "causes", "first"),
    [
        ([2], {}, 2),
        ([0, 1], {0: 1}, 1),  # 0 ended sooner, but because it lost 1
        ([0, 2, 1], {0: 2, 2: 1}, 1),
        ([0, 1], {0: 3}, 0),  # 3 did not fail by itself: it left, or was told to end
        ([0, 1], {0: 1, 1: 0}, 0),  # both blame each other
    ],
)
def test_who_was_first(failed: list[int], causes: dict[int, int | None], first: int) -> None:
    """A rank that failed because it lost another was not first."""
    assert first_failure(failed, causes) == first


def test_start_to_first_barrier_does_not_import_numpy() -> None:
    """What makes starting fast: meeting needs no NumPy, and the launcher neither."""
    outcome = launch(
        "import sys, weft; weft.init(); weft.barrier(); print('numpy' in sys.modules)", 2
    )
    assert outcome.out.count("False") == 2
    code = (
        "import sys, weft.cli, weft.engines.local.meeting.launcher; print('numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS
    )
    assert done.stdout == "False\n"
