"""How tests run ranks: real processes, started by `weft run` or by mpirun."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

MARK = "WEFT_TEST_MARK"
#: seconds after which whatever was started is taken to hang; no test measures anything by it
HANGS = 240.0

#: what each rank of `run_ranks` executes: join, call, keep the result. Helpers of other files of
#: tests are found as pytest finds them
_RUNNER = f"""
import os, pickle, sys
sys.path.append({str(Path(__file__).parent.parent)!r})
import weft
import cloudpickle

with open(sys.argv[1], "rb") as file:
    function, arguments = pickle.load(file)
group = weft.init()
result = function(group, *arguments)
with open(f"{{sys.argv[1]}}.{{group.rank}}", "wb") as file:
    cloudpickle.dump(result, file)
"""


@dataclass(frozen=True)
class Outcome:
    """What a launch printed, how it ended, and how long it took."""

    code: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        return f"exit code {self.code} after {self.seconds:.2f} s\n{self.out}\n{self.err}"


def command(ranks: int, *options: str, launcher: str = "weft run") -> list[str]:
    """The command line that starts so many ranks of the script that follows it."""
    if launcher == "mpirun":
        return [*mpirun(ranks), *options, sys.executable]
    return [sys.executable, "-m", "weft", "run", "-n", str(ranks), *options]


def mpirun(ranks: int) -> list[str]:
    """Open MPI's mpirun, which the test environment has, with what it needs on any machine."""
    path = Path(sys.executable).parent / "mpirun"
    return [str(path), "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]


def launch(
    script: str | Path,
    ranks: int,
    *arguments: str,
    options: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    limit: float = HANGS,
    launcher: str = "weft run",
) -> Outcome:
    """Run a script, given as a path or as its text, by `weft run` or another launcher."""
    path = write_script(script) if isinstance(script, str) else script
    line = [*command(ranks, *options, launcher=launcher), str(path), *arguments]
    return run_command(line, env=env, limit=limit)


def write_script(text: str) -> Path:
    """A file with this text, gone after the test."""
    path = Path(os.environ["WEFT_TEST_FOLDER"]) / f"script{time.monotonic_ns()}.py"
    path.write_text(text)
    return path


def run_command(
    line: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    limit: float = HANGS,
    folder: Path | None = None,
) -> Outcome:
    """Run a command to its end, in this folder or another."""
    began = time.monotonic()
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        timeout=limit,
        env={**os.environ, **(env or {})},
        cwd=folder,
    )
    seconds = time.monotonic() - began
    readings.append(Reading.take())
    return Outcome(done.returncode, done.stdout, done.stderr, seconds)


def run_ranks(
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    options: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    launcher: str = "weft run",
    limit: float = HANGS,
) -> list[Any]:
    """Call `function(group, *arguments)` in each of `ranks` processes; the results by rank."""
    payload = _payload(function, arguments)
    outcome = launch(
        _RUNNER, ranks, str(payload), options=options, env=env, limit=limit, launcher=launcher
    )
    assert outcome.code == 0, outcome
    return _results(payload, ranks)


def run_ranks_on_hosts(
    each: Sequence[int], function: Callable[..., Any], *arguments: Any, limit: float = HANGS
) -> list[Any]:
    """Do as `run_ranks` on hosts of namespaces, with so many ranks each."""
    from tests.hosts import Hosts

    payload = _payload(function, arguments)
    with Hosts(len(each)) as hosts:
        outcome = hosts.launch(_RUNNER, each, str(payload), timeout=limit)
        assert outcome.code == 0, outcome
        assert not (left := hosts.leave_nothing()), left
    return _results(payload, sum(each))


