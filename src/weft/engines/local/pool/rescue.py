"""What is finished of a chunk when a deadline passes, and the function does not end.

    main thread                        thread of `Rescue`
    the function runs on, in C or      a signal has come: the kernel's handler wrote to a pipe
    past a KeyboardInterrupt           waits a moment for the function
                                       sends Stopped with the results before it
    if it does return: never answers   (the driver ends this process)

The thread runs as soon as the function lets go of the interpreter's lock. The first chunk starts
it of which a deadline is to keep the results.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable

#: seconds that a function has to end after SIGINT: a part of those that the driver waits
_PATIENCE = 0.1

#: sends what is finished
Answer = Callable[[], None]


class Rescue:
    """A thread that answers for the main thread where that does not."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        #: answers for the chunk that is run now
        self._answer: Answer | None = None
        self._answered = False
        self._pipe: tuple[int, int] | None = None

    def begin(self, answer: Answer) -> None:
        """Prepare to answer for the chunk that begins, should it not end after SIGINT."""
        if self._pipe is None:
            self._pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            given = [self._pipe[0]]
            threading.Thread(target=self._run, args=given, name="weft rescue", daemon=True).start()
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        with self._changed:
            self._answer = answer

    def end(self) -> None:
        """Note that the chunk has ended. Do not return if it was answered for."""
        if self._answer is None:
            return
        with self._changed:
            self._answer = None
            self._changed.notify_all()
        while self._answered:
            signal.pause()
        signal.set_wakeup_fd(-1)

    def _run(self, signals: int) -> None:
        while not self._answered:
            select.select([signals], [], [])
            came = os.read(signals, 4096)
            with self._changed:
                answer = self._answer
                if answer is None or signal.SIGINT not in came:
                    continue
                until = time.monotonic() + _PATIENCE
                while self._answer is answer and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                if self._answer is answer:
                    self._answered = True
                    answer()


def _in_child() -> None:
    """Keep signals of a child that the function has forked from being taken for this one's."""
    with contextlib.suppress(ValueError):  # forked by another thread
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_child)
