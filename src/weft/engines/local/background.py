"""Calls that are carried out beside the caller's own work, one after the other, by a thread.

The thread is started by the first call and ends when there has been none for a while.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from weft._core.timeouts import checked
from weft.errors import Stalled

#: seconds without work after which the thread ends
_IDLE = 0.5


class PendingCall:
    """What `async_op=True` returns: see `weft.engines.base.Handle`."""

    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self._work: Callable[[], Any] | None = work
        self._name = name
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        seconds = None if timeout is None else min(checked(timeout), threading.TIMEOUT_MAX)
        if not self._ended.wait(seconds):
            raise Stalled(f"{self._name} was not done after {timeout:g} s; it goes on, wait again")
        if self._error is not None:
            raise self._error
        return self._result

    def join(self) -> None:
        """Return when it has ended, well or not."""
        self._ended.wait()

    def run(self) -> None:
        """Carry it out; for the thread."""
        work, self._work = self._work, None  # what it holds is free as soon as it has ended
        try:
            if work is not None:
                self._result = work()
        except BaseException as error:
            self._error = error
        finally:
            del work
            self._ended.set()


class Background:
    """The pending calls of one group, and the thread that carries them out."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[PendingCall] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        #: the call that was made last, if it may be pending
        self.last: PendingCall | None = None

    def start(self, work: Callable[[], Any], name: str) -> PendingCall:
        """Have a call carried out after those before it."""
        call = PendingCall(work, name)
        with self._changed:
            self._calls.append(call)
            self.last = call
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"weft async {self._name}", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return call

    def finish(self) -> None:
        """Return when no call is pending. Errors are for who waits for the calls themselves."""
        last = self.last
        if last is not None:
            last.join()
            self.last = None

    def close(self) -> None:
        """Return when the thread has ended. Nothing more is started afterwards."""
        with self._changed:
            thread, self._closing = self._thread, True
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closing, _IDLE)
                if not self._calls:
                    self._thread = None
                    return
                call = self._calls.popleft()
            call.run()
            del call  # not until the next one: it holds its result
