"""Errors and checks that all engines share: a program gets the same ones wherever it runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from weft._core.arguments import whole
from weft.errors import (
    InvalidType,
    InvalidValue,
    NotInitialized,
    OutOfMemory,
    UsageError,
    UsedAfterFork,
    format_bytes,
)
from weft.resources import available_memory

if TYPE_CHECKING:
    from weft.engines.base import Group


def superseded_error(group: Group) -> UsageError:
    """Return the error for a group that is used after `survivors`."""
    return UsageError(
        f"group {group.name!r} of generation {group.generation} has a successor, which survivors() "
        "returned; go on with that one:\n    group = group.latest"
    )


def reentrant_error(name: str) -> UsageError:
    """Return the error for a table that is used within one of its own calls."""
    return UsageError(
        f"table {name!r} is used by an updater or a signal handler in the middle of a call of the "
        "same thread; an updater only changes the rows it is given"
    )


def forked_error(what: str, parent: int) -> UsedAfterFork:
    """Return the error for a part of a group that is used in a forked child."""
    return UsedAfterFork(
        f"{what} belongs to process {parent}, from which this process {os.getpid()} was forked; "
        "a child starts with a group of its own:\n    group = weft.init()"
    )


def left_error(what: str) -> NotInitialized:
    """Return the error for a group that is used after `leave` or `weft.shutdown`."""
    return NotInitialized(
        f"this process has left {what}; a new one comes from weft.init(), or from split() of a "
        "group that it is still in:\n    group = weft.init()"
    )


def validate_split(color: object, key: object) -> tuple[int | None, int]:
    """Return a color and a key as 64-bit integers. Raises InvalidType, InvalidValue."""
    number = None if color is None else _as_int64("color", color, ", or None for no subgroup")
    return number, _as_int64("key", key)


def _as_int64(name: str, value: object, else_expected: str = "") -> int:
    number = whole(value)
    if number is None:
        raise InvalidType(f"split({name}={value!r}): expected a whole number{else_expected}")
    if not -(2**63) < number < 2**63:
        raise InvalidValue(f"split({name}={value!r}): expected a number of at most 63 bits")
    return number


#: bytes that are left to other programs
_MARGIN = 64 << 20


def validate_memory(what: str, size: int, remedy: str) -> None:
    """Raise OutOfMemory unless `size` more bytes can be allocated now."""
    free, reason = available_memory()
    if size + _MARGIN > free:
        raise OutOfMemory(
            f"{what} of {format_bytes(size)} was asked for, but {format_bytes(free)} are free "
            f"({reason}); {remedy}"
        )
