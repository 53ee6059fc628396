"""Turns: what only one thread may use at a time, and several want to."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from weft.errors import Stalled

_Result = TypeVar("_Result")


class Turns:
    """Has threads take turns. A thread whose turn it is may take another within it."""

    def __init__(self, what: str, timeout: float) -> None:
        """Let a thread wait for `what` so many seconds."""
        self._what = what
        self._timeout = min(timeout, threading.TIMEOUT_MAX)
        self._lock = threading.RLock()
        self._process = os.getpid()
        #: the name of the thread whose turn it is, or was last
        self._thread = ""

    def call(self, method: Callable[..., _Result], *arguments: Any, **keywords: Any) -> _Result:
        """Call a method when it is this thread's turn. Raises Stalled if that does not come.

        Not a context manager: a signal handler that raises between its `__enter__` and the block
        would leave the turn taken. `extend` and `map` are one step, in which none runs.
        """
        if self._process != os.getpid():  # forked: the thread that had the turn is not here
            self._lock, self._process = threading.RLock(), os.getpid()
        locked: list[bool] = []
        try:
            locked.extend(map(self._lock.acquire, (True,), (self._timeout,)))
            if not locked[-1]:
                raise Stalled(
                    f"{self._timeout} s have passed, and the thread {self._thread!r} is still in "
                    f"the middle of a call of {self._what}; give it a longer timeout=, or each "
                    "thread one of its own"
                )
            self._thread = threading.current_thread().name
            return method(*arguments, **keywords)
        finally:
            if any(locked):
                self._lock.release()
