"""What happens around the ranks: the launcher killed, Ctrl-C, a closed terminal, limits."""

from __future__ import annotations

import os
import pty
import re
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import (
    HANGS,
    command,
    deadline,
    launch,
    marked_processes,
    run_python,
    take_terminal,
    wait_until,
    within,
    write_script,
)

WAITING = """
import os, sys, time, weft
group = weft.init()
group.barrier()
open(f"{sys.argv[1]}/ready{group.rank}", "w").close()
if group.rank == 0:
    time.sleep(60)  # computes, while the others wait
group.barrier()
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts three ranks of which two wait; returns when they do."""

    def start(**options: object) -> subprocess.Popen[bytes]:
        script = tmp_path / "waiting.py"
        script.write_text(WAITING)
        process = subprocess.Popen([*command(3), str(script), str(tmp_path)], **options)  # type: ignore[call-overload]
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(3)))
        return process  # type: ignore[no-any-return]

    return start


def code_of(process: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit code of what ends within so many seconds (of an idle machine)."""
    wait_until(lambda: process.poll() is not None, seconds=seconds)
    return process.returncode


def test_killed_launcher_takes_its_ranks_along(
    waiting: Callable[..., subprocess.Popen[bytes]],
) -> None:
    """SIGKILL of the launcher ends every rank, computing or waiting."""
    process = waiting()
    process.kill()
    process.wait()
    wait_until(lambda: not marked_processes(), seconds=2.0)
    assert process.returncode == -signal.SIGKILL


DRIVING = """
import sys, time, numpy, weft
rank = weft.init().rank
weft.map(abs, [1], n=1)
double = weft.function(lambda x: 2 * x, collect="gather", team=weft.Team(2))
double(numpy.arange(4))
open(f"{sys.argv[1]}/driving{rank}", "w").close()
weft.map(time.sleep, [60], n=1)
"""


def test_killed_launcher_takes_the_workers_of_its_ranks_along(tmp_path: Path) -> None:
    """Those of a map, those of a team, and what started them."""
    script = tmp_path / "driving.py"
    script.write_text(DRIVING)
    process = subprocess.Popen([*command(2), str(script), str(tmp_path)])
    wait_until(lambda: all((tmp_path / f"driving{rank}").exists() for rank in range(2)))
    process.kill()
    process.wait()
    wait_until(lambda: not marked_processes(), seconds=2.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_the_job(
    waiting: Callable[..., subprocess.Popen[bytes]], number: signal.Signals
) -> None:
    """A signal that ends the launcher ends all ranks within two seconds, with the usual code."""
    process = waiting(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process.send_signal(number)
    assert code_of(process, seconds=2) == 128 + number
    assert not marked_processes()


def test_ctrl_c_in_the_terminal(waiting: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Ctrl-C reaches each rank once: one KeyboardInterrupt each, and all end."""
    ours, theirs = pty.openpty()
    process = waiting(stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    os.write(ours, b"\x03")
    output = _read_all(ours)
    assert code_of(process, seconds=5) == 130
    assert len(re.findall(r"^\[\d\] KeyboardInterrupt", output, re.MULTILINE)) == 3, output
    os.close(ours)


def test_rank_0_reads_from_the_terminal() -> None:
    """Though it is in the background there, and the others have none to read from."""
    ours, theirs = pty.openpty()
    script = write_script(
        """
import os, weft
rank = weft.init().rank
print("got", input() if rank == 0 else "nothing")
try:
    os.open("/dev/tty", os.O_RDWR)
except OSError as error:
    print("none:", error.strerror)
weft.barrier()
"""
    )
    process = subprocess.Popen(
        [*command(2), str(script)], stdin=theirs, stdout=subprocess.PIPE, preexec_fn=take_terminal
    )
    os.close(theirs)
    os.write(ours, b"a line\n")
    try:
        output = process.communicate(timeout=HANGS)[0].decode().splitlines()
    finally:
        process.kill()
        os.close(ours)
    expected = ["[0] got a line", "[1] got nothing"]
    expected += [f"[{rank}] none: No such device or address" for rank in range(2)]
    assert sorted(output) == sorted(expected)


def test_closing_the_terminal(waiting: Callable[..., subprocess.Popen[bytes]]) -> None:
    """When the terminal goes away everything ends."""
    ours, theirs = pty.openpty()
    process = waiting(stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    os.close(ours)
    assert code_of(process, seconds=5) == 128 + signal.SIGHUP
    assert not marked_processes()


def test_a_closed_pipe_ends_the_job(tmp_path: Path) -> None:
    """`weft run ... | head -1` does not run on for nobody."""
    script = tmp_path / "chatty.py"
    script.write_text("import time\nwhile True:\n    print('line')\n    time.sleep(0.01)\n")
    process = subprocess.Popen(
        [*command(2), str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert b"line" in process.stdout.readline()
    process.stdout.close()
    assert code_of(process, seconds=5) == 128 + signal.SIGPIPE


def test_stop_and_continue(waiting: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Ctrl-Z stops launcher and ranks, SIGCONT has them go on."""
    process = waiting(stderr=subprocess.DEVNULL)
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: [text[0] for text in marked_processes().values()] == ["T"] * 4)
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: "T" not in [text[0] for text in marked_processes().values()])
    process.terminate()
    assert code_of(process, seconds=5) == 128 + signal.SIGTERM


@pytest.mark.alone
def test_descendants_of_a_failed_rank_end_too() -> None:
    """What a rank has started is ended with it when the job fails."""
    outcome = launch(
        """
import subprocess, sys, weft
weft.init()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
sys.exit(3)
""",
        2,
    )
    assert outcome.code == 3
    assert outcome.seconds < within(5)


def test_an_orphan_with_the_output_pipe_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """The launcher waits for ranks, not for whoever inherited their output."""
    over = tmp_path / "over"
    outcome = launch(
        f"""
import subprocess, sys, os
import weft
if weft.init().rank == 0:
    code = "import os, time\\nwhile not os.path.exists({str(over)!r}): time.sleep(0.01)"
    child = subprocess.Popen([sys.executable, "-c", code])
print("done")
""",
        2,
    )
    assert outcome.code == 0
    assert outcome.out.count("done") == 2
    assert len(marked_processes()) == 1
    over.touch()
    wait_until(lambda: not marked_processes())


def _read_all(descriptor: int) -> str:
    output = b""
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:
            return output.decode()
        output += data


@pytest.mark.parametrize("spare", range(12))
def test_a_full_descriptor_table_is_an_error_that_says_so(spare: int) -> None:
    """However few descriptors are left: a rank starts and works, or says what is missing."""
    seconds = deadline(5.0)
    outcome = launch(
        f"""
import resource, sys, os
import weft, weft.engines.local.engine, weft.engines.local.group
weft.init  # loads what it needs while there are descriptors
from weft.engines.local.memory import blocks
used = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + {spare}, used + {spare}))
try:
    group = weft.init(timeout={seconds})
    group.barrier()
    block = blocks.allocate(100)
    half = group.split(0)
    half.barrier()
except weft.WeftError as error:
    print("WEFT", type(error).__name__, str(error).splitlines()[0])
    sys.exit(9)
""",
        2,
        options=("--timeout", str(seconds)),
    )
    assert outcome.code in (0, 9), outcome
    if outcome.code == 9:
        assert "ulimit -n" in outcome.out, outcome


def test_the_launcher_without_descriptors_says_so(tmp_path: Path) -> None:
    """More ranks than the descriptor limit allows: one error, nothing left."""
    script = tmp_path / "sleep.py"
    script.write_text("import time; time.sleep(30)")
    done = subprocess.run(
        [*command(20), str(script)],
        capture_output=True,
        text=True,
        timeout=HANGS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30)),
    )
    assert done.returncode == 1
    assert "ulimit -n" in done.stderr
    assert not marked_processes()


def test_too_little_address_space_is_an_error() -> None:
    """When mapping fails the error is OutOfMemory, and nothing is left."""
    outcome = run_python(
        """
import resource, weft
from weft.engines.local.memory import blocks
resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
try:
    blocks.allocate(1 << 30)
except weft.WeftError as error:
    print(type(error).__name__, error)
"""
    )
    assert outcome.out.startswith("OutOfMemory"), outcome


def test_ctrl_c_twice_while_starting(tmp_path: Path) -> None:
    """Two signals during a slow start: no rank is started after them, none is left."""
    script = tmp_path / "sleep.py"
    script.write_text(
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(30)"
    )
    process = subprocess.Popen(
        [*command(40), str(script)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: len(marked_processes()) > 5)

    def press_again() -> bool:
        process.send_signal(signal.SIGINT)
        return process.poll() is not None

    wait_until(press_again, seconds=5)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "did not end when told to, and was killed" in err
    assert not marked_processes()


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_have_time_to_save_after_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    """A handler that takes longer than the end of a failed job may still finish its work."""
    script = tmp_path / "save.py"
    script.write_text(
        "import signal, sys, time, weft\n"
        "def save(*_):\n"
        "    time.sleep(2.5)\n"
        "    print('saved')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGINT, save); signal.signal(signal.SIGTERM, save)\n"
        "weft.init(); weft.barrier()\n"
        "print('ready')\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([*command(2), str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert {process.stdout.readline()[4:], process.stdout.readline()[4:]} == {"ready\n"}
    process.send_signal(number)
    out, _ = process.communicate(timeout=HANGS)
    assert out.count("saved") == 2
    assert process.returncode == 0


def test_output_to_a_non_blocking_reader_is_complete(tmp_path: Path) -> None:
    """A terminal that somebody made non-blocking loses nothing."""
    script = tmp_path / "chatty.py"
    script.write_text("for number in range(20000): print('line', number)")
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = subprocess.Popen([*command(1), str(script)], stdout=write)
    os.close(write)
    with os.fdopen(read) as file:
        assert len(file.readlines()) == 20000
    assert code_of(process, seconds=10) == 0


def test_a_slow_exit_is_still_the_first_failure() -> None:
    """A rank that needs long to end after its exception is blamed all the same, with its code."""
    outcome = launch(
        """
import atexit, time, weft
group = weft.init()
group.barrier()
if group.rank == 1:
    weft.shutdown()
    atexit.register(time.sleep, 1.0)
    raise ValueError("the cause")
group.barrier()
""",
        3,
    )
    assert "weft run: rank 1 " in outcome.err, outcome
    assert "ValueError: the cause" in outcome.err.partition("failed first")[2]
    assert outcome.code == 1


def test_nohup_and_an_ignored_child_signal(tmp_path: Path) -> None:
    """Signals that were ignored when the launcher started stay ignored; children are counted."""
    script = tmp_path / "brief.py"
    go_on = tmp_path / "go on"
    script.write_text(
        f"import os, time, weft; weft.init()\nwhile not os.path.exists({str(go_on)!r}):\n"
        "    time.sleep(0.01)\nprint('done')"
    )

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    process = subprocess.Popen(
        [*command(2), str(script)], stdout=subprocess.PIPE, text=True, preexec_fn=ignore
    )
    wait_until(lambda: len(marked_processes()) == 3)
    process.send_signal(signal.SIGHUP)
    go_on.touch()
    out, _ = process.communicate(timeout=HANGS)
    assert out.count("done") == 2
    assert process.returncode == 0


@pytest.mark.alone
def test_a_noisy_grandchild_does_not_keep_the_launcher_busy(tmp_path: Path) -> None:
    """What a rank has started may print for ever; the end of the job does not wait for it."""
    noisy = tmp_path / "noisy"
    outcome = launch(
        f"""
import os, subprocess, sys, time, weft
group = weft.init()
group.barrier()
if group.rank == 0:
    code = "for n in range(10**7): print('noise' * 20); n == 1000 and open({str(noisy)!r}, 'w')"
    subprocess.Popen([sys.executable, "-c", code])
    while not os.path.exists({str(noisy)!r}):
        time.sleep(0.01)
    sys.exit(3)
group.barrier()
""",
        2,
    )
    assert outcome.code == 3
    assert outcome.seconds < within(5)


def test_real_time_signals_have_a_name_too() -> None:
    """A rank killed by a signal without a name is reported by its number."""
    outcome = launch(
        """
import os, weft
group = weft.init()
group.barrier()
if group.rank == 1:
    os.kill(os.getpid(), 40)
try:
    group.barrier()
except weft.PeerLost as error:
    print(error.states[1].status)
""",
        2,
        options=("--no-prefix",),
    )
    assert outcome.out == "killed by signal 40\n", outcome
    assert outcome.code == 168
    assert "killed by signal 40" in outcome.err


def test_a_launcher_without_stdout(tmp_path: Path) -> None:
    """`weft run ... >&-` runs."""
    script = tmp_path / "print.py"
    script.write_text("import sys; print('x'); print('y', file=sys.stderr)")
    done = subprocess.run(
        [*command(2), str(script)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANGS,
        preexec_fn=lambda: os.close(1),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("y") == 2
