"""Exceptions on their way between processes."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import Any

import pytest

import weft
from weft._core.failures import Failure, caller_line, describe, is_outside, restore
from weft.errors import RemoteError, RemoteTraceback


class Detailed(Exception):
    """Takes other arguments than it keeps, and says how to pickle it."""

    def __init__(self, code: int, *, detail: str) -> None:
        self.code, self.detail = code, detail
        super().__init__(f"{code}: {detail}")

    def __reduce__(self) -> Any:
        return _detailed, (self.code, self.detail)


def _detailed(code: int, detail: str) -> Detailed:
    return Detailed(code, detail=detail)


class TwoArguments(Exception):
    """Keeps one argument and takes two: its own pickle cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)
        self.second = second


class Unprintable(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


def caught(error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as raised:  # SystemExit too
        return describe(raised)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad", 3),
        KeyError("k"),
        Detailed(7, detail="d"),
        OSError(2, "No such", "f"),
        TwoArguments("one", "two"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_keeps_its_class_and_arguments(error: Exception) -> None:
    """What arrives is what was raised, with the remote traceback, worker and item as its cause."""
    found = restore(caught(error), "worker 1 (pid 2)", 5, host="alder")
    assert type(found) is type(error)
    assert (found.args, str(found)) == (error.args, str(error))
    assert {**vars(found)} == {**vars(error)}
    cause = found.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert (cause.where, cause.item, cause.host) == ("worker 1 (pid 2)", 5, "alder")
    assert "in caught" in cause.text
    assert str(cause).startswith("raised in item 5, worker 1 (pid 2):\nTraceback")
    assert "raised in worker 1 (pid 2):" in str(
        restore(caught(error), "worker 1 (pid 2)").__cause__
    )


def test_the_cause_of_a_remote_exception_is_in_its_traceback() -> None:
    """`raise ... from` is not lost: the text shows both."""
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    text = caught(error).text
    assert "KeyError: 'inner'" in text
    assert "direct cause" in text
    assert "ValueError: outer" in text


def test_what_cannot_travel_is_named() -> None:
    """A lock inside, an end of the process: a RemoteError says which."""
    locked = ValueError("with a lock", threading.Lock())
    for error, start in (
        (locked, "ValueError: ('with a lock'"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
    ):
        found = restore(caught(error), "worker 0", 1)
        assert type(found) is RemoteError
        assert str(found).startswith(start)
        assert isinstance(found.__cause__, RemoteTraceback)
        assert "Traceback" in found.__cause__.text


def test_local_classes_arrive() -> None:
    """An exception of a class that only the worker's function knew keeps its name and message."""

    class Local(LookupError):
        pass

    found = restore(caught(Local("here")), "worker 0")
    assert type(found).__name__ == "Local"
    assert isinstance(found, LookupError)
    assert str(found) == "here"


def test_an_exception_without_a_text_is_described() -> None:
    """One whose own __str__ raises does not take the worker with it."""
    failure = caught(Unprintable())
    assert failure.kind == "Unprintable"
    assert isinstance(restore(failure, "worker 0"), Unprintable)


def test_a_description_holds_no_frames() -> None:
    """What the function had in its variables can go before the failure is sent."""

    class Big:
        pass

    import gc
    import weakref

    def fails() -> None:
        big = Big()
        seen.append(weakref.ref(big))
        raise ValueError

    seen: list[Any] = []
    try:
        fails()
    except ValueError as error:
        failure = describe(error)
    gc.collect()
    assert seen[0]() is None
    assert failure.kind == "ValueError"


def test_the_line_that_errors_name_is_the_users() -> None:
    """Every file of weft and of the older names is the library's, wherever it lies in there."""
    frame = inspect.currentframe()
    assert frame is not None
    assert caller_line() == f"{__file__}:{frame.f_lineno}"
    library = Path(weft.__file__).parent
    files = list(library.parent.rglob("*.py"))
    assert len(files) > len(list(library.rglob("*.py"))) > 50
    assert not any(is_outside(str(path)) for path in files)
    assert is_outside(str(library.parent / "weft_like" / "program.py"))
