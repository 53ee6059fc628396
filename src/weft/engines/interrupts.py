"""Exceptions that signal handlers raise, in the middle of whatever is going on."""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType
from typing import Any


def by_signal_handler(error: BaseException) -> bool:
    """Whether an exception is one that a handler of this program's raised: it says nothing of what
    was going on then, and is the user's to catch. Its traceback shows it.
    """
    if threading.current_thread() is not threading.main_thread():
        return False  # handlers run in the main thread only
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    """What a handler runs, if it is written in Python: a function, a method, or an object that can
    be called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = getattr(handler, "__call__", None)  # noqa: B004  what it is, not whether
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None
