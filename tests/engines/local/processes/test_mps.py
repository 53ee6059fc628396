"""MPS's daemon: started for those who ask, ended with them however they end.

Where there is no GPU a program stands in for NVIDIA's: it goes to the background as that does,
starts a server, and ends when it is told to. That shows who starts and ends what; tests with the
marker `gpu` use the real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import HANGS, Outcome, launch, run_python, wait_until, write_script

PROGRAM = f"""\
#!{sys.executable}
import os, signal, socket, subprocess, sys, time
folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
notes = os.environ["STAND_IN"]
address = os.path.join(folder, "control")
if sys.argv[1:] == ["-d"]:
    if os.path.exists(os.path.join(notes, "fails")):
        sys.exit("cannot start:\\nno GPU")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    server = subprocess.Popen(["sleep", "1000"])
    with open(os.path.join(notes, "pids"), "w") as file:
        print(os.getpid(), server.pid, os.environ.get("CUDA_VISIBLE_DEVICES"), file=file)
    caller, _ = listener.accept()
    if os.path.exists(os.path.join(notes, "stubborn")):
        caller.close()
        signal.pause()
    server.kill()
    server.wait()
    caller.close()
elif sys.stdin.read() == "quit\\n":
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(address)
        caller.recv(1)
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with what the program that stands in notes, and is told."""
    programs, notes = tmp_path / "programs", tmp_path / "notes"
    programs.mkdir()
    notes.mkdir()
    program = programs / "nvidia-cuda-mps-control"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(notes))
    return notes


#: what a client sees of its daemon
CLIENT = """\
import os, weft
from pathlib import Path
def client(*_):
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
    return folder, os.path.exists(os.path.join(folder, "control"))
