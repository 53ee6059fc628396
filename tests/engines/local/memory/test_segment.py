"""Memory that several processes see."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from pathlib import Path

import numpy as np
import pytest

from weft.engines.local.memory import segment
from weft.engines.local.memory.segment import Block, Segment
from weft.engines.local.processes.linux import map_over, translate_os_error
from weft.errors import OutOfDescriptors, OutOfMemory


def test_two_mappings_see_the_same_bytes() -> None:
    """A descriptor mapped again is the same memory, zero at first, and without a name."""
    first = Segment.create(10_000)
    second = Segment(os.dup(first.descriptor), first.size)
    assert os.readlink(f"/proc/self/fd/{first.descriptor}").endswith(" (deleted)")
    assert first.size == 12288
    assert bytes(second.view(0, second.size)) == bytes(first.size)
    Block(first, 64, 64).words[3] = 7
    assert Block(second, 0, 128).words[11] == 7


def test_memory_is_reserved_at_creation() -> None:
    """The pages exist before anybody touches them: no SIGBUS later."""
    made = Segment.create(1 << 20)
    assert os.fstat(made.descriptor).st_blocks * 512 >= 1 << 20


LARGE = 5 * segment.HUGE + 3 * 4096


def mapped_by_huge_pages() -> int:
    """Bytes of shared memory that this process has mapped so."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped"))


def kernel_makes_them() -> bool:
    """Whether this one does when it is asked to (MADV_COLLAPSE)."""
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return release >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


def test_large_segments_have_huge_pages() -> None:
    """Wherever a whole one fits, where it was made and where it is mapped again; all is zero."""
    if not kernel_makes_them():
        pytest.skip("this kernel makes none for shared memory")
    before = mapped_by_huge_pages()
    first = Segment.create(LARGE)
    memory = np.frombuffer(first.view(0, LARGE), np.uint8)
    assert not memory.any()
    assert mapped_by_huge_pages() - before == 5 * segment.HUGE
    second = Segment(os.dup(first.descriptor), first.size)
    there = np.frombuffer(second.view(4096, LARGE - 4096), np.uint8)
    memory[:] = np.arange(LARGE) % 251
    np.testing.assert_array_equal(there, memory[4096:])
    assert mapped_by_huge_pages() - before == 10 * segment.HUGE


@pytest.mark.parametrize("made", [0, 1])
def test_memory_is_reserved_where_no_huge_pages_are_made(
    made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that makes none, or none any longer, makes small ones."""
    answers = iter([True] * made)
    monkeypatch.setattr(segment, "make_huge", lambda *_: next(answers, False))
    monkeypatch.setattr(segment, "PIECE", 2 * segment.HUGE)
    one = Segment.create(LARGE)
    assert os.fstat(one.descriptor).st_blocks * 512 == LARGE
    assert not np.frombuffer(one.view(0, LARGE), np.uint8).any()


def mappings() -> int:
    """How many of shared memory this process has."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:weft" in line or "/dev/shm" in line for line in lines)


def test_a_large_mapping_goes_with_its_last_user() -> None:
    """Not before, and all of it."""
    before = mappings()
    made = Segment.create(LARGE)
    view = made.view(LARGE - 1, 1)
    del made
    view[0] = 7
    assert view[0] == 7
    assert mappings() > before
    del view
    assert mappings() == before


def test_what_cannot_be_mapped() -> None:
    """It is said, and nothing is mapped there."""
    made = Segment.create(segment.HUGE)
    address = ctypes.addressof(made.view(0, 1))
    with pytest.raises(OSError, match=r"cannot map 4096 bytes: Invalid argument"):
        map_over(address + 1, made.descriptor, 4096)
    with pytest.raises(OSError, match=r"cannot map 4096 bytes: Bad file descriptor"):
        map_over(address, -1, 4096)


def test_more_than_there_is() -> None:
    """Asking for more than is available is an OutOfMemory that says how much there is."""
    with pytest.raises(OutOfMemory, match=r"99999.* GB was asked for, but .* are free"):
        Segment.create(99_999 * 10**9)
    with pytest.raises(MemoryError):
        Segment.create(99_999 * 10**9)


def test_the_descriptor_closes_with_the_segment() -> None:
    """Dropping a segment closes its descriptor; its mapping lives on in a block's buffer."""
    made = Segment.create(4096)
    descriptor = made.descriptor
    block = Block(made, 0, 64)
    block.words[0] = 5
    buffer = block.buffer
    del made, block
    assert not Path(f"/proc/self/fd/{descriptor}").exists()
    assert bytes(buffer)[:1] == b"\x05"


def test_system_errors_are_translated() -> None:
    """ENOSPC and ENOMEM are OutOfMemory, EMFILE is OutOfDescriptors, the rest stays."""
    for number in (errno.ENOSPC, errno.ENOMEM):
        assert isinstance(translate_os_error(OSError(number, "x"), 5), OutOfMemory)
    full = translate_os_error(OSError(errno.EMFILE, "x"))
    assert isinstance(full, OutOfDescriptors)
    assert isinstance(full, OSError)
    assert "ulimit -n" in str(full)
    other = OSError(errno.EPERM, "x")
    assert translate_os_error(other) is other


def test_whole_pages() -> None:
    """Sizes are rounded up to pages, and nothing is a page too."""
    assert [segment.whole_pages(n) for n in (0, 1, 4096, 4097)] == [4096, 4096, 4096, 8192]
