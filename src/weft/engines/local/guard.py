"""The driver's own part of a call, ended when a worker fails meanwhile.

The driver computes like the workers, so nobody hears them while it does. A thread listens instead,
but only once the computation has taken a while: short calls pay nothing for it. When a worker has
failed, the thread has an exception raised in the computing one, as a debugger would.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from types import TracebackType

#: seconds until anybody listens, and between two looks
_LOOK = 0.05
#: seconds without a call after which the thread ends
_REST = 0.3


class Interrupted(BaseException):
    """Raised in the driver's computation: a worker has failed, and there is no use in going on."""


class Guard:
    """Used as `with`: the block may end with Interrupted once `failed()` is true.

    `failed` is called in another thread, and never after the block.
    """

    def __init__(self, failed: Callable[[], bool]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        self._open = True
        self._raised = False
        self.since = time.monotonic()

    def __enter__(self) -> None:
        _watchman.guard = self
        if not _watchman.on_duty:
            _watchman.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._open = False
        if self._raised and not isinstance(error, Interrupted):
            # it is on its way to this thread: it must not arrive outside
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                time.sleep(0)

    def look(self) -> bool:
        """Whether to look again."""
        with self._lock:
            if not self._open or self._raised:
                return False
            if time.monotonic() - self.since > _LOOK and self._failed():
                self._raised = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(Interrupted)
                )
            return True


class _Watchman:
    """The thread, while it is needed."""

    def __init__(self) -> None:
        self.guard: Guard | None = None
        self.on_duty = False

    def start(self) -> None:
        self.on_duty = True
        threading.Thread(target=self._run, name="weft guard", daemon=True).start()

    def _run(self) -> None:
        rested = time.monotonic()
        while time.monotonic() - rested < _REST:
            time.sleep(_LOOK)
            guard = self.guard
            if guard is not None and guard.look():
                rested = time.monotonic()
        self.on_duty = False


_watchman = _Watchman()
