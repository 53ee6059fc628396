"""Errors: their tree, their tables, and their travels."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace

import pytest

from weft import errors
from weft.errors import Loss, PeerLost, RankState, Stalled, WeftError

STATES = (
    RankState(0, 41, "alive", "barrier", 1.25, "train.py:10"),
    RankState(1, 42, "killed by SIGKILL, likely out of memory", "after barrier", 0.5, "train.py:9"),
)


def test_the_drawing_shows_the_tree() -> None:
    """Every public error stands in the drawing at the top of errors.py."""
    drawing = errors.__doc__ or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, WeftError) and not name.startswith("_"):
            assert drawing.count(f"{name} ") + drawing.count(f"{name}\n") >= 1, name
            assert kind.__doc__


def test_errors_are_the_built_in_kind_a_reader_expects() -> None:
    """except MemoryError, TimeoutError, ConnectionError, ValueError, TypeError work."""
    assert issubclass(errors.OutOfMemory, MemoryError)
    assert issubclass(errors.Stalled, TimeoutError)
    assert issubclass(errors.PeerLost, ConnectionError)
    assert issubclass(errors.InvalidValue, ValueError)
    assert issubclass(errors.InvalidType, TypeError)
    assert issubclass(errors.MissingPackage, ImportError)


@pytest.mark.parametrize("kind", [PeerLost, Stalled])
def test_the_table_is_a_field_and_a_text(kind: type[PeerLost]) -> None:
    """Rank, pid, status, operation, time and line of every rank, readable and aligned."""
    error = kind("rank 1 is gone", [1], STATES)
    assert error.ranks == (1,)
    assert error.states == STATES
    assert [state.alive for state in error.states] == [True, False]
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 is gone"
    assert lines[1].split() == ["rank", "pid", "status", "operation", "since", "line"]
    assert lines[3].endswith("after barrier  0.50 s  train.py:9")
    assert lines[2].index("train.py") == lines[3].index("train.py")


def test_hosts_are_shown_where_they_differ() -> None:
    """One host is no news; of several each rank's is, in a column of its own."""
    here = [replace(state, host="alder") for state in STATES]
    assert str(Stalled("late", [1], here)) == str(Stalled("late", [1], STATES))
    lines = str(Stalled("late", [1], [here[0], replace(here[1], host="birch")])).splitlines()
    assert lines[1].split() == ["rank", "host", "pid", "status", "operation", "since", "line"]
    assert [line.split()[:3] for line in lines[2:]] == [["0", "alder", "41"], ["1", "birch", "42"]]


def test_losses_and_tracebacks_keep_their_host() -> None:
    """Also in another process."""
    loss = Loss(3, 1, 42, -9, 1 << 20, True, host="birch")
    lost = pickle.loads(pickle.dumps(errors.WorkerLost("gone", loss=loss)))
    assert (lost.loss, lost.loss.host) == (loss, "birch")
    cause = errors.RemoteTraceback("Traceback ...", "worker 1 (pid 42)", 3, "birch")
    assert pickle.loads(pickle.dumps(cause)).host == cause.host == "birch"


def test_errors_survive_pickling() -> None:
    """Fields and text are the same in another process."""
    error = pickle.loads(pickle.dumps(PeerLost("rank 1 is gone", [1], STATES)))
    assert (error.ranks, error.states) == ((1,), STATES)
    assert str(error) == str(PeerLost("rank 1 is gone", [1], STATES))


def test_bytes_are_told_in_words() -> None:
    """Small numbers whole, large ones rounded down, and larger ones than a float can hold."""
    sizes = (0, 9_999_999, 10**7, 999_999_999, 10**9, 8_049_999_999, 10**400)
    words = [errors.format_bytes(size) for size in sizes]
    assert words[:3] == ["0 bytes", "9,999,999 bytes", "10 MB"]
    assert words[3:6] == ["999 MB", "1.0 GB", "8.0 GB"]
    assert words[6] == "1" + "0" * 391 + ".0 GB"
