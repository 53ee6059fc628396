"""Calls that are carried out beside the caller's own work, one after the other, by a thread.

    the caller                       the thread
      pending.append(call)             while there are calls, or there may soon be some:
      none runs? start one                 carry out the first; take it away; open its gate
      news
    whoever waits
      until the gate is open: see that a thread runs

The thread is started by the first call and ends when there has been none for a while. A signal
handler may raise between any two steps of the caller, so none of them may be needed for those
before it: a call is pending from the moment at which it is in the queue, and whoever waits for it
sees to it that somebody carries it out. There may be two threads for a moment; they take turns.
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
#: seconds after which those who wait see to the thread again
_SLICE = 1.0
#: seconds that the thread has to end what it does when its group is left
_ENDING = 10.0
#: seconds in which a thread begins, or was never started
_BEGINNING = 1.0


class PendingCall:
    """What `async_op=True`, `get_async` and `add_async` return: `weft.engines.base.Handle`."""

    # of the class too: a signal handler may raise before `__init__` has set them
    _error: BaseException | None = None
    _waited_for = False

    def __init__(self, work: Callable[[], Any], name: str, background: Background) -> None:
        self._work: Callable[[], Any] | None = work
        self._name, self._background = name, background
        self._process = os.getpid()
        self._ended = False
        #: locked until it has ended
        self._gate = threading.Lock()
        self._gate.acquire()
        self._result: Any = None
        self._error = None
        #: whether somebody has waited for it
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
        """Return when it has ended, well or not."""
        self._await(float("inf"))

    def _await(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        deadline = time.monotonic() + seconds
        while not self._ended:
            if os.getpid() != self._process:
                raise forked_error(f"the handle of {self._name}", self._process)
            self._background.see_to_thread()
            left = deadline - time.monotonic()
            if self._gate.acquire(timeout=min(max(left, 0.0), _SLICE)):
                self._gate.release()
            elif left <= 0:
                return self._ended
        return True

    def run(self) -> None:
        """Carry it out; for the thread."""
        work, self._work = self._work, None  # what it holds is free as soon as it has ended
        try:
            if work is not None:
                self._result = work()
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        """Let go those who wait; for the thread."""
        self._ended = True
        self._gate.release()


class Background:
    """The pending calls of one group or table, and the thread that carries them out."""

    def __init__(self, name: str) -> None:
        self._name = name
        #: calls that have not ended; the first one is being carried out
        self.pending: deque[PendingCall] = deque()
        self._thread: threading.Thread | None = None
        #: all that have not ended: where starting one was interrupted there may be several
        self._threads: list[threading.Thread] = []
        self._turn = threading.Lock()
        #: unlocked when there may be something new
        self._news = threading.Lock()
        self._closing = False
        self._process = os.getpid()

    def start(self, work: Callable[[], Any], name: str) -> PendingCall:
        """Have a call carried out after those before it. Raises UsedAfterFork."""
        if os.getpid() != self._process:  # where the thread, if there was one, is not
            raise forked_error(self._name, self._process)
        call = PendingCall(work, name, self)
        self.pending.append(call)
        try:
            self.see_to_thread()
        except RuntimeError:  # no thread can be started: the call was not made
            self.pending.remove(call)
            raise
        self._tell()
        return call

    def finish(self) -> None:
        """Return when no call is pending. Errors are for who waits for the calls themselves."""
        while self.pending:
            with contextlib.suppress(IndexError):  # it has just ended
                self.pending[-1].join()

    def close(self) -> None:
        """Return when the thread has ended. For a group whose calls all fail from now on."""
        self._closing = True
        self._tell()
        begun = time.monotonic() + _BEGINNING
        for thread in list(self._threads):
            while not thread.is_alive() and thread in self._threads and time.monotonic() < begun:
                time.sleep(0.001)  # whoever started it was interrupted: it may be about to begin
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_ENDING)

    def see_to_thread(self) -> None:
        """Start the thread if there is work and no thread. One that runs may end soon, but before
        it does it looks for work again."""
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

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):  # already unlocked
            self._news.release()

    def _run(self) -> None:
        this = threading.current_thread()
        with self._turn:
            # again: whoever started it may have been interrupted, and have taken it for not started
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
            del call  # not until the next one: it holds its result
