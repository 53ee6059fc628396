"""What each rank is doing, for whoever asks."""

from __future__ import annotations

import inspect
import random
import threading

from weft.engines.local.meeting import roster
from weft.engines.local.meeting.roster import Recorder
from weft.engines.local.memory.segment import Block, Segment


def _strip() -> memoryview:
    return Block(Segment.create(8 * roster.STRIP_WORDS), 0, 8 * roster.STRIP_WORDS).words


def _line_below() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno + 1


def test_an_open_operation_is_current_until_it_ends() -> None:
    """Readers see the operation, its source line and its times."""
    words = _strip()
    log = Recorder(words, 0)
    assert roster.current(words, 0) == roster.NOTHING
    line = _line_below()
    at = log.enter("barrier", 77)
    entry = roster.current(words, 0)
    assert (entry.operation, entry.tag, entry.ended) == ("barrier", 77, 0)
    assert entry.line == f"{__file__}:{line}"
    log.leave(at)
    entry = roster.current(words, 0)
    assert entry.ended >= entry.began > 0


def test_the_ring_keeps_the_last_sixteen() -> None:
    """Old entries are overwritten in turn; an open one counts as current before a later ended."""
    words = _strip()
    log = Recorder(words, 0)
    for _ in range(100):
        log.leave(log.enter("old"))
    log.enter("open")
    for _ in range(5):
        log.leave(log.enter("nested"))
    found = roster.entries(words, 0)
    assert [entry.number for entry in found] == list(range(91, 107))
    assert roster.current(words, 0).operation == "open"


def test_many_sites_and_long_names() -> None:
    """More source lines than fit are written over older ones; the current one is always right."""
    words = _strip()
    log = Recorder(words, 0)
    for number in range(300):
        name = f"{'é' * 120}{number}"
        at = log.enter(name)
        entry = roster.current(words, 0)
        assert entry.operation.endswith(f"é{number}")
        assert __file__ in entry.line
        log.leave(at)


def test_what_the_ring_names_is_not_written_over() -> None:
    """Whoever is slow to read finds each entry as it was, however many texts are new since; also
    where texts that were written long ago are used again."""
    words = _strip()
    log = Recorder(words, 0)
    chance = random.Random(1)
    called: list[tuple[str, str]] = []
    for number in range(3000):
        operation = chance.choice(["barrier", "split", f"operation {chance.randrange(90)}"])
        line = chance.choice(["here", f"line {chance.randrange(50)}", f"line {number}"])
        called.append((operation, line))
        log.leave(log.enter_at(operation, line))
        found = [(entry.operation, entry.line) for entry in roster.entries(words, 0)]
        assert found == called[-16:], number


def test_threads_get_different_entries() -> None:
    """Two threads never write one entry."""
    words = _strip()
    log = Recorder(words, 0)
    places: list[int] = []
    threads = [
        threading.Thread(target=lambda: places.extend(log.enter("x") for _ in range(8)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(places)) == 16
