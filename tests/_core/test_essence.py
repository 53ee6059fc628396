"""Functions that are nothing but their code are told from those that may change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from weft._core.essence import essence_of

GLOBAL = 3


def plain(x):  # type: ignore[no-untyped-def]
    return max(x, 0) + 1


def annotated(x: int) -> "list[int]":  # noqa: UP037  a text, and a class
    return [y + 1 for y in range(x)]


def uses_a_global(x: int) -> int:
    return x + GLOBAL


def uses_one_inside(x: int) -> Callable[[], int]:
    return lambda: x + GLOBAL


def has_a_default(x: int = 2) -> int:
    return x


def has_a_keyword(*, x: int = 2) -> int:
    return x


def closing_over(value: int) -> Callable[[], int]:
    return lambda: value


@pytest.mark.parametrize("function", [plain, annotated, lambda x: x, lambda: print("x")])
def test_plain_functions_have_one(function: Any) -> None:
    """It is the same as long as nobody changes the function."""
    assert essence_of(function) is not None
    assert essence_of(function) == essence_of(function)


@pytest.mark.parametrize(
    "function",
    [
        uses_a_global,
        uses_one_inside,
        has_a_default,
        has_a_keyword,
        closing_over(1),
        functools.partial(plain, 1),
        len,
        [].append,
        int,
    ],
)
def test_others_have_none(function: Any) -> None:
    """What they do may depend on something else, or they are no functions of Python's."""
    assert essence_of(function) is None


def test_attributes_and_annotations_count() -> None:
    """Whoever hangs something on a function may change it."""

    def function(x):  # type: ignore[no-untyped-def]
        return x

    assert essence_of(function) is not None
    function.calls = []  # type: ignore[attr-defined]
    assert essence_of(function) is None
    del function.calls  # type: ignore[attr-defined]
    function.__annotations__["x"] = closing_over(1)
    assert essence_of(function) is None


@pytest.mark.parametrize("annotation", [list[int], type[int], 3, object()])
def test_annotations_that_hold_more_than_a_name(annotation: Any) -> None:
    """A class in them is sent with the function as it is then, and may be another later."""

    def function(x):  # type: ignore[no-untyped-def]
        return x

    function.__annotations__["x"] = annotation
    assert essence_of(function) is None


def test_a_function_that_its_name_no_longer_leads_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module has been loaded again: it is sent by value from now on."""
    before = essence_of(plain)
    monkeypatch.setitem(globals(), "plain", None)
    assert essence_of(plain_as_it_was) not in (None, before)


plain_as_it_was = plain


def test_new_code_is_another_essence() -> None:
    """A function that is given other code is another one."""

    def one(x):  # type: ignore[no-untyped-def]
        return x

    def other(x):  # type: ignore[no-untyped-def]
        return -x

    before = essence_of(one)
    one.__code__ = other.__code__
    assert essence_of(one) != before


def test_a_builtin_that_is_hidden_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A global variable that comes later and has the name of a built-in function is seen."""
    assert essence_of(plain) is not None
    monkeypatch.setitem(globals(), "max", lambda *_: 7)
    assert essence_of(plain) is None
