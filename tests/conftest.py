"""After every test: no process, shared memory, socket, temporary file or thread is left."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import weft
from tests.support import MARK, Reading, marked_processes, readings

# a shell without job control starts background commands with Ctrl-C ignored, nohup has them ignore
# the end of the terminal, and programs inherit both; the tests that do these things need them back
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# images of containers often have Python keep no bytecode: each of the thousands of processes that
# tests start would compile weft anew, which is a quarter of the work of a launch
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv(MARK, uuid.uuid4().hex)
    monkeypatch.setenv("WEFT_TEST_FOLDER", str(tmp_path))
    # torch's optimizers make this folder, by default among the temporary files
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    before = _leavings(temporary)
    readings[:] = [Reading.take()]
    yield
    weft.shutdown()
    deadline = time.monotonic() + float(os.environ.get("WEFT_TEST_PATIENCE", "20"))
    while (left := _leavings(temporary) - before) and time.monotonic() < deadline:
        gc.collect()  # an exception may hold arrays in a cycle,
        weft.shutdown()  # whose memory is then kept for the next ones
        time.sleep(0.02)
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
