"""Items that a thread of their own draws, so that who hands them out never waits for one.

    map's thread                      items' thread
    draw: some are wanted    ──>      asks the iterator
    attends to the workers            (which may take for ever)
    draw: here they are      <──      rings the bell

The thread asks for no more than is wanted, and only then. When the map ends while the iterator is
at work, the thread stays until that has given its next item: nobody can end it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from weft.engines import threads
from weft.engines.local.translation import translated

#: seconds for all that is wanted to come; later it is taken as it comes
_AT_ONCE = 0.002


class Feed:
    """An iterator's items, some at a time."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._news = threading.Condition()
        self._wanted = 0
        self._here: deque[Any] = deque()
        self._ended = self._closed = False
        self._error: BaseException | None = None
        try:
            #: readable when something has come; who waits for it reads it
            self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            raise translated(error) from error
        threads.start(threading.Thread(target=self._run, name="weft items", daemon=True))

    def draw(self, size: int) -> list[Any] | None:
        """At most so many items, none at the end; None if none is here yet. Raises what the
        iterator raised."""
        with self._news:
            if not self._wanted:
                self._wanted = size
                self._news.notify_all()
                self._news.wait_for(lambda: not self._is_asked(), _AT_ONCE)
            if self._here:
                self._wanted = 0
                return [self._here.popleft() for _ in range(min(size, len(self._here)))]
            if self._error is not None:
                raise self._error
            return [] if self._ended else None

    def close(self) -> None:
        """No more are wanted. Once or several times."""
        with self._news:
            if not self._closed:
                self._closed = True
                self._news.notify_all()
                os.close(self.bell)

    # the items' thread

    def _run(self) -> None:
        while not self._closed and not self._ended:
            with self._news:
                self._news.wait_for(lambda: self._closed or self._is_asked())
            try:
                while self._is_asked():
                    self._here.append(next(self._items))
                    if len(self._here) == 1:
                        self._ring()  # the next may be slow to come
            except StopIteration:
                self._ended = True
            except BaseException as error:  # it is raised in who draws
                self._error, self._ended = error, True
            self._ring()

    def _is_asked(self) -> bool:
        return len(self._here) < self._wanted and not self._ended and not self._closed

    def _ring(self) -> None:
        with self._news:
            self._news.notify_all()
            if not self._closed:
                os.eventfd_write(self.bell, 1)
