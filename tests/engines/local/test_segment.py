"""Memory that several processes see."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from weft.engines.local import segment
from weft.engines.local.segment import Block, Segment
from weft.engines.local.translation import translated
from weft.errors import OutOfDescriptors, OutOfMemory


@pytest.fixture(params=["memfd", "portable"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "portable":
        monkeypatch.setenv("WEFT_PORTABLE", "1")
        _count_no_tracker(monkeypatch)
    return str(request.param)


def _count_no_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """multiprocessing's tracker is a process that lives as long as this one: do without here."""
    from multiprocessing import resource_tracker

    monkeypatch.setattr(resource_tracker, "register", lambda *_: None)
    monkeypatch.setattr(resource_tracker, "unregister", lambda *_: None)


def test_two_mappings_see_the_same_bytes(kind: str) -> None:
    """A descriptor mapped again is the same memory, zero at first, and without a name."""
    names = set(os.listdir("/dev/shm"))
    first = Segment.create(10_000)
    second = Segment(os.dup(first.descriptor), first.size)
    assert set(os.listdir("/dev/shm")) == names
    assert first.size == 12288
    assert bytes(second.view(0, second.size)) == bytes(first.size)
    Block(first, 64, 64).words[3] = 7
    assert Block(second, 0, 128).words[11] == 7


def test_memory_is_reserved_at_creation(kind: str) -> None:
    """The pages exist before anybody touches them: no SIGBUS later."""
    made = Segment.create(1 << 20)
    assert os.fstat(made.descriptor).st_blocks * 512 >= 1 << 20


def test_more_than_there_is(kind: str) -> None:
    """Asking for more than is available is an OutOfMemory that says how much there is."""
    with pytest.raises(OutOfMemory, match=r"99999.* GB was asked for, but .* are free"):
        Segment.create(99_999 * 10**9)
    with pytest.raises(MemoryError):
        Segment.create(99_999 * 10**9)


def test_the_descriptor_closes_with_the_segment(kind: str) -> None:
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
        assert isinstance(translated(OSError(number, "x"), 5), OutOfMemory)
    full = translated(OSError(errno.EMFILE, "x"))
    assert isinstance(full, OutOfDescriptors)
    assert isinstance(full, OSError)
    assert "ulimit -n" in str(full)
    other = OSError(errno.EPERM, "x")
    assert translated(other) is other


def test_whole_pages() -> None:
    """Sizes are rounded up to pages, and nothing is a page too."""
    assert [segment.whole_pages(n) for n in (0, 1, 4096, 4097)] == [4096, 4096, 4096, 8192]