"""


def pids(notes: Path) -> list[int]:
    """The daemon's and its server's, when it has noted them."""
    text = wait_until(lambda: (notes / "pids").exists() and (notes / "pids").read_text())
    return [int(word) for word in text.split()[:2]]


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def nothing_stays(notes: Path, folder: str) -> None:
    """Neither the daemon, nor its server, nor its folder."""
    wait_until(lambda: all(map(has_ended, pids(notes))))
    wait_until(lambda: not Path(folder).parent.exists())


def test_ranks_are_clients_and_the_daemon_ends_with_them(
    notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of one daemon, in a private folder; the daemon sees all GPUs, so that the ranks' entries
    keep their meaning. One that does not end when told to is killed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    code = CLIENT + "weft.init(); print(*client(), os.stat(client()[0] + '/..').st_mode & 0o777)"
    for word in ("", "stubborn"):
        (notes / word if word else notes / "obeys").touch()
        (notes / "pids").unlink(missing_ok=True)
        outcome = launch(code, 2, options=("--mps", "--no-prefix"))
        assert outcome.code == 0, outcome
        first, second = outcome.out.splitlines()
        assert first == second
        folder, there, mode = first.split()
        assert (there, mode) == ("True", str(0o700))
        assert all(map(has_ended, pids(notes)))
        assert not Path(folder).parent.exists()
        assert (notes / "pids").read_text().split()[2] == "None"


@pytest.mark.parametrize("who", ["launcher", "rank", "watcher", "watcher by SIGTERM"])
def test_the_daemon_ends_whoever_is_killed(who: str, notes: Path) -> None:
    """At once: nothing of it stays, and no folder."""
    code = CLIENT + (
        "import signal\n"
        "group = weft.init()\n"
        "print(client()[0], os.getppid(), os.getpid(), flush=True)\n"
        "signal.pause()\n"
    )
    command = [sys.executable, "-m", "weft", "run", "-n", "1", "--mps", "--no-prefix"]
    process = subprocess.Popen(
        [*command, str(write_script(code))], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        folder, launcher, rank = process.stdout.readline().split()
        watcher = next(pid for pid in children(int(launcher)) if pid != int(rank))
        kill = {"launcher": int(launcher), "rank": int(rank)}.get(who, watcher)
        os.kill(kill, signal.SIGTERM if "SIGTERM" in who else signal.SIGKILL)
        if kill == watcher:
            os.kill(int(rank), signal.SIGKILL)
        process.wait(HANGS)
    nothing_stays(notes, folder)


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_team_has_a_daemon_until_shutdown(notes: Path) -> None:
    """Driver and workers are its clients, workers that served others before are not taken; after
    shutdown the environment is as it was."""
    program = CLIENT + textwrap.dedent("""
        before = dict(os.environ)
        warm = weft.map(lambda _: os.getpid(), range(8), n=2)
        with weft.Team(2, mps=True) as team:
            found = team.backend.call(client, [()] * 2)
            assert team.backend.call(lambda member: os.getpid(), [()] * 2)[1] not in warm
        with weft.Team(2, mps=True) as team:
            assert team.backend.call(client, [()] * 2) == found
        assert found == [client()] * 2 and client()[1]
        weft.shutdown()
        assert dict(os.environ) == before
        print(found[0][0])
    """)
    outcome = run_python(program, env={"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"})
    assert outcome.code == 0, outcome
    assert all(map(has_ended, pids(notes)))
    assert not Path(outcome.out.strip()).parent.exists()


def test_the_daemon_of_a_team_ends_with_a_killed_driver(notes: Path) -> None:
    """Also where a child that the driver has forked lives on."""
    program = CLIENT + textwrap.dedent("""
        import signal
        team = weft.Team(2, mps=True)
        if os.fork() == 0:
            signal.pause()
        print(client()[0], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    outcome = run_python_until_line(program)
    nothing_stays(notes, outcome)


def run_python_until_line(program: str) -> str:
    """The first line that a program prints; then it and its children are ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        process.wait(HANGS)
        found = Path(line)
        wait_until(lambda: not found.parent.exists())  # while the child lives
        os.killpg(process.pid, signal.SIGKILL)
    return line


def test_without_the_program_or_where_it_fails(notes: Path) -> None:
    """The error says what is missing, or what the program printed; nothing runs."""
    (notes / "fails").touch()
    script = "print('ran')"
    failed = launch(script, 2, options=("--mps",))
    words = (
        "MPS could not be started: nvidia-cuda-mps-control -d ended with 1: cannot start: no GPU"
    )
    expect_refusal(failed, words)
    empty = {"PATH": str(notes)}
    missing = launch(script, 2, options=("--mps",), env=empty)
    expect_refusal(missing, "MPS needs the program nvidia-cuda-mps-control, which is not in PATH")
    team = run_python(
        "import weft\ntry: weft.Team(2, mps=True)\nexcept weft.DeviceUnavailable as e: print(e)",
        env=empty,
    )
    assert "MPS needs the program" in team.out, team


def expect_refusal(outcome: Outcome, words: str) -> None:
    assert outcome.code == 1, outcome
    assert words in outcome.err, outcome
    assert "Traceback" not in outcome.err
    assert "ran" not in outcome.out


# with a GPU


@pytest.mark.gpu
def test_the_real_daemon_ends_with_a_killed_launcher() -> None:
    """While a rank is inside a kernel of ten seconds, and another one waits. The next launch has a
    daemon of its own."""
    code = CLIENT + (
        "import signal, torch\n"
        "group = weft.init()\n"
        "torch.ones(1, device=weft.device()).sum().item()\n"
        "weft.barrier()\n"
        "if group.rank == 0:\n"
        "    torch.cuda._sleep(20_000_000_000)\n"
        "    with open(client()[0] + '/nvidia-cuda-mps-control.pid') as file:\n"
        "        print(client()[0], os.getppid(), file.read(), flush=True)\n"
        "signal.pause()\n"
    )
    for _ in range(2):
        command = [sys.executable, "-m", "weft", "run", "-n", "2", "--mps", "--no-prefix"]
        process = subprocess.Popen(
            [*command, str(write_script(code))], stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            folder, launcher, daemon = process.stdout.readline().split()
            assert not has_ended(int(daemon))
            os.kill(int(launcher), signal.SIGKILL)
            process.wait(HANGS)
        wait_until(lambda pid=int(daemon): has_ended(pid))
        wait_until(lambda there=Path(folder).parent: not there.exists())


REAL = """
import ctypes, os, weft, torch
def shared(*_):
    total = torch.ones(1000, device=weft.device()).sum().item()
    value = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuDeviceGetAttribute(ctypes.byref(value), 133, 0) == 0
    return total, value.value
"""


@pytest.mark.gpu
def test_ranks_share_a_gpu_under_mps() -> None:
    """As CUDA itself says; without the option they do not."""
    code = REAL + "weft.init(); print(*shared())"
    for options, value in ((("--mps",), 1), ((), 0)):
        outcome = launch(code, 2, options=(*options, "--no-prefix"))
        assert outcome.code == 0, outcome
        assert outcome.out.splitlines() == [f"1000.0 {value}"] * 2


@pytest.mark.gpu
def test_a_team_shares_a_gpu_under_mps() -> None:
    """Driver and workers; not where the driver has used CUDA before."""
    program = REAL + textwrap.dedent("""
        if __name__ == "__main__":
            with weft.Team(2, mps=True) as team:
                print(team.backend.call(shared, [()] * 2))
                weft.shutdown()  # the daemon stays, as this process is its client
            print(shared(), os.path.exists(os.environ["CUDA_MPS_PIPE_DIRECTORY"]))
    """)
    outcome = run_python(program)
    assert outcome.out.splitlines() == ["[(1000.0, 1), (1000.0, 1)]", "(1000.0, 1) True"], outcome
    late = run_python(
        "import torch, weft\ntorch.cuda.is_available()\n"
        "try: weft.Team(2, mps=True)\nexcept weft.DeviceUnavailable as e: print(e)"
    )
    assert "CUDA was initialised in this process before MPS was started" in late.out, late
