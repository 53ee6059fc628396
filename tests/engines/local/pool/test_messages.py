"""Whole messages over a stream."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft._core.failures import Failure
from weft.engines.local.pool.messages import (
    Begun,
    CacheFunction,
    Cancel,
    CancelAcknowledged,
    Done,
    DropFunction,
    Frames,
    Logged,
    Message,
    Modules,
    Outdated,
    Settings,
    Stopped,
    Unreadable,
    Update,
    Warned,
    Work,
    as_tuple,
    from_tuple,
)
from weft.engines.local.processes.channel import Closed

FAILURE = Failure(None, "ValueError", "no", "Traceback")
MESSAGES: list[Message] = [
    Settings(b"state", 2, None, 60.0),
    Settings(b"state", 1, "0", None),
    Modules({"module": {"f": b"digest"}}),
    Outdated({"module": ["f"]}),
    Update(b"values", {("module", "f"): b"digest"}, [("module", "g")], FAILURE),
    Warned(b"message", "file.py", 3, None),
    CacheFunction(b"digest", b"function"),
    DropFunction(b"digest"),
    Work(b"digest", 7, b"items", None, True),
    Work(b"digest", 7, b"items", 3, False, True),
    Done(b"values", [(1, FAILURE)], 0.5, 100),
    Unreadable(FAILURE, True),
    Stopped(b"values", [(1, FAILURE)], 0.5, 100),
    Begun(1.5),
    Cancel(),
    CancelAcknowledged(),
    Logged({"msg": "text"}),
]


@pytest.fixture
def ends() -> Iterator[tuple[Frames, Frames, socket.socket]]:
    """The driver's end, which does not block, the worker's, and the worker's socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    driver, worker = Frames(ours), Frames(theirs)
    yield driver, worker, theirs
    driver.close()
    worker.close()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_what_it_was(message: Message) -> None:
    """Every kind there is, with its type."""
    assert from_tuple(as_tuple(message)) == message
    assert type(from_tuple(as_tuple(message))) is type(message)


def test_messages_arrive_in_order(ends: tuple[Frames, Frames, socket.socket]) -> None:
    """Several in one call or in several, both ways; without any, the driver gets None."""
    driver, worker, _ = ends
    assert driver.receive() is None
    driver.send(*MESSAGES[:4])
    driver.send(MESSAGES[4])
    assert [worker.receive() for _ in range(5)] == MESSAGES[:5]
    worker.send(MESSAGES[5], MESSAGES[6])
    assert [driver.receive(), driver.receive(), driver.receive()] == [*MESSAGES[5:7], None]


def test_what_is_too_much_at_once_is_sent_bit_by_bit(
    ends: tuple[Frames, Frames, socket.socket],
) -> None:
    """A driver does not wait for a worker: it keeps the rest, and sends when there is room."""
    driver, worker, _ = ends
    large = Work(b"digest", 0, b"x" * 5_000_000, None, False)
    driver.send(large)
    assert driver.unsent
    driver.send(Cancel())
    found: list[Message | None] = []
    reader = threading.Thread(target=lambda: found.extend(worker.receive() for _ in range(2)))
    reader.start()
    while not driver.flush():
        pass
    reader.join()
    assert found == [large, Cancel()]
    assert not driver.unsent


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=3), st.data())
def test_messages_may_come_in_any_pieces(sizes: list[int], data: st.DataObject) -> None:
    """However the bytes are cut, a message is there when it is whole, and not before."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.setblocking(False)
    written, read = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, written, read:
        messages = [CacheFunction(b"digest", b"x" * size) for size in sizes]
        Frames(written).send(*messages)
        written.close()
        whole = b"".join(iter(lambda: read.recv(1 << 20), b""))
        cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=5)))
        frames, found = Frames(theirs), []
        for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            ours.sendall(whole[start:stop])
            while (message := frames.receive()) is not None:
                found.append(message)
        assert found == messages


def test_the_end_of_the_other_side_is_closed(
    ends: tuple[Frames, Frames, socket.socket],
) -> None:
    """Also in the middle of a message, and also for who sends; what came whole is received."""
    driver, worker, theirs = ends
    worker.send(Cancel())
    theirs.sendall(b"\x10\0\0\0\0\0\0\0half")
    theirs.close()
    assert driver.receive() == Cancel()
    with pytest.raises(Closed, match="the other end closed the connection"):
        driver.receive()
    with pytest.raises(Closed):
        driver.send(Work(b"digest", 0, b"x" * 1_000_000, None, False))


class Struck(Exception):
    """What the signal handler raises."""


@pytest.fixture
def strike() -> Iterator[Callable[[float], None]]:
    """Has a signal handler raise `Struck` after so many seconds; 0: it does no more."""

    def handler(*_: Any) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, handler)
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # of this test's own time limit
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, left)


def test_interrupts_at_random_lose_no_bytes(
    ends: tuple[Frames, Frames, socket.socket], strike: Callable[[float], None]
) -> None:
    """Wherever a signal handler raises, in sending and in receiving: of what the other end gets
    each message is whole, in its place and there once; at most two go missing for an interrupt."""
    driver, worker, _ = ends
    rng = random.Random(0)
    sent, struck, echoed = 0, 0, list[int]()

    def echo() -> None:
        while (message := worker.receive()) != Cancel():
            assert isinstance(message, CacheFunction)
            whole = len(set(message.function)) == 1
            worker.send(
                CacheFunction(message.digest, message.function[:100] if whole else b"not whole")
            )

    other = threading.Thread(target=echo)
    other.start()
    deadline = time.monotonic() + 60
    while struck < 300 and time.monotonic() < deadline:
        sent += 1
        message = CacheFunction(
            sent.to_bytes(4, "big"), bytes([sent % 256]) * rng.randrange(1, 200_000)
        )
        try:
            strike(rng.random() * 0.0005 + 1e-6)
            driver.send(message)
            while not driver.flush() and time.monotonic() < deadline:
                pass
            while (answer := driver.receive()) is not None:
                echoed.append(_number(answer))
            strike(0)
        except Struck:
            struck += 1
    strike(0)
    driver.send(Cancel())
    while (not driver.flush() or other.is_alive()) and time.monotonic() < deadline:
        pass
    while (answer := driver.receive()) is not None:
        echoed.append(_number(answer))
    other.join()
    assert struck >= 300
    assert echoed == sorted(set(echoed))
    # one may have been struck while it was sent, and one that had come while it was received
    assert sent - len(echoed) <= 2 * struck


def _number(message: Message) -> int:
    assert isinstance(message, CacheFunction)
    number = int.from_bytes(message.digest, "big")
    assert set(message.function) == {number % 256}
    return number
