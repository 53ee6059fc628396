"""Messages between the agents of a job: MPI, never waited for.

A message is a frame and a body. What it belongs to stands in the frame, so it may come early; one
agent's messages arrive in the order in which it sent them. Chunks of large arrays travel beside,
with tags of their own, into memory that waits for them.

Nothing here blocks: an agent polls. One thread of a process speaks MPI.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from mpi4py import MPI

#: of messages; chunks have the tags of their groups, from FIRST_TAG on
_TAG, FIRST_TAG = 1, 16
_FRAME = struct.Struct("=QIHHQ")
#: seconds that a request is kept after its message has gone
_LINGERING = 1.0
#: what MPI says of a peer that has ended, where it goes on (ULFM)
_FAILURES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)


class PeerFailed(Exception):
    """MPI tells that a peer has failed."""


class Frame(NamedTuple):
    """Describe what a message is about."""

    #: the group
    key: int
    generation: int
    kind: int
    #: of the rounds of one exchange
    turn: int
    #: counts the exchanges of a generation
    number: int


class Letter(NamedTuple):
    """A message that has come."""

    sender: int
    frame: Frame
    body: bytes


class Mail:
    """One agent's messages."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        #: the largest tag that MPI has
        self.last_tag: int = comm.Get_attr(MPI.TAG_UB)
        #: the ranks in MPI that are known to have failed
        self.failed: set[int] = set()
        self._sending: list[tuple[Any, bytes, int]] = []
        self._status = MPI.Status()
        self._coming: deque[tuple[int, Any, bytearray]] = deque()
        #: chunks that nobody waits for any more, and what has their memory
        self._kept: list[tuple[Any, int, Any]] = []
        #: messages that have gone, as far as MPI tells, since when, and to whom. Open MPI ends the
        #: process if it finds later that one has not, as its receiver has failed, and the request
        #: was freed, as Test does
        self._gone: deque[tuple[float, Any, int]] = deque()
        #: memory of what a peer's failure has ended. What that peer had sent before may still come,
        #: and MPI then writes it there, though it has ended the request
        self._lost: list[Any] = []

    def send(self, to: int, frame: Frame, body: bytes) -> None:
        """Send a message, unless its receiver has failed."""
        if to in self.failed:
            return
        message = _FRAME.pack(*frame) + body
        try:
            self._sending.append((self.comm.Isend([message, MPI.BYTE], to, _TAG), message, to))
        except MPI.Exception as error:
            self.note_failure(error, to)

    def poll(self) -> list[Letter]:
        """Return the messages that have come, and let those go on that are under way."""
        if self._sending:
            self._sending = [entry for entry in self._sending if not self.has_gone(*entry)]
        if self._gone:
            self._free_requests()
        if self._kept:
            self._kept = [entry for entry in self._kept if not self.has_ended(*entry)]
        with contextlib.suppress(PeerFailed):  # told once; the next poll goes on
            while (message := self._probe()) is not None:
                self._coming.append(message)
        letters: list[Letter] = []
        while self._coming:
            sender, request, data = self._coming[0]
            try:
                if not self.test(request, sender):
                    break
            except PeerFailed:
                self.keep_for_good(data)
                self._coming.popleft()
                continue
            self._coming.popleft()
            frame = Frame(*_FRAME.unpack_from(data))
            letters.append(Letter(sender, frame, bytes(data[_FRAME.size :])))
        return letters

    @property
    def all_sent(self) -> bool:
        return not (self._sending or self._kept)

    def test(self, request: Any, peer: int) -> bool:
        """Return whether a request has ended. Raises PeerFailed."""
        try:
            return bool(request.Test())
        except MPI.Exception as error:
            self.note_failure(error, peer)
            raise PeerFailed from None

    def send_chunk(self, array: Any, to: int, tag: int) -> Any:
        """Start to send bytes; return the request."""
        return self.comm.Isend([array, MPI.BYTE], to, tag)

    def receive_chunk(self, array: Any, source: int, tag: int) -> Any:
        """Start to receive bytes; return the request."""
        return self.comm.Irecv([array, MPI.BYTE], source, tag)

    def keep(self, requests: Collection[tuple[Any, int]], owner: Any) -> None:
        """Keep the memory of chunks, which `owner` has, until MPI has ended these requests, though
        nobody waits for them any more."""
        self._kept += [(request, peer, owner) for request, peer in requests]
        if any(peer in self.failed for _, peer in requests):
            self.keep_for_good(owner)

    def look_for_failures(self) -> None:
        """Ask MPI who has failed, where it can tell (ULFM)."""
        with contextlib.suppress(MPI.Exception, NotImplementedError, AttributeError):
            failed = self.comm.Get_failed()
            if failed.Get_size() > len(self.failed):
                everybody = self.comm.Get_group()
                ranks = failed.Translate_ranks(None, everybody)
                self.failed.update(rank for rank in ranks if rank >= 0)
            failed.Free()

    def note_failure(self, error: Any, peer: int) -> None:
        """Note that a peer has failed; raise any other error of MPI again."""
        if error.Get_error_class() not in _FAILURES:
            raise error
        self.failed.add(peer)

    def has_ended(self, request: Any, peer: int, memory: Any) -> bool:
        """Return whether a request has ended, if only by a failure: then its memory is kept."""
        try:
            return self.test(request, peer)
        except PeerFailed:
            self.keep_for_good(memory)
            return True

    def has_gone(self, request: Any, memory: Any, peer: int) -> bool:
        """Return whether a message needs its memory no more."""
        if peer in self.failed:
            self.keep_for_good((request, memory))
            return True
        if not request.Get_status():
            return False
        self._gone.append((time.monotonic(), request, peer))
        return True

    def _free_requests(self) -> None:
        """Free the requests of messages that went some time ago."""
        since = time.monotonic() - _LINGERING
        while self._gone and self._gone[0][0] < since:
            _, request, peer = self._gone.popleft()
            if peer in self.failed:
                self.keep_for_good(request)
            else:
                self.has_ended(request, peer, None)

    def keep_for_good(self, memory: Any) -> None:
        """Keep the memory of a request that a peer's failure has ended."""
        self._lost.append(memory)

    def _probe(self) -> tuple[int, Any, bytearray] | None:
        status = self._status
        try:
            message = self.comm.Improbe(MPI.ANY_SOURCE, _TAG, status)
        except MPI.Exception:
            # with ULFM, once for each failure: from now on it is not told again
            self.look_for_failures()
            with contextlib.suppress(MPI.Exception, NotImplementedError, AttributeError):
                self.comm.Ack_failed()
            raise PeerFailed from None
        if message is None:
            return None
        data = bytearray(status.Get_count(MPI.BYTE))
        return status.Get_source(), message.Irecv([data, MPI.BYTE]), data


