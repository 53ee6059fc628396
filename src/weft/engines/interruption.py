"""Computations that are interrupted from outside, and code that signal handlers interrupt.

ComputationGuard    interrupts the driver's own part of a call when a worker fails meanwhile. The
                    driver computes like the workers, so it does not read their messages while it
                    does. A thread does that instead, but only once the computation has taken a
                    while: short calls pay nothing for it. When a worker has failed, the thread has
                    `ComputationInterrupted` raised in the computing one: in the main thread by a
                    signal, which ends sleeps and other system calls too, elsewhere by Python,
                    between two bytecodes. So it is everywhere on systems without real-time signals.
run_until           interrupts an action of this thread at a deadline.
start               starts a thread whole or not at all, wherever a signal handler raises.
by_signal_handler   tells exceptions that signal handlers raised, in the middle of whatever was
                    going on, from all others.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

#: seconds before a guard is first checked, and between two checks
_LOOK = 0.05

#: seconds without a guard after which the thread ends
_REST = 0.3

#: a signal that neither programs nor libraries use; 0: macOS and Windows have none
_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else 0


class ComputationInterrupted(BaseException):
    """Raised in a computation of this process whose result is of no use any more."""


class _TakenBack(BaseException):
    """Raised in place of a ComputationInterrupted that came too late."""


class ComputationGuard:
    """A context manager that raises ComputationInterrupted in its block once `failed()` is true.

    `failed` is called in another thread, and never after the block. What it raises interrupts the
    block too, and is raised at the end of it.
    """

    def __init__(self, failed: Callable[[], bool]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        in_main = threading.current_thread() is threading.main_thread()
        self._by_signal = in_main and _SIGNAL > 0
        self._open = True
        self.raised = False
        #: what `failed` has raised
        self._error: BaseException | None = None
        self._since = time.monotonic()

    def __enter__(self) -> None:
        try:
            if self._by_signal:
                _listen()
            _watcher.watch(self)
        except BaseException:  # a Ctrl-C: `__exit__` will not be called
            self._open = False
            _watcher.guards.pop(self, None)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
        failure, self._error = self._error, None
        if failure is not None and (kind is None or issubclass(kind, ComputationInterrupted)):
            raise failure from failure.__cause__

    def close(self) -> None:
        """Stop interrupting the block. Idempotent, for callers that an interrupt kept from
        `__exit__`."""
        self._open = False  # from here on the signal is ignored
        _watcher.guards.pop(self, None)
        with self._lock:  # a check may be under way
            if self.raised and not self._by_signal:
                self._take_back()

    def _take_back(self) -> None:
        """Keep a ComputationInterrupted that is pending from being raised after the block.

        Clearing it is not enough: CPython 3.11 then goes on looking for it at every bytecode, and
        under a tracer never gets past one. So another exception replaces it, and is caught here.
        """
        try:
            while _raise_in(self._thread, _TakenBack):
                time.sleep(0)
        except (_TakenBack, ComputationInterrupted):
            pass

    def check(self) -> None:
        """Interrupt the block, once, if it has failed."""
        with self._lock:
            if not self._open or self.raised or time.monotonic() - self._since < _LOOK:
                return
            if self._has_failed():
                self.raised = True
                self._by_signal = self._by_signal and _is_listening()
                if self._by_signal:
                    signal.pthread_kill(self._thread, _SIGNAL)
                else:
                    _raise_in(self._thread, ComputationInterrupted)

    def _has_failed(self) -> bool:
        try:
            return self._failed()
        except BaseException as error:  # the program's log handlers, say, may raise anything
            self._error = error
            return True

    def raise_in_main_thread(self) -> None:
        """Raise ComputationInterrupted if this guard sent the signal; for the signal handler."""
        if self._open and self.raised and self._by_signal:
            self._open = False
            raise ComputationInterrupted


Result = TypeVar("Result")


def run_until(deadline: float, action: Callable[[], Result]) -> Result:
    """Return the result of an action that may block. Raises ComputationInterrupted if the deadline,
    on the monotonic clock, comes first."""
    if deadline == math.inf:
        return action()
    guard = ComputationGuard(lambda: time.monotonic() >= deadline)
    try:
        with guard:
            return action()
    finally:
        guard.close()


class _Watcher:
    """The thread that checks the guards, while there are some."""

    def __init__(self) -> None:
        #: a set in order of entry; several threads may have teams
        self.guards: dict[ComputationGuard, None] = {}
        self._lock = threading.Lock()
        self._running = False

    def watch(self, guard: ComputationGuard) -> None:
        self.guards[guard] = None
        with self._lock:
            if not self._running:
                self._running = True
                thread = threading.Thread(target=self._run, name="weft guard", daemon=True)
                try:
                    start(thread)
                except BaseException:  # the thread may run all the same, beside the next one
                    self._running = False
                    raise

    def _run(self) -> None:
        try:
            self._check_guards()
        except BaseException:  # the next guard starts another thread
            self._running = False
            raise

    def _check_guards(self) -> None:
        last_used = time.monotonic()
        while True:
            time.sleep(_LOOK)
            for guard in list(self.guards):
                guard.check()
                last_used = time.monotonic()
            with self._lock:  # a guard that comes now finds either this thread or none
                if not self.guards and time.monotonic() - last_used > _REST:
                    self._running = False
                    return


def _listen() -> None:
    """Install the signal's handler. It stays: it costs nothing while no signal comes."""
    global _listening
    if not _listening:
        signal.signal(_SIGNAL, _on_signal)
        _listening = True


def _is_listening() -> bool:
    """Return whether the handler is still installed: the program may have replaced it."""
    global _listening
    _listening = signal.getsignal(_SIGNAL) is _on_signal
    return _listening


def _on_signal(_: int, __: FrameType | None) -> None:
    for guard in list(_watcher.guards):
        guard.raise_in_main_thread()


def _raise_in(thread: int, error: type[BaseException]) -> bool:
    """Inject an exception into a thread. Return whether the thread is alive."""
    raise_later = ctypes.pythonapi.PyThreadState_SetAsyncExc
    return bool(raise_later(ctypes.c_ulong(thread), ctypes.py_object(error)))


def _in_child() -> None:
    global _watcher
    _watcher = _Watcher()  # the parent's thread does not run here


_watcher = _Watcher()

#: whether the signal's handler is installed
_listening = False

if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_in_child)


def start(thread: threading.Thread) -> None:
    """Start a thread. A caller that is interrupted in here does not know whether it runs.

    `Thread.start` takes several steps, and a signal handler that raises between two of them leaves
    a thread that dies as it begins. Handlers run in the main thread only, so the steps are taken in
    another thread, which starts in a single step. Raises RuntimeError if no more threads can be
    started.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    started = threading.Lock()
    started.acquire()
    errors: list[RuntimeError] = []
    _thread.start_new_thread(_start, (thread, started, errors))
    started.acquire()
    for error in errors:
        raise error


def _start(thread: threading.Thread, started: threading.Lock, errors: list[RuntimeError]) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        errors.append(error)
    finally:
        started.release()


def by_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler of this program raised an exception, by its traceback. Such
    an exception says nothing of the code that it interrupted, and is the user's to catch."""
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
    """Return the code of a handler that is written in Python: a function, a method, or an object
    that can be called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = getattr(handler, "__call__", None)  # noqa: B004  what it is, not whether
    code = getattr(getattr(handler, "__func__", handler), "__code__", None)
    return code if isinstance(code, CodeType) else None
