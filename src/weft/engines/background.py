"""Asynchronous calls: a thread carries them out, one after the other, beside the caller's own work.

    the caller                       the thread
      pending.append(call)             while calls are pending, or may be soon:
      no thread runs? start one            carry out the first; remove it; unlock its gate
      unlock news
    whoever waits for a call
      until its gate is unlocked: start a thread if none runs

The first call starts the thread, which ends when there has been no call for a while. A signal
handler may raise between any two steps of the caller, so no step relies on those after it: a call
is pending as soon as it is in the queue, and whoever waits for it makes sure that a thread carries
it out. There may be two threads for a moment; they take turns.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

from weft._core.arguments import validate_seconds
from weft.engines import interruption
from weft.engines.refusals import forked_error
from weft.errors import Stalled

#: seconds without work after which the thread ends
_IDLE = 0.5
#: seconds after which those who wait make sure again that a thread runs
_SLICE = 1.0
#: seconds that the thread has to finish its call when its group is left
_ENDING = 10.0
#: seconds after which a thread that has not begun was never started
_BEGINNING = 1.0


class PendingCall:
    """The Handle that `async_op=True`, `get_async` and `add_async` return."""

    # `__del__` reads these: a signal handler may raise before `__init__` has set them
    _error: BaseException | None = None
    _waited_for = False

    def __init__(self, work: Callable[[], Any], name: str, background: Background) -> None:
        self._work: Callable[[], Any] | None = work
        self._name, self._background = name, background
        self._process = os.getpid()
        self._ended = False
        #: locked until the call has ended
        self._gate = threading.Lock()
        self._gate.acquire()
        self._result: Any = None
        self._error = None
        #: whether `wait` has returned its result or raised its error
        self._waited_for = False

    def done(self) -> bool:
        return self._ended

    def wait(self, timeout: float | None = None) -> Any:
        if not self._await(float("inf") if timeout is None else validate_seconds(timeout)):
            raise Stalled(f"{self._name} was not done after {timeout:g} s; it goes on, wait again")
        self._waited_for = True
        if self._error is not None:
            raise self._error
        return self._result

    def __repr__(self) -> str:
        state = "pending" if not self._ended else "failed" if self._error is not None else "done"
        return f"<{self._name}, {state}>"

    def __del__(self) -> None:
        if self._error is not None and not self._waited_for:
            warnings.warn(
                f"{self._name} was left to a thread, failed, and nobody waited for it: "
                f"{type(self._error).__name__}: {self._error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def join(self) -> None:
        """Wait until the call has ended, with a result or an error."""
        self._await(float("inf"))

    def _await(self, seconds: float) -> bool:
        """Wait for so many seconds at most; return whether the call has ended."""
        deadline = time.monotonic() + seconds
        while not self._ended:
            if os.getpid() != self._process:
                raise forked_error(f"the handle of {self._name}", self._process)
            self._background.ensure_thread()
            remaining = deadline - time.monotonic()
            if self._gate.acquire(timeout=min(max(remaining, 0.0), _SLICE)):
                self._gate.release()
            elif remaining <= 0:
                return self._ended
        return True

    def run(self) -> None:
        """Carry out the call; for the thread."""
        work, self._work = self._work, None  # frees what the work holds as soon as it has ended
        try:
            if work is not None:
                self._result = work()
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """Wake those who wait for the call; for the thread."""
        self._ended = True
        self._gate.release()


class Background:
    """The pending calls of one group or table, and the thread that carries them out."""

    def __init__(self, name: str) -> None:
        self._name = name
        #: calls that have not ended; the first one is being carried out
        self.pending: deque[PendingCall] = deque()
        self._thread: threading.Thread | None = None
        #: all that have not ended: several, if the start of one was interrupted
        self._threads: list[threading.Thread] = []
        self._turn = threading.Lock()
        #: unlocked when there may be a new call
        self._news = threading.Lock()
        self._closing = False
        self._process = os.getpid()

    def start(self, work: Callable[[], Any], name: str) -> PendingCall:
        """Queue a call after those before it. Raises UsedAfterFork."""
        if os.getpid() != self._process:  # the parent's thread does not run here
            raise forked_error(self._name, self._process)
        call = PendingCall(work, name, self)
        self.pending.append(call)
        try:
            self.ensure_thread()
        except RuntimeError:  # no thread can be started: the call was not made
            self.pending.remove(call)
            raise
        self._notify()
        return call

    def finish(self) -> None:
        """Wait until no call is pending. Errors are raised only by the calls' own handles."""
        while self.pending:
            with contextlib.suppress(IndexError):  # it has just ended
                self.pending[-1].join()

    def close(self) -> None:
        """Wait until the thread has ended. For a group whose calls all fail from now on."""
        self._closing = True
        self._notify()
        begun = time.monotonic() + _BEGINNING
        for thread in list(self._threads):
            while not thread.is_alive() and thread in self._threads and time.monotonic() < begun:
                time.sleep(0.001)  # its start was interrupted: it may be about to begin
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_ENDING)

    def ensure_thread(self) -> None:
        """Start a thread if calls are pending and none runs. One that runs may be about to end, but
        looks for pending calls again before it does."""
        if self.pending and self._thread is None:
            thread = threading.Thread(
                target=self._run, name=f"weft async {self._name}", daemon=True
            )
            self._threads.append(thread)
            self._thread = thread
            try:
                interruption.start(thread)
            except BaseException:
                self._thread = None
                raise

    def _notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is unlocked already
            self._news.release()

    def _run(self) -> None:
        this = threading.current_thread()
        with self._turn:
            # again: if its start was interrupted, it was taken for not started
            self._thread = this
            while True:
                self._carry_out_pending()
                if self._closing or not self._news.acquire(timeout=_IDLE):
                    self._thread = None
                    if not self.pending:
                        break
        self._threads.remove(this)

    def _carry_out_pending(self) -> None:
        while self.pending:
            call = self.pending[0]
            call.run()
            self.pending.popleft()
            call.end()
            del call  # else it would hold its result until the next call