class Messages:
    """Messages of tables: from memory straight into memory, of any length, one for each.

    Answers have a communicator of their own, so that requests for which there is no room yet hold
    none of them up.
    """

    #: of a request, of several, and of several answers; one has the tag that its request names
    REQUEST, REQUESTS, ANSWERS, FIRST_ANSWER = 1, 2, 3, 16

    def __init__(self, comm: Any, answers: Any, mail: Mail) -> None:
        self._comm, self._answers, self._mail = comm, answers, mail
        self._last_tag: int = comm.Get_attr(MPI.TAG_UB)
        self._status = MPI.Status()
        self._sending: list[tuple[Any, Any, int]] = []
        self._coming: list[tuple[Any, int, int, Any]] = []
        self._next_tag = self.FIRST_ANSWER

    def reserve_tags(self, count: int) -> int:
        """Return the first of so many tags for answers, which were not used for long."""
        first = self._next_tag
        if first + count > self._last_tag:
            first = self.FIRST_ANSWER
        self._next_tag = first + count
        return first

    def send(self, memory: Any, to: int, tag: int) -> None:
        """Send memory, which stays as it is until it has gone, unless its receiver has failed."""
        if to in self._mail.failed:
            return
        comm = self._comm if tag in (self.REQUEST, self.REQUESTS) else self._answers
        try:
            self._sending.append((comm.Isend([memory, MPI.BYTE], to, tag), memory, to))
        except MPI.Exception as error:
            self._mail.note_failure(error, to)

    def poll(self, room_for: Callable[[int, int, int], Any]) -> list[tuple[int, int, Any]]:
        """Return the messages that have come: sender, tag and memory. `room_for` gives memory for
        one, by its sender, tag and length; None if it has to wait."""
        if self._sending:
            self._sending = [entry for entry in self._sending if not self._mail.has_gone(*entry)]
        for comm in (self._answers, self._comm):
            while (message := self._probe(comm, room_for)) is not None:
                self._coming.append(message)
        if not self._coming:
            return []
        come, waiting = [], []
        behind: set[tuple[int, bool]] = set()  # what one sender has sent comes in order
        for entry in self._coming:
            request, sender, tag, _memory = entry
            kind = sender, tag in (self.REQUEST, self.REQUESTS)
            try:
                if kind not in behind and self._mail.test(request, sender):
                    come.append(entry)
                else:
                    behind.add(kind)
                    waiting.append(entry)
            except PeerFailed:
                self._mail.keep_for_good(entry)
        self._coming = waiting
        return [(sender, tag, memory) for _, sender, tag, memory in come]

    @property
    def all_sent(self) -> bool:
        return not self._sending

    @property
    def coming_bytes(self) -> int:
        """Return the bytes of the requests that are coming."""
        requests = self.REQUEST, self.REQUESTS
        return sum(len(memory) for *_, tag, memory in self._coming if tag in requests)

    def comes_from(self, sender: int) -> bool:
        """Return whether something of a sender is coming."""
        return any(its == sender for _, its, *_ in self._coming)

    def sending_bytes(self, to: int) -> int:
        """Return the bytes for one receiver that have not gone yet."""
        return sum(len(memory) for _, memory, its in self._sending if its == to)

    def _probe(
        self, comm: Any, room_for: Callable[[int, int, int], Any]
    ) -> tuple[Any, int, int, Any] | None:
        status = self._status
        try:
            if not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                return None
            sender, tag = status.Get_source(), status.Get_tag()
            length = status.Get_count(MPI.BYTE)
            memory = room_for(sender, tag, length)
            if memory is None:
                return None
            request = comm.Irecv([memory, MPI.BYTE], sender, tag)
        except MPI.Exception:
            self._mail.look_for_failures()
            with contextlib.suppress(MPI.Exception, NotImplementedError, AttributeError):
                comm.Ack_failed()
            return None
        return request, sender, tag, memory
