"""The blocks that this process got from others. The asking side of `keeper.py`."""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

from weft._core import timeouts
from weft._core.messages import (
    Attach,
    Attached,
    Gone,
    Message,
    Pin,
    Pinned,
    Process,
    Release,
)
from weft.engines.local.channel import Channel, Closed
from weft.engines.local.keeper import Keeper, Reference, Source
from weft.engines.local.roster import open_pidfd
from weft.engines.local.segment import Block, Segment
from weft.engines.local.views import Views
from weft.errors import SegmentGone, Stalled


@dataclass(eq=False)
class _Owner:
    """A keeper in another process, and the segments this one has mapped from it."""

    source: Source
    channel: Channel
    pidfd: int
    #: answers still to come for questions that were given up
    late: int = 0
    segments: weakref.WeakValueDictionary[int, Segment] = field(
        default_factory=weakref.WeakValueDictionary
    )

    def close(self) -> None:
        self.channel.close()
        os.close(self.pidfd)


class Attachments:
    """This process as a user of other processes' blocks."""

    def __init__(self, views: Views) -> None:
        self._views = views
        self._lock = threading.Lock()  # held while another process answers
        self._owners: dict[Source, _Owner] = {}
        self._origins: dict[int, Source] = {}

    def attach(self, name: int, pin: int, source: Source) -> Block | None:
        """Map a block of another process; None if it no longer has it, or has ended."""
        with self._lock:
            try:
                owner = self._owner(source)
                answer, descriptors = self._ask(owner, Attach(name, pin), Attached, Gone)
            except Closed:
                return self._views.get(name)  # its memory may still be mapped here
            if isinstance(answer, Gone):
                return None
            segment = owner.segments.get(answer.segment)
            if segment is None or answer.segment == 0:  # 0: handed on, numbered by somebody else
                segment = owner.segments[answer.segment] = Segment(descriptors[0], answer.size)
            else:
                os.close(descriptors[0])
            known = self._views.get(name)
            self._origins[name] = source
            if known is not None:
                owner.channel.send_now(Release(name))  # one lease is enough
                return known
            return self._views.open(name, segment, answer.offset, answer.length, self._drop)

    def refer(self, name: int, keeper: Keeper) -> Reference:
        """Pin a block at its owner; if that has ended, hand on the memory from here."""
        block = self._views.get(name)
        if block is None:
            raise SegmentGone(f"block {name} is no longer attached here")
        with self._lock:
            source = self._origins[name]
            try:
                answer, _ = self._ask(self._owner(source), Pin(name), Pinned, Gone)
            except Closed:
                return keeper.refer_on_behalf(name, block)
        if isinstance(answer, Gone):  # handed on by somebody who is not its owner
            return keeper.refer_on_behalf(name, block)
        here = keeper.refer_on_behalf(name, None)
        return Reference(name, answer.pin, (source, *here.sources))

    def locate(self, name: int) -> Block | None:
        """A block attached here, for the keeper to hand on."""
        return self._views.get(name)

    def _drop(self, name: int) -> None:
        """Called in a finalizer."""
        source = self._origins.pop(name, None)
        owner = self._owners.get(source) if source else None
        if owner is not None:
            owner.channel.send_now(Release(name))

    def _owner(self, source: Source) -> _Owner:
        """The connection to a keeper. Raises Closed if it has ended."""
        owner = self._owners.get(source)
        if owner is not None:
            return owner
        self._close_unused()
        pidfd = open_pidfd(Process(source.pid, source.start))
        if pidfd < 0:
            raise Closed(f"process {source.pid} has ended")
        try:
            channel = Channel.connect(source.address)
        except ConnectionRefusedError:
            os.close(pidfd)
            raise Closed(f"process {source.pid} keeps nothing") from None
        except BaseException:
            os.close(pidfd)
            raise
        owner = self._owners[source] = _Owner(source, channel, pidfd)
        return owner

    def _close_unused(self) -> None:
        """Hang up on keepers from whom this process has nothing any more."""
        used = set(self._origins.values())
        for source in [source for source in self._owners if source not in used]:
            self._owners.pop(source).close()

    def _ask(
        self, owner: _Owner, message: Message, *answers: type[Message]
    ) -> tuple[Any, list[int]]:
        """Send a message and take its answer. Raises Closed, Stalled.

        Closing the connection would end the leases of blocks still in use here, so a question
        that is given up leaves it open, and its answer is thrown away when it comes.
        """
        seconds = timeouts.from_environment(os.environ)
        deadline = time.monotonic() + (timeouts.DEFAULT if seconds is None else seconds)
        try:
            owner.channel.send(message)
            owner.late += 1
            while owner.channel.wait(deadline, owner.pidfd):
                answer, descriptors = owner.channel.receive(Attached, Pinned, Gone)
                owner.late -= 1
                if owner.late == 0 and isinstance(answer, answers):
                    return answer, descriptors
                self._throw_away(owner, answer, descriptors)
        except Closed:
            del self._owners[owner.source]
            owner.close()
            raise
        raise Stalled(
            f"process {owner.source.pid}, which owns the shared array, is alive but does not answer"
        )

    def _throw_away(
        self, owner: _Owner, answer: Attached | Pinned | Gone, descriptors: list[int]
    ) -> None:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(answer, Attached):
            owner.channel.send_now(Release(answer.block))
