"""Which blocks this process sees, and when it has stopped seeing one.

The end of a view is told by a weak reference on its buffer. A signal handler
may raise inside any callback that is written in Python, and what such a
callback had still to do would be lost; so the first callback is the `append`
of a queue, which no handler can interrupt, and the second works the queue off.
Should that one be interrupted, the next to come does its work, or `catch_up`.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable

from weft.engines.local.segment import Block, Segment

Buffer = ctypes.Array[ctypes.c_ubyte]


class Views:
    """Blocks by name, for as long as anything here uses their memory."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._names: dict[int, int] = {}
        self._live: dict[int, _View] = {}
        self._ended: deque[_View] = deque()

    def open(
        self, name: int, segment: Segment, offset: int, length: int, dropped: Callable[[], None]
    ) -> Block:
        """The block, seen from now on; `dropped()` is called when its last user is gone.

        It is called in a finalizer, so it must not take a lock or start anything, and it may be
        called twice.
        """
        block = self.get(name)
        if block is None:
            block = Block(segment, offset, length)
            # the later of two references is called back first
            second = weakref.ref(block.buffer, self._work_off)
            identity = id(block.buffer)
            # from here on there is no call: a handler that raises must not leave it half described
            view = _View(block.buffer, self._ended.append)
            view.second, view.name, view.identity = second, name, identity
            view.segment, view.offset, view.length = segment, offset, length
            view.dropped = dropped
            self._names[view.identity] = name
            self._live[name] = view
        return block

    def when_dropped(self, name: int, dropped: Callable[[], None]) -> None:
        """Have something else called when the last user of a block, which is in use, is gone."""
        self._live[name].dropped = dropped

    def get(self, name: int) -> Block | None:
        """The block, if it is in use here."""
        view = self._live.get(name)
        buffer = view() if view else None
        if view is None or buffer is None:
            return None
        return Block(view.segment, view.offset, view.length, buffer)

    def buffers(self) -> list[object]:
        """Everything that is in use here."""
        found = [view() for view in self._live.copy().values()]
        return [buffer for buffer in found if buffer is not None]

    def name_of(self, buffer: object) -> int | None:
        return self._names.get(id(buffer))

    def catch_up(self) -> None:
        """Do what an interrupted finalizer has left, if one has."""
        if self._ended:
            self._work_off(None)

    def _work_off(self, _: object) -> None:
        if os.getpid() != self._process:
            return  # a forked child drops what it inherited; the parent still has it
        while self._ended:
            view = self._ended[0]
            if self._live.get(view.name) is view:
                del self._live[view.name]
                self._names.pop(view.identity, None)
            view.dropped()
            # only now is it done; another thread may have done the same meanwhile
            if self._ended and self._ended[0] is view:
                self._ended.popleft()


class _View(weakref.ref[Buffer]):
    second: object
    name: int
    identity: int
    segment: Segment
    offset: int
    length: int
    dropped: Callable[[], None]
