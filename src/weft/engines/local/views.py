"""Which blocks this process sees, and when it has stopped seeing one."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from weft.engines.local.segment import Block, Segment


class Views:
    """Blocks by name, for as long as anything here uses their memory."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._names: dict[int, int] = {}
        self._live: dict[int, _View] = {}

    def open(
        self, name: int, segment: Segment, offset: int, length: int, dropped: Callable[[int], None]
    ) -> Block:
        """The block, seen from now on; `dropped(name)` is called when its last user is gone.

        It is called in a finalizer, so it must not take a lock or start anything.
        """
        block = self.get(name)
        if block is None:
            block = Block(segment, offset, length)
            self._names[id(block.buffer)] = name
            self._live[name] = _View(weakref.ref(block.buffer), segment, offset, length)
            finalizer = weakref.finalize(
                block.buffer, self._closed, id(block.buffer), name, dropped
            )
            finalizer.atexit = False  # the end of the process gives everything back by itself
        return block

    def get(self, name: int) -> Block | None:
        """The block, if it is in use here."""
        view = self._live.get(name)
        buffer = view.buffer() if view else None
        if view is None or buffer is None:
            return None
        return Block(view.segment, view.offset, view.length, buffer)

    def buffers(self) -> list[object]:
        """Everything that is in use here."""
        found = [view.buffer() for view in self._live.copy().values()]
        return [buffer for buffer in found if buffer is not None]

    def name_of(self, buffer: object) -> int | None:
        return self._names.get(id(buffer))

    def _closed(self, identity: int, name: int, dropped: Callable[[int], None]) -> None:
        if os.getpid() != self._process:
            return  # a forked child drops what it inherited; the parent still has it
        self._names.pop(identity, None)
        if self.get(name) is None:  # it may have been opened again in the meantime
            self._live.pop(name, None)
        dropped(name)


@dataclass(frozen=True)
class _View:
    buffer: weakref.ref[ctypes.Array[ctypes.c_ubyte]]
    segment: Segment
    offset: int
    length: int