def _payload(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Path:
    payload = Path(os.environ["WEFT_TEST_FOLDER"]) / f"payload{time.monotonic_ns()}"
    with by_value(sys.modules[function.__module__]):
        payload.write_bytes(cloudpickle.dumps((function, arguments)))
    return payload


@contextlib.contextmanager
def by_value(module: ModuleType) -> Iterator[None]:
    """Have functions of a module of tests pickled by value, as ranks cannot import it."""
    known = module.__name__ in cloudpickle.cloudpickle.list_registry_pickle_by_value()
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        if not known:
            cloudpickle.unregister_pickle_by_value(module)


def _results(payload: Path, ranks: int) -> list[Any]:
    return [pickle.loads(Path(f"{payload}.{rank}").read_bytes()) for rank in range(ranks)]


def run_python(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> Outcome:
    """Run a program of its own, without a launcher."""
    return run_command([sys.executable, "-c", code, *arguments], env=env)


def run_script(text: str, *, env: Mapping[str, str] | None = None) -> Outcome:
    """Run a program as a user does: from a file of its own."""
    return run_command([sys.executable, str(write_script(text))], env=env)


def take_terminal() -> None:
    """In a child, before its program is run: have its stdin be the terminal of its session."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@dataclass(frozen=True)
class Reading:
    """How long all cores have been busy until now, and how long of that with this test."""

    now: float
    busy: float
    own: float

    @classmethod
    def take(cls) -> Reading:
        ticks = os.sysconf("SC_CLK_TCK")
        cpu = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = (sum(cpu) - cpu[3] - cpu[4]) / ticks  # all but idle, and idle until a disk answers
        own = sum(os.times()[:4])
        for pid in marked_processes():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                own += sum(map(int, stat[11:15])) / ticks  # with the children that it has seen end
        return cls(time.monotonic(), busy, own)

    def others_until(self, later: Reading) -> float:
        """The part of all cores that others have had between two readings."""
        seconds = (later.now - self.now) * (os.cpu_count() or 1)
        others = (later.busy - self.busy) - (later.own - self.own)
        # the counters tick a hundred times a second
        return min(1.0, max(0.0, others / seconds)) if seconds > 0.2 else 0.0


#: taken in this test: when it began, and whenever something that it ran had ended
readings: list[Reading] = []


def load() -> float:
    """How many times as long as on an idle machine something may take that this test has just done,
    or will do now: 1 where there is a core for whoever wants one, 2.5 beside as many busy processes
    as there are cores.

    Measured by what others have had of the cores since the test began, at its worst; and by a
    little work now, and how long it has to wait for its core."""
    began, used = time.perf_counter(), time.thread_time()
    while (worked := time.thread_time() - used) < 0.03:
        pass
    now = 1 + 3 * max(0.0, (time.perf_counter() - began) / worked - 1)
    if readings:
        readings.append(Reading.take())
    others = (early.others_until(late) for early, late in itertools.pairwise(readings))
    return max(now, 1 + 3 * min(0.5, max(others, default=0.0)))


def within(seconds: float) -> float:
    """How long something may take that takes so many seconds at most on an idle machine. Asked when
    it has ended, it is known how busy the machine was meanwhile."""
    return seconds * load()


def deadline(seconds: float) -> float:
    """The deadline of what will not come, by which all else has come that takes less than so many
    seconds on an idle machine. No longer than four times that, as a test waits for all of it."""
    return round(min(within(seconds), 4 * seconds), 1)


def wait_until(condition: Callable[[], Any], seconds: float | None = None) -> Any:
    """What `condition` returns once it is true; fails the test if it never is, or not within so
    many seconds (of an idle machine)."""
    began = time.monotonic()
    while not (found := condition()):
        assert time.monotonic() < began + HANGS / 2, f"{condition} did not become true"
        time.sleep(0.005)
    taken = time.monotonic() - began
    assert seconds is None or taken < within(seconds), f"{condition} became true after {taken} s"
    return found


def await_state(group: Any, rank: int, condition: Callable[[Any], Any]) -> None:
    """In a rank: wait until what another rank does is as it should be; see `RankState`."""
    end = time.monotonic() + 60
    while not condition(state := group._meeting.roster.states(group._meeting.members)[rank]):
        assert time.monotonic() < end, state
        time.sleep(0.005)


#: the same for programs that are given as text
AWAIT_STATE = "import time\nfrom typing import Any, Callable\n" + inspect.getsource(await_state)


#: processes that were there before the test began, and so have not its mark
earlier: set[tuple[int, int]] = set()


def marked_processes() -> dict[int, str]:
    """Processes that a test started, by their environment: orphans are found too."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for pid, _ in all_processes() - earlier:
        folder = Path(f"/proc/{pid}")
        try:
            if pid != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                command_line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if state != "Z":
                    found[pid] = f"{state} {command_line}"
        except OSError:
            continue
    return found


def all_processes() -> set[tuple[int, int]]:
    """All processes of this machine: the number of each, and that of its folder, which is another
    one if the process is."""
    with os.scandir("/proc") as folders:
        return {(int(one.name), one.inode()) for one in folders if one.name.isdigit()}
