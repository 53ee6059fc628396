"""The memory of other processes, through libc."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from weft.engines.local.processes import linux

#: tells where its 64 bytes are, and at the end of its input what is in them
HOLDER = """
import ctypes, sys
from weft.engines.local.processes import linux as libc
libc.allow_ptrace_by(int(sys.argv[1]))
memory = ctypes.create_string_buffer(b"a" * 32, 64)
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
print(memory.value.decode())
"""

#: what a sibling of the holder does
READER = """
import ctypes, sys
from weft.engines.local.processes import linux as libc
memory = ctypes.create_string_buffer(64)
count = libc.read_memory(int(sys.argv[1]), int(sys.argv[2]), ctypes.addressof(memory), 64)
print(count, memory.value.decode())
"""


@contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A child that allows this process and its descendants, and the address of its memory."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout
        yield child, int(child.stdout.readline())


def skip_where_forbidden(call: Callable[[], int]) -> int:
    try:
        return call()
    except PermissionError as error:
        pytest.skip(f"this machine forbids it: {error}")


def test_a_parent_reads_and_writes_its_child() -> None:
    """Bytes go straight from one process's memory into the other's, both ways."""
    memory = ctypes.create_string_buffer(64)
    here = ctypes.addressof(memory)
    with holder() as (child, there):
        assert skip_where_forbidden(lambda: linux.read_memory(child.pid, there, here, 64)) == 64
        assert memory.value == b"a" * 32
        memory.value = b"b" * 8
        assert linux.write_memory(child.pid, there + 4, here, 8) == 8
        out, _ = child.communicate()
    assert out == "a" * 4 + "b" * 8 + "a" * 20 + "\n"


def test_a_sibling_reads() -> None:
    """What ranks do: one reads another that has allowed the descendants of their parent."""
    with holder() as (child, there):
        done = subprocess.run(
            [sys.executable, "-c", READER, str(child.pid), str(there)],
            capture_output=True,
            text=True,
        )
        child.communicate()
    if "PermissionError" in done.stderr:
        pytest.skip("this machine forbids it")
    assert done.stdout == f"64 {'a' * 32}\n", done.stderr


def test_fewer_bytes_where_the_memory_ends() -> None:
    """A range that runs into unmapped memory is copied up to there."""
    page = mmap.PAGESIZE
    pages = mmap.mmap(-1, 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    here = ctypes.create_string_buffer(2 * page)
    protect = ctypes.CDLL(None).mprotect  # unreadable is as good as unmapped, and can be undone
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(address + page, page, 0) == 0
    copied = linux.read_memory(os.getpid(), address, ctypes.addressof(here), 2 * page)
    assert protect(address + page, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    assert copied == page


def test_errors_name_the_process() -> None:
    """A process that has ended, and an address that is not mapped."""
    memory = ctypes.create_string_buffer(8)
    here = ctypes.addressof(memory)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for call, verb in ((linux.read_memory, "read"), (linux.write_memory, "write")):
        told = f"cannot {verb} the memory of process {gone.pid}: No such process"
        with pytest.raises(ProcessLookupError, match=told):
            call(gone.pid, here, here, 8)
        with pytest.raises(OSError) as caught:
            call(os.getpid(), 8, here, 8)
        assert caught.value.errno == errno.EFAULT


def test_allowing_a_process_that_has_ended_changes_nothing() -> None:
    """Ranks allow their launcher, which may be gone by then."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    linux.allow_ptrace_by(gone.pid)


def test_threads_do_not_disturb_each_other() -> None:
    """Each call has ranges of its own."""

    def reads(number: int) -> bool:
        source = ctypes.create_string_buffer(bytes([number]) * 50_000)
        target = ctypes.create_string_buffer(50_000)
        for _ in range(200):
            ctypes.memset(target, 0, 50_000)
            ends = ctypes.addressof(source), ctypes.addressof(target)
            if linux.read_memory(os.getpid(), *ends, 50_000) != 50_000:
                return False
            if target.raw != source.raw[:50_000]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(reads, range(1, 9))) == [True] * 8
