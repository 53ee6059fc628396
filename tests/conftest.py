"""After every test: no process, shared memory, socket, temporary file or thread is left."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import weft
from tests.gpus import require_gpu
from tests.hosts import Hosts, require_hosts
from tests.support import MARK, Reading, all_processes, earlier, marked_processes, readings

# a shell without job control starts background commands with Ctrl-C ignored, nohup has them ignore
# the end of the terminal, and programs inherit both; the tests that do these things need them back
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# images of containers often have Python keep no bytecode: each of the thousands of processes that
# tests start would compile weft anew, which is a quarter of the work of a launch
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collect_file(file_path: Path) -> None:
    """Have hypothesis set no deadline of its own: on a busy machine anything may take a second. It
    is told before it sees the first test; files without it do not load it."""
    if file_path.suffix == ".py" and "from hypothesis import" in file_path.read_text():
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]
        settings.register_profile("busy", deadline=None, suppress_health_check=slow)
        settings.load_profile("busy")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look for a GPU before a fixture of a test with the marker `gpu` is made."""
    if item.get_closest_marker("gpu"):
        require_gpu()


@pytest.fixture
def two_hosts(_two_hosts: Hosts) -> Iterator[Hosts]:
    """Two hosts, which are as fresh for each test; what a test leaves there is an error."""
    yield from _cleaned(_two_hosts)


@pytest.fixture
def three_hosts(_three_hosts: Hosts) -> Iterator[Hosts]:
    """Three hosts, which are as fresh for each test; what a test leaves there is an error."""
    yield from _cleaned(_three_hosts)


@pytest.fixture(scope="module")
def _two_hosts() -> Iterator[Hosts]:
    yield from _made(2)


@pytest.fixture(scope="module")
def _three_hosts() -> Iterator[Hosts]:
    yield from _made(3)


def _made(count: int) -> Iterator[Hosts]:
    require_hosts()
    with Hosts(count) as hosts:
        yield hosts


def _cleaned(hosts: Hosts) -> Iterator[Hosts]:
    yield hosts
    left = hosts.leave_nothing()
    hosts.clean()
    assert not left, f"left on hosts: {left}"


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_a_module(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Tests that share something that stays, such as a team, are looked after together: their
    module says `SHARES = True`."""
    gc.collect()
    gc.freeze()  # with PyTorch loaded, each collection after a test would take a tenth of a second
    with contextlib.ExitStack() as stack:
        if _shares(request):
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            stack.enter_context(nothing_stays(_new_folder(tmp_path_factory), patch))
        yield


@pytest.fixture(autouse=True)
def nothing_left(
    request: pytest.FixtureRequest,
    nothing_left_by_a_module: None,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not _shares(request):
            has_folder = "tmp_path" in request.fixturenames
            folder = request.getfixturevalue("tmp_path") if has_folder else None
            stack.enter_context(nothing_stays(folder or _new_folder(tmp_path_factory), monkeypatch))
        yield
        request.node.funcargs.clear()  # with a team, its replicas and their memory


#: numbers of folders
_numbers = itertools.count()


def _new_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder for a test that asks for none: `tmp_path` takes long, as it looks through those of
    other tests."""
    folder = factory.getbasetemp() / f"left{next(_numbers)}"
    folder.mkdir()
    return folder


def _shares(request: pytest.FixtureRequest) -> bool:
    return getattr(request.module, "SHARES", False)


@contextlib.contextmanager
def nothing_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look for what a block leaves behind. Its files go into the folder."""
    temporary = folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    monkeypatch.setenv("WEFT_TEST_FOLDER", str(folder))
    # torch's optimizers make this folder, by default among the temporary files
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "torch"))
    earlier.clear()
    earlier.update(all_processes())
    before = _leavings(temporary)
    readings[:] = [Reading.take()]
    yield
    weft.shutdown()
    deadline = time.monotonic() + float(os.environ.get("WEFT_TEST_PATIENCE", "20"))
    while (left := _leavings(temporary) - before) and time.monotonic() < deadline:
        gc.collect()  # an exception may hold arrays in a cycle,
        weft.shutdown()  # whose memory is then kept for the next ones
        time.sleep(0.005)
    assert not left, f"left behind: {sorted(left)}"


def _leavings(temporary: Path) -> set[str]:
    processes = marked_processes()
    found = {f"process {pid}: {text}" for pid, text in processes.items()}
    found |= {f"thread {thread.name}" for thread in threading.enumerate()}
    found |= {f"shared memory {name}" for name in _shared_memory(processes)}
    found |= {f"temporary file {name}" for name in os.listdir(temporary)}
    return found | {f"socket {name}" for name in _own_sockets(processes)}


def _shared_memory(processes: Iterable[int]) -> set[str]:
    """What this process and those that it started have mapped: weft's memory, and what still has a
    name in /dev/shm. Other programs' files there, and other tests', are none of this test's."""
    found = set()
    for pid in (os.getpid(), *processes):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                named = "/dev/shm/" in line and not line.endswith("(deleted)")
                if "/memfd:weft" in line or named:
                    found.add(" ".join(line.split()[4:6]))  # the number of the file, and its name
    return found


def _own_sockets(processes: Iterable[int]) -> set[str]:
    """Addresses of weft at which this process or one that it started listens or talks."""
    inodes = set()
    for pid in (os.getpid(), *processes):
        folder = Path(f"/proc/{pid}/fd")
        with contextlib.suppress(OSError):
            for link in folder.iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(link)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {row[7] for row in rows if len(row) > 7 and "@weft/" in row[7] and row[6] in inodes}
